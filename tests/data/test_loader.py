"""Loaders: batches that are the schedule's rows, the same bits from workers, each validation sample once."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data.batch import Batch
from fourfold.data.corpus import open_text
from fourfold.data.loader import Loader, validation_batches
from fourfold.data.microbatch import Microbatches
from fourfold.data.pack import PackedSource, PaddedSource
from fourfold.data.parts import part_of
from fourfold.data.sample import Source
from fourfold.data.schedule import BatchSchedule
from fourfold.data.synthetic import SyntheticSource
from fourfold.data.transforms import make_transforms, transformed
from fourfold.spec.data import TransformSpec
from fourfold.spec.errors import DataError, SpecError

NOISE = (TransformSpec(kind="token_noise", probability=0.3),)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> PackedSource:
    """64 samples of 8 tokens, from documents of many lengths."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text("lorem ipsum "[: number % 11] * (number // 10 + 1))
    source = PackedSource(part_of(open_text(str(folder)), "all", 0.0), 8, 256)
    assert len(source) == 64
    return source


def vectors(size: int = 50, task: Any = "regression") -> SyntheticSource:
    return SyntheticSource(task, 6, 3, 0.1, seed=0, first=0, size=size)


def schedule(
    samples: int, degree: int = 2, micro: int = 3, accumulation: int = 2, **more: Any
) -> BatchSchedule:
    return BatchSchedule(samples, micro * accumulation * degree, micro, accumulation, degree, 7, **more)


def loader(source: Source, dp_rank: int = 0, workers: int = 0, transforms: Any = (), **more: Any) -> Loader:
    return Loader(source, schedule(len(source), **more), dp_rank, 7, workers, transforms)


def same(left: Batch, right: Batch) -> bool:
    def equal(name: str) -> bool:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return bool(a == b)

    return all(equal(field.name) for field in fields(Batch))


def flat(steps: Iterator[list[Batch]]) -> list[Batch]:
    return [batch for batches in steps for batch in batches]


@pytest.fixture
def two_workers(text: PackedSource) -> Iterator[Loader]:
    made = loader(text, dp_rank=1, workers=2, transforms=NOISE, last_batch="keep")
    yield made
    made.close()


