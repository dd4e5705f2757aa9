"""From the Spec to samples: the one place that knows which data the Spec names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from fourfold.data import documents
from fourfold.data.corpus import Corpus, open_jsonl, open_stdlib, open_text
from fourfold.data.pack import PackedSource, PaddedSource, TokenSource
from fourfold.data.parts import Part, part_of, split
from fourfold.data.sample import Source
from fourfold.data.synthetic import SyntheticSource
from fourfold.data.tokens import VERIFIED_BYTES, open_tokens, read_header
from fourfold.spec.data import (
    DataSpec,
    JsonlDataSpec,
    StdlibDataSpec,
    SyntheticDataSpec,
    TextDataSpec,
    TokensDataSpec,
)
from fourfold.spec.errors import DataError, Problem
from fourfold.spec.huggingface import vocabulary_of
from fourfold.spec.model import MlpSpec
from fourfold.spec.rules import require
from fourfold.spec.spec import Spec

TokenData = StdlibDataSpec | TextDataSpec | JsonlDataSpec | TokensDataSpec


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The data of a run. content_hash: of everything read; with a validation file, of both, joined by "+"."""

    train: Source
    validation: Source | None
    content_hash: str
    notes: tuple[str, ...] = ()


def open_sources(spec: Spec, verify_up_to: int = VERIFIED_BYTES) -> Sources:
    """Open the data that the Spec names, here and now; it needs no settled layout.

    verify_up_to: bytes of a token file up to which its content is compared with its header.
    Raises DataError for data that is missing, damaged or unfit for the request, SpecError for a Spec that breaks a
    rule (such as a model that reads vectors on text).
    """
    require(spec, "always")
    if isinstance(spec.data, SyntheticDataSpec):
        return _synthetic(spec, spec.data)
    return _tokens(spec, spec.data, verify_up_to)


def require_paths(data: DataSpec) -> None:
    """Raise DataError where a path that `data` names leads nowhere; reads no text."""
    for path in (getattr(data, "path", None), getattr(data, "validation_path", None)):
        if path is None:
            continue
        if isinstance(data, TokensDataSpec):
            read_header(path)
        else:
            documents.located(path, "text" if isinstance(data, TextDataSpec) else "JSON lines")


def open_corpus(data: TokenData, path: str | None, verify_up_to: int = VERIFIED_BYTES) -> Corpus:
    """The corpus at `path`, read as `data` says (the standard library has no path)."""
    if isinstance(data, StdlibDataSpec):
        return open_stdlib()
    assert path is not None
    if isinstance(data, TextDataSpec):
        return open_text(path)
    if isinstance(data, JsonlDataSpec):
        return open_jsonl(path, data.field)
    return open_tokens(path, verify_up_to)


def _tokens(spec: Spec, data: TokenData, verify_up_to: int) -> Sources:
    corpus = open_corpus(data, None if isinstance(data, StdlibDataSpec) else data.path, verify_up_to)
    corpora, content_hash, notes = [corpus], corpus.content_hash, corpus.notes
    parts: list[Part]
    if not isinstance(data, StdlibDataSpec) and data.validation_path is not None:
        corpora.append(open_corpus(data, data.validation_path, verify_up_to))
        parts = [part_of(each, "all", 0.0) for each in corpora]
        content_hash = "+".join(each.content_hash for each in corpora)
        notes += corpora[1].notes
    else:
        train, validation, more = split(corpus, data.validation_fraction)
        parts = [train] if validation is None else [train, validation]
        notes += more
    vocabulary = _vocabulary(spec, corpora)
    notes += _spans(corpus, data)
    sources = [_rows(part, data, vocabulary) for part in parts]
    return Sources(sources[0], sources[1] if len(sources) > 1 else None, content_hash, notes)


def _rows(part: Part, data: TokenData, vocabulary: int) -> TokenSource:
    kind = PackedSource if data.packing == "pack" else PaddedSource
    source = kind(part, data.sequence, vocabulary, data.attend_across_documents)
    if len(source) == 0:
        raise DataError(
            Problem(
                asked=f"samples of {data.sequence} tokens",
                found=f"{part.tokens} tokens in {len(part)} documents",
                why="one input and its target need two tokens of one document",
                instead="more text",
            )
        )
    return source


def _vocabulary(spec: Spec, corpora: list[Corpus]) -> int:
    """Tokens that the model knows; for a user's own model, those that the data can hold."""
    largest = max(corpus.largest for corpus in corpora)
    key, known = vocabulary_of(spec.model)
    if known is None:
        return max(256, largest + 1)
    if largest >= known:
        raise DataError(
            Problem(
                asked=f"{key} = {known}",
                found=f"token {largest} in the data",
                why=f"the embedding has rows 0 … {known - 1} only",
                instead=f"--set {key}={max(256, largest + 1)}",
            )
        )
    return known


def _spans(corpus: Corpus, data: TokenData) -> tuple[str, ...]:
    """What a sequence longer than every document means: refused when padding, worth a note when packing."""
    longest = int(np.diff(corpus.offsets).max()) - 1  # inputs: the end mark is a target only
    if data.sequence <= longest:
        return ()
    if data.packing == "pad":
        raise DataError(
            Problem(
                asked=f'data.sequence = {data.sequence} with data.packing = "pad"',
                found=f"the longest of {len(corpus)} documents fills {longest} tokens",
                why="every sample would be padded, and no position past that ever trained",
                instead=f"--set data.sequence={max(1, longest)}   or   --set data.packing=pack",
            )
        )
    if data.attend_across_documents:
        return ()
    return (
        f"data.sequence = {data.sequence} is longer than any document (the longest fills {longest} tokens): documents "
        f"are packed into rows, but attention never spans more than {longest} tokens unless "
        "data.attend_across_documents = true",
    )


def _synthetic(spec: Spec, data: SyntheticDataSpec) -> Sources:
    """Vectors. The validation samples come on top of data.samples, as many as the fraction says and at least one."""
    sizes = spec.model if isinstance(spec.model, MlpSpec) else data
    assert sizes.task and sizes.inputs and sizes.outputs, "a rule of the Spec holds this"
    make = partial(SyntheticSource, sizes.task, sizes.inputs, sizes.outputs, data.noise, spec.run.seed)
    train = make(0, data.samples)
    validation = None
    if data.validation_fraction > 0.0:
        size = max(1, round(data.samples * data.validation_fraction))
        validation = make(data.samples, size)
    return Sources(train, validation, xxhash.xxh3_128_hexdigest(f"{train} {validation}".encode()))
