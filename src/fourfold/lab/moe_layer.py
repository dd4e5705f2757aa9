"""The product's own mixture in the experts' exercise: on the same numbers, and in a short training of a router.

Its router, its way of tokens (`models.mixture.Routed`, `parallel.expert_parallel`) and its balance; experts are a
matrix each, as in the exercise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.collectives.context import Context
from fourfold.lab.moe_ranks import Sizes, added, inputs, moe_of, of_the_row, stand
from fourfold.lab.moe_steps import TOP_K
from fourfold.models.carried import LossWeight, noted
from fourfold.models.exchange import Here, Stacks
from fourfold.models.mixture import Routed
from fourfold.models.routing import Rows, chosen_experts, counted
from fourfold.parallel.balance import Balance
from fourfold.parallel.clip import local
from fourfold.parallel.expert_parallel import expert_parallel
from fourfold.spec.model import DecoderSpec, MoeSpec

Balanced = Literal["none", "loss", "bias"]
Sum = Callable[[Tensor], Tensor]
BALANCES: tuple[Balanced, ...] = get_args(Balanced)
TRAINED = Sizes(rows=4, tokens=32, width=8, experts=4, whole=False)
RATE, WEIGHT, SPEED = 0.3, 1.0, 0.02  # of the training: learning rate, auxiliary loss, correction


class Matrices(Stacks):
    """Experts that are a matrix each: a stack [E, H, H]."""

    def __init__(self, stack: Tensor) -> None:
        super().__init__(len(stack))
        self.stack = nn.Parameter(stack.clone())

    def forward(self, x: Tensor, counts: Sequence[int], here: Here) -> Tensor:
        """[n, H], sorted by expert, `counts` of each -> [n, H]."""
        parts = torch.split(x, list(counts))
        return torch.cat([part @ A.T for part, A in zip(parts, here.own(self.stack).unbind(0), strict=True)])


def mixture_of(given: dict[str, Tensor], moe: MoeSpec) -> tuple[Routed, Matrices]:
    """The product's mixture with this router and these experts, which are returned, too."""
    width = given["R"].shape[1]
    routed = Routed(DecoderSpec(layers=1, width=width, heads=1), moe)
    routed.router = nn.Parameter(given["R"].clone())
    experts = Matrices(given["A"])
    routed.experts = experts  # type: ignore[assignment]
    return routed, experts


def by_product(sizes: Sizes, capacity: float | None = None) -> dict[str, Tensor]:
    """y, ∂A and ∂x of this rank, and ∂R with the auxiliary loss, by the product's own layer.

    Collectives: expert parallel's on "ep", an all-gather of choices where a row is on two ranks; all-reduces of ∂A on
    "edp" and of ∂R over all ranks, which the trainer does.
    """
    here, given = stand(sizes), inputs(sizes)
    routed, experts = mixture_of(given, moe_of(sizes, capacity))
    expert_parallel(routed, here.mesh["ep"])
    x = given["x"][here.mine].clone().requires_grad_()
    live, first = torch.ones(1, sizes.tokens, dtype=torch.bool), here.mine.start % sizes.tokens
    context = Context(
        runs=((first, first + len(x)),),
        length=sizes.tokens,
        attend=_no_attention,
        gather=lambda of_tokens: of_the_row(of_tokens[0], here, sizes)[None],
        inputs=live.long(),
        valid=live,
    )
    rows = Rows(live, torch.full((1,), sizes.tokens), context, LossWeight())
    y = routed(x[None], rows)[0]
    noted((y * given["∂y"][here.mine]).sum(), rows.weight).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None, "it takes part"
    of_experts = added(_gradient(experts.stack), here.mesh.get_group("edp"))
    return {"y": y.detach(), "∂x": x.grad, "∂A": of_experts, "∂R": added(_gradient(routed.router))}


class Trained(NamedTuple):
    """A short training. loads: tokens of each expert at each step, int64 [steps, E]; losses: [steps]."""

    loads: Tensor
    losses: Tensor
    router: Tensor


def train(balance: Balanced, steps: int) -> Trained:
    """Steps of SGD of a mixture whose tokens lean to one side, on all ranks or, without any, on one device.

    Collectives: expert parallel's; all-reduces of ∂R, loads, losses and corrections over all ranks, of ∂A on "edp".
    """
    parallel = dist.is_initialized() and dist.get_world_size() > 1
    moe = MoeSpec(
        experts=TRAINED.experts, top_k=TOP_K, balance=balance, balance_weight=WEIGHT, balance_speed=SPEED
    )
    routed, experts = mixture_of(_begin(), moe)
    if balance == "bias":
        routed.begin_anew(torch.float64)
    mine = slice(None)
    sum_all: Sum = _as_it_is
    sum_copies: Sum = _as_it_is
    if parallel:
        here = stand(TRAINED)
        expert_parallel(routed, here.mesh["ep"])
        mine = slice(here.mine.start // TRAINED.tokens, here.mine.stop // TRAINED.tokens)
        sum_all, sum_copies = added, functools.partial(added, group=here.mesh.get_group("edp"))
    corrections = Balance(routed)
    loads, losses = [], []
    for step in range(steps):
        x, target = (whole[mine] for whole in _data(step))
        every = torch.ones(x.shape[:2], dtype=torch.bool)
        rows = Rows(every, every.sum(1), None, LossWeight())
        corrections.begin()
        loss = (routed(x, rows) - target).square().mean(-1).sum()
        chosen = chosen_experts(F.linear(x, routed.router), moe, routed.correction)[1].detach()
        loads.append(counted(chosen, None, moe.experts).sum(0))
        routed.zero_grad()
        tokens = TRAINED.rows * TRAINED.tokens
        (noted(loss, rows.weight) / tokens).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach() / tokens)
        with torch.no_grad():
            routed.router.sub_(RATE * sum_all(_gradient(routed.router)))
            local(experts.stack).sub_(RATE * sum_copies(_gradient(experts.stack)))
        corrections.update()
    return Trained(sum_all(torch.stack(loads)), sum_all(torch.stack(losses)), routed.router.detach().clone())


def _begin() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    experts, width = TRAINED.experts, TRAINED.width
    return {
        name: 0.3 * torch.randn(shape, dtype=torch.float64, generator=draw)
        for name, shape in (("R", (experts, width)), ("A", (experts, width, width)))
    }


def _data(step: int) -> tuple[Tensor, Tensor]:
    """Tokens [rows, T, H] of a step, which lean to one side, and what should be made of them."""
    draw = torch.Generator().manual_seed(1000 + step)
    shape = (TRAINED.rows, TRAINED.tokens, TRAINED.width)
    x = torch.randn(shape, dtype=torch.float64, generator=draw) + 0.75
    return x, torch.tanh(x.roll(1, -1)) - x.abs().flip(-1) / 2


def _gradient(parameter: Tensor) -> Tensor:
    """What this rank has of it."""
    assert parameter.grad is not None, "it takes part"
    return local(parameter.grad)


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _no_attention(*_: object) -> Tensor:
    raise AssertionError("a mixture attends to nothing")
