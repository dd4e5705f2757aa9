from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import fourfold.diagnose.summary as module
from fourfold.diagnose.summary import Summary, summarize
from fourfold.record.run_dir import RunDir, claim
from fourfold.record.writer import JsonLines, write_json, write_request
from fourfold.spec.errors import DataError
from fourfold.spec.model import MlpSpec
from fourfold.spec.spec import Spec
from fourfold.spec.training import RunSpec


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run just begun: two ranks were planned, and 20 steps."""
    made = claim(tmp_path / "run")
    write_request(made, Spec(name="toy", model=MlpSpec(kind="mlp"), run=RunSpec(steps=20)), {}, "")
    write_json(made.plan_json, {"world": 2})
    return made


def rank_events(run: RunDir, rank: int, steps: int, *more: dict[str, Any], start: float = 100.0) -> None:
    with JsonLines(run.events(rank)) as file:
        base = {"rank": rank, "t": start}
        file.write({**base, "step": 0, "kind": "census"})
        file.write({**base, "step": 0, "kind": "start", "world": 2})
        for step in range(1, steps + 1):
            file.write({**base, "t": start + step, "step": step, "kind": "step", "sample_ids": [step]})
        for event in more:
            file.write({**base, "t": start + steps + 1, "step": steps, **event})


def metrics(run: RunDir, losses: list[float], rates: list[float] | None = None) -> None:
    with JsonLines(run.metrics) as file:
        for step, loss in enumerate(losses, start=1):
            rate = (rates or [100.0] * len(losses))[step - 1]
            line = {"step": step, "loss": loss, "tokens_per_s": rate, "nonpadding_per_s": rate / 2}
            file.write({**line, "loss_tokens_per_s": rate / 4})


END = {"kind": "end", "ending": "finished"}


def test_a_finished_run(run: RunDir) -> None:
    # The first tenth (two of 20) counts in no rate; the median ignores one stall.
    metrics(run, [4.0, 1.5, *[2.0] * 18], rates=[500.0, 500.0, *[100.0] * 9, *[102.0] * 8, 1.0])
    with JsonLines(run.metrics) as file:
        file.write({"step": 10, "validation_loss": 3.5})
        file.write({"step": 20, "validation_loss": 2.5})
    rank_events(run, 0, 20, END)
    rank_events(run, 1, 20, END, start=100.5)
    summary = summarize(run.path)
    assert summary == Summary(
        steps_asked=20, steps_done=20, first_loss=4.0, last_loss=2.0, best_loss=1.5,
        validation_loss=2.5, tokens_per_s=100.0, nonpadding_per_s=50.0, loss_tokens_per_s=25.0,
        started=100.0, wall_s=21.5, ranks=2, worlds=(),
        steps_by_rank=(20, 20), steps_agree=True, ended="finished", ended_why="",
    )  # fmt: skip
    assert Summary.model_validate_json(summary.model_dump_json()) == summary


def test_a_run_that_wrote_nothing_yet_is_unknown_not_zero(run: RunDir) -> None:
    run.plan_json.unlink()
    summary = summarize(run.path)
    assert summary.ended == "unfinished"
    assert summary.steps_done == 0
    unknown = {"first_loss", "last_loss", "best_loss", "validation_loss", "tokens_per_s", "nonpadding_per_s"}
    unknown |= {"loss_tokens_per_s", "started", "wall_s", "ranks", "steps_agree"}
    assert {name for name, value in summary.model_dump().items() if value == "n/a"} == unknown


def test_a_rank_with_fewer_steps_is_seen_and_counts(run: RunDir) -> None:
    rank_events(run, 0, 5)
    rank_events(run, 1, 4)
    summary = summarize(run.path)
    assert (summary.steps_done, summary.steps_by_rank, summary.steps_agree) == (4, (5, 4), False)
    assert summary.ended == "unfinished"


def test_a_rank_that_left_no_events_is_seen(run: RunDir) -> None:
    rank_events(run, 0, 5, END)
    metrics(run, [1.0] * 3)
    summary = summarize(run.path)
    assert (summary.steps_by_rank, summary.steps_agree, summary.ended) == ((5, "n/a"), False, "unfinished")
    assert summary.steps_done == 3


def test_without_a_plan_the_ranks_say_how_many_they_are(run: RunDir) -> None:
    run.plan_json.unlink()
    rank_events(run, 0, 5, END)
    assert summarize(run.path).ranks == 2


@pytest.mark.parametrize("how", [{"kind": "end", "ending": "stopped"}, {"kind": "signal"}])
def test_a_run_stopped_by_a_signal(run: RunDir, how: dict[str, str]) -> None:
    for rank in (0, 1):
        rank_events(run, rank, 5, *([how] if how["kind"] == "end" else [how, END]))
    assert summarize(run.path).ended == "stopped by a signal"


KILLED = """# Failed: 2 ranks of `fourfold train toy --nproc 2`

