"""Notes of a plan: what is allowed, and may surprise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fourfold.plan.notes import notes_on
from fourfold.plan.run_plan import make_run_plan
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle

QUIET = "hardware.device=cuda"  # no note on how many cores this machine has
MOE = "model.moe={experts=4, top_k=2}"
TOKENS = ("data.kind=tokens", "data.path=x")


def notes(world: int, *sets: str) -> tuple[str, ...]:
    return notes_on(settle(load_spec("tiny", [*sets, QUIET]).spec, world), world)


@pytest.mark.parametrize(
    ("world", "sets", "told"),
    [
        (2, [*TOKENS, "model.vocabulary=33", "layout.tp=2"], "vocabulary 33 over tp 2: 17 and 16 rows"),
        (4, [*TOKENS, "model.vocabulary=33", "layout.tp=4"], "vocabulary 33 over tp 4: 9, 9, 9 and 6 rows"),
        (
            8,
            ["model.heads=8", "model.kv_heads=8", "model.vocabulary=260", "layout.tp=8"],
            "vocabulary 260 over tp 8: 7 × 33 and 1 × 29 rows",
        ),
        (
            2,
            [MOE, "model.moe.capacity_factor=0.75"],
            "model.moe.capacity_factor = 0.75: at least 25% of all choices are dropped, however evenly tokens choose",
        ),
        (
            2,
            [MOE, "layout.tp=2", "layout.ep=2"],
            "ep 2: traffic and memory of a rehearsal are those of experts chosen equally often; ranks whose experts "
            "are chosen more often hold and receive more",
        ),
        (
            2,
            ["data.sequence=127", "layout.tp=2", "layout.sp=true"],
            "sequence 127 over tp 2: 64 and 63 tokens between its products",
        ),
        (
            1,
            ["model.kind=mlp", "data.kind=synthetic", "layout.recompute=full"],
            "layout.recompute = full frees nothing of an mlp: each of its blocks is one Linear, which keeps no more "
            "than what goes into it",
        ),
        (
            1,
            ["layout.zero=3"],
            "layout.zero = 3 does nothing with dp_shard = 1: there is one rank to shard over",
        ),
        (
            2,
            ["layout.zero=1", "layout.dp_replicate=1", "layout.tp=2"],
            "layout.zero = 1 does nothing with dp_shard = 1: there is one rank to shard over",
        ),
        (
            2,
            ["layout.pp_schedule=zbv", "layout.pp_split=[2,2]"],
            "layout.pp_schedule and layout.pp_split do nothing with layout.pp = 1",
        ),
        (2, ["layout.cp_method=ring"], "layout.cp_method does nothing with layout.cp = 1"),
        (
            2,
            ["model.kind=import", "model.target=a:b", "layout.tp=2"],
            "whether tp 2 cuts this model is known once it is built: its sharding() says (docs/own_model.md); "
            "whether it cuts it right, only fourfold verify equal shows",
        ),
    ],
)
def test_told(world: int, sets: Sequence[str], told: str) -> None:
    assert notes(world, *sets) == (told,)


@pytest.mark.parametrize(
    ("world", "sets"),
    [
        (2, []),
        (2, ["layout.tp=2", "layout.sp=true"]),
        (2, ["layout.tp=2", "data.sequence=127"]),  # whole on every rank
        (1, ["model.vocabulary=257", "data.sequence=127"]),
        (2, ["layout.zero=1"]),
        (2, ["model.kind=import", "model.target=a:b"]),
    ],
)
def test_nothing_to_tell(world: int, sets: Sequence[str]) -> None:
    assert notes(world, *sets) == ()


def test_they_stand_in_the_plan() -> None:
    plan = make_run_plan(load_spec("tiny", ["model.vocabulary=257", "layout.tp=2"]), 2, ("test",), 1)
    assert "note       vocabulary 257 over tp 2: 129 and 128 rows" in str(plan)
