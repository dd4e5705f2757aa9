"""In exact mode a run goes on with another number of ranks, and another stage of ZeRO, to the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.validate import read_manifest
from fourfold.lab.report import report_document
from fourfold.lab.report_page import render
from fourfold.lab.report_words import count
from fourfold.record.reader import RunReader
from fourfold.record.run_dir import RunDir
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.train.resume import differences
from fourfold.verify.coverage import run_coverage
from tests.cli.test_train import finish
from tests.train.test_resume import SLOW, curve, go, go_to_the_end

EXACT = (SLOW, "run.exact=true", "batch.global_batch=16", "batch.micro_batch=2", "run.validate_every=4")


def stop_after(run: Path, step: int, nproc: int, *sets: str, number: int = signal.SIGTERM) -> None:
    process = go(run, "--resume", "auto", sets=(*EXACT, *sets), nproc=nproc)
    metrics = RunDir(run).events(0)
    while f'"step": {step},' not in (metrics.read_text() if metrics.exists() else ""):
        assert process.poll() is None, finish(process)
    os.kill(process.pid, number)
    code, story = finish(process)
    assert code == 75, story


def state(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, however it was cut; but for the ranks' own streams."""
    folder = newest_valid(RunDir(run).checkpoints).path
    assert folder is not None
    whole = {}
    for name, record in read_manifest(folder).tensors.items():
        if name.startswith("rank"):
            continue
        parts = []
        for chunk in sorted(record.chunks, key=lambda chunk: chunk.offset):
            with safe_open(folder / chunk.file, framework="pt") as file:
                parts.append(file.get_tensor(chunk.key))
        joined = torch.cat(parts) if parts[0].ndim else parts[0]
        whole[name] = joined.contiguous().view(-1).numpy().tobytes()
    return whole


def validations(run: Path) -> list[object]:
    lines = RunDir(run).metrics.read_text().splitlines()
    return [
        line.partition('"validation_loss"')[2].partition(",")[0]
        for line in lines
        if "validation_loss" in line
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    go_to_the_end(run, sets=EXACT, nproc=1)
    return run


ZERO3 = ("layout.zero=3",)
HSDP = ("layout.zero=1", "layout.dp_replicate=2", "layout.dp_shard=4")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ((2, ZERO3), (4, ()), (1, ())),
        pytest.param((4, ()), (2, ZERO3), (8, HSDP), marks=pytest.mark.long),
    ],
)
def test_other_numbers_of_ranks_one_after_the_other(tmp_path, undisturbed, first, second, third):
    run = tmp_path / "run"
    for step, (nproc, sets) in ((3, first), (7, second)):
        stop_after(run, step, nproc, *sets)
    go_to_the_end(run, "--resume", "must", sets=(*EXACT, *third[1]), nproc=third[0])
    assert state(run) == state(undisturbed)
    assert curve(run) == curve(undisturbed)
    assert validations(run) == validations(undisturbed)
    assert len(validations(run)) == 3
    document = run_coverage(run)
    assert (document["verdict"], document["duplicates"], document["missing"]) == ("pass", 0, 0)
    worlds = [first[0], second[0], third[0]]
    assert [start["ranks"] for start in document["starts"]] == worlds
    told = report_document(RunReader(run))
    assert told["verdict"] == "pass"
    assert told["title"].endswith(f" on {worlds[0]}, then {worlds[1]}, then {count(worlds[2], 'rank')}")
    assert told["summary"]["steps_agree"] is True and told["summary"]["steps_done"] == 12
    assert [one["ranks"] for one in told["history"]["attempts"]] == worlds
    page = render(told, RunReader(run).metrics(), RunReader(run).spec().model)
    assert f"on {worlds[1]} ranks; stopped" in page


def test_what_would_have_other_bits_is_refused(undisturbed):
    for sets, key in (
        (("batch.micro_batch=1",), "batch.micro_batch"),
        (("hardware.threads_per_rank=2",), "hardware.threads_per_rank"),
        (("run.exact=false",), "run.exact"),
    ):
        code, story = finish(go(undisturbed, "--resume", "must", sets=(*EXACT, *sets), nproc=1))
        assert code == 2, story
        assert key in story


def test_one_thread_is_what_exact_mode_has_without_a_word():
    def asked(*sets):
        return settle(load_spec("tiny", sets).spec, 2).model_dump(mode="json")

    exact, typed = asked("run.exact=true"), asked("run.exact=true", "hardware.threads_per_rank=1")
    assert differences(exact, typed) == differences(typed, exact) == []
    two = asked("run.exact=true", "hardware.threads_per_rank=2")
    assert differences(typed, two) == differences(exact, two) == [("hardware.threads_per_rank", 1, 2)]
    assert differences(asked(), asked("hardware.threads_per_rank=2")) == []  # outside of it they are free


def test_another_number_of_ranks_needs_exact_mode(tmp_path):
    run = tmp_path / "run"
    plain = (*EXACT, "run.exact=false")
    go_to_the_end(run, sets=plain, nproc=2)
    code, story = finish(go(run, "--resume", "must", sets=plain, nproc=1))
    assert code == 2
    assert "run.exact = true" in " ".join(story.split())
