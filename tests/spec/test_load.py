"""Loading a Spec: precedence, provenance, `--set`, changes of kind, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.data import JsonlDataSpec, SyntheticDataSpec
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.model import DecoderSpec, ImportSpec, MlpSpec
from fourfold.spec.ready import ready_text
from fourfold.spec.settings import parse_setting, typed
from fourfold.spec.spec import Spec

SMALLEST = "[model]\nlayers = 1\nwidth = 8\nheads = 2\n"


def write(folder: Path, text: str, name: str = "my.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(source: str, *sets: str) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        load_spec(source, sets)
    return caught.value.problems


def problem(source: str, *sets: str) -> Problem:
    found = problems(source, *sets)
    assert len(found) == 1, found
    return found[0]


def test_ready_spec() -> None:
    loaded = load_spec("tiny")
    assert isinstance(loaded.spec.model, DecoderSpec)
    assert (loaded.spec.name, loaded.spec.model.layers, loaded.spec.model.dropout) == ("tiny", 4, 0.1)
    assert loaded.text == ready_text("tiny")
    assert loaded.notes == ()


def test_precedence_and_provenance(tmp_path: Path) -> None:
    text = f"{SMALLEST}tied = false\n\n[run]\nsteps = 20\nseed = 3\n"
    loaded = load_spec(write(tmp_path, text), ["run.steps=30", "optimizer.lr=1", "run.log_every=10"])
    assert (loaded.spec.run.steps, loaded.spec.run.seed, loaded.spec.optimizer.lr) == (30, 3, 1.0)
    # run.log_every and model.tied were given, but as the default.
    assert loaded.provenance == {
        "name": "my.toml",
        "model.layers": "my.toml:2",
        "model.width": "my.toml:3",
        "model.heads": "my.toml:4",
        "run.steps": "--set #1",
        "run.seed": "my.toml:9",
        "optimizer.lr": "--set #2",
    }


def test_provenance_of_lists_and_nested_tables() -> None:
    sets = ["model.moe={experts=4,top_k=2}", 'data.transforms=[{kind="token_noise",probability=0.1}]']
    provenance = load_spec("tiny", sets).provenance
    assert provenance["model.moe.experts"] == "--set #1"
    assert provenance["data.transforms"] == "--set #2"


def test_name_comes_from_the_file(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, SMALLEST, "my run (2).toml")).spec.name == "my-run-2-"
    assert load_spec(write(tmp_path, f'name = "other"\n{SMALLEST}')).spec.name == "other"
    assert load_spec(write(tmp_path, SMALLEST, "_.toml")).spec.name == "run"


def test_integer_for_a_float_and_byte_order_mark(tmp_path: Path) -> None:
    text = f"{SMALLEST}[optimizer]\nlr = 1\nclip_norm = 0\n"
    loaded = load_spec(write(tmp_path, f"\ufeff{text}"))
    assert loaded.spec.optimizer.lr == 1.0
    assert type(loaded.spec.optimizer.lr) is float


def test_later_setting_of_one_key_holds() -> None:
    loaded = load_spec("tiny", ["run.steps=30", "run.steps=40"])
    assert loaded.spec.run.steps == 40
    assert loaded.provenance["run.steps"] == "--set #2"


def test_a_setting_replaces_a_whole_section() -> None:
    loaded = load_spec("tiny", ["batch={micro_batch=3}"])
    assert (loaded.spec.batch.global_batch, loaded.spec.batch.micro_batch) == (None, 3)
    assert loaded.provenance["batch.micro_batch"] == "--set #1"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run.dir=runs/x", "runs/x"),
        ("run.dir=~/runs/2024", "~/runs/2024"),
        ("run.dir=./a.b", "./a.b"),
        ("run.dir=/data/x-1", "/data/x-1"),
        ("data.kind=jsonl", "jsonl"),
        ("model.target=a.b:c", "a.b:c"),
        ('run.dir="a b=c"', "a b=c"),
        ("run.steps=1_000", 1000),
        ("run.exact=true", True),
        ("optimizer.betas=[0.9, 0.99]", [0.9, 0.99]),
        ("model.moe={experts=4}", {"experts": 4}),
    ],
)
def test_setting_values(text: str, value: object) -> None:
    setting = parse_setting(text)
    assert setting.value == value
    assert ".".join(setting.path) == text.partition("=")[0]


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("run.steps", "--set run.steps=VALUE"),
        ("run.steps=", "--set run.steps=VALUE or leave it out for the default"),
        ("=3", "--set run.steps=20"),
        ("a b=3", "--set run.steps=20"),
        ("run..steps=3", "--set run.steps=20"),
        ("run.exact=True", "--set run.exact=true or --set 'run.exact=\"True\"' for the text"),
        ("run.exact=no", "--set run.exact=false or --set 'run.exact=\"no\"' for the text"),
        ("run.dir=None", "leave --set run.dir out for the default or --set 'run.dir=\"None\"' for the text"),
        ("optimizer.lr=.5", "--set optimizer.lr=0.5"),
        ("optimizer.lr=5.", "--set optimizer.lr=5.0"),
        ("run.dir=2024-runs", "--set 'run.dir=\"2024-runs\"' for the text"),
        ("run.dir=a b", "--set 'run.dir=\"a b\"' for the text"),
        ("run.steps=3\nseed = 4", "--set 'run.steps=\"3\\nseed = 4\"' for the text"),
    ],
)
def test_settings_that_cannot_be_read(text: str, instead: str) -> None:
    found = problem("tiny", text)
    assert found.instead == instead
    assert found.where == "--set #1"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_typed_text_is_read_back(text: str) -> None:
    import shlex

    from fourfold.spec.keys import toml_word

    option, setting = shlex.split(typed("run.dir", toml_word(text)))
    assert option == "--set"
    assert parse_setting(setting).value == text


def test_settings_through_a_value() -> None:
    assert problem("tiny", "run.steps.x=1").why == "run.steps is a value, not a section, so it has no key 'x'"
    noise = 'data.transforms=[{kind="token_noise"}]'
    assert problem("tiny", noise, "data.transforms.0.probability=0.1").where == "--set #2"


def test_kind_changes_keep_shared_keys_and_tell_what_is_left_out() -> None:
    loaded = load_spec("tiny", ["data.kind=jsonl", "data.path=x.jsonl"])
    assert isinstance(loaded.spec.data, JsonlDataSpec)
    assert loaded.spec.data.sequence == 128
    assert loaded.notes == ()

    loaded = load_spec("tiny", ["model.width=9", "model.kind=mlp", "data.kind=synthetic"][1:])
    assert isinstance(loaded.spec.model, MlpSpec)
    assert isinstance(loaded.spec.data, SyntheticDataSpec)
    assert loaded.spec.model.layers == 4  # a key of both kinds
    assert 'tiny.toml:8: model.width left out, for --set #1 makes model.kind "mlp"' in loaded.notes
    assert 'tiny.toml:18: data.sequence left out, for --set #2 makes data.kind "synthetic"' in loaded.notes

    loaded = load_spec("tiny", ["model.target=a.b:c", "model.kind=import"])
    assert isinstance(loaded.spec.model, ImportSpec)


def test_kind_changes_do_not_hide_settings_of_the_old_kind() -> None:
    for sets in (["model.width=9", "model.kind=mlp"], ["model.kind=mlp", "model.width=9"]):
        found = problem("tiny", *sets, "data.kind=synthetic")
        assert found.found == 'not a key of model kind "mlp"'
        assert found.asked == "model.width = 9"


def test_same_kind_changes_nothing() -> None:
    assert load_spec("tiny", ["model.kind=decoder", "data.kind=stdlib"]).spec == load_spec("tiny").spec


@pytest.mark.parametrize(
    ("source", "instead"),
    [
        ("tniy", "tiny"),
        ("llama3-8", "llama3-8b"),
        ("nothing-like-it", "one of them, or the path of a TOML file"),
        ("", "one of them, or the path of a TOML file"),
        ("no/such.toml", "the path of a TOML file; see: fourfold spec list"),
        ("no/tiny.toml", "tiny, the ready Spec; or first: fourfold spec copy tiny no/tiny.toml"),
    ],
)
def test_no_such_file(source: str, instead: str) -> None:
    assert problem(source).instead == instead


def test_nearest_file_of_the_folder(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST)
    assert problem(str(tmp_path / "mi.toml")).instead == path
    assert problem(str(tmp_path)).found == "a folder"
    assert problem(str(tmp_path)).instead == path


def test_a_ready_name_wins_over_a_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, SMALLEST, "tiny")
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_spec("tiny").spec.model, DecoderSpec)
    assert load_spec("tiny").spec.model.layers == 4
    assert load_spec("./tiny").spec.model.layers == 1


def test_undecodable_bytes(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(b"[model]\nkind = '\xff'\n")
    found = problem(str(path))
    assert found.where == "my.toml:2"
    assert found.found == "byte 0xff at offset 16, which is no UTF-8"


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("dir = runs/x", 'dir = "runs/x"'),
        ("exact = True", "exact = true"),
        ("exact = yes # !", "exact = true"),
        ("dir = None", "leave dir out for the default"),
        ("grace_s = .5", "grace_s = 0.5"),
        ("grace_s = 5.", "grace_s = 5.0"),
        ("steps: 20", "steps = 20"),
        ('dir = "abc', 'dir = "abc"'),
        ("steps 20", "key = value, or [section]"),
        ("seed = 1\nseed = 2", "each key and each section once"),
        ("[run]", "each key and each section once"),
        ("[batch", "[batch]"),
    ],
)
def test_no_toml(tmp_path: Path, line: str, instead: str) -> None:
    found = problem(write(tmp_path, f"{SMALLEST}[run]\n{line}\n"))
    assert found.instead == instead
    assert found.where == f"my.toml:{6 + line.count(chr(10))}"
    assert found.asked == line.splitlines()[-1]


def test_toml_that_ends_too_early(tmp_path: Path) -> None:
    found = problem(write(tmp_path, "[optimizer]\nbetas = [0.9,\n"))
    assert found.instead == "the bracket or quote that closes it"


def test_no_toml_does_not_hide_bad_settings(tmp_path: Path) -> None:
    found = problems(write(tmp_path, "a b\n"), "run.steps")
    assert [each.where for each in found] == ["my.toml:1", "--set #1"]


def test_all_at_once_in_order(tmp_path: Path) -> None:
    text = f'{SMALLEST}[run]\nsteps = "5"\nglobal_batch = 4\n[optimiser]\nlr = 1\n'
    found = problems(write(tmp_path, text), "run.seed=-1", "run.exact=True", "lr=1.0")
    places = ["my.toml:6", "my.toml:7", "my.toml:8", "--set #1", "--set #2", "--set #3"]
    assert [each.where for each in found] == places


def test_rules_come_with_their_place(tmp_path: Path) -> None:
    found = problems(write(tmp_path, f"{SMALLEST}kv_heads = 3\n"), "layout.sp=true")
    assert [each.where for each in found] == ["my.toml:5", "--set #1"]


def test_round_trip_through_json() -> None:
    spec = load_spec("deepseek-v3").spec
    assert Spec.model_validate_json(spec.model_dump_json()) == spec
