"""Rotary positions and the mask, by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fourfold.models.attention import Cached, rotate


def test_rotary_scores_depend_on_distance_alone() -> None:
    turns = Cached(16, 10000.0).turns(40, torch.zeros(1, dtype=torch.float64))
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind(0)

    def score(i: int, j: int) -> Tensor:
        return (rotate(query, turns[i : i + 1]) * rotate(key, turns[j : j + 1])).sum()

    for distance in (0, 1, 7):
        expected = score(distance, 0)
        for place in (1, 20, 32):
            torch.testing.assert_close(score(place + distance, place), expected, rtol=1e-12, atol=1e-12)
    assert (score(7, 0) - score(0, 0)).abs() > 1e-3
    assert torch.equal(rotate(query, turns[:1]), query)


def test_rotary_angles_are_those_of_the_paper() -> None:
    turns = Cached(8, 100.0).turns(5, torch.zeros(1, dtype=torch.float64))
    for place in range(5):
        for pair in range(4):
            angle = place * 100.0 ** (-2 * pair / 8)
            assert turns[place, 0, pair].real.item() == pytest.approx(math.cos(angle), abs=1e-15)
            assert turns[place, 0, pair].imag.item() == pytest.approx(math.sin(angle), abs=1e-15)


def test_rotary_is_made_once_per_length_in_fp32_or_wider() -> None:
    cached = Cached(8, 10000.0)
    narrow = torch.zeros(1, dtype=torch.bfloat16)
    assert cached.turns(6, narrow) is cached.turns(6, narrow)
    assert cached.turns(6, narrow).dtype == torch.complex64
    assert cached.turns(6, narrow.double()).dtype == torch.complex128
    assert (
        rotate(torch.zeros(1, 6, 2, 8, dtype=torch.bfloat16), cached.turns(6, narrow)).dtype == torch.bfloat16
    )


def test_a_document_number_however_large_stands_apart() -> None:
    """The mask's arithmetic overflows to -inf at worst."""
    documents = torch.tensor([[0, 1, 2**24 - 1, 2**24]], dtype=torch.int32)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        mask = Cached(8, 1e4).mask(documents, dtype)
        weights = torch.softmax(mask.float(), -1)[0, 0]
        assert mask.dtype == dtype
        assert torch.equal(weights, torch.eye(4))
