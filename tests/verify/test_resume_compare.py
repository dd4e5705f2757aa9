"""Which deviation comes first, and what a wrong value may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.record.run_dir import RunDir
from fourfold.train.setup import batch_schedule
from fourfold.verify.resume_compare import (
    IDS,
    KINDS,
    LOSS,
    RATE,
    STREAM,
    VALIDATION,
    Deviation,
    Rules,
    in_order,
)
from fourfold.verify.resume_course import Scenario
from fourfold.verify.resume_record import Life, Trail
from tests.train.rank_jobs import spec

ASKED = spec(2, "run.steps=12", 'optimizer.schedule="linear"')
RULES = Rules(ASKED, batch_schedule(ASKED, 40, 2))  # 5 steps an epoch


def trail(**changes):
    """A run of steps 3 to 12, as the rules have it but for `changes` of its life."""
    steps = range(3, 13)
    life = Life(
        2,
        tuple({step: RULES.ids(rank, step) for step in steps} for rank in (0, 1)),
        {
            step: {"step": step, "loss": 10.0 - step, "grad_norm": 1.0, "lr": RULES.rate(step)}
            for step in steps
        },
        {6: {"step": 6, "validation_loss": 3.0}},
    )
    return Trail(Scenario("test", "a test"), RunDir(Path("nowhere")), [replace(life, **changes)])


def with_line(step, **values):
    lines = trail().lives[0].steps
    return trail(steps={**lines, step: {**lines[step], **values}})


def test_equal_runs_do_not_deviate():
    assert RULES.compare(trail(), trail()) == RULES.broken_by(trail()) == []


def test_what_comes_first_in_a_run_comes_first():
    def at(life, step, kind):
        return Deviation("a run", life, step, kind, None, "", "1", "2")

    expected = [at(0, 9, VALIDATION), at(1, 4, IDS), at(1, 4, RATE), at(1, 4, STREAM), at(1, 5, IDS)]
    assert in_order(expected[::-1]) == expected
    assert KINDS.index(IDS) < KINDS.index(RATE) < KINDS.index(LOSS) < KINDS.index(STREAM)


@pytest.mark.parametrize(
    ("ids", "note"),
    [
        (RULES.ids(1, 4), "those of step 4, rank 1"),
        (RULES.ids(0, 14), "those of step 14, rank 0"),  # beyond the run's end
        ([0] * 4, ""),
    ],
)
def test_wrong_ids_are_those_of_another_step_or_rank(ids, note):
    wrong = trail()
    wrong = trail(ids=({**wrong.lives[0].ids[0], 3: ids}, wrong.lives[0].ids[1]))
    for found in (RULES.compare(wrong, trail()), RULES.broken_by(wrong)):
        assert [(one.kind, one.step, one.rank, one.note) for one in found] == [(IDS, 3, 0, note)]


@pytest.mark.parametrize(
    ("rate", "note"),
    [
        (RULES.rate(5), "that of step 5"),
        (RULES.rate(3) * RULES.rate(2) / ASKED.optimizer.lr, "the schedule's share of the rate of step 2"),
        (0.25, ""),
    ],
)
def test_a_wrong_rate_is_that_of_another_step_or_the_schedule_twice(rate, note):
    for found in (RULES.compare(with_line(3, lr=rate), trail()), RULES.broken_by(with_line(3, lr=rate))):
        assert [(one.kind, one.step, one.found) for one in found] == [(RATE, 3, repr(rate))]
        assert found[0].note.startswith(note) and bool(found[0].note) == bool(note)


def test_a_wrong_loss_or_validation_is_told_with_both_values():
    found = RULES.compare(with_line(4, loss=10.0 - 7), trail())
    assert str(found[0]) == "step 4, loss: 3.0 in place of 6.0 (that of step 7)"
    found = RULES.compare(trail(validations={6: {"step": 6, "validation_loss": 3.5}}), trail())
    assert str(found[0]) == "step 6, validation loss: 3.5 in place of 3.0"
    assert RULES.compare(with_line(4, loss="nan"), with_line(4, loss="nan")) == []


def test_a_constant_rate_tells_of_no_step():
    asked = spec(1, 'optimizer.schedule="constant"')
    rules = Rules(asked, batch_schedule(asked, 40, 1))
    assert rules._guess_rate(rules.rate(2), 0.5, 2) == ""
