"""What is computed again in backward is what was computed at first, and takes the memory it saves."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fourfold.parallel.recompute import OPERATIONS, _operations
from fourfold.spec.errors import CheckFailed, SpecError
from fourfold.spec.training import KEEPABLE, PrecisionSpec
from fourfold.verify.measure import GRADIENT_TOLERANCE
from tests.parallel import one_device, recompute_jobs
from tests.parallel.one_device import DECODER, MLP, make_kit, part
from tests.parallel.plain_kit import PlainKit

MODES = [
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective", "recompute_keep": ("bmm", "collective")},
]
LAYOUTS = {
    "ddp": {"dp_replicate": 2},
    "zero 3": {"dp_replicate": 1, "dp_shard": 2, "zero": 3},
    "tp, sp": {"dp_replicate": 1, "tp": 2, "sp": True},
}
MORE = {
    "zero 1": {"dp_replicate": 1, "dp_shard": 2, "zero": 1},
    "zero 2, units of two": {"dp_replicate": 1, "dp_shard": 2, "zero": 2, "wrap": 2},
    "zero 3, one unit": {"dp_replicate": 1, "dp_shard": 2, "zero": 3, "wrap": "model"},
    "zero 3, ahead": {"dp_replicate": 1, "dp_shard": 2, "zero": 3, "prefetch": 1},
    "zero 3, disk": {"dp_replicate": 1, "dp_shard": 2, "zero": 3, "offload": "disk"},
    "tp": {"dp_replicate": 1, "tp": 2},
    "ddp, unused": {"dp_replicate": 2, "unused_parameters": True},
}
PRECISIONS = [
    {"compute": "fp32"},
    {"compute": "bf16"},
    {"compute": "fp16"},
    {"compute": "bf16", "parameters": "compute"},
]


def test_every_name_is_an_operation_of_torch():
    assert sorted(OPERATIONS) == sorted(KEEPABLE)
    for name in KEEPABLE:
        assert len(_operations([name])) >= len(OPERATIONS[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_recompute_are_equal_to_one_device(ranks, layout):
    for mode in MODES:
        seen = ranks(2).run(one_device.compare, DECODER, LAYOUTS[layout] | mode)
        assert max(one.worst for one in seen) <= GRADIENT_TOLERANCE, mode


@pytest.mark.long
@pytest.mark.parametrize("layout", MORE)
def test_other_ranks_that_recompute_are_too(ranks, layout):
    for mode in MODES:
        seen = ranks(2).run(one_device.compare, DECODER, MORE[layout] | mode)
        assert max(one.worst for one in seen) <= GRADIENT_TOLERANCE, mode


@pytest.mark.long
@pytest.mark.parametrize("layout", [*LAYOUTS, "tp"])
def test_ranks_of_a_perceptron_too(ranks, layout):
    for mode in MODES:
        asked = (LAYOUTS | MORE)[layout] | mode | {"sp": False}
        seen = ranks(2).run(one_device.compare, MLP, asked)
        assert max(one.worst for one in seen) <= GRADIENT_TOLERANCE, mode


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_one_device_has_the_same_bits_in_every_precision(mode, precision):
    kit = make_kit(DECODER)
    plain, again = (
        recompute_jobs.gradients(kit, how, part(kit, 0, 0, 7, True), **precision) for how in ("none", mode)
    )
    assert plain.keys() == again.keys()
    for name, expected in plain.items():
        assert torch.equal(expected, again[name]), name


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_torchs_own_random_stream_is_where_it_was(mode):
    batch = recompute_jobs.Batched([torch.arange(12.0).view(3, 4)])
    plain, again = (
        recompute_jobs.gradients(recompute_jobs.odds("none"), how, batch) for how in ("none", mode)
    )
    for name, expected in plain.items():
        assert torch.equal(expected, again[name]), name


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_was_gathered_for_another_module_is_gathered_again_in_a_block(ranks, mode):
    plain, again = (ranks(2).run(recompute_jobs.forked, how) for how in ("none", mode))
    for one, other in zip(plain, again, strict=True):
        assert one.keys() == other.keys()
        for name, expected in one.items():
            assert other[name] == pytest.approx(expected, rel=1e-12, abs=1e-14), name


def test_activations_shrink():
    (none, most), (some, most_of_some), (least, most_of_least) = (
        recompute_jobs.kept(mode) for mode in ("none", "selective", "full")
    )
    assert 0 < least < some / 2 < none / 2
    assert most_of_least < most_of_some < most


def test_names_and_modules_are_those_of_the_model():
    kit = make_kit(DECODER)
    network = recompute_jobs.spread(kit, "selective", PrecisionSpec()).network
    plain = kit.build(0, torch.float32)
    assert [*network.state_dict()] == [*plain.state_dict()]
    assert [name for name, _ in network.named_modules()] == [name for name, _ in plain.named_modules()]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_block_that_is_computed_otherwise_is_named(mode):
    error = recompute_jobs.refusal(partial(recompute_jobs.odds, "counter"), mode)
    assert isinstance(error, CheckFailed)
    (problem,) = error.problems
    assert problem.asked.startswith('block "parts.1" computed again')
    assert "computed otherwise: " in problem.found
    assert "layout.recompute=" in problem.instead


@pytest.mark.parametrize(
    ("fault", "buffer"),
    [("statistics", "norm.num_batches_tracked"), ("buffer", "seen"), ("replaced", "seen")],
)
def test_a_block_that_changes_a_buffer_is_refused(fault, buffer):
    error = recompute_jobs.refusal(partial(recompute_jobs.odds, fault), "full")
    assert isinstance(error, SpecError)
    (problem,) = error.problems
    assert '"parts.1"' in problem.asked
    assert f'"{buffer}"' in problem.found
    assert recompute_jobs.refusal(partial(recompute_jobs.odds, fault), "none") is None


def test_a_model_without_blocks_is_refused():
    error = recompute_jobs.refusal(lambda: PlainKit(lambda: recompute_jobs.Odds("none")), "full")
    assert isinstance(error, SpecError)
    assert "blocks() names none" in str(error)
