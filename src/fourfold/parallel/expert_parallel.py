"""Expert parallel: each rank of a group holds some of the experts, whole, and tokens travel to them and back.

The stacks of experts are cut over dim 0, on the mesh "ep" (`spec.grid` says which ranks that are: it is borrowed from
dp_shard × cp × tp). Every one of those ranks routes tokens of its own: of its samples, of its part of each row under
context parallel, and of that some under tensor parallel (see `stream_experts`). What is left of those ranks, "edp",
holds the same experts, and their gradients are summed over it, once: those of the other ranks of the group came with
the tokens. Collectives on "ep", for each mixture: in forward an all-to-all of counts, one of tokens and one of what
experts made of them; in backward the last two again. (Lepikhin et al., arXiv 2006.16668, section 3.2.)
Letters: N choices sent, n received, H features, E experts of a layer, e of these here.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fourfold.models.exchange import Arrived, Here, Meeting, Stacks, read
from fourfold.parallel.stream_experts import held
from fourfold.spec.degrees import nearest_divisors
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.rules_model import either


def expert_parallel(network: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the experts of `network` in place over the ranks of `mesh` ("ep"). Collectives: none here.

    network: whole on this rank, or on the meta device; where tensor parallel has cut the rest, experts are whole.
    Raises SpecError for a model without experts, or with a number of them that cannot be cut.
    """
    stacks = {name: module for name, module in network.named_modules() if isinstance(module, Stacks)}
    problems = [
        _not_divided(name, stack, mesh) for name, stack in stacks.items() if stack.experts % mesh.size()
    ]
    if not stacks:
        problems = [_no_experts(mesh)]
    if problems:
        raise SpecError(problems[0])
    for stack in stacks.values():
        for key, parameter in list(stack.named_parameters(recurse=False)):
            stack.register_parameter(key, _own_experts(parameter, mesh))
    for module in network.modules():
        if isinstance(module, Meeting):
            module.here = Spread(module.here, mesh)


def _own_experts(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    each = parameter.shape[0] // mesh.size()
    mine = parameter.detach().narrow(0, mesh.get_local_rank() * each, each)
    own = DTensor.from_local(
        mine.clone(memory_format=torch.contiguous_format), mesh, [Shard(0)], run_check=False
    )
    return nn.Parameter(own, requires_grad=parameter.requires_grad)


class Spread(Here):
    """Experts lie on the ranks of `mesh`; how tokens are taken from the stream is left to `inner`."""

    def __init__(self, inner: Here, mesh: DeviceMesh) -> None:
        self._inner, self._group, self._ranks = inner, mesh.get_group(), mesh.size()
        self.speaks = inner.speaks

    def enter(self, stream: Tensor) -> Tensor:
        """See `Here.enter`."""
        return self._inner.enter(stream)

    def leave(self, y: Tensor, stream: Tensor) -> Tensor:
        """See `Here.leave`."""
        return self._inner.leave(y, stream)

    def part(self, of_tokens: Tensor) -> Tensor:
        """See `Here.part`."""
        return self._inner.part(of_tokens)

    def together(self, of_part: Tensor, length: int) -> Tensor:
        """See `Here.together`."""
        return self._inner.together(of_part, length)

    def own(self, parameter: Tensor) -> Tensor:
        """See `Here.own`: the experts that are here."""
        return held(parameter)

    def once(self, parameter: Tensor) -> Tensor:
        """See `Here.once`: experts are whole."""
        return held(parameter)

    def to_experts(self, x: Tensor, counts: Tensor, total: int) -> Arrived:
        """See `Here.to_experts`. They arrive by rank, and are put in the order of the experts here."""
        came = functional.all_to_all_single(counts.contiguous(), None, None, self._group)
        sent = read(counts.view(self._ranks, -1).sum(1), total)
        by_rank = read(came, total)  # of each rank in turn, for each expert here
        here = len(by_rank) // self._ranks
        received = [sum(by_rank[rank * here : (rank + 1) * here]) for rank in range(self._ranks)]
        order = _by_expert(by_rank, here, x.device)
        arrived = self._exchanged(x, received, sent).index_select(0, order)
        back = partial(self._back, torch.argsort(order), sent, received)
        return Arrived(arrived, [sum(by_rank[expert::here]) for expert in range(here)], back)

    def _back(self, places: Tensor, sent: list[int], received: list[int], y: Tensor) -> Tensor:
        """[n, H], in the order of experts -> [N, H], as it was sent."""
        return self._exchanged(y.index_select(0, places), sent, received)

    def _exchanged(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """`sent` rows to each rank, `received` from each. Collectives: an all-to-all over "ep", in backward too."""
        return functional.all_to_all_single_autograd(x.contiguous(), received, sent, self._group)


def _by_expert(by_rank: list[int], experts: int, device: torch.device) -> Tensor:
    """Places of what has arrived by rank, and of each rank by expert: those of the first expert, by rank, and so on."""
    starts = [0, *accumulate(by_rank)]
    runs = [
        torch.arange(starts[at], starts[at + 1], device=device)
        for expert in range(experts)
        for at in range(expert, len(by_rank), experts)
    ]
    return torch.cat(runs)


def _no_experts(mesh: DeviceMesh) -> Problem:
    return Problem(
        asked=f"layout.ep = {mesh.size()} with this model",
        found="no experts: no module of it is models.exchange.Stacks",
        why="expert parallel gives every rank other experts",
        instead="--set layout.ep=1",
    )


def _not_divided(name: str, stack: Stacks, mesh: DeviceMesh) -> Problem:
    return Problem(
        asked=f"layout.ep = {mesh.size()} with {name} of {stack.experts} experts",
        found="no such number of equal groups",
        why="every rank of an expert-parallel group holds equally many experts",
        instead=either("layout.ep", nearest_divisors(stack.experts, mesh.size())),
    )
