from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from fourfold.cli.main import main
from fourfold.cli.verify import findings_table
from fourfold.spec.training import LayoutSpec
from fourfold.verify.exact_rank import RunBits, StepBits


def test_coverage_prints_a_table_and_the_next_command(spec, capsys):
    assert main(["verify", "coverage", spec, "--world", "2", "--set", "run.seed=3"]) == 0
    printed = capsys.readouterr()
    assert "no sample comes twice" in printed.out and "0 duplicates" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "runs/verify-small-1/findings/coverage.json" in printed.out
    assert "next: fourfold verify equal small.toml --world 2 --set run.seed=3" in printed.err


def test_equal_prints_a_table_and_the_next_command(spec, capsys):
    assert main(["verify", "equal", spec, "--world", "2", "--steps", "2"]) == 0
    printed = capsys.readouterr()
    assert "every gradient before clipping" in printed.out and "within 1e-12" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "next: fourfold train small.toml --nproc 2" in printed.err
    assert "for the check: precision.compute fp32 -> fp64" in printed.err


@pytest.mark.parametrize("name", ["coverage", "equal"])
def test_json_is_one_document_whose_command_can_be_repeated(spec, capsys, name):
    assert main(["verify", name, spec, "--world", "2", "--out", "here", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == f"fourfold.verify.{name}/1"
    assert document["verdict"] == "pass"
    command = document["findings"][0]["command"]
    assert command.startswith(f"fourfold verify {name} small.toml --world 2")
    again = [*command.split()[1:], "--out", "there", "--json"]
    assert main(again) == 0
    repeated = json.loads(capsys.readouterr().out)
    assert [f["measured"] for f in repeated["findings"]] == [f["measured"] for f in document["findings"]]


def test_a_failed_check_exits_3_and_says_what_failed(spec, capsys, monkeypatch):
    document = {
        "schema": "fourfold.verify.equal/1",
        "verdict": "fail",
        "changes": [],
        "findings_file": "x.json",
        "findings": [
            {
                "claim": "loss",
                "measured": "0.5",
                "verdict": "fail",
                "tolerance": "1e-12",
                "command": "do it again",
            }
        ],
    }
    monkeypatch.setattr("fourfold.verify.equal.verify_equal", lambda *_args, **_more: document)
    assert main(["verify", "equal", spec, "--world", "2"]) == 3
    printed = capsys.readouterr()
    assert printed.out == "verdict  finding\nfail     loss: 0.5 (within 1e-12)\n\nfail  x.json\n"
    assert "loss: 0.5" not in printed.err and "next: do it again" in printed.err
    assert main(["verify", "equal", spec, "--world", "2", "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out) == document and "failed: loss: 0.5" in printed.err


def test_every_layout_is_a_table_of_its_own(spec, capsys, monkeypatch):
    finding = {"verdict": "pass", "tolerance": "1e-12", "command": "", "expected": ""}
    bad = {
        **finding,
        "claim": "tp 2, sp",
        "verdict": "fail",
        "measured": "norm of global norm",
        "command": "one",
    }
    asked = {}

    def every(*_args, **more):
        asked.update(more)
        return {
            "verdict": "fail",
            "changes": ["model.layers 4 -> 2"],
            "count": 2,
            "findings_file": "x.json",
            "layouts": [
                {"verdict": "pass", "worst_relative": 2e-15, "seconds": 1.25, "words": "tp 2"},
                {"verdict": "fail", "worst_relative": 0.5, "seconds": 2.0, "words": "tp 2, sp"},
            ],
            "refused": [{"family": "pp 2", "rule": "layout.pp not trained yet"}],
            "findings": [{**finding, "claim": "tp 2", "measured": "worst 2e-15"}, bad],
        }

    monkeypatch.setattr("fourfold.verify.every_layout.verify_every_layout", every)
    assert main(["verify", "equal", spec, "--world", "2", "--all", "--set", "run.seed=3"]) == 3
    printed = capsys.readouterr()
    assert "pass     2e-15  1.2      tp 2\nfail     0.5    2.0      tp 2, sp" in printed.out
    assert "tp 2, sp: norm of global norm" in printed.out and "tp 2: worst" not in printed.out
    assert "refused: pp 2 (layout.pp not trained yet)" in printed.err and "next: one" in printed.err
    assert asked["steps"] == 3
    assert asked["command"] == f"fourfold verify equal {spec} --world 2 --steps 3 --all --set run.seed=3"
    alone = asked["repeat"](("layout.tp=2",))
    assert alone == (
        f"fourfold verify equal {spec} --world 2 --steps 3 --adversarial --set run.seed=3 --set layout.tp=2"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["verify", "equal", "small.toml"], 2, "--world"),
        (["verify", "equal", "small.toml", "--world", "3"], 2, "8"),
        (["verify", "equal", "no.toml", "--world", "2"], 2, "no such file"),
        (["verify", "coverage", "small.toml", "--set", "data.samples=4"], 5, "fewer than one global batch"),
        (["verify", "coverage", "."], 5, "a folder without spec.json"),
        (["verify", "coverage", ".", "--world", "2"], 2, "a run directory"),
        (["verify", "coverage", "small.toml", "--epochs", "0"], 2, "no step at all"),
        (["verify", "exact", "small.toml"], 2, "--world"),
        (["verify", "exact", "small.toml", "--world", "3"], 2, "--world 2 or --world 4"),
        (["verify", "exact", "small.toml", "--world", "2", "--steps", "0"], 2, "--steps"),
        (["verify", "exact", "small.toml", "--world", "2", "--steps", "1000000"], 2, "run.steps"),
        (["verify", "exact", "small.toml", "--world", "2", "--set", "layout.tp=2"], 2, "layout.tp"),
        (["verify", "exact", "small.toml", "--world", "2", "--set", "precision.reduce=bf16"], 2, "reduce"),
    ],
)
@pytest.mark.usefixtures("spec")
def test_wrong_requests_are_refused_before_anything_starts(capsys, tmp_path, arguments, code, said):
    assert main(arguments) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "wrong", [("--world", "3"), ("--world", "2", "--steps", "0"), ("--world", "2", "--set", "layout.tp=2")]
)
def test_what_exact_mode_cannot_be_asked_is_refused_in_four_parts(spec, capsys, wrong):
    assert main(["verify", "exact", spec, *wrong, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["verdict"], document["findings"]) == ("fourfold.error/1", "fail", [])
    assert document["exit_code"] == 2
    for problem in document["problems"]:
        assert all(problem[part] for part in ("asked", "found", "why", "instead"))


EXACT = ["verify", "exact", "small.toml", "--world", "2", "--steps", "1"]


@pytest.mark.usefixtures("spec")
def test_exact_is_one_document_and_one_command(capsys, monkeypatch):
    layouts = [LayoutSpec(dp_replicate=1), LayoutSpec(dp_replicate=1, dp_shard=2, zero=3)]
    monkeypatch.setattr("fourfold.verify.exact.exact_layouts", lambda _world: iter(layouts))
    assert main([*EXACT, "--set", "run.seed=3", "--out", "here", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["schema"], document["verdict"]) == ("fourfold.verify.exact/1", "pass")
    assert (document["world"], document["steps"], document["changes"]) == (2, 1, [])
    first, second = document["layouts"]
    assert first["sha256"] == second["sha256"] and len(first["sha256"]) == 64
    assert [finding["claim"] for finding in document["findings"]] == [first["words"], second["words"]]
    assert document["findings"][0]["command"] == f"fourfold {' '.join(EXACT)} --set run.seed=3"
    assert "next: fourfold train small.toml --nproc 2 --set run.seed=3 --set run.exact=true" in printed.err


@pytest.mark.usefixtures("spec")
def test_other_bits_exit_3(capsys, monkeypatch):
    def bits(spec, *_more):
        one = RunBits((StepBits("0x1p0", {"w": "a"}, "0x1p0", {"w": "b"}),), {"w": "b"})
        other = replace(one.steps[0], gradients={"w": "c"})
        return one if spec.layout.zero == 0 else replace(one, steps=(other,))

    monkeypatch.setattr("fourfold.verify.exact._bits_of", bits)
    assert main(EXACT) == 3
    printed = capsys.readouterr()
    assert "step 1: gradient of w" in printed.out and "SHA-256 of all parameters" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    assert f"next: fourfold {' '.join(EXACT)}" in printed.err
    assert main([*EXACT, "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "fail" and "failed: " in printed.err


def test_long_claims_are_broken_and_short_ones_are_not():
    finding = {"claim": "word " * 30, "measured": "1", "verdict": "pass", "tolerance": ""}
    lines = findings_table([finding]).splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 80


def test_help_imports_no_torch():
    code = (
        "import sys; from fourfold.cli.main import main; main(['verify', 'equal', '--help']); "
        "assert 'torch' not in sys.modules"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "fourfold verify equal tiny --world 2" in told.stdout
