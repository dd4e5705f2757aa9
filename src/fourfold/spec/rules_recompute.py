"""Rules about what is computed again in backward. Each function gives the problem, or None."""

from __future__ import annotations

from difflib import get_close_matches

from fourfold.spec.errors import Problem
from fourfold.spec.keys import toml_word
from fourfold.spec.spec import Spec
from fourfold.spec.training import KEEPABLE, KEPT


def keep_is_used(spec: Spec) -> Problem | None:
    mode, keep = spec.layout.recompute, spec.layout.recompute_keep
    if mode == "selective" or keep == KEPT:
        return None
    nothing = "nothing is computed again" if mode == "none" else "everything is computed again"
    return Problem(
        asked=f'layout.recompute_keep = {toml_word(keep)} with layout.recompute = "{mode}"',
        found=f"{nothing}, whatever is to be kept",
        why="the list would be silently ignored",
        instead=f"--set layout.recompute=selective, or leave layout.recompute_keep out with {mode}",
    )


def keep_names_operations(spec: Spec) -> Problem | None:
    keep = spec.layout.recompute_keep
    unknown = [name for name in keep if name not in KEEPABLE]
    if not unknown:
        return None
    meant = [
        get_close_matches(name, KEEPABLE, n=1, cutoff=0.0)[0] if name in unknown else name for name in keep
    ]
    return Problem(
        asked=f"layout.recompute_keep = {toml_word(keep)}",
        found=f"no operation of the name {', '.join(toml_word(name) for name in unknown)}",
        why=f"there are {', '.join(KEEPABLE)}; a name that means nothing would keep nothing",
        instead=f"--set 'layout.recompute_keep={toml_word(list(dict.fromkeys(meant)))}'",
    )


def keep_is_not_empty(spec: Spec) -> Problem | None:
    if spec.layout.recompute_keep or spec.layout.recompute != "selective":
        return None
    return Problem(
        asked='layout.recompute_keep = [] with layout.recompute = "selective"',
        found="no operation whose result is kept",
        why='without any, all is computed again: that is layout.recompute = "full", at less cost',
        instead=f"--set layout.recompute=full or --set 'layout.recompute_keep={toml_word(KEPT)}'",
    )
