"""Global batches depend on (seed, epoch, step) alone; ranks and microbatches only read their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data.order import SampleOrder
from fourfold.data.schedule import FILLER, BatchSchedule, steps_per_epoch
from fourfold.spec.errors import DataError, SpecError

small = st.integers(1, 5)


def schedule(samples: int = 100, global_batch: int = 12, **more: Any) -> BatchSchedule:
    cut: dict[str, Any] = {"micro_batch": global_batch, "accumulation": 1, "degree": 1, "seed": 5}
    return BatchSchedule(samples, global_batch, **(cut | more))


def read_back(cut: BatchSchedule, step: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows and ids of a step, as the ranks read them."""
    places = [(rank, micro) for rank in range(cut.degree) for micro in range(cut.accumulation)]
    rows = np.concatenate([cut.rows(*place) for place in places])
    ids = np.concatenate([cut.micro_ids(step, *place) for place in places])
    return rows, ids


@given(
    *(small, small, small, st.integers(0, 30), st.sampled_from(["drop", "keep"]), st.integers(0, 9)),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_ranks_and_microbatches_read_every_row_of_the_same_global_batch_once(
    micro: int, accumulation: int, degree: int, spare: int, last: Any, step: int, by_rank: bool
) -> None:
    size = micro * accumulation * degree
    more: Any = {"last_batch": last, "by_rank": by_rank}
    cut = BatchSchedule(size + spare, size, micro, accumulation, degree, 3, **more)
    whole = BatchSchedule(size + spare, size, size, 1, 1, 3, last_batch=last)
    rows, ids = read_back(cut, step)
    assert sorted(rows) == list(range(size))
    assert (ids[np.argsort(rows)] == whole.global_ids(step)).all()


def test_one_microbatch_of_all_ranks_is_a_run_of_rows_or_all_of_one_rank() -> None:
    for by_rank, first in ((False, [0, 1, 6, 7]), (True, [0, 1, 2, 3])):
        cut = schedule(micro_batch=2, accumulation=2, degree=3, by_rank=by_rank)
        assert [*cut.rows(0, 0), *cut.rows(0, 1)] == first


@given(st.integers(1, 60), st.integers(1, 20), st.booleans())
@settings(max_examples=100, deadline=None)
def test_kept_epochs_hold_every_sample_once_with_filler_at_the_very_end(
    samples: int, size: int, shuffle: bool
) -> None:
    cut = schedule(samples, size, micro_batch=size, last_batch="keep", shuffle=shuffle)
    for epoch in range(2):
        steps = range(epoch * cut.steps_per_epoch, (epoch + 1) * cut.steps_per_epoch)
        ids = np.concatenate([cut.global_ids(step) for step in steps])
        assert sorted(ids[:samples]) == list(range(samples))
        assert (ids[samples:] == FILLER).all()
        assert len(ids) - samples < size


@given(st.integers(1, 60), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_dropped_epochs_hold_distinct_samples_and_pass_over_less_than_a_batch(
    samples: int, size: int
) -> None:
    if samples < size:
        return
    cut = schedule(samples, size, micro_batch=size)
    ids = np.concatenate([cut.global_ids(step) for step in range(cut.steps_per_epoch)])
    assert len(set(ids.tolist())) == len(ids) > samples - size
    assert ids.min() >= 0


def test_every_epoch_has_another_order_and_drops_other_samples() -> None:
    cut = schedule(samples=100, global_batch=12)
    epochs = [
        np.concatenate([cut.global_ids(step) for step in range(first, first + 8)])
        for first in range(0, 40, 8)
    ]
    assert len({tuple(ids) for ids in epochs}) == 5
    assert len({frozenset(ids) for ids in epochs}) == 5


def test_an_epoch_that_does_not_advance_would_repeat_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail: with the epoch stuck, the second epoch is the first again."""
    monkeypatch.setattr(BatchSchedule, "epoch", lambda *_: 0)
    cut = schedule(samples=96)
    assert (cut.global_ids(0) == cut.global_ids(8)).all()


def test_the_order_is_that_of_the_seed_whatever_the_global_batch() -> None:
    ids = [
        np.concatenate([cut.global_ids(step) for step in range(60 // size)])
        for size in (4, 6, 60)
        for cut in [schedule(60, size, micro_batch=size)]
    ]
    expected = SampleOrder(60, 5).ids(0, np.arange(60))
    assert all((each == expected).all() for each in ids)


@given(st.integers(0, 500), st.sampled_from(["drop", "keep"]))
@settings(deadline=None)
def test_position_and_step_are_each_others_inverse(step: int, last: Any) -> None:
    cut = schedule(samples=100, global_batch=12, last_batch=last)
    position = cut.position(step)
    assert cut.step_at(position) == step
    assert cut.position(step + 1) > position
    epoch, offset = divmod(position, 100)
    first = SampleOrder(100, 5).ids(epoch, np.array([offset]))
    assert cut.global_ids(step)[0] == first[0]


@pytest.mark.parametrize("position", [-12, 1, 96, 99])
def test_a_position_where_no_step_begins_is_refused(position: int) -> None:
    with pytest.raises(SpecError, match="no global batch begins there"):
        schedule(samples=100, global_batch=12).step_at(position)


def test_a_microbatch_of_all_ranks_is_a_run_of_rows() -> None:
    cut = schedule(global_batch=12, micro_batch=2, accumulation=2, degree=3)
    rows = [[cut.rows(rank, micro).tolist() for rank in range(3)] for micro in range(2)]
    assert rows == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]


def test_without_shuffle_samples_come_as_they_lie_in_every_epoch() -> None:
    cut = schedule(samples=25, global_batch=12, shuffle=False)
    assert [cut.global_ids(step).tolist() for step in range(3)] == [
        list(range(12)),
        list(range(12, 24)),
        list(range(12)),
    ]


def test_many_steps_at_once_are_the_steps_one_by_one() -> None:
    cut = schedule(samples=50, global_batch=12, last_batch="keep", micro_batch=2, accumulation=3, degree=2)
    rows = np.concatenate([cut.rows(1, micro) for micro in range(3)])
    together = cut.ids(range(2, 13), rows)
    alone = [np.concatenate([cut.micro_ids(step, 1, micro) for micro in range(3)]) for step in range(2, 13)]
    assert (together == np.stack(alone)).all()


def test_fewer_samples_than_a_global_batch_are_refused_with_what_to_type() -> None:
    with pytest.raises(DataError) as error:
        schedule(samples=11, global_batch=12, micro_batch=2, accumulation=2, degree=3)
    assert "11 training samples" in str(error.value)
    assert "12 samples" in str(error.value)
    assert "--set batch.global_batch=6" in str(error.value)
    assert "last_batch=keep" in str(error.value)


def test_no_smaller_global_batch_is_offered_where_there_is_none() -> None:
    with pytest.raises(DataError) as error:
        schedule(samples=5, global_batch=12, micro_batch=2, accumulation=2, degree=3)
    assert "global_batch=" not in str(error.value)


def test_fewer_samples_than_a_kept_global_batch_make_one_step() -> None:
    cut = schedule(samples=5, global_batch=12, last_batch="keep")
    assert cut.steps_per_epoch == 1
    assert sorted(cut.global_ids(0)[:5]) == [0, 1, 2, 3, 4]
    assert (cut.global_ids(0)[5:] == FILLER).all()


@pytest.mark.parametrize("wrong", [{"micro_batch": 5}, {"degree": 2}, {"accumulation": 0}])
def test_a_product_that_does_not_hold_is_shown(wrong: dict[str, int]) -> None:
    with pytest.raises(SpecError, match=r"micro_batch \d+ × accumulation \d"):
        schedule(**wrong)


def test_steps_per_epoch() -> None:
    assert [steps_per_epoch(n, 4, "drop") for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert [steps_per_epoch(n, 4, "keep") for n in (0, 3, 4, 7, 8)] == [0, 1, 1, 2, 2]
