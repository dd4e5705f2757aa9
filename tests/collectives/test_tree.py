"""Sums in one order: the same bits however many ranks hold the leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.collectives.sums import sum_exactly
from fourfold.collectives.tree import completed, is_power_of_two, most_held, sum_in_order
from tests.collectives import rank_jobs


def added(leaves):
    """The sum of a list by the tree, as a rank forms it: one leaf after the other."""
    held, most = [], 0
    for leaf, count in zip(leaves, completed(len(leaves)), strict=True):
        held.append(leaf)
        most = max(most, len(held))
        for _ in range(count):
            right = held.pop()
            held.append(held.pop() + right)
    assert len(held) == 1
    assert most == most_held(len(leaves))
    return held[0]


def test_a_tree_of_halves():
    assert completed(1) == [0]
    assert completed(4) == [0, 1, 0, 2]
    assert completed(3) == [0, 1, 1]  # the first half has the odd leaf
    assert added(list("abcdef")) == "abcdef"  # in order
    assert [most_held(n) for n in (1, 2, 3, 4, 8, 24)] == [1, 2, 2, 3, 4, 5]


@given(st.integers(1, 20), st.integers(0, 4), st.integers(0, 2**32))
def test_the_same_bits_on_every_power_of_two(each, power, seed):
    draws = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-6, 6, (each << power,), generator=draws)
    leaves = torch.randn(each << power, generator=draws) * scale
    whole = added(list(leaves))
    for ranks in (1 << p for p in range(power + 1)):
        own = torch.stack([added(list(part)) for part in leaves.chunk(ranks)])
        total = sum_in_order(own[:, None].clone(), torch.empty(1))
        assert total.view(torch.int32) == whole.view(torch.int32)


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_any_number_of_parts_is_summed_as_the_tree_has_it(number, seed):
    draws = torch.Generator().manual_seed(seed)
    parts = torch.randn(number, 3, generator=draws) * 10.0 ** torch.randint(
        -6, 6, (number, 1), generator=draws
    )
    expected = added([*parts.clone()])
    assert torch.equal(sum_in_order(parts, torch.empty(3)), expected)


def test_another_order_has_other_bits():
    leaves = torch.randn(64, generator=torch.Generator().manual_seed(0))
    one_by_one = leaves[0]
    for leaf in leaves[1:]:
        one_by_one = one_by_one + leaf
    assert added(list(leaves)) != one_by_one


def test_powers_of_two():
    assert [n for n in range(-1, 20) if is_power_of_two(n)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_over_ranks_are_those_of_one(ranks, world):
    tensors = rank_jobs.tensors_of_ranks(world)
    expected = sum_in_order(torch.stack(tensors), torch.empty_like(tensors[0]))
    for rank, (reduced, chunk) in enumerate(ranks(world).run(rank_jobs.summed_in_order)):
        assert torch.equal(reduced.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(chunk.view(torch.int32), expected[:12].chunk(world)[rank].view(torch.int32))


def test_exact_sums_are_rounded_once():
    assert sum_exactly([[1e16, 1.0, -1e16], [], [0.1] * 10]) == [1.0, 0.0, 1.0]
    assert sum_exactly([[float("inf"), 1.0]]) == [float("inf")]
    assert sum_exactly([[float("nan")]])[0] != sum_exactly([[float("nan")]])[0]


def test_exact_sums_of_ranks_do_not_depend_on_their_number(ranks):
    for found in ranks(2).run(rank_jobs.summed_exactly):
        assert found == [1.0, 3.0]
