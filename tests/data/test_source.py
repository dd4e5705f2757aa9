"""From the Spec to samples: each kind of data, and what is said about data that does not fit the request."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.data.corpus import open_stdlib
from fourfold.data.pack import PaddedSource
from fourfold.data.source import open_sources
from fourfold.data.tokens import prepare, token_paths
from fourfold.spec.errors import DataError, SpecError
from fourfold.spec.spec import Spec

DECODER = {"kind": "decoder", "layers": 1, "width": 8, "heads": 2}
MLP = {"kind": "mlp", "inputs": 5, "outputs": 2}


def spec_of(data: dict[str, Any], model: dict[str, Any] | None = None, seed: int = 0) -> Spec:
    return Spec.model_validate({"model": model or DECODER, "data": data, "run": {"seed": seed}})


def write_lines(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    return write_lines(tmp_path / "a.jsonl", *(f"document number {number}" for number in range(200)))


def test_the_standard_library_is_the_default_and_small_to_send() -> None:
    sources = open_sources(Spec.model_validate({"model": DECODER}))
    assert sources.validation is not None
    assert sources.content_hash == open_stdlib().content_hash
    assert sources.train.counts()["documents"] > 10 * sources.validation.counts()["documents"] > 0
    for source in (sources.train, sources.validation):
        assert len(pickle.dumps(source)) < 1000
        again = pickle.loads(pickle.dumps(source))
        for index in (0, len(source) - 1):
            assert np.array_equal(again.sample(index).inputs, source.sample(index).inputs)
    assert sources.train.sample(0).inputs.shape == (128,)


def test_kinds_of_text_agree_on_samples_and_hash(tmp_path: Path, jsonl: str) -> None:
    prepare(jsonl, str(tmp_path / "made"), "jsonl")
    data = {"sequence": 16, "validation_fraction": 0.2}
    direct = open_sources(spec_of({"kind": "jsonl", "path": jsonl, **data}))
    mapped = open_sources(spec_of({"kind": "tokens", "path": str(tmp_path / "made.bin"), **data}))
    assert direct.content_hash == mapped.content_hash
    for ours, theirs in ((direct.train, mapped.train), (direct.validation, mapped.validation)):
        assert ours is not None
        assert theirs is not None
        assert len(ours) == len(theirs) > 0
        for index in range(len(ours)):
            assert np.array_equal(ours.sample(index).targets, theirs.sample(index).targets)


def test_the_seed_has_no_say_in_text_and_its_division(jsonl: str) -> None:
    first, second = (open_sources(spec_of({"kind": "jsonl", "path": jsonl}, seed=seed)) for seed in (0, 1))
    assert first.validation is not None
    assert second.validation is not None
    assert first.validation.counts() == second.validation.counts()
    assert first.content_hash == second.content_hash


def test_a_validation_file_is_the_whole_validation_set(tmp_path: Path, jsonl: str) -> None:
    other = write_lines(tmp_path / "other.jsonl", "held out", "by hand")
    sources = open_sources(spec_of({"kind": "jsonl", "path": jsonl, "validation_path": other}))
    assert sources.validation is not None
    assert sources.train.counts()["documents"] == 200
    assert sources.validation.counts()["tokens"] == len("held out.by hand.")
    write_lines(tmp_path / "other.jsonl", "held out", "by hands")
    changed = open_sources(spec_of({"kind": "jsonl", "path": jsonl, "validation_path": other}))
    assert sources.content_hash != changed.content_hash
    assert sources.content_hash.split("+")[0] == changed.content_hash.split("+")[0]


def test_no_validation_is_none(jsonl: str) -> None:
    sources = open_sources(spec_of({"kind": "jsonl", "path": jsonl, "validation_fraction": 0.0}))
    assert sources.validation is None
    assert sources.train.counts()["documents"] == 200


def test_padding_and_attention_are_as_asked(jsonl: str) -> None:
    sources = open_sources(spec_of({"kind": "jsonl", "path": jsonl, "packing": "pad", "sequence": 19}))
    assert isinstance(sources.train, PaddedSource)
    assert sources.train.sample(3).nonpadding == 17 + 1
    across = {"kind": "jsonl", "path": jsonl, "attend_across_documents": True}
    documents = open_sources(spec_of(across)).train.sample(0).documents
    assert documents is not None
    assert not documents.any()


def test_a_sequence_longer_than_any_document(jsonl: str) -> None:
    longest = len("document number 100")
    fits = {"kind": "jsonl", "path": jsonl, "sequence": longest}
    too_long = {**fits, "sequence": longest + 1}
    assert open_sources(spec_of(fits)).notes == ()
    assert open_sources(spec_of({**fits, "packing": "pad"})).notes == ()
    with pytest.raises(DataError) as error:
        open_sources(spec_of({**too_long, "packing": "pad"}))
    assert f"--set data.sequence={longest} " in str(error.value)
    assert "data.packing=pack" in str(error.value)
    (note,) = open_sources(spec_of(too_long)).notes
    assert f"the longest fills {longest} tokens" in note
    assert "attend_across_documents" in note
    assert open_sources(spec_of({**too_long, "attend_across_documents": True})).notes == ()


def test_one_document_is_divided_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a long book " * 100)
    sources = open_sources(spec_of({"kind": "text", "path": str(path)}))
    assert sources.validation is not None
    assert sources.validation.counts()["tokens"] == 60
    assert "held out" in sources.notes[0]


def test_tokens_that_the_model_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain ASCII text, " * 20)
    prepare(str(tmp_path / "a.txt"), str(tmp_path / "a"), "text")
    data = {"kind": "tokens", "path": str(tmp_path / "a")}
    assert open_sources(spec_of(data, {**DECODER, "vocabulary": 121})).train.vocabulary == 121
    with pytest.raises(DataError, match=r"token 120 in the data(.|\n)*--set model.vocabulary=256"):
        open_sources(spec_of(data, {**DECODER, "vocabulary": 120}))
    own = {"kind": "import", "target": "package.module:factory"}
    assert open_sources(spec_of(data, own)).train.vocabulary == 256


def test_a_damaged_token_file_is_refused_and_a_large_one_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text, " * 100)
    prepare(str(tmp_path / "a.txt"), str(tmp_path / "a"), "text")
    token_place = token_paths(tmp_path / "a")[0]
    token_place.write_bytes(token_place.read_bytes().replace(b"plain", b"Plain", 1))
    spec = spec_of({"kind": "tokens", "path": str(tmp_path / "a")})
    with pytest.raises(DataError, match="content_hash"):
        open_sources(spec)
    assert "not compared with its header" in open_sources(spec, verify_up_to=10).notes[0]


def test_too_little_text_for_one_sample(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", "ab")
    sources = open_sources(spec_of({"kind": "jsonl", "path": lines, "validation_fraction": 0.0}))
    assert len(sources.train) == 1
    empty = write_lines(tmp_path / "b.jsonl", "", "")
    with pytest.raises(DataError, match="all of them empty"):
        open_sources(spec_of({"kind": "jsonl", "path": empty}))


def test_synthetic_data_takes_its_sizes_from_the_model() -> None:
    sources = open_sources(spec_of({"kind": "synthetic", "samples": 50}, MLP))
    assert sources.validation is not None
    assert (len(sources.train), len(sources.validation)) == (50, 2)
    assert sources.train.sample(0).inputs.shape == (5,)
    assert sources.train.sample(0).targets.shape == (2,)
    ids = [source.sample(0).inputs.tolist() for source in (sources.train, sources.validation)]
    assert ids[0] != ids[1]


def test_synthetic_hashes_tell_seed_noise_and_size_apart() -> None:
    data = {"kind": "synthetic", "samples": 50, "validation_fraction": 0.0}
    specs = [
        spec_of(data, MLP),
        spec_of(data, MLP, seed=1),
        spec_of({**data, "noise": 0.2}, MLP),
        spec_of({**data, "samples": 51}, MLP),
        spec_of({**data, "validation_fraction": 0.1}, MLP),
    ]
    assert len({open_sources(spec).content_hash for spec in specs}) == len(specs)


def test_synthetic_data_for_a_model_of_ones_own_says_its_sizes() -> None:
    own = {"kind": "import", "target": "package.module:factory"}
    sizes = {"inputs": 3, "outputs": 4, "task": "classification"}
    sample = open_sources(spec_of({"kind": "synthetic", **sizes}, own)).train.sample(0)
    assert sample.inputs.shape == (3,)
    assert sample.targets.shape == ()
    with pytest.raises(SpecError, match=r"data\.inputs, data\.outputs, data\.task"):
        open_sources(spec_of({"kind": "synthetic"}, own))


@pytest.mark.parametrize(("data", "model"), [({"kind": "stdlib"}, MLP), ({"kind": "synthetic"}, DECODER)])
def test_data_of_the_other_sort_is_refused(data: dict[str, Any], model: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="reads"):
        open_sources(spec_of(data, model))
