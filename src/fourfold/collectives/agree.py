"""What all ranks must hold in common, compared by fingerprint; the rank that differs is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch.distributed as dist

from fourfold.spec.errors import CheckFailed, Problem


def disagreements(values_by_rank: list[Mapping[str, str]], *, partly: bool = False) -> list[Problem]:
    """What differs between ranks: one Problem for each name, against the value most ranks hold (ties: the lowest's).

    values_by_rank: for each rank, in order of rank, a mapping of names to fingerprints.
    partly: a rank need not have all names; those that have one must have the same.
    """
    problems = []
    names = sorted({name for values in values_by_rank for name in values})
    for name in names:
        held = [values.get(name, "(missing)") for values in values_by_rank]
        counted = [values[name] for values in values_by_rank if name in values] if partly else held
        usual, _ = Counter(counted).most_common(1)[0]
        odd = [rank for rank, value in enumerate(held) if value != usual]
        if partly:
            odd = [rank for rank in odd if name in values_by_rank[rank]]
        if odd:
            ranks = ", ".join(f"rank {rank} has {held[rank]}" for rank in odd)
            problems.append(
                Problem(
                    asked=f"the same {name} on every rank",
                    found=f"{ranks}; the others have {usual}",
                    why="ranks that do not share it train different models under one loss",
                    instead=f"start rank {odd[0]} with the same {name} as the others",
                )
            )
    return problems


def agree(values: Mapping[str, str], *, partly: bool = False) -> list[Mapping[str, str]]:
    """Compare `values` over the whole world, each name among the ranks that have it if `partly`; returns all ranks'.

    Collectives: one all-gather of objects on the default group.
    Raises CheckFailed on every rank, naming each value and rank that differs.
    """
    gathered = all_of(values)
    problems = disagreements(gathered, partly=partly)
    if problems:
        raise CheckFailed(problems)
    return gathered


def all_of(values: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Those of every rank, in order of rank. Collectives: one all-gather of objects on the default group."""
    gathered: list[Mapping[str, str]] = [values]
    if dist.is_initialized():
        gathered = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, dict(values))
    return gathered
