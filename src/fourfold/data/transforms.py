"""Augmentation of training samples. Its randomness belongs to the sample: (seed, epoch, sample id, place in the list).

So a sample is changed alike on every rank, worker and layout, and differently in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module

import numpy as np

from fourfold.data.order import key_of
from fourfold.data.process_streams import drawn_from
from fourfold.data.sample import Sample
from fourfold.data.synthetic import stream
from fourfold.spec.data import TransformSpec
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.target import look_here_first

Transform = Callable[[Sample, np.random.Generator], Sample]


@dataclass(frozen=True, slots=True)
class TokenNoise:
    """Replaces a share of the input tokens by tokens drawn evenly; targets and padding stay."""

    probability: float
    vocabulary: int

    def __call__(self, sample: Sample, draws: np.random.Generator) -> Sample:
        inputs = sample.inputs.copy()
        text = inputs[: sample.nonpadding]
        hit = draws.random(len(text)) < self.probability
        text[hit] = draws.integers(self.vocabulary, size=len(text))[hit]
        return replace(sample, inputs=inputs)


@dataclass(frozen=True, slots=True)
class GaussianNoise:
    """Adds normal noise to every input feature."""

    std: float

    def __call__(self, sample: Sample, draws: np.random.Generator) -> Sample:
        noise = self.std * draws.standard_normal(sample.inputs.shape)
        return replace(sample, inputs=(sample.inputs + noise).astype(sample.inputs.dtype))


@dataclass(frozen=True, slots=True)
class Imported:
    """A user's own "package.module:function"(sample, generator) -> sample of the same shapes and dtypes.

    Also what it draws from the process-wide streams of random, numpy and torch is a function of `draws`.
    """

    target: str

    def __call__(self, sample: Sample, draws: np.random.Generator) -> Sample:
        function = _function(self.target)
        with drawn_from(draws):
            changed = function(sample, draws)
        if _form(changed) != _form(sample):
            raise SpecError(_changes_form(self.target, sample, changed))
        return changed


def make_transforms(specs: Sequence[TransformSpec], vocabulary: int | None) -> tuple[Transform, ...]:
    """The transforms that were asked for; vocabulary: of the tokens, None for vectors.

    Raises SpecError, with all of them, for those that do not fit the data or cannot be imported.
    """
    made: list[Transform] = []
    problems: list[Problem] = []
    for number, spec in enumerate(specs):
        try:
            made.append(_make(spec, vocabulary, f"data.transforms[{number}]"))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return tuple(made)


def transformed(
    transforms: Sequence[Transform], sample: Sample, seed: int, epoch: int, sample_id: int
) -> Sample:
    """The sample after all transforms, each with a stream keyed by (seed, epoch, sample id, its place)."""
    for place, transform in enumerate(transforms):
        sample = transform(sample, stream(key_of("transform", seed, epoch, place), sample_id))
    return sample


def _make(spec: TransformSpec, vocabulary: int | None, where: str) -> Transform:
    if spec.kind == "token_noise":
        if vocabulary is None:
            raise SpecError(_unfit(spec, "vectors", "gaussian_noise", where))
        return TokenNoise(spec.probability, vocabulary)
    if spec.kind == "gaussian_noise":
        if vocabulary is not None:
            raise SpecError(_unfit(spec, "tokens", "token_noise", where))
        return GaussianNoise(spec.std)
    try:
        _function(spec.target)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise SpecError(_not_importable(spec.target, error, where)) from error
    return Imported(spec.target)


@lru_cache(maxsize=64)
def _function(target: str) -> Transform:
    """The function, looked for in the working directory first, as `python -m` does (and a model of one's own)."""
    look_here_first()
    module, _, name = target.partition(":")
    function: Transform = getattr(import_module(module), name)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function


def _form(sample: Sample) -> object:
    if not isinstance(sample, Sample):
        return None
    arrays = (sample.inputs, sample.targets, sample.valid, sample.documents)
    return [None if array is None else (array.shape, array.dtype) for array in arrays]


def _unfit(spec: TransformSpec, data: str, other: str, where: str) -> Problem:
    return Problem(
        asked=f'the transform "{spec.kind}"',
        found=f"samples that are {data}",
        why="it changes the other sort of input",
        instead=f'kind = "{other}", or kind = "import"',
        where=where,
    )


def _not_importable(target: str, error: Exception, where: str) -> Problem:
    return Problem(
        asked=f'the transform "{target}"',
        found=f"{type(error).__name__}: {error}",
        why='it is imported as "package.module:function"',
        instead="the module's dotted name; start in the folder that holds it, or PYTHONPATH=FOLDER fourfold …",
        where=where,
    )


def _changes_form(target: str, sample: Sample, changed: object) -> Problem:
    found = f"a {type(changed).__name__}" if not isinstance(changed, Sample) else f"{_form(changed)}"
    return Problem(
        asked=f'a Sample of shapes and dtypes {_form(sample)} back from the transform "{target}"',
        found=found,
        why="the rows of a batch are stacked, and have one shape and dtype",
        instead="return dataclasses.replace(sample, inputs=…) with arrays of the same form",
    )
