"""Synthetic samples: a function of (seed, index), with a rule that can be learned."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from fourfold.data.synthetic import SyntheticSource, stream

REGRESSION = SyntheticSource("regression", 32, 1, 0.0, seed=3, first=0, size=400)
CLASSES = SyntheticSource("classification", 8, 4, 0.0, seed=3, first=0, size=400)


def arrays(source: SyntheticSource) -> tuple[np.ndarray, np.ndarray]:
    samples = [source.sample(index) for index in range(len(source))]
    return np.stack([s.inputs for s in samples]), np.stack([s.targets for s in samples])


@pytest.mark.parametrize("source", [REGRESSION, CLASSES])
def test_a_sample_depends_on_seed_and_number_only(source: SyntheticSource) -> None:
    later = replace(source, first=100, size=10)
    again = pickle.loads(pickle.dumps(source))
    for index in (0, 9):
        assert np.array_equal(later.sample(index).inputs, source.sample(100 + index).inputs)
        assert np.array_equal(later.sample(index).targets, source.sample(100 + index).targets)
        assert np.array_equal(again.sample(index).inputs, source.sample(index).inputs)
    assert not np.array_equal(replace(source, seed=4).sample(0).inputs, source.sample(0).inputs)
    inputs, _ = arrays(source)
    assert len(np.unique(inputs, axis=0)) == len(source)


def test_regression_has_the_shapes_and_a_rule_that_is_not_linear() -> None:
    inputs, targets = arrays(REGRESSION)
    assert (inputs.shape, targets.shape) == ((400, 32), (400, 1))
    assert (inputs.dtype, targets.dtype) == (np.float32, np.float32)
    assert 0.3 < targets.var() < 3
    fitted, *_ = np.linalg.lstsq(np.c_[inputs, np.ones(400)], targets, rcond=None)
    unexplained = (targets - np.c_[inputs, np.ones(400)] @ fitted).var() / targets.var()
    assert 0.02 < unexplained < 0.9


def test_noise_is_added_to_the_target_and_the_rule_is_that_of_every_seed() -> None:
    noisy = arrays(replace(REGRESSION, noise=0.5))
    clean = arrays(REGRESSION)
    assert np.array_equal(noisy[0], clean[0])
    assert (noisy[1] - clean[1]).std() == pytest.approx(0.5, rel=0.15)


def test_classes_are_even_and_told_apart_by_no_linear_rule() -> None:
    inputs, labels = arrays(CLASSES)
    assert labels.dtype == np.int64
    assert np.bincount(labels, minlength=4).min() > 60
    means = np.stack([inputs[labels == label].mean(axis=0) for label in range(4)])
    squares = np.stack([(inputs[labels == label] ** 2).mean(axis=0) for label in range(4)])
    assert np.abs(means).max() < 0.6
    assert np.ptp(squares, axis=0).max() > 2


def test_samples_outside_are_refused_and_the_largest_is_any() -> None:
    with pytest.raises(IndexError, match="0 … 399"):
        REGRESSION.sample(400)
    assert REGRESSION.largest().inputs.shape == (32,)
    assert REGRESSION.vocabulary is None
    assert REGRESSION.counts() == {"samples": 400}


def test_streams_are_their_own() -> None:
    draws = {stream(key, counter).random() for key in range(10) for counter in range(10)}
    assert len(draws) == 100
    assert stream(2**64 - 1, 5).random() == stream(2**64 - 1, 5).random()
