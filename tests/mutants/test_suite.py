"""The suite itself: every kind has a planted fault, one that is caught is told with its step, nothing is run twice."""

from __future__ import annotations

import importlib
import json

import pytest

from tests.mutants import runner
from tests.mutants.catalogue import KINDS
from tests.mutants.checks import CHECKS, COLUMNS, Asked, Result, asked_of
from tests.mutants.clean import drawn, plan_of
from tests.mutants.kinds import MUTANTS, NUMBERS
from tests.mutants.suite import chosen
from tests.mutants.table import BEGIN, END, Row, is_caught, matrix, put_between_marks, score_of, summary
from tests.verify.small import write_small

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.fixture
def spec(tmp_path):
    return str(write_small(tmp_path / "small"))


def test_every_kind_has_a_planted_fault():
    assert len(BY_NAME) == len(MUTANTS), "a name twice"
    assert NUMBERS.keys() <= BY_NAME.keys()
    assert {kind for mutant in MUTANTS for kind in mutant.kinds} == KINDS.keys()


def test_every_fault_can_be_planted():
    for mutant in MUTANTS:
        if mutant.planted is not None:
            module, _, name = mutant.planted.partition(":")
            assert callable(getattr(importlib.import_module(module), name)), mutant.planted


def test_a_fault_is_caught_in_its_step_and_a_clean_run_is_not(spec, tmp_path):
    mutant = BY_NAME["broken_one_value"]
    caught = next(CHECKS["run"](asked_of(mutant, spec), tmp_path / "faulty"))
    assert (caught.outcome, caught.step) == ("caught", 3)
    assert "equal on all ranks that hold it, after step 3" in caught.told
    clean = list(CHECKS["run"](asked_of(mutant, spec, control=True), tmp_path / "clean"))
    assert [(one.check, one.outcome) for one in clean] == [
        ("run", "missed"),
        ("audit", "missed"),
        ("ckpt", "missed"),
    ]
    assert clean[0].bits != caught.bits


def test_what_runs_of_other_kinds_of_layouts_cannot_be_asked(spec, tmp_path):
    (told,) = CHECKS["exact"](Asked(spec, ("layout.tp=2",), 2, None), tmp_path)
    assert (told.outcome, told.told) == ("not applicable", "tp = 2 is refused there")


def test_a_check_that_fails_by_itself_is_a_crash(monkeypatch, spec):
    def breaks(_asked, _folder):
        yield Result("run", "missed")
        raise TypeError("no such thing")

    monkeypatch.setitem(runner.CHECKS, "run", breaks)
    task = runner.Task("a", "b", "run", Asked(spec, (), 2, None))
    told = runner.done(task)
    assert [one.outcome for one in told] == ["missed", "crash", "not applicable"]
    assert told[1].told == "TypeError: no such thing"


def test_what_is_written_down_is_not_run_again(tmp_path, spec):
    results = tmp_path / "results.jsonl"
    mutants = chosen("never_synced,factor_missing")
    tasks = list(runner.tasks_of(tmp_path, mutants, ["equal"], spec))
    assert [task.who.split()[0] for task in tasks] == ["clean", "factor_missing", "never_synced"]
    assert runner.missing(tasks, runner.read_results(results)) == tasks
    first = {"who": tasks[0].who, "source": tasks[0].source, "check": "equal", "outcome": "missed"}
    other = {**first, "who": tasks[1].who, "source": "of other sources"}
    results.write_text("".join(json.dumps(line) + "\n" for line in (first, other)) + '{"who": "cut')
    assert runner.missing(tasks, runner.read_results(results)) == tasks[1:]


def test_faults_are_chosen_by_kind_and_by_name():
    assert {mutant.name for mutant in chosen("31")} == {"replicated_counted_tp_times"}
    assert [mutant.name for mutant in chosen("epoch_not")] == ["epoch_not_advanced"]
    assert chosen("") == MUTANTS
    with pytest.raises(SystemExit):
        chosen("no such fault")


def line(outcome, step=None, bits="1"):
    return {"outcome": outcome, "step": step, "bits": bits}


def test_the_matrix_says_where_each_fault_is_caught(tmp_path):
    one, two = BY_NAME["never_synced"], BY_NAME["factor_missing"]
    clean = {"run": line("missed"), "equal": line("missed"), "exact": line("crash")}
    rows = [
        Row(one, {"run": line("caught", 1), "equal": line("hang"), "exact": line("caught", 2)}, clean),
        Row(two, {"run": line("missed"), "audit": line("missed"), "equal": line("missed")}, clean),
    ]
    assert [rows[0].cell(column) for column in COLUMNS] == ["1", "", "", "hang", "", "–", ""]
    assert [rows[1].cell(column) for column in COLUMNS] == ["=", "=", "", "·", "", "", ""]
    assert matrix(rows).splitlines()[2:] == [
        "| 21 | `factor_missing` | = | = |  | · |  |  |  |",
        "| 23 | `never_synced` | 1 |  |  | hang |  | – |  |",
    ]
    assert [is_caught(cell) for cell in ("3", "start", "yes", "·", "", "crash")] == [True] * 3 + [False] * 3
    score = score_of(rows, [{"alarm": ""}, {"alarm": "an alarm"}])
    assert (score.kinds, score.faults, score.of_faults, score.clean, score.alarms) == ({23}, 1, 2, 2, 1)
    assert not score.holds
    assert "not caught by the checks asked so far: `factor_missing`" in summary(rows, score)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_between_marks(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n{END}\nafter\n"


def test_clean_runs_are_legal_and_can_be_repeated(spec):
    draws = [drawn(spec, number) for number in range(4)]
    assert draws == [drawn(spec, number) for number in range(4)]
    for draw in draws:
        assert plan_of(spec, draw).world == draw.world
        assert f"--nproc {draw.world}" in draw.command(spec)
