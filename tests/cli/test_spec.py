"""`fourfold spec`: what it prints, where, and what it says comes next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.spec.load import load_spec
from fourfold.spec.ready import ready_names
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec


def run(capsys: pytest.CaptureFixture[str], *tokens: str, code: int = 0) -> tuple[str, str]:
    assert main(["spec", *tokens]) == code
    return capsys.readouterr()


def test_show_is_a_spec_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, err = run(capsys, "show", "tiny")
    path = tmp_path / "shown.toml"
    path.write_text(out, encoding="utf-8")
    assert load_spec(path).spec == load_spec("tiny").spec
    assert err == "next: fourfold train tiny --nproc 2\n"
    assert "dropout = 0.1                    # tiny.toml:14\n" in out
    assert 'norm = "rmsnorm"\n' in out  # a default has no remark
    assert '\n[data]\nkind = "stdlib"\n' in out  # what says which keys there are comes first


def test_show_settled_with_settings(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "show", "tiny", "--world", "4", "--set", "batch.micro_batch=4")
    assert "micro_batch = 4                  # --set #1\n" in out
    assert "accumulation = 3                 # world 4\n" in out
    assert "dp_replicate = 4                 # world 4\n" in out
    assert err == "next: fourfold train tiny --nproc 4 --set batch.micro_batch=4\n"


def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "show", "tiny", "--world", "2", "--set", "run.steps=30", "--json")
    document = json.loads(out)
    assert document["schema"] == "fourfold.spec/1"
    assert (document["source"], document["world"]) == ("tiny", 2)
    assert document["provenance"]["run.steps"] == "--set #1"
    assert document["provenance"]["batch.accumulation"] == "world 2"
    spec = Spec.model_validate_json(json.dumps(document["spec"]))
    assert spec == settle(load_spec("tiny", ["run.steps=30"]).spec, 2)


def test_show_what_can_only_be_planned_with(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "show", "deepseek-v3")
    assert 'dp_shard = "auto"' in out
    assert "to plan with, not to train yet: " in err
    assert err.endswith("next: fourfold layout show deepseek-v3 --world 16\n")


def test_show_notes_what_a_change_of_kind_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(capsys, "show", "tiny", "--set", "data.kind=synthetic", "--set", "model.kind=mlp")
    assert 'note: tiny.toml:18: data.sequence left out, for --set #1 makes data.kind "synthetic"\n' in err


def test_show_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "show", "tiny", "--world", "5", code=2)
    assert out == ""
    assert "found: 48 / (2 x 5) = 4.8" in err
    _, err = run(capsys, "show", "tniy", code=2)
    assert "type:  tiny\n" in err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "list")
    assert all(name in out for name in ready_names())
    assert max(map(len, out.splitlines())) <= 80
    assert err.startswith("next: fourfold spec show tiny\n")
    entries = json.loads(run(capsys, "list", "--json")[0])["specs"]
    assert {entry["name"]: entry["use"] for entry in entries} == {
        name: "plan" if name == "deepseek-v3" else "train" for name in ready_names()
    }
    assert [entry["parameters"] for entry in entries] == sorted(entry["parameters"] for entry in entries)


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = run(capsys, "schema")
    assert plain == run(capsys, "schema", "--json")[0]
    document = json.loads(plain)
    assert document["schema"] == "fourfold.spec.schema/1"
    assert document["$schema"].startswith("https://json-schema.org/")
    assert set(document["properties"]) == set(Spec.model_fields)


def test_copy(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "copy", "tiny") == ("tiny.toml\n", "next: fourfold spec show tiny.toml\n")
    document = json.loads(run(capsys, "copy", "small", "my.toml", "--json")[0])
    assert document == {"schema": "fourfold.spec.copy/1", "name": "small", "path": "my.toml"}
    assert "a Spec that someone wrote is never overwritten" in run(capsys, "copy", "tiny", code=2)[1]
    run(capsys, "copy", "tiny", "no/x.toml", code=5)
    assert load_spec("my.toml").spec.model == load_spec("small").spec.model
