"""Draws: a function of the address, never of who computes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.models.draws import _GAMMA, Draws, _mix_, draw_key, normal
from fourfold.spec.boxes import Box
from tests.models import draws_jobs

SHAPE = (16, 33)


def keep(
    seed: int = 1, step: int = 2, name: str = "a", rows: tuple[int, ...] = (0,), p: float = 0.5
) -> torch.Tensor:
    return Draws(seed, step, torch.tensor(rows)).keep(name, p, (len(rows), *SHAPE))


def agreement(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one == other).double().mean().item()


@given(rows=st.lists(st.integers(0, 10**12), min_size=1, max_size=5), p=st.floats(0.01, 0.99))
@settings(max_examples=30, deadline=None)
def test_a_row_has_the_same_mask_whatever_rows_stand_beside_it(rows: list[int], p: float) -> None:
    together = keep(rows=tuple(rows), p=p)
    for place, row in enumerate(rows):
        assert torch.equal(together[place], keep(rows=(row,), p=p)[0])


def test_masks_differ_between_rows_steps_names_and_seeds() -> None:
    base = keep(rows=(0,))[0]
    others = [
        keep(rows=(1,)),
        keep(step=3),
        keep(name="b"),
        keep(seed=2),
        keep(seed=2, step=1),
    ]
    spread = 5 / (2 * math.sqrt(base.numel()))
    for other in others:
        assert abs(agreement(base, other[0]) - 0.5) < spread


def test_masks_of_neighbouring_addresses_are_pairwise_independent() -> None:
    """All pairs of 24 rows × 3 names: the worst agreement of 2,556 stays where chance puts it."""
    draws = Draws(0, 0, torch.arange(24))
    masks = torch.cat([draws.keep(f"blocks.{i}.ffn.down", 0.5, (24, 64, 64)) for i in range(3)]).flatten(1)
    signs = masks.double() * 2 - 1
    correlation = (signs @ signs.T / signs.shape[1]).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(signs.shape[1])


def test_no_bit_of_the_address_shows_in_the_mask() -> None:
    """Elements apart by any power of two, and the four lanes of a hash, agree as chance has it."""
    mask = Draws(5, 9, torch.arange(8)).keep("x", 0.5, (8, 1 << 14)).double() * 2 - 1
    for distance in [1, 2, 3, *(1 << k for k in range(2, 13))]:
        product = mask[:, distance:] * mask[:, :-distance]
        assert product.mean().abs() < 5 / math.sqrt(product.numel()), distance
    lanes = mask.view(8, -1, 4).mean((0, 1))
    assert lanes.abs().max() < 5 / math.sqrt(mask.numel() / 4)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_dropped_is_p(p: float) -> None:
    count = 1 << 20
    kept = Draws(3, 4, torch.arange(4)).keep("x", p, (4, count // 4))
    spread = math.sqrt(p * (1 - p) / count)
    assert abs((1 - kept.double().mean().item()) - p) < 5 * spread + 2**-17


def test_p_zero_keeps_all_and_the_smallest_p_is_not_lost() -> None:
    assert keep(p=0.0).all()
    many = Draws(0, 0, torch.arange(4)).keep("x", 1e-9, (4, 1 << 20))
    assert 0 < (~many).sum() < 200  # 64 expected: one step of 2**-16


def test_a_longer_row_begins_with_the_mask_of_a_shorter_one() -> None:
    """The index is the flat one within the row, so any number of elements that is no multiple of four is right too."""
    draws = Draws(0, 0, torch.arange(2))
    whole = draws.keep("x", 0.3, (2, 40))
    for elements in range(1, 40):
        assert torch.equal(draws.keep("x", 0.3, (2, elements)), whole[:, :elements])
    assert torch.equal(draws.keep("x", 0.3, (2, 5, 8)).flatten(1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_zeroes_by_the_mask_and_keeps_the_expectation(dtype: torch.dtype) -> None:
    draws = Draws(1, 2, torch.arange(3))
    x = torch.ones(3, 50, dtype=dtype)
    out = draws.dropout(x, 0.25, "a")
    mask = draws.keep("a", 0.25, (3, 50))
    assert out.dtype == dtype
    assert torch.equal(out != 0, mask)
    assert torch.equal(out[mask], torch.full_like(out[mask], 1 / 0.75))


def test_dropout_passes_the_gradient_of_kept_elements_only() -> None:
    draws = Draws(1, 2, torch.arange(2))
    x = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    draws.dropout(x, 0.5, "a").sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, draws.keep("a", 0.5, (2, 9)).double() * 2)


def test_dropout_of_nothing_returns_its_input() -> None:
    x = torch.randn(2, 9)
    assert Draws(1, 2, torch.arange(2)).dropout(x, 0.0, "a") is x


def test_rows_must_match() -> None:
    with pytest.raises(AssertionError, match="one row of draws"):
        Draws(1, 2, torch.arange(2)).keep("a", 0.5, (3, 4))


@given(shape=st.lists(st.integers(1, 7), min_size=2, max_size=4), data=st.data())
def test_a_box_has_the_draws_of_the_whole(shape: list[int], data: st.DataObject) -> None:
    """Any dims cut, any offset, empty ones too: only what is inside is drawn, and it is the same."""
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    size = tuple(data.draw(st.integers(0, full - at)) for full, at in zip(shape, offset, strict=True))
    draws = Draws(3, 5, torch.arange(shape[0]))
    whole = draws._kept("x", 1 << 15, shape)
    box = Box(offset, size)
    assert torch.equal(draws._kept("x", 1 << 15, shape, box), whole[box.slices])


def test_a_box_of_the_first_dim_that_is_cut_makes_no_draws_but_its_own() -> None:
    """At every offset within a hash's four lanes."""
    draws = Draws(0, 0, torch.arange(2))
    whole = draws._kept("x", 1 << 15, (2, 40, 3))
    for start in range(40):
        box = Box((0, start, 0), (2, min(5, 40 - start), 3))
        assert torch.equal(draws._kept("x", 1 << 15, (2, 40, 3), box), whole[box.slices])
    assert max(stop - first for first, stop in draws._counters if (first, stop) != (0, 30)) <= 5


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shape", [(3, 5, 6), (4, 8, 4), (1, 3, 2), (5, 7)])
def test_dropout_of_a_cut_tensor_is_the_part_of_the_whole(ranks, world, shape) -> None:  # type: ignore[no-untyped-def]
    dims: list[int | None] = [None, *range(len(shape))]
    for held in ranks(world).run(draws_jobs.dropout_of_boxes, dims, shape, 0.3):
        assert held == [True] * len(dims)


