"""Rules about what is computed again in backward. Each function gives the problem, or None."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from fourfold.spec.errors import Problem
from fourfold.spec.keys import toml_word
from fourfold.spec.settings import typed
from fourfold.spec.spec import Spec
from fourfold.spec.training import KEEPABLE, KEPT


def keep_is_used(spec: Spec) -> Problem | None:
    mode, keep = spec.layout.recompute, spec.layout.recompute_keep
    if mode == "selective" or keep == KEPT:
        return None
    return Problem(
        asked=f'layout.recompute_keep = {_listed(keep)} with layout.recompute = "{mode}"',
        found="nothing is computed again" if mode == "none" else "everything is computed again",
        why="what is to be kept all the same is read by selective alone: it would be silently ignored",
        instead="leave layout.recompute_keep out, or --set layout.recompute=selective",
    )


def keep_names_operations(spec: Spec) -> Problem | None:
    keep = spec.layout.recompute_keep
    unknown = [name for name in dict.fromkeys(keep) if name not in KEEPABLE]
    twice = [name for name in dict.fromkeys(keep) if keep.count(name) > 1]
    if not unknown and not twice:
        return None
    found = [f"no operation of the name {', '.join(map(toml_word, unknown))}"] if unknown else []
    found += [f"{', '.join(map(toml_word, twice))} more than once"] if twice else []
    meant = [
        close for name in keep for close in get_close_matches(name, KEEPABLE, n=1)
    ]  # itself, if it is one
    return Problem(
        asked=f"layout.recompute_keep = {_listed(keep)}",
        found=", and ".join(found),
        why=f"there are {', '.join(KEEPABLE)}; by any other name nothing would be kept",
        instead=_typed(list(dict.fromkeys(meant)) or KEPT),
    )


def keep_is_not_empty(spec: Spec) -> Problem | None:
    if spec.layout.recompute_keep or spec.layout.recompute != "selective":
        return None
    return Problem(
        asked='layout.recompute_keep = [] with layout.recompute = "selective"',
        found="no operation whose result is kept",
        why='all is computed again then: that is layout.recompute = "full", at less cost',
        instead=f"leave it out with --set layout.recompute=full, or {_typed(KEPT)}",
    )


def _typed(names: Sequence[str]) -> str:
    return typed("layout.recompute_keep", _listed(names))


def _listed(names: Sequence[str]) -> str:
    return f"[{','.join(map(toml_word, names))}]"
