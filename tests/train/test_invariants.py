"""What must hold in every run: broken on one rank, it is named; a clean run raises nothing."""

from __future__ import annotations

import pytest

from fourfold.spec.errors import RankFailed
from tests.train import invariant_jobs

CLEAN = [
    (1, ()),
    (2, ()),
    (2, ("layout.zero=3",)),
    (2, ("layout.tp=2",)),
    (2, ("precision.compute=fp16",)),
    (2, ("run.exact=true", "layout.zero=1")),
    (2, ("layout.pp=2", "model.tied=true")),
    (4, ("layout.dp_shard=2", "layout.dp_replicate=2", "layout.zero=2")),
]
QUICK = [
    ("one_value", (), f"{invariant_jobs.NAME} (stage 0) equal on all ranks that hold it, after step 3"),
    ("one_value", ("layout.zero=3",), None),  # each holds a part of its own
    ("not_finite", ("layout.zero=3",), f"finite values in {invariant_jobs.NAME}"),
    ("twice", (), "it is in 2 of the optimizer's groups"),
    ("draws", ("run.exact=true",), "draws from the process's random stream of torch"),
    ("one_value", ("layout.tp=2",), None),  # it is held by one rank alone: nothing to compare it with
]
MORE = [
    ("a_moment", (), f"{invariant_jobs.NAME}.exp_avg_sq"),
    ("a_count", (), f"{invariant_jobs.NAME}.step"),
    ("a_rate", (), "learning rate equal"),
    (
        "a_buffer",
        ("model.moe={experts=4, top_k=2, balance='bias'}",),
        "correction (buffers of stage 0) equal",
    ),
    ("untied", ("model.tied=true",), "one parameter, as at the beginning"),
    ("no_decay", (), "its group has weight_decay = 0.0, not"),
    ("a_narrow_moment", ("layout.zero=2",), f"{invariant_jobs.NAME}.exp_avg in torch.float32"),
    ("draws", (), None),  # only in exact mode it matters
]


@pytest.mark.parametrize(("world", "sets"), CLEAN, ids=str)
def test_a_clean_run_raises_nothing(ranks, world, sets):
    ranks(world).run(invariant_jobs.watched, sets, None)


@pytest.mark.parametrize(
    ("fault", "sets", "told"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)],
    ids=str,
)
def test_what_is_broken_on_one_rank_is_named(ranks, fault, sets, told):
    if told is None:
        ranks(2).run(invariant_jobs.watched, sets, fault)
        return
    with pytest.raises(RankFailed) as failed:
        ranks(2).run(invariant_jobs.watched, sets, fault)
    assert told in str(failed.value)
    assert "after step 1 it held" in str(failed.value) or "equal" not in told


def test_a_parameter_moves_if_and_only_if_it_has_a_gradient(ranks):
    (found,) = ranks(1).run(invariant_jobs.moved_or_not, "moves without")
    assert f"{invariant_jobs.NAME} unchanged by the update of step 6" in found
    (found,) = ranks(1).run(invariant_jobs.moved_or_not, "stays")
    assert f"{invariant_jobs.NAME} moved by the update of step 6" in found
    assert "not one element has changed" in found
