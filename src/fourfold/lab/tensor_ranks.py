"""What each rank of the tensor exercise does: one layer, forward and backward, written out with its collectives.

Nothing is left to autograd here, so that every partial sum can be looked at; the one device that it is held against has
its gradients from autograd alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Values = dict[str, Tensor]


class Sizes(NamedTuple):
    """Of the layer; ranks divide tokens and hidden. whole: small whole numbers, exact and easy to read."""

    tokens: int
    width: int
    hidden: int
    whole: bool


def inputs(sizes: Sizes) -> Values:
    """What is given: x0, s, U, u, D, d and ∂y, fp64, the same everywhere."""
    draw = torch.Generator().manual_seed(5)
    tokens, width, hidden, whole = sizes
    shapes = {
        "x0": (tokens, width),
        "s": (width,),
        "U": (hidden, width),
        "u": (hidden,),
        "D": (width, hidden),
        "d": (width,),
        "∂y": (tokens, width),
    }
    if not whole:
        return {
            name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in shapes.items()
        }
    return {
        name: torch.randint(
            1 if name in "sd" else -1, 3 if name in "sd" else 2, shape, generator=draw
        ).double()
        for name, shape in shapes.items()
    }


def one_device(given: Values) -> Values:
    """Every value of the layer on one device; gradients by autograd."""
    leaf = {name: given[name].clone().requires_grad_() for name in ("x0", "s", "U", "u", "D", "d")}
    x = leaf["x0"] * leaf["s"]
    z = x @ leaf["U"].T + leaf["u"]
    h = torch.relu(z)
    total = h @ leaf["D"].T
    y = total + leaf["d"]
    between = {"x": x, "z": z, "h": h, "sum": total, "y": y}
    for value in between.values():
        value.retain_grad()
    (y * given["∂y"]).sum().backward()  # type: ignore[no-untyped-call]
    values = leaf | between
    found = {name: value.detach() for name, value in values.items()}
    return found | {f"∂{name}": value.grad for name, value in values.items() if value.grad is not None}


def layer(sizes: Sizes, sequence: bool, mistake: str = "") -> Values:
    """This rank's value at every step of the layer; mistake: the name of what is done wrong ("": nothing).

    Collectives over all ranks: one all-reduce forward and one backward; with `sequence` an all-gather and a
    reduce-scatter each way, and all-reduces of the gradients of s and d.
    """
    have = _own(inputs(sizes), sequence)
    if sequence:
        have["x slice"] = have["x0"] * have["s"]
        have["x"] = _gather(have["x slice"])
    else:
        have["x"] = have["x0"] * have["s"]
    have["z"] = have["x"] @ have["U"].T + have["u"]
    have["h"] = torch.relu(have["z"])
    have["part"] = have["h"] @ have["D"].T
    if mistake == "bias-on-every-rank":
        have["y"] = have["sum"] = _add(have["part"] + have["d"])
    else:
        have["sum"] = have["part"] if mistake == "no-sum-forward" else _total(have["part"], sequence)
        have["y"] = have["sum"] + have["d"]
    _backward(have, sequence, mistake)
    return have


def _backward(have: Values, sequence: bool, mistake: str) -> None:
    """The way back, from ∂y to ∂x0."""
    if sequence:
        have["∂d part"] = have["∂y slice"].sum(0)
        have["∂d"] = _add(have["∂d part"])
        have["∂y"] = _gather(have["∂y slice"])
    else:
        have["∂d"] = have["∂y"].sum(0)
    have["∂D"] = have["∂y"].T @ have["h"]
    have["∂h"] = have["∂y"] @ have["D"]
    have["∂z"] = torch.where(have["z"] > 0, have["∂h"], 0.0)
    have["∂u"] = have["∂z"].sum(0)
    have["∂U"] = have["∂z"].T @ have["x"]
    have["∂part"] = have["∂z"] @ have["U"]
    have["∂x"] = have["∂part"] if mistake == "no-sum-backward" else _total(have["∂part"], sequence)
    scale = (have["∂x"] * have["x0"]).sum(0)
    if sequence:
        have["∂s part"] = scale
    have["∂s"] = _add(scale) if sequence and mistake != "no-sum-of-slices" else scale
    have["∂x0"] = have["∂x"] * have["s"]


def by_torch(sizes: Sizes, sequence: bool) -> Values:
    """y and gradients of U, u, D, d and x by torch's own styles, whole. Collectives: DTensor's, over all ranks."""
    given = inputs(sizes)
    mlp = nn.Sequential(nn.Linear(sizes.width, sizes.hidden), nn.ReLU(), nn.Linear(sizes.hidden, sizes.width))
    mlp.double()
    parameters = dict(zip(("U", "u", "D", "d"), mlp.parameters(), strict=True))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(given[name])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    outside = Shard(0) if sequence else Replicate()
    styles = {
        "0": ColwiseParallel(input_layouts=outside),
        "2": RowwiseParallel(output_layouts=outside, use_local_output=False),
    }
    parallelize_module(mlp, mesh, styles)
    own = _own(given, sequence)
    x = DTensor.from_local(own["x0"] * own["s"], mesh, [outside]).requires_grad_()
    y = mlp(x)
    y.backward(DTensor.from_local(own["∂y slice" if sequence else "∂y"], mesh, [outside]))
    found = {"y": y, "∂x": x.grad} | {
        f"∂{name}": parameter.grad
        for name, parameter in zip(("U", "u", "D", "d"), mlp.parameters(), strict=True)
    }
    return {name: value.full_tensor().detach() for name, value in found.items()}


def _own(given: Values, sequence: bool) -> Values:
    """This rank's part of what is given."""
    cuts = {"U": 0, "u": 0, "D": 1} | ({"x0": 0, "∂y": 0} if sequence else {})
    rank, world = dist.get_rank(), dist.get_world_size()
    have = {
        name: value.chunk(world, cuts[name])[rank].contiguous() if name in cuts else value
        for name, value in given.items()
    }
    if sequence:
        have["∂y slice"] = have.pop("∂y")
    return have


def _total(part: Tensor, sequence: bool) -> Tensor:
    """The sum over ranks: the whole, or this rank's tokens of it."""
    if not sequence:
        return _add(part)
    world = dist.get_world_size()
    own = part.new_empty(part.shape[0] // world, *part.shape[1:])
    dist.reduce_scatter(own, list(part.chunk(world)))
    return own


def _add(part: Tensor) -> Tensor:
    total = part.clone()
    dist.all_reduce(total)
    return total


def _gather(own: Tensor) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)
