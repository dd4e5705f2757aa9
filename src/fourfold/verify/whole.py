"""Makes whole what the ranks of a tensor- or context-parallel group hold in parts, to hold it against one device.

Whatever is made whole is a collective on "tp" or "cp": all ranks of a group must come here in the same order, as their
hooks do, for they run the same modules on the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.collectives.context import Context
from fourfold.models.boxes import box_of
from fourfold.models.exchange import Meeting
from fourfold.models.protocol import Heads
from fourfold.parallel.apply import Parallel
from fourfold.parallel.clip import local
from fourfold.parallel.context_parallel import runs_of
from fourfold.parallel.mesh import sub_mesh

NETWORK = "(the model)"


@dataclass(frozen=True, slots=True)
class Collectives:
    """The mesh axis whose collective stands before a value.

    output: of a module; behind: between the gradient of a module's output and the gradient of what it was given;
    loss: between the last module and the loss. Left out or "" where there is none.
    """

    output: dict[str, str] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)
    loss: str = ""


class Whole:
    """One rank holds everything."""

    collectives = Collectives()

    def begin(self, context: Context | None) -> None:
        """A microbatch begins; context: which of its tokens are here, if not all."""

    def tokens(self, value: Tensor) -> Tensor:
        """Of all tokens what `value` [B, t, ...] is of those that are here."""
        return value

    def output(self, name: str, value: Tensor) -> Tensor | None:  # noqa: ARG002
        """All of a module's output; None where nothing is known of how the ranks hold it."""
        return value

    def gradient(self, name: str, value: Tensor) -> Tensor | None:  # noqa: ARG002
        """All of the gradient of a module's output."""
        return value

    def parameter(self, gradient: Tensor) -> Tensor:
        """All of a parameter's gradient, as backward gives it; of experts that lie on other ranks zeros."""
        gradient = gradient.detach()
        if not isinstance(gradient, DTensor) or not of_spread_experts(gradient):
            return gradient
        whole = torch.zeros(gradient.shape, dtype=gradient.dtype)
        whole[box_of(gradient).slices] = local(gradient)
        return whole


