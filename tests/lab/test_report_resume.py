"""The command with which an unfinished run goes on: it asks for the run's own Spec, whatever was typed then."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fourfold.lab.report_resume import going_on
from fourfold.plan.run_plan import make_run_plan
from fourfold.record.reader import RunReader
from fourfold.record.run_dir import RunDir, claim
from fourfold.record.writer import write_json, write_request
from fourfold.spec.load import load_spec
from fourfold.train.resume import differences

TOML = """
model = {kind = "mlp", inputs = 4}
data = {kind = "synthetic", samples = 50}
batch = {global_batch = 8, micro_batch = 2}
optimizer = {lr = 2e-3}
"""


def begun(
    source: str, *sets: str, nproc: int = 2, command: tuple[str, ...] = ("fourfold", "train", "x")
) -> RunDir:
    run = claim(Path("r n"))
    loaded = load_spec(source, sets)
    plan = make_run_plan(loaded, 2, command, nproc)
    write_request(run, plan.spec, plan.provenance, loaded.text)
    write_json(run.plan_json, plan)
    return run


def again(command: str) -> tuple[str, list[str], list[str]]:
    """The Spec's source, its settings, the other words."""
    words = shlex.split(command)
    sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    rest = [word for at, word in enumerate(words) if word != "--set" and words[at - 1] != "--set"]
    return words[2], sets, rest


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("run.steps=14", "checkpoint.every=2", "run.dir=elsewhere"),
        ("optimizer.lr=0.001",),  # the default: what spec.toml has is then another
        ("optimizer.betas=[0.8,0.9]", "note='two words, \"quoted\"'", "name=other"),
        (
            "model.kind=decoder",
            "model.layers=1",
            "model.heads=2",
            "model.width=32",
            "data.kind=stdlib",
            "data.sequence=16",
        ),
        ("optimizer={lr=1e-5, schedule='constant'}",),
    ],
)
def test_the_spec_comes_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(TOML)
    run = begun("mine.toml", *sets)
    source, settings, rest = again(going_on(RunReader(run.path)))
    assert rest == ["fourfold", "train", "r n/spec.toml", "--nproc", "2", "--resume", "auto"]
    assert settings[-1] == 'run.dir="r n"'
    plan = make_run_plan(load_spec(source, settings), 2, (), 2)
    before, after = RunReader(run.path).spec().model_dump(mode="json"), plan.spec.model_dump(mode="json")
    assert differences(before, after) == []
    assert after["run"]["dir"] == "r n" and after["checkpoint"] == before["checkpoint"]


def test_restarts_are_asked_for_again_and_torchrun_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun("tiny", command=("fourfold", "train", "tiny", "--max-restarts", "3"))
    assert " --nproc 2 --max-restarts 3 --set name=tiny " in going_on(RunReader("r n"))
    Path("r n").rename("first")
    begun("tiny", nproc=1)
    assert going_on(RunReader("r n")).startswith(
        "torchrun --nnodes 2 --nproc-per-node 1 … -m fourfold train 'r n/spec.toml'"
    )


def test_a_request_that_is_lost_leaves_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = begun("tiny", command=("fourfold", "train", "a b.toml", "--resume", "must", "--nproc", "2"))
    run.spec_toml.write_text("no TOML")
    assert (
        going_on(RunReader("r n"))
        == "fourfold train 'a b.toml' --nproc 2 --set 'run.dir=\"r n\"' --resume auto"
    )
