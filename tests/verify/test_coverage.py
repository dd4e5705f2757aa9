from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fourfold.data.source import open_sources
from fourfold.record.lock import locked
from fourfold.record.reader import RunReader
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines, write_request
from fourfold.spec.errors import DataError, Problem, SpecError
from fourfold.spec.settle import settle
from fourfold.train.setup import batch_schedule
from fourfold.verify.coverage import run_coverage, verify_coverage
from fourfold.verify.deliver import smallest_model
from fourfold.verify.ledger import RankLedger
from fourfold.verify.ledger_check import LedgerCheck


def by_claim(document, text):
    found = [f for f in document["findings"] if text in f["claim"]]
    assert found, [f["claim"] for f in document["findings"]]
    return found[0]


def test_three_ranks_share_two_epochs_and_a_validation(small, tmp_path):
    spec = small("batch.global_batch=12", "data.validation_fraction=0.1")
    document = verify_coverage(spec, 3, out=tmp_path, command="repeat me")
    samples = document["samples"]
    assert (document["schema"], document["verdict"]) == ("fourfold.verify.coverage/1", "pass")
    assert (document["duplicates"], document["missing"]) == (0, 0)
    whole = samples // 12
    assert [rank["steps"] for rank in document["ranks"]] == [2 * whole] * 3
    assert [rank["samples"] for rank in document["ranks"]] == [2 * whole * 4] * 3
    assert samples % 12, "the tail must be worth naming"
    for epoch in document["epochs"]:
        assert epoch["dropped"] == samples % 12 and len(epoch["dropped_ids"]) == min(8, samples % 12)
        assert epoch["samples"] + epoch["dropped"] == samples
    assert by_claim(document, "order changes")["verdict"] == "pass"
    assert "degrees 1, 2, 3, 6" in by_claim(document, "global batches")["claim"]
    assert by_claim(document, "validation")["verdict"] == "pass"
    assert by_claim(document, "denominators")["command"] == "repeat me"
    assert (
        json.loads((tmp_path / "findings" / "coverage.json").read_text())["findings"] == document["findings"]
    )


def test_a_kept_tail_is_filled_up_and_nothing_dropped(small, tmp_path):
    document = verify_coverage(
        small('data.last_batch="keep"', "data.shuffle=false"), 2, epochs=1, out=tmp_path
    )
    assert document["verdict"] == "pass"
    assert document["epochs"][0]["samples"] == document["samples"]
    assert document["epochs"][0]["dropped"] == 0
    assert sum(rank["fillers"] for rank in document["ranks"]) == -document["samples"] % 8
    assert by_claim(document, "as they lie")["verdict"] == "pass"


def test_a_limited_ledger_says_what_it_does_not_show(small, tmp_path):
    document = verify_coverage(small(), 2, max_steps=5, out=tmp_path)
    assert document["verdict"] == "pass" and document["missing"] == 0
    assert document["epochs"] == [
        {
            "epoch": 0,
            "steps": 5,
            "whole": False,
            "samples": 40,
            "duplicates": 0,
            "missing": 0,
            "shared_by_ranks": 0,
            "not_in_the_data": 0,
            "dropped": 0,
            "dropped_ids": [],
        }
    ]
    assert by_claim(document, "the rest of epoch 1")["kind"] == "open"
    assert by_claim(document, "order changes")["kind"] == "open"


def test_vectors_transforms_and_workers(small, tmp_path):
    spec = small(
        'model.kind="mlp"',
        'data.kind="synthetic"',
        "data.samples=40",
        "data.workers=1",
        'data.transforms=[{kind="gaussian_noise", std=0.5}]',
    )
    document = verify_coverage(spec, 1, out=tmp_path)
    assert document["verdict"] == "pass"
    assert by_claim(document, "denominators")["measured"].startswith("80 targets")