class TensorParallelWhole(Whole):
    """The same where ranks hold parts.

    A DTensor says itself how it is held. A `Heads` module gives this rank's own units, or the one that its share of
    the others meets. Any other plain tensor, but the network's own output, is left out.
    """

    def __init__(self, parallel: Parallel, sequence: bool) -> None:
        mesh = sub_mesh(parallel.grid, "cpu", "tp")
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._units = {name: rule.units for name, rule in parallel.joined.items() if isinstance(rule, Heads)}
        self.collectives = _collectives(parallel, sequence)

    @torch.no_grad()
    def output(self, name: str, value: Tensor) -> Tensor | None:
        """See `Whole.output`."""
        value = value.detach()
        if isinstance(value, DTensor):
            return value.full_tensor()
        if name in self._units:
            return torch.cat(self._once(name, self._gathered(value)), dim=-1)
        return value if name == NETWORK else None

    @torch.no_grad()
    def gradient(self, name: str, value: Tensor) -> Tensor | None:
        """See `Whole.gradient`; of a unit that several ranks hold each has a part of it."""
        value = value.detach()
        if isinstance(value, DTensor) or name not in self._units:
            return self.output(name, value)
        parts = self._gathered(value)
        copies = self._ranks // len(self._once(name, parts))
        sums = [torch.stack(parts[at : at + copies]).sum(0) for at in range(0, self._ranks, copies)]
        return torch.cat(sums, dim=-1)

    @torch.no_grad()
    def parameter(self, gradient: Tensor) -> Tensor:
        """See `Whole.parameter`; partial sums are added up."""
        gradient = gradient.detach()
        if not isinstance(gradient, DTensor) or of_spread_experts(gradient):
            return super().parameter(gradient)
        whole: Tensor = gradient.full_tensor()
        return whole

    def _gathered(self, value: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self._ranks)]
        dist.all_gather(parts, value.contiguous(), group=self._group)
        return parts

    def _once(self, name: str, parts: list[Tensor]) -> list[Tensor]:
        """Of ranks that hold the same unit the first: they are neighbours."""
        return parts[:: max(1, self._ranks // self._units[name])]


class ContextWhole(Whole):
    """The same where the tokens of a row lie on several ranks; `inner` makes whole what those hold of theirs."""

    def __init__(self, inner: Whole, parallel: Parallel) -> None:
        mesh = sub_mesh(parallel.grid, "cpu", "cp")
        self._inner, self._group, self._ranks = inner, mesh.get_group(), mesh.size()
        self._places = torch.empty(0, dtype=torch.int64)  # of all tokens, by rank
        self._here = 0
        self.collectives = inner.collectives

    def begin(self, context: Context | None) -> None:
        """See `Whole.begin`."""
        assert context is not None, "rows are cut"
        runs = [runs_of(context.length, self._ranks, rank) for rank in range(self._ranks)]
        self._places = torch.cat([torch.arange(*run) for of_rank in runs for run in of_rank])
        self._here = context.length // self._ranks

    @torch.no_grad()
    def tokens(self, value: Tensor) -> Tensor:
        """See `Whole.tokens`; what has no such dim is as it is."""
        if value.ndim < 2 or value.shape[1] != self._here:
            return value
        sent = value.detach().contiguous()
        sent = sent.to(torch.uint8) if sent.dtype == torch.bool else sent
        parts = [torch.empty_like(sent) for _ in range(self._ranks)]
        dist.all_gather(parts, sent, group=self._group)
        by_rank = torch.cat(parts, dim=1)
        return torch.empty_like(by_rank).index_copy_(1, self._places, by_rank)

    def output(self, name: str, value: Tensor) -> Tensor | None:
        """See `Whole.output`."""
        known = self._inner.output(name, value)
        return None if known is None else self.tokens(known)

    def gradient(self, name: str, value: Tensor) -> Tensor | None:
        """See `Whole.gradient`."""
        known = self._inner.gradient(name, value)
        return None if known is None else self.tokens(known)

    def parameter(self, gradient: Tensor) -> Tensor:
        """See `Whole.parameter`: of this rank's tokens alone, as of its own samples alone."""
        return self._inner.parameter(gradient)


def whole_of(parallel: Parallel, sequence: bool) -> Whole:
    """The one that suits the layout. sequence: whether activations are cut over tokens."""
    whole = TensorParallelWhole(parallel, sequence) if parallel.grid.tp > 1 else Whole()
    if parallel.grid.ep > 1:
        named = parallel.network.named_modules()
        routed = {name: "ep" for name, module in named if isinstance(module, Meeting)}
        known = whole.collectives
        whole.collectives = Collectives(known.output | routed, known.behind | routed, known.loss)
    return ContextWhole(whole, parallel) if parallel.grid.cp > 1 else whole


def of_spread_experts(tensor: Tensor) -> bool:
    """Whether it is of experts of which others lie on other ranks: each of those has its own part, and no other."""
    return isinstance(tensor, DTensor) and "ep" in (tensor.device_mesh.mesh_dim_names or ())


def _collectives(parallel: Parallel, sequence: bool) -> Collectives:
    """What `parallel.tensor_parallel` says of each rule."""
    network, output, behind, loss = parallel.network, {}, {}, ""
    for name, rule in parallel.joined.items():
        module = network.get_submodule(name)
        table = isinstance(module, nn.Embedding)
        if isinstance(module, Meeting):
            output[name] = behind[name] = "tp"
            continue
        if rule == "replicate":
            continue
        if rule == "row" or table:
            output[name] = "tp"
            if sequence:
                behind[name] = "tp"
            continue
        behind[name] = "tp"
        if sequence:
            output[name] = "tp"
        if rule == "vocabulary":
            loss = "tp"
    return Collectives(output, behind, loss)
