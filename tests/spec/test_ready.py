"""The Specs that come with Fourfold: all load, all are legal, the published shapes have their published sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.plan.parameters import count_parameters
from fourfold.spec.errors import DataError, SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.ready import copy_ready, ready_names, ready_text
from fourfold.spec.rules import check
from fourfold.spec.settle import settle
from fourfold.spec.show import changed, to_toml

WORLDS = {
    "tiny": (1, 2, 3, 4, 6, 8, 12, 24),
    "small": (1, 2, 4),
    "moe-tiny": (1, 2, 3, 4, 6, 8, 12, 24),
    "hf-tiny": (1, 2, 3, 4, 6, 8, 12, 24),
    "gpt2-124m": (8,),
    "llama3-8b": (1, 8, 64, 512),
    "llama3-70b": (8, 64, 4096),
    "llama3-405b": (128, 16384, 128 * 2048),
    "mixtral-8x7b": (8, 64, 1024),
    "deepseek-v3": (2048,),
}
# gpt2: the released weights. llama3, mixtral: safetensors of the released weights. deepseek-v3: main model of the
# released weights, without the multi-token-prediction layer.
PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}


def test_names() -> None:
    assert set(ready_names()) == set(WORLDS)
    assert ready_names() == tuple(sorted(WORLDS))


@pytest.mark.parametrize("name", WORLDS)
def test_legal_and_settled_on_its_worlds(name: str) -> None:
    spec = load_spec(name).spec
    assert spec.name == name
    assert spec.note
    for world in WORLDS[name]:
        assert check(settle(spec, world), "always") == []


@pytest.mark.parametrize("name", ["tiny", "small", "hf-tiny", "gpt2-124m"])
def test_what_can_be_trained(name: str) -> None:
    assert check(settle(load_spec(name).spec, WORLDS[name][-1]), "train") == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes(name: str) -> None:
    assert count_parameters(load_spec(name).spec.model) == PARAMETERS[name]
    assert "# source:" in ready_text(name)


def test_small_is_about_five_million() -> None:
    parameters = count_parameters(load_spec("small").spec.model)
    assert parameters is not None
    assert 4_500_000 < parameters < 5_500_000


def test_moe_tiny_is_tiny_with_experts() -> None:
    tiny, moe = load_spec("tiny").spec, load_spec("moe-tiny").spec
    without = moe.model_copy(update={"model": moe.model.model_copy(update={"moe": None})})
    assert without.model_copy(update={"name": tiny.name, "note": tiny.note}) == tiny


def test_unknown_name() -> None:
    with pytest.raises(SpecError, match="type:  llama3-8b"):
        ready_text("llama-8b")


def test_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert copy_ready("tiny") == Path("tiny.toml")
    assert copy_ready("tiny", "mine.toml").read_text(encoding="utf-8") == ready_text("tiny")
    folder = tmp_path / "specs"
    folder.mkdir()
    assert copy_ready("small", folder) == folder / "small.toml"
    assert load_spec("./tiny.toml").spec == load_spec("tiny").spec


def test_copy_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mine")
    (tmp_path / "mine-2.toml").write_text("mine too")
    with pytest.raises(SpecError) as caught:
        copy_ready("tiny", path)
    assert caught.value.problems[0].instead == f"fourfold spec copy tiny {tmp_path}/mine-3.toml"
    assert path.read_text() == "mine"


def test_copy_to_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        copy_ready("tiny", tmp_path / "no" / "x.toml")
    assert caught.value.problems[0].instead.startswith(f"mkdir -p {tmp_path}/no && ")
    with pytest.raises(SpecError):
        copy_ready("tny", tmp_path / "x.toml")


@pytest.mark.parametrize("name", WORLDS)
def test_shown_as_toml_it_is_the_same_spec(name: str, tmp_path: Path) -> None:
    loaded = load_spec(name)
    path = tmp_path / "shown.toml"
    path.write_text(to_toml(loaded.spec, loaded.provenance), encoding="utf-8")
    assert load_spec(path).spec == loaded.spec


def test_shown_with_everything_awkward(tmp_path: Path) -> None:
    sets = [
        "model.kind=import",
        "model.target=a.b:c",
        'model.args={"x y" = [1, {z = "\\"q\\"\\n"}], w = 1e-30, v = {}}',
        'data.transforms=[{kind="token_noise",probability=0.1},{kind="import",target="a:b"}]',
        'note="é # \\\\ \\u007f"',
    ]
    loaded = load_spec("tiny", sets)
    text = to_toml(loaded.spec, loaded.provenance)
    path = tmp_path / "shown.toml"
    path.write_text(text, encoding="utf-8")
    assert load_spec(path).spec == loaded.spec
    assert "# --set #3" in next(line for line in text.splitlines() if line.startswith("args = "))
    assert "# dir" in text  # not given, and still to be found


def test_what_is_no_default_is_told_with_where_it_came_from():
    loaded = load_spec("tiny", ["run.steps=7", 'data.transforms=[{kind="token_noise", probability=0.5}]'])
    settled = settle(loaded.spec, 2, loaded.provenance)
    lines = changed(loaded.spec, settled, loaded.provenance, 2).splitlines()
    told = {" ".join(line.split()) for line in lines}
    assert {"run.steps = 7 # --set #1", "model.heads = 4 # tiny.toml:9"} <= told
    assert {"layout.dp_replicate = 2 # world 2", "batch.accumulation = 12 # world 2"} <= told
    assert any(line.startswith("data.transforms = [{") and line.endswith("# --set #2") for line in lines)
    assert {line.partition(" ")[0] for line in lines} == {
        *loaded.provenance, "layout.dp_replicate", "batch.accumulation"
    }  # fmt: skip
