"""What several ranks hold in common must be equal: hashes of it by who holds it, compared over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.collectives.agree import all_of, disagreements
from fourfold.models.boxes import cut_dim
from fourfold.parallel.clip import local
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.spec.words import counted

_TOLD = 8  # tensors, of those that differ
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of what this rank holds of each: xxh3-64 of its bytes; on another device than the CPU the sum of its words.

    There nothing is copied, and one wait serves all. Collectives: none.
    """
    found, elsewhere = {}, {}
    for name, tensor in tensors.items():
        held = local(tensor).contiguous().view(-1)
        if held.device.type == "cpu":
            data: Any = held.view(torch.uint8).numpy()
            found[name] = str(xxhash.xxh3_64_hexdigest(data))
        else:
            elsewhere[name] = held.view(_WIDTHS[held.element_size()]).sum(dtype=torch.int64)
    if elsewhere:
        sums = torch.stack([*elsewhere.values()]).tolist()
        found |= {name: f"{total:x}" for name, total in zip(elsewhere, sums, strict=True)}
    return found


def holders(tensor: Tensor) -> str:
    """Who holds the same of it as this rank: those at the same place of every mesh axis that cuts it."""
    if not isinstance(tensor, DTensor):
        return ""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    cut = [name for name, place in zip(names, tensor.placements, strict=True) if cut_dim(place) is not None]
    return " ".join(f"{name} {mesh.get_local_rank(name)}" for name in cut)


class Copies:
    """What is compared in one look: tensors by name and by who holds them, each with its hash."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, str]] = defaultdict(dict)

    def add(self, who: str, names: Iterable[tuple[str, str]]) -> None:
        """who: the same text on all ranks that must hold the same. names: with their hashes."""
        self._held[who].update(names)

    def compare(self, step: int, held_until: int | None) -> None:
        """One hash of all that ranks have in common; only where one differs, those of each tensor.

        step: that just ended, from 1; held_until: the last one after which nothing differed.
        Collectives: one all-gather of objects over the world, of a few hashes; another one only if they differ.
        Raises CheckFailed, on every rank, naming each tensor and the rank that differs from most.
        """
        whole = {who: _of_all(names) for who, names in self._held.items()}
        differing = _odd(all_of(whole))
        if not differing:
            return
        parts = {
            f"{name}{f' ({who})' if who else ''}": found
            for who, names in self._held.items()
            if who in differing
            for name, found in names.items()
        }
        found = disagreements(all_of(parts), partly=True)
        since = "it was not looked at before" if held_until is None else f"after step {held_until} it held"
        more = f"; and {counted(len(found) - _TOLD, 'more tensor')} like it" if len(found) > _TOLD else ""
        raise CheckFailed([_differs(problem, step, since + more) for problem in found[:_TOLD]])


def _of_all(names: Mapping[str, str]) -> str:
    return str(xxhash.xxh3_128_hexdigest(repr(sorted(names.items())).encode()))


def _odd(values_by_rank: list[Mapping[str, str]]) -> set[str]:
    names = {name for values in values_by_rank for name in values}
    return {name for name in names if len({values[name] for values in values_by_rank if name in values}) > 1}


def _differs(problem: Problem, step: int, since: str) -> Problem:
    name = problem.asked.removeprefix("the same ").removesuffix(" on every rank")
    return Problem(
        asked=f"{name} equal on all ranks that hold it, after step {step}",
        found=f"{problem.found}; {since}",
        why="from here on they train different models under one loss, and only one of them would be saved",
        instead="look at what that rank did in these steps beside the optimizer's update: a gradient that was not "
        "reduced, a value changed in place, memory that fails; fourfold verify equal names the collective",
    )
