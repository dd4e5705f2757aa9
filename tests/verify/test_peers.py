"""Coverage where several ranks work on the same samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fourfold.data.source import open_sources
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines, write_request
from fourfold.spec.grid import Grid
from fourfold.spec.settle import settle
from fourfold.train.setup import batch_schedule
from fourfold.verify.coverage import run_coverage, verify_coverage
from fourfold.verify.deliver import smallest_model
from fourfold.verify.ledger import RankLedger
from fourfold.verify.peers import one_of_each, one_pass_of_each

GRID = Grid(dp_replicate=2, tp=2)
LAYOUT = ("layout.tp=2", "layout.sp=true")


def by_claim(document, text):
    return next(f for f in document["findings"] if text in f["claim"])


def ledger(rank, ids, valid=(3, 3)):
    rows = np.broadcast_to(np.arange(2) + 2 * GRID.index(rank, "dp"), (2, 2))
    return RankLedger(rank, np.asarray(ids), rows, np.asarray(valid))


def test_one_rank_speaks_for_its_peers():
    first, second = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    every = [ledger(rank, first if rank < 2 else second) for rank in range(4)]
    shares, differing = one_of_each(every, GRID)
    assert ([share.rank for share in shares], differing) == ([0, 2], [])
    assert one_of_each(every[1:], GRID)[0][0].rank == 1, "of those that there are"
    for wrong, told in (
        (ledger(3, [[2, 3], [6, 6]]), "rank 3 against rank 2: other samples in step 2"),
        (replace(every[3], rows=every[3].rows + 1), "rank 3 against rank 2: other rows in step 1"),
        (ledger(3, second, (3, 4)), "rank 3 against rank 2: other valid targets in step 2"),
        (RankLedger(3, every[3].ids[:1], every[3].rows[:1]), "rank 3 against rank 2: 1 step, not 2"),
    ):
        assert one_of_each([*every[:3], wrong], GRID)[1] == [told]
    passes, differing = one_pass_of_each([np.arange(2), np.arange(2), np.arange(3), np.arange(4)], GRID)
    assert [len(ids) for ids in passes] == [2, 3] and "rank 3 against rank 2" in differing[0]


def test_reading_needs_no_more_than_a_head_for_each_rank(small):
    assert smallest_model(settle(small(*LAYOUT), 2)).model.heads == 2
    assert smallest_model(settle(small(), 2)).model.heads == 1


def test_peers_read_the_same_and_count_once(small, tmp_path):
    spec = small(*LAYOUT, "data.validation_fraction=0.1")
    document = verify_coverage(spec, 2, max_steps=6, out=tmp_path)
    assert document["verdict"] == "pass"
    assert by_claim(document, "same samples")["measured"] == "equal"
    assert by_claim(document, "same validation samples")["verdict"] == "pass"
    assert [rank["samples"] for rank in document["ranks"]] == [48, 48]
    assert document["duplicates"] == 0


def test_a_sharded_rank_has_a_share_of_its_own(small, tmp_path):
    spec = small("layout.dp_shard=2", "layout.zero=2")
    document = verify_coverage(spec, 2, max_steps=6, out=tmp_path)
    assert document["verdict"] == "pass"
    assert [rank["samples"] for rank in document["ranks"]] == [24, 24]
    assert not any("same samples" in f["claim"] for f in document["findings"])


def test_peers_that_read_other_samples_are_named(small, tmp_path):
    document = verify_coverage(
        small(*LAYOUT), 2, max_steps=6, out=tmp_path, setup="tests.verify.test_peers:a_share_for_every_rank"
    )
    assert document["verdict"] == "fail"
    assert "rank 1 against rank 0: other samples in step 1" in by_claim(document, "same samples")["measured"]


def a_share_for_every_rank():
    import torch.distributed as dist

    from fourfold.data.schedule import BatchSchedule

    rows = BatchSchedule.rows
    BatchSchedule.rows = lambda self, dp_rank, micro: (rows(self, dp_rank, micro) + dist.get_rank()) % 8


@pytest.fixture
def run(small, tmp_path):
    """A run directory as four ranks leave it, two of each share; change(rank, step, ids) -> ids."""

    def make(steps, change=lambda _rank, _step, ids: ids):
        spec = settle(small(*LAYOUT, "layout.dp_replicate=2"), 4)
        sources = open_sources(spec)
        schedule = batch_schedule(spec, len(sources.train), 2)
        room = RunDir(tmp_path / "run")
        room.path.mkdir()
        write_request(room, spec, {}, "")
        for rank in range(4):
            with JsonLines(room.events(rank)) as events:
                for step in range(steps):
                    ids = [i for m in range(2) for i in schedule.micro_ids(step, rank // 2, m).tolist()]
                    line = {"t": 1.0, "rank": rank, "step": step + 1, "kind": "step"}
                    events.write({**line, "sample_ids": change(rank, step, ids)})
                events.write({"t": 2.0, "rank": rank, "step": steps, "kind": "end", "ending": "finished"})
        return room.path

    return make


def test_a_run_of_four_ranks_with_two_shares(run):
    document = run_coverage(run(9))
    assert document["verdict"] == "pass"
    assert (document["world"], len(document["ranks"]), document["duplicates"]) == (4, 4, 0)
    assert by_claim(document, "every rank left a record")["measured"] == "4 ranks"
    assert by_claim(document, "same samples")["verdict"] == "pass"


def test_a_peer_that_was_given_something_else_is_named(run):
    document = run_coverage(run(9, lambda rank, step, ids: ids[::-1] if (rank, step) == (3, 4) else ids))
    assert document["verdict"] == "fail"
    assert by_claim(document, "same samples")["measured"] == "rank 3 against rank 2: other samples in step 5"


def test_a_peer_without_a_record_is_a_failure(run):
    path = run(9)
    (path / "events" / "rank3.jsonl").unlink()
    document = run_coverage(path)
    assert by_claim(document, "every rank left a record")["measured"] == "3 ranks"
    assert document["verdict"] == "fail"
