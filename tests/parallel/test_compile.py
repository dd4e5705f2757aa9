"""Compiled blocks compute what blocks compute: on every layout, each with its own numbers, by one code for all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fourfold.models.draws import Draws, draw_key
from fourfold.models.exchange import Meeting
from fourfold.models.protocol import LossModule
from fourfold.parallel import compile as compiling
from fourfold.parallel.apply import parallelize
from fourfold.parallel.compile import require_compiler, surfaces
from fourfold.spec.errors import CheckFailed, SpecError
from fourfold.spec.training import LayoutSpec
from fourfold.verify.measure import GRADIENT_TOLERANCE
from tests.parallel import compile_jobs
from tests.parallel.compile_jobs import (
    AOT,
    MIXTURE,
    Capped,
    Counting,
    Dropping,
    InTurn,
    begin_counting,
    graphs,
)
from tests.parallel.one_device import CPU, DECODER, SEED, make_kit, part
from tests.parallel.plain_kit import PlainKit

# Of torch's compiler itself, while it looks at tensors and is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated:DeprecationWarning"),
]
INDUCTOR = {"compile": "blocks"}
ONE_CODE = {
    "ddp": {"dp_replicate": 2},
    "zero 3, again": {"dp_replicate": 1, "dp_shard": 2, "zero": 3, "recompute": "full"},
}
MORE = {
    "zero 1": (DECODER, {"dp_replicate": 1, "dp_shard": 2, "zero": 1}),
    "zero 2, units of two": (DECODER, {"dp_replicate": 1, "dp_shard": 2, "zero": 2, "wrap": 2}),
    "zero 3, disk": (DECODER, {"dp_replicate": 1, "dp_shard": 2, "zero": 3, "offload": "disk"}),
    "tp": (DECODER, {"dp_replicate": 1, "tp": 2}),
    "tp, sp": (DECODER, {"dp_replicate": 1, "tp": 2, "sp": True}),
    "tp, sp, again": (DECODER, {"dp_replicate": 1, "tp": 2, "sp": True, "recompute": "full"}),
    "cp": (DECODER, {"dp_replicate": 1, "cp": 2}),
    "ring, again": (DECODER, {"dp_replicate": 1, "cp": 2, "cp_method": "ring", "recompute": "full"}),
    "ulysses": (DECODER, {"dp_replicate": 1, "cp": 2, "cp_method": "ulysses"}),
    "experts": (MIXTURE, {"dp_replicate": 2}),
    "ep": (MIXTURE, {"dp_replicate": 1, "dp_shard": 2, "ep": 2, "zero": 3}),
    "ep, again": (MIXTURE, {"dp_replicate": 1, "dp_shard": 2, "ep": 2, "zero": 2, "recompute": "full"}),
}


@pytest.mark.parametrize("layout", ONE_CODE)
def test_ranks_are_equal_to_one_device_with_one_code(ranks, layout):
    """Two blocks, with dropout, in two steps of two microbatches."""
    seen = ranks(2).run(compile_jobs.compare_counting, DECODER, ONE_CODE[layout] | AOT, {})
    assert max(one.worst for one, _, _ in seen) <= GRADIENT_TOLERANCE
    assert [(made, breaks) for _, made, breaks in seen] == [(1, []), (1, [])]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", MORE)
def test_other_layouts_are_too(ranks, case):
    model, layout = MORE[case]
    seen = ranks(2).run(compile_jobs.compare_counting, model, layout | AOT, {"tokens": 8})
    assert max(one.worst for one, _, _ in seen) <= GRADIENT_TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ONE_CODE)
def test_fused_kernels_of_ranks_are_too(ranks, layout):
    seen = ranks(2).run(compile_jobs.compare_counting, DECODER, ONE_CODE[layout] | INDUCTOR, {})
    assert max(one.worst for one, _, _ in seen) <= GRADIENT_TOLERANCE


def spread(kit, **layout):
    """On one device: what is called like the bare model, and the bare model itself."""
    asked = LayoutSpec(**({"dp_replicate": 1, "unused_parameters": True} | layout))
    return parallelize(LossModule(kit, kit.build(SEED, torch.float64)), asked, CPU)


def both(network, inputs, **layout):
    """Loss and gradients of a network, and the same with its blocks compiled."""
    found = []
    for asked in ({}, layout):
        own = copy.deepcopy(network)
        names = tuple(f"blocks.{index}" for index in range(len(network.blocks)))
        parallel = spread(PlainKit(lambda own=own: own, names), **asked)
        for _ in range(2):
            total, _ = parallel.module(inputs)
            total.backward()
        found.append([total.detach(), *(p.grad for p in own.parameters())])
    return found


def worst(plain, other):
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, other, strict=True))


def test_fused_kernels_with_numbers_of_their_own():
    network = InTurn(Capped(0.5), Capped(0.05)).double()
    plain, fused = both(network, (torch.randn(8, 4, dtype=torch.float64),), **INDUCTOR)
    assert 0.0 <= worst(plain, fused) <= GRADIENT_TOLERANCE


def test_a_number_that_is_frozen_shows(monkeypatch):
    """Kind 45: the second block has the first one's number, as where nothing looks whether code still fits."""
    network = InTurn(Capped(0.5), Capped(0.05)).double()
    inputs = (torch.randn(8, 4, dtype=torch.float64),)
    begin_counting()
    plain, right = both(network, inputs, **AOT)
    assert worst(plain, right) <= GRADIENT_TOLERANCE
    begin_counting()
    monkeypatch.setattr(torch, "compile", compile_jobs.for_good(torch.compile))
    plain, frozen = both(network, inputs, **AOT)
    assert worst(plain, frozen) > 1e-3