## First to fail

    rank 1 was killed by SIGKILL at step 6 (forward)
      why:   SIGKILL comes from a person, a scheduler, or the kernel when memory is short
"""


def test_the_failure_reported_first_is_the_reason(run: RunDir) -> None:
    rank_events(run, 0, 6, {"kind": "failure", "error": "ConnectionError: peer gone"})
    rank_events(run, 1, 5, {"kind": "failure", "error": "ValueError: bad sample"})
    summary = summarize(run.path)
    assert (summary.ended, summary.ended_why) == ("failed", "rank 1: ValueError: bad sample")


def test_a_killed_rank_is_known_from_who_started_it(run: RunDir) -> None:
    rank_events(run, 0, 5, {"kind": "failure", "error": "ConnectionError: peer gone"})
    rank_events(run, 1, 5)
    run.failures_md.write_text(KILLED)
    summary = summarize(run.path)
    assert (summary.ended, summary.ended_why) == (
        "failed",
        "rank 1 was killed by SIGKILL at step 6 (forward)",
    )


def test_a_resumed_run_is_what_it_is_now(run: RunDir) -> None:
    """Rank 0 came to step 6 when rank 1 was killed in it; from step 4 on they went together, and were stopped in 5."""
    rank_events(run, 0, 6, {"kind": "failure", "error": "ConnectionError: peer gone"})
    rank_events(run, 1, 5)
    for rank in (0, 1):
        with JsonLines(run.events(rank)) as file:
            base = {"rank": rank, "t": 200.0}
            file.write({**base, "step": 4, "kind": "start", "world": 2})
            file.write({**base, "step": 5, "kind": "step", "sample_ids": [5]})
            file.write({**base, "step": 5, "kind": "end", "ending": "stopped"})
    summary = summarize(run.path)
    assert (summary.steps_done, summary.steps_by_rank, summary.steps_agree) == (5, (5, 5), True)
    assert (summary.ended, summary.ended_why) == ("stopped by a signal", "")
    rank_events(run, 0, 20, END)
    rank_events(run, 1, 20)
    assert summarize(run.path).ended == "unfinished"
    rank_events(run, 1, 20, END)
    assert summarize(run.path).ended == "finished"


def test_a_run_on_several_numbers_of_ranks_is_judged_by_who_was_there(run: RunDir) -> None:
    """Four ranks to step 6, of which two that were saved stand; two from there to 8; one from there to 20."""
    for world, began, stop, ending in ((4, 0, 6, "stopped"), (2, 2, 8, "stopped"), (1, 8, 20, "finished")):
        for rank in range(world):
            with JsonLines(run.events(rank)) as file:
                base = {"rank": rank, "t": 100.0 + began}
                file.write({**base, "step": began, "kind": "start", "world": world})
                for step in range(began + 1, stop + 1):
                    file.write({**base, "step": step, "kind": "step", "sample_ids": [step]})
                file.write({**base, "step": stop, "kind": "end", "ending": ending})
    write_json(run.plan_json, {"world": 1})
    summary = summarize(run.path)
    assert (summary.steps_done, summary.steps_by_rank, summary.steps_agree) == (20, (20,), True)
    assert (summary.ended, summary.ranks, summary.worlds) == ("finished", 1, (4, 2, 1))
    lines = run.events(1).read_text().splitlines()
    run.events(1).write_text(
        "".join(f"{line}\n" for line in lines if '"step": 8, "kind": "step"' not in line)
    )
    assert summarize(run.path).steps_agree is False


def test_what_an_earlier_attempt_failed_of_is_not_the_end(run: RunDir) -> None:
    restarted = "# Started again since: " + KILLED.removeprefix("# Failed: ")
    run.failures_md.write_text(restarted)
    rank_events(run, 0, 5)
    rank_events(run, 1, 5)
    assert summarize(run.path).ended == "unfinished"
    run.failures_md.write_text(f"{KILLED}\n{restarted}")
    assert summarize(run.path).ended == "failed"
    run.failures_md.write_text(restarted)
    rank_events(run, 0, 6, END)
    rank_events(run, 1, 6, END)
    assert summarize(run.path).ended == "finished"


def test_a_loss_that_is_not_finite_is_kept_as_it_is(run: RunDir) -> None:
    metrics(run, [3.0, 2.0, float("nan")])
    summary = summarize(run.path)
    assert (summary.first_loss, summary.best_loss, summary.last_loss) == (3.0, 2.0, "nan")


def test_a_folder_that_is_no_run_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"spec\.json"):
        summarize(tmp_path)


def test_reading_a_run_needs_neither_torch_nor_the_trainer() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in imported if name and name.startswith("fourfold")}
    assert ours == {"fourfold.record.reader", "fourfold.record.starts", "fourfold.spec.value"}
