"""What a person reads: nearest keys, the section where a key belongs, wrong types and values."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.keys import SYNONYMS, has_key, keys, kinds, nearest_key, sections
from fourfold.spec.load import load_spec

MODEL = "[model]\nlayers = 1\nwidth = 8\nheads = 2\n"


def of_text(folder: Path, text: str) -> Problem:
    """The one problem of a file with a whole model and `text`."""
    path = folder / "my.toml"
    path.write_text(MODEL + text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


def of_sets(*sets: str) -> Problem:
    with pytest.raises(SpecError) as caught:
        load_spec("tiny", sets)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


def test_four_parts(tmp_path: Path) -> None:
    found = of_text(tmp_path, "[run]\nglobal_batch = 48\n")
    assert str(found) == (
        "my.toml:6: run.global_batch = 48\n"
        "  found: not a key of [run]\n"
        '  why:   "global_batch" belongs in [batch]\n'
        "  type:  global_batch = 48, under [batch]"
    )


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("[run]\nstesp = 4", "steps = 4, under [run]"),
        ("[optimizer]\nlearning_rate = 1e-3", "lr = 0.001, under [optimizer]"),
        ("[run]\nlearning_rate = 1e-3", "lr = 0.001, under [optimizer]"),
        ("[run]\nmax_steps = 4", "steps = 4, under [run]"),
        ('[run]\nname = "x"', 'name = "x", above the first [section]'),
        ("[batch]\nbatch_size = 8", "global_batch = 8, under [batch]"),
        ("[layout]\ndropout = 0.5", "dropout = 0.5, under [model]"),
        ("hidden_size = 8", "width = 8, under [model]"),
        ("[model.moe]\nexperts = 4\ntop_k = 2\nexpert_widht = 3", "expert_width = 3, under [model.moe]"),
        (
            '[data]\ntransforms = [{kind = "token_noise", probabilty = 0.5}]',
            "probability = 0.5, in item 0 of",
        ),
        ("[optimizer]\nlerning_rate = '3'", "leave it out"),
        ("[hardware]\nfoo = 1", "leave it out"),
    ],
)
def test_unknown_keys(tmp_path: Path, text: str, instead: str) -> None:
    assert of_text(tmp_path, text + "\n").instead.startswith(instead)


def test_unknown_key_at_the_top(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(f"lr = 1e-3\n{MODEL}", encoding="utf-8")
    with pytest.raises(SpecError, match=r'"lr" belongs in \[optimizer\]'):
        load_spec(path)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("[optimiser]\nlr = 1.0", "[optimizer]"),
        ("[training]\nsteps = 3\nlr = 1.0", "[run], lr under [optimizer]"),
        ("[zzz]\nlr = 1.0", "lr under [optimizer]"),
        ("[zzz]\nqqq = 1.0", "leave it out"),
        ("[zzz]", "leave it out"),
    ],
)
def test_unknown_sections(tmp_path: Path, text: str, instead: str) -> None:
    found = of_text(tmp_path, text + "\n")
    assert found.instead == instead
    assert found.where == "my.toml:5"


def test_keys_of_kinds(tmp_path: Path) -> None:
    found = of_text(tmp_path, '[data]\nkind = "jsonl"\npath = "x"\nfeild = "body"\n')
    assert (found.asked, found.found) == ('data.feild = "body"', 'not a key of data kind "jsonl"')
    assert found.instead == 'field = "body", under [data]'

    found = of_text(tmp_path, '[data]\npath = "x"\n')
    assert found.found == 'not a key of data kind "stdlib" (the default kind)'
    assert 'kind = "text", under [data]' in found.instead

    found = of_text(tmp_path, '[data]\nkind = "jsnl"\nfeild = 3\n')
    assert (found.asked, found.instead) == ('data.kind = "jsnl"', 'kind = "jsonl", under [data]')

    found = of_text(tmp_path, '[data]\nkind = "text"\n')
    assert (found.asked, found.found) == ('[data] of kind "text"', "no path")
    assert (found.instead, found.where) == ("path = <text in quotes>, under [data]", "my.toml:6")


def test_missing_path_after_a_setting_of_the_kind() -> None:
    found = of_sets("data.kind=jsonl")
    assert (found.instead, found.where) == ("--set 'data.path=<text in quotes>'", "--set #1")


@pytest.mark.parametrize(
    ("text", "found", "instead"),
    [
        ('[optimizer]\nlr = "6e-3"', 'the text "6e-3"', "lr = 0.006, under [optimizer]"),
        ("[optimizer]\nlr = true", "the truth value true", "lr = <a number above 0>, under [optimizer]"),
        ("[optimizer]\nlr = nan", "the number nan", "lr = <a number above 0>, under [optimizer]"),
        ("[optimizer]\nlr = inf", "the number inf", "lr = <a number above 0>, under [optimizer]"),
        ("[optimizer]\nbetas = [0.9]", "a list of 1", "betas = <a list of 2, each a number from 0 to 1>"),
        ('[optimizer]\nbetas = ["0.9", 0.95]', "a list of 2", "betas = [0.9, 0.95], under [optimizer]"),
        ('[optimizer]\nschedule = "Cosine"', 'the text "Cosine"', 'schedule = "cosine", under [optimizer]'),
        ("[run]\nsteps = true", "the truth value true", "steps = <a whole number from 1 up>, under [run]"),
        ("[run]\nsteps = 0", "the whole number 0", "steps = 1, under [run]"),
        ("[run]\nsteps = 1e3", "the number 1000.0", "steps = 1000, under [run]"),
        ("[run]\nsteps = 2.5", "the number 2.5", "steps = <a whole number from 1 up>, under [run]"),
        ("[run]\nseed = -4", "the whole number -4", "seed = 0, under [run]"),
        ("[run]\ndir = 3", "the whole number 3", 'dir = "3", under [run]'),
        ("[run]\ndir = 2024-01-01", "a date", 'dir = "2024-01-01", under [run]'),
        ("[run]\nexact = 1", "the whole number 1", "exact = true, under [run]"),
        ('[run]\nexact = "no"', 'the text "no"', "exact = false, under [run]"),
        ("[layout]\nzero = true", "the truth value true", "zero = 1, under [layout]"),
        ("[layout]\nzero = 1.0", "the number 1.0", "zero = 1, under [layout]"),
        ("[layout]\nzero = 7", "the whole number 7", "zero = <0, 1, 2 or 3>, under [layout]"),
        ('[layout]\ndp_shard = "atuo"', 'the text "atuo"', 'dp_shard = "auto", under [layout]'),
        ("[layout]\ndp_replicate = 0", "the whole number 0", "dp_replicate = 1, under [layout]"),
        (
            "[precision]\nscale_backoff = 2.0",
            "the number 2.0",
            "scale_backoff = <a number above 0 and below 1>",
        ),
        (
            "[precision]\nscale_growth = 1.0",
            "the number 1.0",
            "scale_growth = <a number above 1, up to 65536>",
        ),
        ("dropout = 1.0", "the number 1.0", "dropout = <a number from 0 to below 1>, under [model]"),
        ("moe = true", "the truth value true", "[model.moe], and below it its keys (experts, top_k, "),
        ("[[batch]]\nmicro_batch = 2", "a list of 1", "[batch], and below it its keys (global_batch, "),
    ],
)
def test_wrong_values(tmp_path: Path, text: str, found: str, instead: str) -> None:
    problem = of_text(tmp_path, text + "\n")
    assert problem.found == found
    assert problem.instead.startswith(instead)


def test_a_degree_has_one_problem_not_one_for_each_way_to_be_right(tmp_path: Path) -> None:
    assert of_text(tmp_path, '[layout]\ndp_shard = "2"\n').instead == "dp_shard = 2, under [layout]"


def test_bad_name() -> None:
    assert of_sets('name="a b"').why == "name takes text of letters, digits and . _ -"


def test_a_text_is_no_list_of_texts() -> None:
    told = of_sets('checkpoint.allow_missing="model.head"').why
    assert told == "checkpoint.allow_missing takes a list of texts in quotes"


def test_a_list_of_numbers_is_no_list_of_tables() -> None:
    told = of_sets("layout.pp_split=[2,0]").why
    assert told == "layout.pp_split takes a list, each a whole number from 1 up"


def test_no_model(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("", encoding="utf-8")
    with pytest.raises(SpecError, match="fourfold spec copy tiny"):
        load_spec(path)
    path.write_text("model = 3\n", encoding="utf-8")
    with pytest.raises(SpecError, match="model takes a section of keys"):
        load_spec(path)


def test_arguments_that_json_cannot_hold() -> None:
    base = ["model.kind=import", "model.target=a:b"]
    assert of_sets(*base, "model.args.x=nan").found == "the number nan"
    assert of_sets(*base, "model.args.x=[1, {y=2024-01-01}]").where == "--set #3"
    args = load_spec("tiny", [*base, 'model.args={x=[1, {y="z"}], w=0.5}']).spec.model.model_dump()["args"]
    assert args == {"x": [1, {"y": "z"}], "w": 0.5}


def test_every_synonym_names_a_key() -> None:
    for path, names in SYNONYMS.items():
        assert has_key(path)
        assert not {key.leaf for key in keys().values() if key.path == path} & set(names)


def test_key_catalogue() -> None:
    assert {
        "model",
        "data",
        "batch",
        "optimizer",
        "precision",
        "layout",
        "checkpoint",
        "run",
        "hardware",
    } == set(sections())
    assert set(kinds("data")) == {"stdlib", "text", "jsonl", "tokens", "synthetic"}
    assert keys()["data.sequence"].kinds == ("jsonl", "stdlib", "text", "tokens")
    assert keys()["batch.global_batch"].expects == "a whole number from 1 up"
    assert keys()["layout.dp_shard"].expects == 'a whole number from 1 up or "auto"'
    assert keys()["data.kind"].expects == '"jsonl", "stdlib", "synthetic", "text" or "tokens"'
    assert not has_key("data.field", "stdlib")
    assert has_key("data.field", "jsonl")


@given(st.sampled_from(sorted(path for path in keys() if path.count(".") == 1)), st.data())
def test_one_wrong_letter_still_finds_the_key(path: str, data: st.DataObject) -> None:
    section, _, leaf = path.rpartition(".")
    at = data.draw(st.integers(0, len(leaf)))
    misspelt = f"{leaf[:at]}q{leaf[at:]}"
    near = nearest_key(f"{section}.{misspelt}")
    if len(leaf) > 2:  # of two letters a third is much
        assert near is not None
        assert near.leaf == leaf


VALUES = [
    "1",
    "-1",
    "0.5",
    "nan",
    "true",
    '""',
    '"auto"',
    '"mlp"',
    '"jsonl"',
    "2024-01-01",
    "[]",
    "[1]",
    "{}",
]
VALUES += [
    "[{}]",
    "{kind = 3}",
    "{x = {y = 1}}",
    '[{kind = "import"}]',
    '{kind = "mlp", layers = []}',
    "[[], {}]",
]
PATHS = st.one_of(
    st.sampled_from(sorted(keys())),
    st.builds(
        lambda path, leaf: f"{path}.{leaf}",
        st.sampled_from(sorted(keys())),
        st.sampled_from(["x", "0", "kind"]),
    ),
    st.from_regex(r"[a-z_]{1,8}(\.[a-z_]{1,8}){0,2}", fullmatch=True),
)


@given(st.lists(st.builds(lambda path, value: f"{path}={value}", PATHS, st.sampled_from(VALUES)), max_size=6))
def test_nothing_but_an_error_for_people(sets: list[str]) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        load_spec("tiny", sets)
    except SpecError as error:
        problems = error.problems
    assert all(each.found and each.why and each.instead for each in problems), problems
