"""Vectors with a known rule behind them: every sample is computed from (seed, index) when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.data.order import key_of
from fourfold.data.sample import Sample

_HIDDEN = 16  # features of the rule's hidden layer


def stream(key: int, counter: int) -> np.random.Generator:
    """Random numbers of their own for every (64-bit key, counter >= 0): Philox (Salmon et al., SC11)."""
    return np.random.Generator(np.random.Philox(key=np.array([key, counter], dtype=np.uint64)))


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """`size` samples, numbered on from `first` in the endless sequence of the seed.

    regression: standard-normal inputs; targets by a fixed tanh network, plus noise of standard deviation `noise`.
    classification: a class drawn evenly, then its centre or the opposite point, plus standard-normal noise, so that
    no linear rule tells classes apart. The rule depends on the sizes only: other seeds draw other samples of one task.
    """

    task: Literal["regression", "classification"]
    inputs: int
    outputs: int
    noise: float
    seed: int
    first: int
    size: int

    @property
    def vocabulary(self) -> int | None:
        """None: vectors, not tokens."""
        return None

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Sample:
        """The sample with this number, 0 <= index < len."""
        if not 0 <= index < self.size:
            raise IndexError(f"samples are numbered 0 … {self.size - 1}, not {index}")
        draws = stream(key_of("synthetic", self.seed), self.first + index)
        if self.task == "regression":
            inputs = draws.standard_normal(self.inputs)
            targets = _rule(inputs, self.outputs) + self.noise * draws.standard_normal(self.outputs)
            return Sample(inputs.astype(np.float32), targets.astype(np.float32), np.array(True), None, 1)
        label = draws.integers(self.outputs)
        side = 2.0 * draws.integers(2) - 1.0
        inputs = side * _weights("centres", self.outputs, self.inputs)[label] + draws.standard_normal(
            self.inputs
        )
        return Sample(inputs.astype(np.float32), np.array(label, dtype=np.int64), np.array(True), None, 1)

    def largest(self) -> Sample:
        """Any sample: all have one shape."""
        return self.sample(0)

    def counts(self) -> dict[str, int]:
        """The number of samples."""
        return {"samples": self.size}


@lru_cache(maxsize=16)
def _weights(name: str, rows: int, columns: int) -> NDArray[np.float64]:
    return stream(key_of("rule", name, rows, columns), 0).standard_normal((rows, columns))


def _rule(inputs: NDArray[Any], outputs: int) -> NDArray[np.float64]:
    """The hidden rule: two layers, targets of variance about 1. Summed without BLAS, whose order is not fixed."""
    hidden = (_weights("hidden", _HIDDEN, len(inputs)) * inputs).sum(axis=1) / np.sqrt(len(inputs))
    mixed: NDArray[np.float64] = (_weights("outer", outputs, _HIDDEN) * np.tanh(2.0 * hidden)).sum(axis=1)
    mixed /= np.sqrt(_HIDDEN / 2)
    return mixed
