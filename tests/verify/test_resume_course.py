"""How a Spec is cut short: the course holds what a resume check must come past, whatever data there is."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.data.source import open_sources
from fourfold.spec.rules import require
from fourfold.spec.settle import settle
from fourfold.verify.resume_course import EVERY, VALIDATE_EVERY, FirstSamples, plan_course, shortened
from tests.train.rank_jobs import spec


def saved_before(step):
    return (step - 1) // EVERY * EVERY


@given(st.integers(1, 9), st.integers(1, 80), st.sampled_from(["drop", "keep"]))
def test_every_course_comes_past_edges_kills_and_a_stop(whole, available, last):
    available = max(available, whole)
    asked = spec(1, f"batch.global_batch={whole}", "batch.micro_batch=1", f'data.last_batch="{last}"')
    course = plan_course(asked, available, validates=True)
    assert 1 <= course.samples <= available
    assert (course.steps - 1) // course.epoch_steps >= 2
    assert course.edge % course.epoch_steps == course.edge % EVERY == 0
    twice, edge, stopped = course.scenarios
    first, again = twice.interruptions
    assert EVERY < first.step < again.step <= course.steps
    if course.twice:
        epochs = {(one.step - 1) // course.epoch_steps for one in twice.interruptions}
        resumed = {saved_before(one.step) // course.epoch_steps for one in twice.interruptions}
        assert epochs == resumed and len(epochs) == 1
        assert saved_before(first.step) % course.epoch_steps, "in the middle of it"
    else:
        assert course.epoch_steps < 3
    assert saved_before(edge.interruptions[0].step) == course.edge
    assert edge.workers == 2 and edge.leftover
    stop, validation = stopped.interruptions
    assert (stop.signal, validation.signal) == (signal.SIGTERM, signal.SIGKILL)
    assert stop.step % EVERY and stop.step > course.epoch_steps
    assert validation.step % EVERY == validation.step % VALIDATE_EVERY == 0
    assert stop.step < validation.step < course.steps


def test_an_epoch_is_cut_to_six_steps_and_half_a_batch():
    dropped = plan_course(spec(2), 10_000, validates=False)
    kept = plan_course(spec(2, 'data.last_batch="keep"'), 10_000, validates=False)
    assert (dropped.samples, dropped.epoch_steps, kept.samples, kept.epoch_steps) == (52, 6, 44, 6)
    assert (dropped.edge, dropped.steps, dropped.twice) == (6, 13, True)
    assert [str(one) for one in dropped.scenarios[0].interruptions] == [
        "SIGKILL in step 4 (backward)",
        "SIGKILL in step 5 (update)",
    ]
    assert len(dropped.scenarios[2].interruptions) == 1, "there is no validation to be killed in"


def test_only_what_the_check_needs_is_changed_and_all_of_it_is_said():
    asked = spec(2, "checkpoint.every_s=60.0", 'optimizer.schedule="wsd"', "optimizer.decay_steps=4")
    cut, changes = shortened(asked, plan_course(asked, 40, True), 40, True)
    require(cut, "train")
    assert (cut.model, cut.batch, cut.layout, cut.precision, cut.data, cut.optimizer) == (
        *(asked.model, asked.batch, asked.layout, asked.precision, asked.data, asked.optimizer),
    )
    assert cut.checkpoint.every == EVERY and cut.checkpoint.every_s == 0.0
    for change in (
        "run.steps 4 -> 13",
        "checkpoint.every_s 60.0 -> 0.0",
        "data.workers 0 -> 2, where it is killed",
    ):
        assert any(said.startswith(change) for said in changes), changes
    assert not any("optimizer" in said or "training samples" in said for said in changes)
    assert "hardware.threads_per_rank by default -> 1" in changes


def test_a_decay_longer_than_the_check_is_cut():
    asked = spec(
        1,
        *(
            "run.steps=500",
            'optimizer.schedule="wsd"',
            "optimizer.decay_steps=100",
            "optimizer.warmup_steps=30",
        ),
    )
    cut, changes = shortened(asked, plan_course(asked, 40, False), 40, False)
    require(settle(cut, 1), "train")
    assert "optimizer.decay_steps 100 -> 4" in changes and "optimizer.warmup_steps 30 -> 4" in changes
    assert cut.run.validate_every == 0


def test_one_scenario_has_loader_workers():
    assert [scenario.workers for scenario in plan_course(spec(1), 40, True).scenarios] == [0, 2, 0]
    assert plan_course(spec(1, "data.workers=3"), 40, True).scenarios[1].workers == 3


def test_the_first_samples_are_a_source_of_the_same_samples():
    source = open_sources(spec(1)).train
    first = FirstSamples(source, 12)
    assert len(first) == 12 and first.counts()["samples"] == 12
    assert first.vocabulary is None and first.largest().inputs.shape == source.largest().inputs.shape
    assert (first.sample(11).inputs == source.sample(11).inputs).all()


@pytest.mark.parametrize("last", ["drop", "keep"])
def test_one_global_batch_of_data_is_enough(last):
    course = plan_course(spec(1, f'data.last_batch="{last}"'), 8, validates=True)
    assert (course.samples, course.epoch_steps, course.twice) == (8, 1, False)