def test_dropout_that_is_computed_again_in_backward_is_the_same(ranks) -> None:  # type: ignore[no-untyped-def]
    for dim in (None, 0, 1, 2):
        assert all(ranks(2).run(draws_jobs.recomputed, dim))


def test_the_mixer_is_splitmix64() -> None:
    """The first outputs of the published generator from seed 0 (its test vector)."""
    counters = torch.arange(1, 4) * _GAMMA
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % 2**64 for value in _mix_(counters).tolist()] == expected


def test_the_first_draws_never_change() -> None:
    """Written down once: other values would silently break every comparison with an earlier run."""
    kept = Draws(0, 0, torch.tensor([0, 5])).keep("embedding", 0.5, (2, 16)).int().tolist()
    assert kept == [
        [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1],
        [0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1],
    ]
    assert normal(0, "embedding.weight", (4,), 1.0, torch.float64).tolist() == [
        -1.6447906496055413,
        0.7351074219605778,
        0.4242706299322041,
        -0.17428588869216455,
    ]


def test_normal_has_the_moments_of_a_normal() -> None:
    count = 1 << 20
    x = normal(1, "w", (1024, 1024), 0.02, torch.float64).flatten() / 0.02
    assert abs(x.mean()) < 5 / math.sqrt(count)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / count)
    assert abs((x**4).mean() - 2.9) < 5 * math.sqrt(96 / count)  # Irwin-Hall of twelve: 3 - 6 / (5 · 12)
    assert abs((x.abs() < 1).double().mean() - 0.6827) < 0.006  # Irwin-Hall is a little flatter
    assert x.abs().max() < 6


def test_normal_values_of_different_names_seeds_and_neighbours_are_independent() -> None:
    one = normal(1, "w", (1 << 16,), 1.0, torch.float64)
    bound = 5 / math.sqrt(1 << 16)
    for other in (
        normal(1, "v", (1 << 16,), 1.0, torch.float64),
        normal(2, "w", (1 << 16,), 1.0, torch.float64),
        one.roll(1),
        one.roll(256),
    ):
        assert (one * other).mean().abs() < bound


@given(
    full=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_box_of_a_parameter_holds_the_values_of_the_whole(full: list[int], data: st.DataObject) -> None:
    whole = normal(3, "w", full, 1.0, torch.float32)
    offset = [data.draw(st.integers(0, size - 1)) for size in full]
    shape = [data.draw(st.integers(0, size - start)) for size, start in zip(full, offset, strict=True)]
    box = normal(3, "w", shape, 1.0, torch.float32, offset=offset, full_shape=full)
    assert torch.equal(box, whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))])


def test_a_box_over_the_chunks_of_a_large_parameter() -> None:
    whole = normal(3, "w", (700, 300), 1.0, torch.float32)
    box = normal(3, "w", (400, 299), 1.0, torch.float32, offset=(299, 1), full_shape=(700, 300))
    assert torch.equal(box, whole[299:699, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_value_is_the_wide_one_rounded(dtype: torch.dtype) -> None:
    wide = normal(3, "w", (100, 100), 0.02, torch.float64)
    assert torch.equal(normal(3, "w", (100, 100), 0.02, dtype), wide.to(dtype))


def test_half_a_box_is_refused() -> None:
    with pytest.raises(AssertionError, match="a box needs"):
        normal(3, "w", (2,), 1.0, torch.float32, offset=(1,))
    with pytest.raises(AssertionError, match="a box needs"):
        normal(3, "w", (2,), 1.0, torch.float32, full_shape=(4,))


def test_a_key_stands_for_its_name() -> None:
    draws = Draws(3, 4, torch.arange(4))
    by_name = draws.keep("blocks.0.ffn.down", 0.3, (4, 40))
    assert torch.equal(draws.keep(draw_key("blocks.0.ffn.down"), 0.3, (4, 40)), by_name)
    assert not torch.equal(draws.keep(draw_key("blocks.1.ffn.down"), 0.3, (4, 40)), by_name)