def test_a_rank_that_fails_is_a_failed_finding(small, tmp_path):
    document = verify_coverage(small(), 2, out=tmp_path, setup="tests.verify.test_coverage:break_loader")
    assert document["verdict"] == "fail"
    assert document["missing"] == 2 * (document["samples"] // 8 * 8), "nothing is known to have come"
    assert "no such page" in by_claim(document, "reads its share")["measured"]


def break_loader():
    from fourfold.data.loader import Loader

    def steps(*_args):
        raise RuntimeError("no such page")

    Loader.steps = steps


def test_what_a_rank_cannot_read_is_no_failed_check_and_leaves_nothing(small, tmp_path):
    with pytest.raises(DataError) as refused:
        verify_coverage(small(), 2, out=tmp_path / "out", setup="tests.verify.test_coverage:lose_a_file")
    assert refused.value.problems == (LOST,)
    assert list(tmp_path.iterdir()) == []


LOST = Problem("read a shard", "no such file", "it was moved", "ls -l")


def lose_a_file():
    from fourfold.data.loader import Loader

    def steps(*_args):
        raise DataError(LOST)

    Loader.steps = steps


def test_requests_that_count_nothing(small, tmp_path):
    with pytest.raises(SpecError, match="--epochs 0"):
        verify_coverage(small(), 2, epochs=0, out=tmp_path)
    with pytest.raises(SpecError, match="--max-steps 0"):
        verify_coverage(small(), 2, max_steps=0, out=tmp_path)
    with pytest.raises(DataError):
        verify_coverage(small("batch.global_batch=1000"), 2, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reading_needs_no_large_model(small):
    spec = settle(small("model.layers=200", "model.width=8192", "model.heads=64", "model.kv_heads=8"), 2)
    assert smallest_model(spec).model.width == 2
    assert smallest_model(spec).data == spec.data
    assert smallest_model(spec).model.vocabulary == spec.model.vocabulary


def test_ranks_of_a_pipeline_read_the_same(small, tmp_path):
    moe = "model.moe={experts=4, top_k=2}"
    spec = small("layout.pp=2", "layout.pp_split=[1,1]", "batch.micro_batch=2", "batch.accumulation=4", moe)
    document = verify_coverage(spec, 2, out=tmp_path)
    assert (document["verdict"], document["duplicates"], document["missing"]) == ("pass", 0, 0)


def ledgers_of(schedule, steps):
    made = []
    for rank in range(schedule.degree):
        rows = np.concatenate([schedule.rows(rank, micro) for micro in range(schedule.accumulation)])
        made.append(
            RankLedger(rank, schedule.ids(range(steps), rows), np.broadcast_to(rows, (steps, len(rows))))
        )
    return made


def test_swapped_rows_keep_the_set_and_are_told_so(small):
    spec = settle(small(), 2)
    schedule = batch_schedule(spec, 80, 2)
    first, second = ledgers_of(schedule, 10)
    swapped = first.ids.copy()
    swapped[4, [0, 1]] = swapped[4, [1, 0]]
    check = LedgerCheck(schedule, lambda d: replace(schedule, degree=d, accumulation=4 // d), "")
    check.ledger([RankLedger(0, swapped, first.rows), second], 10)
    failed = [f for f in check.findings if f.verdict == "fail"]
    assert len(failed) == 1
    assert "step 5: the same samples in other rows" in failed[0].measured


# ---- of a run


@pytest.fixture
def run(small, tmp_path):
    """A run directory as two ranks leave it: `run(steps, change)`; change(rank, step, ids) -> ids or None."""

    def make(steps, change=lambda _rank, _step, ids: ids, ended=True, data=None):
        spec = settle(small(), 2)
        sources = open_sources(spec)
        schedule = batch_schedule(spec, len(sources.train), 2)
        room = RunDir(tmp_path / "run")
        room.path.mkdir()
        write_request(room, spec, {}, "")
        for rank in range(2):
            with JsonLines(room.events(rank)) as events:
                held = {"training data": data or sources.content_hash}
                events.write({"t": 0.0, "rank": rank, "step": 0, "kind": "census", **held})
                for step in range(steps):
                    ids = [i for micro in range(2) for i in schedule.micro_ids(step, rank, micro).tolist()]
                    ids = change(rank, step, ids)
                    if ids is not None:
                        events.write(
                            {"t": 1.0, "rank": rank, "step": step + 1, "kind": "step", "sample_ids": ids}
                        )
                if ended:
                    events.write({"t": 2.0, "rank": rank, "step": steps, "kind": "end", "ending": "finished"})
        return room.path

    return make


def test_a_run_is_audited_from_its_own_record(run):
    path = run(40)
    document = run_coverage(path)
    assert document["verdict"] == "pass"
    assert [rank["steps"] for rank in document["ranks"]] == [40, 40]
    assert document["epochs"][0]["whole"] and not document["epochs"][-1]["whole"]
    assert (path / "findings" / "coverage-of-run.json").exists()


def test_a_sample_read_twice_in_a_run_is_found(run):
    document = run_coverage(run(10, lambda _rank, step, ids: [ids[0], *ids[:3]] if step == 3 else ids))
    assert document["verdict"] == "fail"
    assert (document["duplicates"], document["missing"]) == (2, 2)
    assert "step 4: other samples" in by_claim(document, "global batches")["measured"]


def test_a_run_that_was_cut_off_is_judged_as_far_as_all_ranks_recorded(run):
    path = run(9, lambda rank, step, ids: None if (rank, step) == (0, 8) else ids, ended=False)
    document = run_coverage(path)
    assert document["verdict"] == "pass"
    open_point = by_claim(document, "still to come")
    assert (open_point["kind"], open_point["measured"]) == (
        "open",
        "the run has 8 of 20 steps on all ranks' records: it stopped unfinished",
    )
    assert [rank["steps"] for rank in document["ranks"]] == [8, 8]


def test_a_run_still_going_on_is_judged_by_what_is_there(run):
    """Rank 1 has not begun its record; then it has, and both are stopped, which is no end either."""
    path = run(9, ended=False)
    second = path / "events" / "rank1.jsonl"
    lines = second.read_text()
    second.unlink()
    with locked(RunDir(path)):
        document = run_coverage(path)
    assert document["verdict"] == "pass"
    assert "still going on" in by_claim(document, "still to come")["measured"]
    assert by_claim(document, "left a record")["verdict"] == "open"
    assert by_claim(document, "samples that are due")["measured"] == "so in 9 lines"
    second.write_text(lines)
    for rank in range(2):
        with JsonLines(path / "events" / f"rank{rank}.jsonl") as events:
            events.write({"rank": rank, "step": 9, "kind": "end", "ending": "stopped"})
    document = run_coverage(path)
    assert (document["verdict"], document["missing"]) == ("pass", 0)
    assert "9 of 20 steps" in by_claim(document, "still to come")["measured"]


def test_a_run_that_writes_while_it_is_read_is_one_record(run, monkeypatch):
    """Rank 0 is read, then both end: what was read of rank 0 had no end, and is not held against rank 1's."""
    path = run(9, lambda rank, step, ids: None if (rank, step) == (0, 8) else ids, ended=False)
    files = [path / "events" / f"rank{rank}.jsonl" for rank in range(2)]
    line = json.loads(files[1].read_text().splitlines()[-1])
    read = RunReader.events

    def events(self, rank):
        yield from read(self, rank)
        if rank == 0 and '"end"' not in files[0].read_text():
            for one, file in enumerate(files):
                with JsonLines(file) as lines:
                    if one == 0:
                        lines.write({**line, "rank": 0})
                    lines.write({"rank": one, "step": 9, "kind": "end", "ending": "finished"})

    monkeypatch.setattr(RunReader, "events", events)
    monkeypatch.setattr("fourfold.verify.coverage._check_data", lambda *_: None)
    document = run_coverage(path)
    assert [rank["steps"] for rank in document["ranks"]] == [8, 8]
    assert document["verdict"] == "pass"


def test_a_resumed_run_is_judged_by_what_it_did_last(run):
    """Rank 0 came to step 9, rank 1 to 8; both went on after step 4 and were stopped after 6."""
    path = run(9, lambda rank, step, ids: None if (rank, step) == (1, 8) else ids, ended=False)
    for rank in range(2):
        file = path / "events" / f"rank{rank}.jsonl"
        steps = [line for line in map(json.loads, file.read_text().splitlines()) if line["step"] in (5, 6)]
        with JsonLines(file) as events:
            events.write({"rank": rank, "step": 4, "kind": "start"})
            for line in steps:
                events.write(line)
            events.write({"rank": rank, "step": 6, "kind": "end", "ending": "stopped"})
    document = run_coverage(path)
    assert document["verdict"] == "pass"
    assert [rank["steps"] for rank in document["ranks"]] == [6, 6]
    with JsonLines(path / "events" / "rank1.jsonl") as events:  # and killed in the next attempt
        events.write({"rank": 1, "step": 6, "kind": "start"})
    assert by_claim(run_coverage(path), "still to come")["kind"] == "open"


def test_a_rank_that_ended_early_in_a_finished_run_is_a_failure(run):
    document = run_coverage(run(9, lambda rank, step, ids: None if (rank, step) == (1, 8) else ids))
    assert document["verdict"] == "fail"
    assert by_claim(document, "same number of steps")["measured"] == "9, 8"
    assert document["missing"] == 4


def test_a_rank_without_a_record_is_a_failure(run):
    path = run(9)
    (path / "events" / "rank1.jsonl").unlink()
    document = run_coverage(path)
    assert by_claim(document, "left a record")["measured"] == "1 rank"
    assert document["verdict"] == "fail"


def test_data_that_has_changed_since_the_run_cannot_be_audited(run):
    with pytest.raises(DataError, match="other data"):
        run_coverage(run(3, data="0123"))


def test_records_that_cannot_be_audited(run, tmp_path):
    path = run(3, lambda _rank, _step, ids: ids[:3])
    with pytest.raises(DataError, match="4 sample ids in each step"):
        run_coverage(path)
    for rank in range(2):
        (path / "events" / f"rank{rank}.jsonl").write_text("")
    with pytest.raises(DataError, match="no step in any"):
        run_coverage(path)
    with pytest.raises(DataError):
        run_coverage(tmp_path / "nothing")


def test_a_rank_whose_early_lines_are_lost_is_not_accused(run):
    """As after a power cut: the file begins with a resumed run's lines."""
    path = run(9, lambda rank, step, ids: None if rank == 0 and step in (0, 1, 2, 3, 6) else ids)
    document = run_coverage(path)
    measured = by_claim(document, "the record holds every step")["measured"]
    file = path / "events" / "rank0.jsonl"
    assert measured == f"{file} has no line of steps 1-4, 7 of rank 0: nothing can be said of them"
    assert [finding["claim"] for finding in document["findings"] if finding["verdict"] == "fail"] == [
        "this run: the record holds every step of every rank"
    ]
    assert (document["verdict"], document["duplicates"], document["missing"]) == ("fail", 0, 0)
    assert [rank["steps"] for rank in document["ranks"]] == [4, 9]


def test_what_is_left_of_a_record_is_still_held_against_the_schedule(run):
    def change(rank, step, ids):
        return None if step == 0 else [ids[0], *ids[:3]] if (rank, step) == (1, 4) else ids

    document = run_coverage(run(9, change))
    assert "step 1 of rank 0" in by_claim(document, "the record holds every step")["measured"]
    assert by_claim(document, "samples that are due")["measured"] == "rank 1, step 5: other samples"


def test_a_record_that_begins_where_nothing_was_left_to_do_lacks_every_step(run):
    path = run(9, lambda rank, _step, ids: None if rank == 1 else ids, ended=True)
    lines = (path / "events" / "rank1.jsonl").read_text().splitlines()
    with_start = [lines[0], json.dumps({"rank": 1, "step": 9, "kind": "start"}), *lines[1:]]
    (path / "events" / "rank1.jsonl").write_text("".join(f"{line}\n" for line in with_start))
    measured = by_claim(run_coverage(path), "the record holds every step")["measured"]
    assert "no line of steps 1-9 of rank 1" in measured


def test_a_run_that_was_cut_off_before_a_rank_recorded_a_step_is_open(run):
    document = run_coverage(run(1, lambda rank, _step, ids: None if rank else ids, ended=False))
    assert by_claim(document, "still to come")["measured"].startswith("the run has 0 of ")


# ---- of a run in exact mode, on one number of ranks after the other


@pytest.fixture
def elastic(small, tmp_path):
    """As starts leave it: `elastic(starts, change)`, each start (ranks, steps before, steps after); as of `run`."""

    def make(starts, change=lambda _world, _rank, _step, ids: ids):
        specs = [
            settle(small("run.exact=true", "batch.micro_batch=1", "run.steps=8"), world)
            for world, _, _ in starts
        ]
        sources = open_sources(specs[0])
        room = RunDir(tmp_path / "run")
        room.path.mkdir()
        write_request(room, specs[0], {}, "")
        for spec, (world, began, stop) in zip(specs, starts, strict=True):
            schedule = batch_schedule(spec, len(sources.train), world)
            for rank in range(world):
                with JsonLines(room.events(rank)) as events:
                    base = {"t": 1.0, "rank": rank}
                    events.write({**base, "step": began, "kind": "start", "world": world})
                    for step in range(began, stop):
                        micros = range(schedule.accumulation)
                        ids = [i for micro in micros for i in schedule.micro_ids(step, rank, micro).tolist()]
                        ids = change(world, rank, step + 1, ids)
                        if ids is not None:
                            events.write({**base, "step": step + 1, "kind": "step", "sample_ids": ids})
                    ending = "finished" if stop == 8 else "stopped"
                    events.write({**base, "step": stop, "kind": "end", "ending": ending})
        return room.path

    return make


@pytest.mark.parametrize(
    "starts",
    [
        [(2, 0, 3), (1, 3, 5), (2, 5, 8)],
        [(4, 0, 5), (2, 3, 4), (8, 4, 8)],  # two steps are taken back
        [(1, 0, 4), (4, 0, 3), (2, 2, 8)],  # anew, and of the four ranks two steps stand
        [(2, 0, 4), (8, 4, 6), (1, 4, 8)],  # nothing stands of the eight
    ],
)
def test_a_run_on_several_numbers_of_ranks_is_audited_as_a_whole(elastic, starts):
    document = run_coverage(elastic(starts))
    assert document["verdict"] == "pass"
    assert (document["duplicates"], document["missing"], document["world"]) == (0, 0, starts[-1][0])
    assert document["epochs"][0]["samples"] == 64
    assert sum(rank["samples"] for rank in document["ranks"]) == 64
    assert document["starts"][-1] == {"after_step": starts[-1][1], "ranks": starts[-1][0]}
    assert by_claim(document, "global batches")["measured"] == "equal in 8 steps"


STARTS = [(4, 0, 5), (2, 3, 8)]


def test_a_sample_lost_where_the_number_of_ranks_changes_is_named(elastic):
    """Step 4, the first of two ranks, begins a sample late, and so has one twice: the first of step 5."""
    lost = []

    def late(world, rank, step, ids):
        if (world, step) != (2, 4):
            return ids
        lost.extend(ids[:1] if rank == 0 else [])
        return [*ids[1:], ids[1]]

    document = run_coverage(elastic(STARTS, late))
    assert (document["verdict"], document["duplicates"], document["missing"]) == ("fail", 2, 2)
    assert by_claim(document, "is missing")["measured"] == f"2 missing: sample {lost[0]}, due in step 4"
    assert "step 4: other samples" in by_claim(document, "global batches")["measured"]


def test_samples_that_come_again_after_a_change_are_named(elastic):
    """Two ranks take up the run after step 3, and begin with the batch of step 3."""
    again = {}

    def early(world, rank, step, ids):
        again[world, step, rank] = ids
        if (world, step) == (2, 4):
            return [i for r in (2 * rank, 2 * rank + 1) for i in again[4, 3, r]]
        return ids

    document = run_coverage(elastic(STARTS, early))
    assert (document["verdict"], document["duplicates"], document["missing"]) == ("fail", 8, 8)
    first = min(i for r in range(4) for i in again[4, 3, r])
    assert by_claim(document, "comes twice")["measured"] == f"8 duplicates: sample {first} in steps 3 and 4"


def test_a_line_lost_where_the_number_of_ranks_changes_is_named(elastic):
    path = elastic(STARTS, lambda world, rank, step, ids: None if (world, rank, step) == (4, 3, 3) else ids)
    document = run_coverage(path)
    assert document["verdict"] == "fail"
    assert "no line of step 3 of rank 3" in by_claim(document, "holds every step")["measured"]
    (path / "events" / "rank3.jsonl").unlink()
    document = run_coverage(path)
    assert by_claim(document, "left a record")["measured"] == "3 ranks"
    assert "no line of steps 1-3 of rank 3" in by_claim(document, "holds every step")["measured"]


def test_ranks_of_the_newest_start_are_waited_for_and_no_others(elastic):
    path = elastic([(4, 0, 3), (2, 3, 6)])
    document = run_coverage(path)
    assert (document["verdict"], by_claim(document, "still to come")["kind"]) == ("pass", "open")
    assert [rank["steps"] for rank in document["ranks"]] == [6, 6, 3, 3]
    with JsonLines(path / "events" / "rank0.jsonl") as events:
        events.write({"rank": 0, "step": 6, "kind": "start", "world": 8})
    document = run_coverage(path)
    assert document["verdict"] == "pass"
    assert by_claim(document, "left a record")["measured"] == "4 ranks of 8"


def test_a_record_of_a_rank_that_was_never_started_is_refused(elastic):
    path = elastic(STARTS)
    (path / "events" / "rank4.jsonl").write_text((path / "events" / "rank1.jsonl").read_text())
    with pytest.raises(DataError, match="4 or 2 ranks"):
        run_coverage(path)