def test_draws_by_name_are_those_of_each_block():
    network = InTurn(*(Dropping(f"blocks.{index}") for index in range(3))).double()
    draws = Draws(1, 2, torch.arange(8))
    inputs = (torch.randn(8, 4, dtype=torch.float64), draws)
    plain, other = both(network, inputs, **AOT)
    assert worst(plain, other) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    "elements", [112, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 96, 100, 101, 130, 256, 508))]
)
def test_draws_of_fused_kernels_are_the_same(elements):
    """torch's compiler gets the products of a counter wrong where they look like places: for 112, and not for 128."""
    torch._dynamo.reset()
    draws, key = Draws(1, 2, torch.arange(2)), draw_key("blocks.0")
    kept = torch.compile(lambda: draws.keep(key, 0.5, (2, elements)))()
    assert torch.equal(kept, draws.keep(key, 0.5, (2, elements)))


def test_one_code_serves_all_blocks_and_lengths():
    """A code for training, one without gradients; and for another length one that takes any length."""
    kit = make_kit(DECODER | {"layers": 4})
    parallel = spread(kit, **AOT)
    begin_counting()
    parallel.module(part(kit, 0, 0, 7, True))[0].backward()
    assert graphs() == 1
    with torch.no_grad():
        parallel.module(part(kit, 0, 0, 7, True))
    assert graphs() == 2
    for tokens in (8, 9, 10, 11):
        parallel.module(part(kit, 0, 0, tokens, True))[0].backward()
    assert graphs() == 3


def test_what_is_another_number_in_every_call_is_refused():
    parallel = spread(PlainKit(lambda: InTurn(Counting()).double(), ("blocks.0",)), **AOT)
    begin_counting()
    x = torch.randn(8, 4, dtype=torch.float64)

    def many():
        for _ in range(5):
            parallel.module((x,))

    with torch._dynamo.config.patch(recompile_limit=3), pytest.raises(CheckFailed) as refused:
        many()
    (problem,) = refused.value.problems
    assert problem.asked.startswith('code for block "blocks.0"')
    assert "again and again" in problem.found


def test_without_a_compiler_it_is_refused(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(SpecError, match="no C\\+\\+ compiler"):
        require_compiler(LayoutSpec(compile="blocks"), CPU)
    require_compiler(LayoutSpec(), CPU)
    require_compiler(LayoutSpec(**AOT), CPU)


def test_code_that_cannot_be_made_is_refused():
    def fails(*_args, **_more):
        raise RuntimeError("no kernel for this")

    block = compiling._Compiled("blocks.0", nn.Linear(4, 4).forward, fails, lambda: None)
    with pytest.raises(SpecError, match="no kernel for this"):
        block(torch.randn(2, 4))


def test_without_blocks_it_is_refused():
    with pytest.raises(SpecError, match="names none"):
        spread(PlainKit(lambda: InTurn(Capped(1.0)).double()), **AOT)


def test_hooks_belong_on_a_block_where_it_is_compiled():
    network = InTurn(Capped(1.0), nn.Sequential(Meeting(), nn.Linear(4, 4)))
    assert all(module is surface for module, surface in surfaces(network).items())
    network.blocks[1].is_compiled = True
    found = surfaces(network)
    assert found[network.blocks[0].inner] is network.blocks[0].inner
    assert found[network.blocks[1][1]] is found[network.blocks[1]] is network.blocks[1]
    assert found[network.blocks[1][0]] is network.blocks[1][0]  # it is no part of the code
