"""What each rank of the experts' exercise does: one mixture, forward and backward, written out with its collectives.

Which experts are chosen, what fits and the auxiliary loss are the product's functions (`models.routing`). How tokens
travel is written out, without autograd, so that each value can be looked at; the one device that it is held against
sends nothing, and has its gradients from autograd alone. `by_product` is the product's own layer on the same numbers.
Letters: N tokens here, E experts, e of them here, n choices that came, H features.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.lab.moe_steps import EP, TOP_K
from fourfold.models.carried import LossWeight
from fourfold.models.routing import Rows, auxiliary, capacities, chosen_experts, counted, fitting
from fourfold.spec.model import MoeSpec

Values = dict[str, Tensor]


class Sizes(NamedTuple):
    """Of the layer: rows, tokens of a row, features, experts. whole: numbers that can be followed by hand."""

    rows: int
    tokens: int
    width: int
    experts: int
    whole: bool


# Each expert is a direction, and a token's features differ by 1: its first expert weighs 2/3, its second 1/3.
_TOKENS = ((2, 1), (1, 2), (3, 2), (2, -1), (-1, 2), (2, 3), (-2, -1), (1, -2))
_ROUTER = ((1, 0), (0, 1), (-1, 0), (0, -1))
_EXPERTS = (((3, 0), (0, 3)), ((0, 3), (3, 0)), ((3, 3), (0, 3)), ((3, 0), (-3, 3)))
_GRADIENTS = ((3, 0), (0, 3), (3, 0), (0, 3), (0, -3), (3, -3), (3, 0), (0, 3))


def inputs(sizes: Sizes) -> Values:
    """What is given: x, R, A and ∂y, fp64, the same everywhere."""
    if sizes.whole:
        given = {"x": _TOKENS, "R": _ROUTER, "A": _EXPERTS, "∂y": _GRADIENTS}
        found = {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}
        return found | {"R": found["R"] * math.log(2)}
    draw = torch.Generator().manual_seed(5)
    tokens, width, experts = sizes.rows * sizes.tokens, sizes.width, sizes.experts
    shapes = {
        "x": (tokens, width),
        "R": (experts, width),
        "A": (experts, width, width),
        "∂y": (tokens, width),
    }
    return {name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in shapes.items()}


def moe_of(sizes: Sizes, capacity: float | None) -> MoeSpec:
    """What `[model.moe]` would say of the layer."""
    return MoeSpec(experts=sizes.experts, top_k=TOP_K, balance_weight=1.0, capacity_factor=capacity)


def rows_of(count: int, sizes: Sizes) -> Rows:
    """So many rows without padding."""
    live = torch.ones(count, sizes.tokens, dtype=torch.bool)
    return Rows(live, torch.full((count,), sizes.tokens), None, LossWeight())


def fits(chosen: Tensor, sizes: Sizes, capacity: float | None) -> tuple[int, Tensor]:
    """How many choices an expert takes of each of the given groups of tokens, and which: [groups, tokens, K]."""
    live = torch.ones(chosen.shape[:2], dtype=torch.bool)
    if capacity is None:
        return chosen[0].numel(), live.unsqueeze(-1).expand_as(chosen)
    moe = moe_of(sizes, capacity)
    limits = capacities(live.sum(1), moe)
    return int(limits[0]), fitting(chosen, live, limits, moe.experts)


def one_device(sizes: Sizes, world: int, capacity: float | None = None) -> Values:
    """Every value of the layer on one device; gradients by autograd. world: of whose counts "matrix" tells."""
    given, moe, rows = inputs(sizes), moe_of(sizes, capacity), rows_of(sizes.rows, sizes)
    x, R, A = (given[name].clone().requires_grad_() for name in ("x", "R", "A"))
    z = x @ R.T
    by_row = (sizes.rows, sizes.tokens, -1)
    scores, chosen, w = chosen_experts(z.view(by_row), moe, None)
    _, kept = fits(chosen, sizes, capacity)
    counts = counted(chosen, None, moe.experts)
    aux = auxiliary(scores, rows.live, counts, rows, moe)
    of_aux, x_of_aux = torch.autograd.grad(aux, (R, x), retain_graph=True)
    copies = x.repeat_interleave(TOP_K, 0)
    m = (A[chosen.flatten()] @ copies.unsqueeze(-1)).squeeze(-1)
    shares = w.flatten() * kept.flatten()
    y = (m * shares[:, None]).view(len(x), TOP_K, -1).sum(1)
    between = {"z": z, "w": w, "x of choices": copies, "m": m, "y": y}
    for value in between.values():
        value.retain_grad()
    (y * given["∂y"]).sum().backward()  # type: ignore[no-untyped-call]
    values = {"x": x, "R": R, "A": A} | between
    grads = {f"∂{name}": value.grad for name, value in values.items() if value.grad is not None}
    sent = chosen.masked_fill(~kept, moe.experts)
    matrix = counted(sent.view(world, -1, TOP_K), None, moe.experts)
    found = (
        values
        | grads
        | {
            "scores": scores,
            "chosen": chosen,
            "kept": kept,
            "counts": matrix.sum(0),
            "matrix": matrix,
            "∂x of experts": grads["∂x of choices"].view(len(x), TOP_K, -1).sum(1),
            "counts of rows": counts,
            "f": counts * (moe.experts / (TOP_K * sizes.tokens)),
            "P": scores.sum(1) / sizes.tokens,
            "aux": aux.view(1),
            "∂R of aux": of_aux,
            "∂x of aux": x_of_aux,
        }
    )
    of_tokens = ("scores", "chosen", "kept", "w", "∂w")
    return {
        name: (value.flatten(0, 1) if name in of_tokens else value).detach() for name, value in found.items()
    }


class Here(NamedTuple):
    """Where this rank stands. mine: its tokens."""

    mesh: DeviceMesh
    ep: int
    mine: slice


def stand(sizes: Sizes) -> Here:
    """Of this rank. Ranks of an "ep" group follow each other; "edp" has those with the same experts."""
    mesh, rank = _mesh(), dist.get_rank()
    each = sizes.rows * sizes.tokens // dist.get_world_size()
    return Here(mesh, rank % EP, slice(rank * each, (rank + 1) * each))


@functools.cache
def _mesh() -> DeviceMesh:
    """Groups are made once in a rank."""
    return init_device_mesh("cpu", (dist.get_world_size() // EP, EP), mesh_dim_names=("edp", "ep"))


def layer(sizes: Sizes, capacity: float | None = None, mistake: str = "") -> Values:
    """This rank's value at every step of the layer; mistake: the name of what is done wrong ("": nothing).

    capacity: the factor; None: nothing is dropped. Collectives on "ep": an all-to-all of counts, two of tokens, two of
    their gradients; where a row is on several ranks an all-gather of choices. All-reduces: ∂A on "edp", ∂R and the
    auxiliary loss over all ranks.
    """
    here, moe, given = stand(sizes), moe_of(sizes, capacity), inputs(sizes)
    x, R = given["x"][here.mine], given["R"]
    have = {"x": x, "R": R, "A": given["A"].chunk(EP)[here.ep], "∂y": given["∂y"][here.mine]}
    have["z"] = x @ R.T
    scores, chosen, w = (value[0] for value in chosen_experts(have["z"][None], moe, None))
    have |= {"scores": scores, "chosen": chosen, "w": w}
    every = of_the_row(chosen, here, sizes)
    first = here.mine.start % sizes.tokens
    kept = fits(every[None], sizes, capacity)[1][0, first : first + len(x)]
    _through_experts(have, chosen.masked_fill(~kept, moe.experts).flatten(), here, mistake)
    _router_back(have, mistake)
    _balance(have, every, sizes, mistake)
    return have


def _through_experts(have: Values, flat: Tensor, here: Here, mistake: str) -> None:
    """To the experts and back, forward and backward. flat: the expert of each choice [N × K], E: it goes nowhere."""
    group, experts = here.mesh.get_group("ep"), len(have["R"])
    have["counts"] = counted(flat[None, :, None], None, experts)[0]
    places = flat.sort(stable=True).indices[: int(have["counts"].sum())]
    came = torch.empty_like(have["counts"])
    dist.all_to_all_single(came, have["counts"], group=group)
    have["counts that came"] = came = came.view(EP, -1)
    out, into = have["counts"].view(EP, -1).sum(1).tolist(), came.sum(1).tolist()
    there = functools.partial(exchange, out=out, into=into, group=group)
    back = functools.partial(exchange, out=into, into=out, group=group)
    each = came.sum(0).tolist()
    order = torch.arange(len(each)).repeat(EP).repeat_interleave(came.flatten()).sort(stable=True).indices
    undo = torch.argsort(order)
    if mistake == "order-lost":
        undo = torch.arange(len(order))

    have["sent"] = have["x"].repeat_interleave(TOP_K, 0)[places]
    have["came"] = there(have["sent"])
    have["sorted"] = have["came"][order]
    of_each = list(zip(torch.split(have["sorted"], each), have["A"], strict=True))
    have["m"] = torch.cat([part @ A.T for part, A in of_each])
    have["m by rank"] = have["m"][undo]
    have["returned"] = back(have["m by rank"])
    of_choices = _spread(have["returned"], places, have["w"])
    have["y"] = (of_choices * have["w"].unsqueeze(-1)).sum(1)

    by_choice = have["∂y"].unsqueeze(1)
    have["∂w"] = (by_choice * of_choices).sum(-1)
    have["∂returned"] = (have["w"].unsqueeze(-1) * by_choice).flatten(0, 1)[places]
    have["∂m by rank"] = there(have["∂returned"])
    have["∂m"] = have["∂m by rank"][torch.argsort(undo)]
    gradients = torch.split(have["∂m"], each)
    have["∂A part"] = torch.stack([g.T @ part for g, (part, _) in zip(gradients, of_each, strict=True)])
    have["∂A"] = added(have["∂A part"], here.mesh.get_group("edp"))
    if mistake == "experts-counted-again":
        have["∂A"] = have["∂A"] * EP
    have["∂sorted"] = torch.cat([g @ A for g, A in zip(gradients, have["A"], strict=True)])
    have["∂came"] = have["∂sorted"][torch.argsort(order)]
    have["∂sent"] = back(have["∂came"])
    have["∂x of experts"] = _spread(have["∂sent"], places, have["w"]).sum(1)


def _router_back(have: Values, mistake: str) -> None:
    """From ∂w to the router."""
    w, into = have["w"], have["∂w"]
    if mistake == "router-cut":
        into = torch.zeros_like(into)
    chosen = w * (into - (w * into).sum(-1, keepdim=True))
    have["∂z"] = torch.zeros_like(have["z"]).scatter(1, have["chosen"], chosen)
    have["∂R part"] = have["∂z"].T @ have["x"]
    have["∂R"] = added(have["∂R part"])
    have["∂x"] = have["∂x of experts"] + have["∂z"] @ have["R"]


def _balance(have: Values, every: Tensor, sizes: Sizes, mistake: str) -> None:
    """The auxiliary loss of this rank's tokens, and its gradient by the router. every: choices of the whole row."""
    moe = moe_of(sizes, None)
    counts = counted(every[None], None, moe.experts).double()
    if mistake == "auxiliary-of-the-batch":
        counts = added(counted(have["chosen"][None], None, moe.experts).double()) / sizes.rows
    scores, live = have["scores"], torch.ones(1, len(have["x"]), dtype=torch.bool)
    part = auxiliary(scores[None], live, counts, rows_of(1, sizes), moe).view(1)
    have["counts of the row"] = counts
    have["f"] = f = counts * (moe.experts / (TOP_K * sizes.tokens))
    have["P part"] = scores.sum(0, keepdim=True) / sizes.tokens
    by_z = scores * (f - (scores * f).sum(-1, keepdim=True))
    times = dist.get_world_size() if mistake == "auxiliary-by-ranks" else 1
    have["aux part"] = part / times
    have["aux"] = added(have["aux part"])
    have["∂R of aux part"] = by_z.T @ have["x"] / times
    have["∂R of aux"] = added(have["∂R of aux part"])


def of_the_row(own: Tensor, here: Here, sizes: Sizes) -> Tensor:
    """What tokens of the whole row have, [N, ...] -> [T, ...].

    Collectives: an all-gather on "ep", where a row is on two ranks.
    """
    if len(own) == sizes.tokens:
        return own
    parts = [torch.empty_like(own) for _ in range(EP)]
    dist.all_gather(parts, own.contiguous(), group=here.mesh.get_group("ep"))
    return torch.cat(parts)


def exchange(x: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
    """`out` rows of x to each rank, `into` from each. Collectives: an all-to-all over `group`."""
    found = x.new_empty(sum(into), x.shape[1])
    dist.all_to_all_single(found, x.contiguous(), into, out, group=group)
    return found


def added(part: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over `group` (None: all ranks). Collectives: an all-reduce."""
    total = part.clone()
    dist.all_reduce(total, group=group)
    return total


def _spread(of_sent: Tensor, places: Tensor, w: Tensor) -> Tensor:
    """Of what was sent, that of each choice of each token, [N, K, H]; 0 of what was dropped."""
    found = of_sent.new_zeros(w.numel(), of_sent.shape[1]).index_copy(0, places, of_sent)
    return found.view(*w.shape, -1)