def test_a_batch_is_the_schedules_rows_of_the_source(text: PackedSource) -> None:
    cut = schedule(len(text))
    for step, batches in enumerate(loader(text, dp_rank=1).steps(0, 12)):
        assert len(batches) == cut.accumulation
        for micro, batch in enumerate(batches):
            assert batch.sample_ids.tolist() == cut.micro_ids(step, 1, micro).tolist()
            assert batch.rows.tolist() == cut.rows(1, micro).tolist()
            assert (batch.seed, batch.step, batch.epoch) == (7, step, step // 5)
            assert (batch.inputs.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
            assert (batch.valid.dtype, batch.sample_ids.dtype) == (torch.bool, torch.int64)
            assert batch.processed == 24
            for place, sample_id in enumerate(batch.sample_ids.tolist()):
                sample = text.sample(sample_id)
                assert np.array_equal(batch.inputs[place], sample.inputs)
                assert np.array_equal(batch.targets[place], sample.targets)
                assert np.array_equal(batch.valid[place], sample.valid)
                assert batch.documents is not None
                assert batch.documents.dtype == torch.int32
                assert np.array_equal(batch.documents[place], sample.documents)
            assert batch.nonpadding == sum(text.sample(i).nonpadding for i in batch.sample_ids.tolist())


def test_padding_is_counted_sample_by_sample(text: PackedSource) -> None:
    padded = PaddedSource(text.part, 8, 256)
    batches = flat(loader(padded).steps(0, 3))
    for batch in batches:
        assert batch.nonpadding == sum(padded.sample(i).nonpadding for i in batch.sample_ids.tolist())
    assert min(batch.nonpadding for batch in batches) < 24


def test_starting_late_gives_what_going_on_gives(text: PackedSource) -> None:
    through = list(loader(text).steps(0, 12))
    late = list(loader(text).steps(5, 12))
    assert all(same(a, b) for x, y in zip(through[5:], late, strict=True) for a, b in zip(x, y, strict=True))
    assert list(loader(text).steps(4, 4)) == []


def test_filler_rows_are_counted_as_computed_and_carry_no_loss(text: PackedSource) -> None:
    (*_, last) = loader(text, dp_rank=1, last_batch="keep").steps(0, 6)
    filler = last[-1]
    assert filler.sample_ids.tolist() == [-1, -1, -1]
    assert filler.rows.tolist() == [9, 10, 11]
    assert not filler.valid.any()
    assert filler.valid_count() == 0
    assert (filler.processed, filler.nonpadding) == (24, 0)
    assert filler.documents is not None
    assert not filler.documents.any()


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_vectors_have_no_documents_and_count_by_row(task: Any) -> None:
    batch = next(iter(loader(vectors(task=task)).steps(0, 1)))[0]
    assert batch.documents is None
    assert batch.inputs.shape == (3, 6)
    assert batch.inputs.dtype == torch.float32
    assert batch.targets.shape == ((3, 3) if task == "regression" else (3,))
    assert batch.targets.dtype == (torch.float32 if task == "regression" else torch.int64)
    assert batch.valid.tolist() == [True] * 3
    assert (batch.processed, batch.nonpadding) == (3, 3)


def test_transforms_draw_by_the_seed_the_epoch_and_the_sample(text: PackedSource) -> None:
    made = make_transforms(NOISE, 256)
    for batch in flat(loader(text, transforms=NOISE).steps(4, 6)):  # the end of an epoch, and the next
        for inputs, sample_id in zip(batch.inputs, batch.sample_ids.tolist(), strict=True):
            expected = transformed(made, text.sample(sample_id), 7, batch.epoch, sample_id)
            assert np.array_equal(inputs, expected.inputs)


def test_transforms_are_the_samples_own_on_any_layout_and_new_in_every_epoch(text: PackedSource) -> None:
    def seen(degree: int, micro: int, accumulation: int) -> dict[tuple[int, int], list[int]]:
        found = {}
        for rank in range(degree):
            cut = {"degree": degree, "micro": micro, "accumulation": accumulation}
            for batch in flat(loader(text, rank, transforms=NOISE, **cut).steps(0, 10)):
                for sample_id, inputs in zip(batch.sample_ids.tolist(), batch.inputs.tolist(), strict=True):
                    found[batch.epoch, sample_id] = inputs
        return found

    one = seen(1, 12, 1)
    assert seen(2, 3, 2) == one
    assert seen(3, 1, 4) == one
    twice = [sample_id for epoch, sample_id in one if epoch == 0 and (1, sample_id) in one]
    changed = [one[0, sample_id] != one[1, sample_id] for sample_id in twice]
    assert len(changed) > 40
    assert sum(changed) > 0.9 * len(changed)


def test_two_workers_give_the_same_bits_and_stay_for_the_next_steps(
    text: PackedSource, two_workers: Loader
) -> None:
    alone = loader(text, dp_rank=1, transforms=NOISE, last_batch="keep")
    for start, stop in ((0, 8), (8, 9), (3, 3), (2, 7)):
        ours, theirs = flat(alone.steps(start, stop)), flat(two_workers.steps(start, stop))
        assert len(ours) == len(theirs) == 2 * (stop - start)
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(two_workers._started) == 2
    theirs[0].inputs.zero_()  # owned and writable


def test_iterations_side_by_side_do_not_mix(text: PackedSource, two_workers: Loader) -> None:
    alone = loader(text, dp_rank=1, transforms=NOISE, last_batch="keep")
    expected = list(alone.steps(0, 4))
    first, second = two_workers.steps(0, 4), two_workers.steps(0, 4)
    for batches in expected:
        for other in (next(first), next(second)):
            assert all(same(a, b) for a, b in zip(batches, other, strict=True))
    first.close()  # left before its end was seen
    assert all(same(a, b) for a, b in zip(flat(iter(expected)), flat(two_workers.steps(0, 4)), strict=True))


def test_workers_ignore_the_signals_that_end_a_run(two_workers: Loader) -> None:
    steps = two_workers.steps(0, 6)
    next(steps)
    for worker in two_workers._started:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid, number)
    assert len(flat(steps)) == 10


def test_a_killed_worker_is_named_and_the_next_steps_have_fresh_ones(two_workers: Loader) -> None:
    steps = two_workers.steps(0, 100)
    next(steps)
    killed = two_workers._started[0].pid
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(
        DataError, match=rf"process id {killed}(.|\n)*exit code -9(.|\n)*data.workers=0"
    ) as raised:
        flat(steps)
    assert raised.value.passing, "a restart may mend it, unlike other errors of the data"
    assert len(flat(two_workers.steps(0, 2))) == 4


def gone(pid: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
                continue
        return True
    return False


def test_close_ends_the_workers_even_in_the_middle(text: PackedSource) -> None:
    made = loader(text, workers=2)
    steps = made.steps(0, 50)
    next(steps)
    pids = [worker.pid for worker in made._started]
    made.close()
    assert all(gone(pid, 0.1) for pid in pids)
    made.close()
    steps.close()


def test_a_forgotten_loader_takes_its_workers_along(text: PackedSource) -> None:
    made = loader(text, workers=1)
    flat(made.steps(0, 1))
    (pid,) = [worker.pid for worker in made._started]
    del made
    assert gone(pid, 0.1)


def test_workers_leave_when_their_parent_is_killed_even_if_they_never_finish(tmp_path: Path) -> None:
    (tmp_path / "slow_change.py").write_text(
        "import time\ndef change(sample, draws):\n    time.sleep(1000)\n"
    )
    script = """
        import sys
        from fourfold.data.loader import Loader
        from fourfold.data.schedule import BatchSchedule
        from fourfold.data.synthetic import SyntheticSource
        from fourfold.spec.data import TransformSpec

        source = SyntheticSource("regression", 4, 1, 0.0, 0, 0, 100)
        slow = [TransformSpec(kind="import", target="slow_change:change")]
        loader = Loader(source, BatchSchedule(100, 2, 2, 1, 1, 0), 0, 0, workers=2, transforms=slow)
        steps = loader.steps(0, 10)
        workers = loader._start()
        for worker in workers:
            worker.ask(0, 0)
        print(*(worker.pid for worker in workers), flush=True)
        workers[0].answer()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(gone(pid, 0.3) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_transform_raises_comes_out_and_the_loader_lives_on(
    text: PackedSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, capfd: Any
) -> None:
    (tmp_path / "picky_change.py").write_text(
        "def change(sample, draws):\n"
        "    print('looking')\n"
        "    if sample.nonpadding < 8:\n        raise KeyError('a short one')\n"
        "    return sample\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    picky = (TransformSpec(kind="import", target="picky_change:change"),)
    made = loader(text, workers=workers, transforms=picky, degree=1)
    with pytest.raises(KeyError, match="a short one") as error:
        flat(made.steps(0, 11))
    assert ("In a loader's worker" in "".join(getattr(error.value, "__notes__", ()))) == bool(workers)
    assert len(next(iter(made.steps(0, 1)))) == 2
    made.close()
    seen = capfd.readouterr()
    assert "looking" in (seen.err if workers else seen.out)


def test_a_worker_that_finds_other_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words " * 50)
    made = loader(PackedSource(part_of(open_text(str(path)), "all", 0.0), 8, 256), workers=1)
    path.write_text("other words " * 50)
    with pytest.raises(DataError, match="changed while it was being read"):
        flat(made.steps(0, 1))
    made.close()


def test_a_transform_that_does_not_fit_is_refused_before_any_step(text: PackedSource) -> None:
    with pytest.raises(SpecError, match="gaussian_noise"):
        loader(text, transforms=(TransformSpec(kind="gaussian_noise", std=1.0),))


@pytest.mark.parametrize("kind", [PackedSource, PaddedSource])
def test_the_mock_is_as_large_as_batches_get(text: PackedSource, kind: Any) -> None:
    made = loader(kind(text.part, 8, 256))
    mock, real = made.mock(), next(iter(made.steps(0, 1)))[0]
    assert mock.inputs.shape == real.inputs.shape
    assert mock.valid.all()
    assert mock.processed == mock.nonpadding == 24
    assert mock.rows.tolist() == [0, 1, 2]
    assert mock.documents is not None
    assert not mock.documents.any()


def test_the_mock_of_vectors() -> None:
    mock = loader(vectors()).mock()
    assert mock.inputs.shape == (3, 6)
    assert mock.valid.all()
    assert mock.documents is None


def test_microbatches_pickle_small(text: PackedSource) -> None:
    work = Microbatches(text, schedule(len(text)), 0, 7, ())
    work.make(0, 0)
    assert len(pickle.dumps(work)) < 1500


def pass_over(source: Source, degree: int, micro: int, limit: int | None = None) -> list[list[Batch]]:
    return [list(validation_batches(source, micro, degree, rank, 7, limit)) for rank in range(degree)]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 50)))
@settings(max_examples=60, deadline=None)
def test_validation_visits_each_sample_once_on_any_number_of_ranks(
    samples: int, degree: int, micro: int, limit: int | None
) -> None:
    ranks = pass_over(vectors(samples), degree, micro, limit)
    assert len({len(batches) for batches in ranks}) == 1
    ids = [sample_id for batches in ranks for batch in batches for sample_id in batch.sample_ids.tolist()]
    visited = Counter(sample_id for sample_id in ids if sample_id >= 0)
    assert set(visited.values()) == {1}
    assert len(visited) == min(samples, limit or samples)
    assert len(ids) - len(visited) < degree * micro
    one = pass_over(vectors(samples), 1, 1, limit)
    assert set(visited) == {batch.sample_ids.item() for batch in one[0]}


def test_validation_fills_up_and_places_rows(text: PackedSource) -> None:
    ranks = pass_over(text, degree=4, micro=3)
    assert [len(batches) for batches in ranks] == [6] * 4
    rows = [row for batches in ranks for batch in batches for row in batch.rows.tolist()]
    assert sorted(rows) == list(range(72))
    last = ranks[1][-1]
    assert ranks[3][-1].sample_ids.tolist() == [-1] * 3
    assert last.sample_ids.tolist()[1:] == [-1, -1]
    assert not last.valid[1:].any()
    assert [batch.step for batch in ranks[1]] == [0, 1, 2, 3, 4, 5]
    sample_id = int(last.sample_ids[0])
    assert last.nonpadding == text.sample(sample_id).nonpadding
    assert np.array_equal(last.inputs[0], text.sample(sample_id).inputs)
    total = sum(batch.valid_count() for batches in ranks for batch in batches)
    assert total == sum(int(text.sample(index).valid.sum()) for index in range(64))


def test_a_shorter_validation_is_a_sample_of_the_whole(text: PackedSource) -> None:
    ids = [b.sample_ids.item() for b in validation_batches(text, 1, 1, 0, 7, limit=20)]
    assert ids != sorted(ids)
    assert max(ids) > 40 > 20 > min(ids)
    assert ids != [b.sample_ids.item() for b in validation_batches(text, 1, 1, 0, 8, limit=20)]
