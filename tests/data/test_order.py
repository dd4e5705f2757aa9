"""The sample order: a bijection for every number of samples, fair, new in every epoch, and cheap anywhere."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data.order import LARGEST, SampleOrder, _round_keys, _walk

seeds = st.integers(0, 2**63)


def whole(samples: int, seed: int, epoch: int) -> list[int]:
    return SampleOrder(samples, seed).ids(epoch, np.arange(samples)).tolist()


def chi_square(counts: np.ndarray) -> float:
    """Deviation from even counts, in standard deviations of the chi-square of that many cells."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2).sum() / expected - degrees) / np.sqrt(2 * degrees))


@given(st.one_of(st.integers(1, 60), st.integers(1000, 5000)), seeds, st.integers(0, 2**40))
@settings(max_examples=120, deadline=None)
def test_every_epoch_is_a_bijection(samples: int, seed: int, epoch: int) -> None:
    assert sorted(whole(samples, seed, epoch)) == list(range(samples))


def test_more_positions_than_are_computed_at_a_time_are_a_bijection_too() -> None:
    assert sorted(whole(40_000, 0, 0)) == list(range(40_000))


@given(st.integers(1, 400), seeds)
@settings(max_examples=60, deadline=None)
def test_the_grid_walk_is_a_bijection_on_its_own(samples: int, seed: int) -> None:
    words = _walk(np.arange(samples, dtype=np.uint64), samples, _round_keys(seed, 0))
    assert sorted(words.tolist()) == list(range(samples))


@given(st.integers(10**9, LARGEST), seeds, st.data())
@settings(max_examples=40, deadline=None)
def test_distant_positions_give_distinct_samples_inside(samples: int, seed: int, data: st.DataObject) -> None:
    positions = np.unique(data.draw(st.lists(st.integers(0, samples - 1), min_size=50, max_size=50)))
    ids = SampleOrder(samples, seed).ids(1, positions)
    assert len(np.unique(ids)) == len(positions)
    assert ids.min() >= 0
    assert ids.max() < samples


@given(st.integers(2, 3000), seeds, st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_position_alone_gives_what_it_gives_in_company(samples: int, seed: int, some: list[int]) -> None:
    order = SampleOrder(samples, seed)
    everything = order.ids(3, np.arange(samples))
    positions = np.array(some) % samples
    assert (order.ids(3, positions) == everything[positions]).all()


@pytest.mark.parametrize("samples", [3, 4])
def test_every_permutation_of_few_samples_occurs_about_equally(samples: int) -> None:
    counts = Counter(tuple(whole(samples, seed, 0)) for seed in range(4800))
    assert set(counts) == set(permutations(range(samples)))
    assert chi_square(np.array(list(counts.values()))) < 5


def test_every_sample_comes_equally_often_at_every_position_for_small_sets() -> None:
    for samples in range(2, 51):
        counts = np.zeros((samples, samples))
        for seed in range(400):
            counts[np.arange(samples), whole(samples, seed, seed % 3)] += 1
        assert chi_square(counts) < 5, samples


def test_both_parities_occur_for_small_sets() -> None:
    """A network of rounds on a grid with odd sides gives even permutations only."""
    for samples in (9, 16, 25):
        odd = 0
        for seed in range(200):
            order = np.array(whole(samples, seed, 0))
            inversions = (order[:, None] > order[None, :])[np.triu_indices(samples, 1)].sum()
            odd += int(inversions) % 2
        assert 70 < odd < 130, samples


@pytest.mark.parametrize("samples", [1025, 1089, 4096])
def test_large_sets_are_even_in_place_and_in_the_distances_of_near_positions(samples: int) -> None:
    """With too few rounds, what lies in one row or column of the grid keeps its distance."""
    width = -(-samples // (isqrt(samples - 1) + 1))
    places, distances = np.zeros(samples), np.zeros((3, 16))
    for seed in range(400):
        here, beside, below, across = SampleOrder(samples, seed).ids(0, np.array([0, 1, width, width + 1]))
        places[here] += 1
        for kind, distance in enumerate((here - beside, here - below, here - beside - below + across)):
            distances[kind, distance % samples * 16 // samples] += 1
    assert chi_square(places) < 5
    assert [chi_square(each) < 5 for each in distances] == [True] * 3


@pytest.mark.parametrize("samples", [50, 5000])
def test_epochs_and_seeds_have_orders_of_their_own(samples: int) -> None:
    orders = [whole(samples, seed, epoch) for seed in range(5) for epoch in range(5)]
    agreeing = [np.mean(np.equal(a, b)) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(agreeing) < 0.2
    assert np.mean(agreeing) == pytest.approx(1 / samples, rel=0.5)


def test_the_order_is_a_fixed_function() -> None:
    """Recorded values: a change here changes the data of every run that is resumed."""
    assert SampleOrder(5, 0).ids(0, np.arange(5)).tolist() == [4, 3, 1, 0, 2]
    assert SampleOrder(10**12, 7).ids(3, np.array([0, 1, 10**12 - 1])).tolist() == [
        437462860161,
        839724343916,
        575996649960,
    ]


def test_no_shuffle_keeps_the_order_and_gives_its_own_array() -> None:
    positions = np.arange(3)
    ids = SampleOrder(3, 0, shuffle=False).ids(9, positions)
    assert ids.tolist() == [0, 1, 2]
    ids[0] = 5
    assert positions[0] == 0


def test_one_sample_and_no_positions() -> None:
    assert whole(1, 4, 4) == [0]
    assert SampleOrder(2000, 0).ids(0, np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("samples", [0, -1, LARGEST + 1])
def test_impossible_numbers_of_samples_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        SampleOrder(samples, 0)


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_the_epoch_are_refused(position: int) -> None:
    with pytest.raises(IndexError, match="0 … 9"):
        SampleOrder(10, 0).ids(0, np.array([position]))
