"""Tensor parallel: parameters cut by the model's sharding table, hooks that make whole what a module takes whole.

Every parameter becomes a DTensor on the "tp" mesh. Between the modules runs one stream of activations, a DTensor that
is the same on all tp ranks, or, with sequence parallel, cut over tokens (Korthikanti et al., arXiv 2205.05198,
section 4.2). By the rule of its weight a module

  column, vocabulary   takes the stream whole; its output is cut over the last dim
  Heads                the same, and its output comes out as this rank's plain tensor
  row                  takes what is cut over the last dim; its outputs are summed into the stream
  replicate            takes the stream as it is
  within heads         takes this rank's own plain tensor, and computes with plain parameters

as in Shoeybi et al., arXiv 1909.08053, section 3. Collectives, all on "tp": in forward an all-gather (with sequence
parallel) of what columns take, once for all that take the same, and an all-reduce, or a reduce-scatter, after each row
and after the embedding; their mirror images in backward. In the first forward two numbers more for each module that is
whole on every rank and takes a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from fourfold.collectives.rehearsed import has_values
from fourfold.models.boxes import box_in, box_of
from fourfold.models.exchange import Meeting, Stacks
from fourfold.models.protocol import Heads, ModelKit, Rule, parameter_rules, pattern_of, typed, word
from fourfold.parallel.stream import Cut
from fourfold.parallel.stream_experts import CutExperts, CutTokens
from fourfold.parallel.table import CUT_DIMS, check_table
from fourfold.parallel.trail import Joined, Trail
from fourfold.spec.errors import Problem, SpecError


def tensor_parallel(
    network: nn.Module, kit: ModelKit, mesh: DeviceMesh, sequence: bool, whole_experts: bool = False
) -> tuple[dict[str, Rule], Trail]:
    """Cut `network` in place over the ranks of `mesh` ("tp"); ties stay ties, and values are kept.

    network: whole on this rank, or on the meta device. whole_experts: stacks of experts are left as they are, for
    expert parallel. Returns each module that has parameters, by name, with the
    rule that it was joined by, and the trail of those that run. Collectives: none here.
    Raises SpecError for a model without a rule for each parameter, or with a dim that cannot be cut.
    """
    rules = parameter_rules(kit, network)
    cut = Cut(mesh, sequence)
    joined: dict[str, Rule] = {}
    stacks = {prefix: module for prefix, module in network.named_modules() if isinstance(module, Stacks)}
    left = [f"{at}.{key}" for at, stack in stacks.items() for key, _ in stack.named_parameters()]
    left = left if whole_experts else []
    check_table(network, {name: rule for name, rule in rules.items() if name not in left}, cut.ranks)
    made: dict[int, nn.Parameter] = {}
    first: dict[int, str] = {id(p): name for name, p in network.named_parameters()}
    for prefix, module in network.named_modules():
        if prefix in stacks and whole_experts:
            continue
        found: list[Rule] = []
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            rule = rules[first[id(parameter)]]
            if id(parameter) not in made:
                made[id(parameter)] = _distributed(parameter, _placement(rule, cut), mesh)
            module.register_parameter(key, made[id(parameter)])
            found.append(rule)
        if found:
            joined[prefix] = next((r for r in found if r != "replicate"), "replicate")
            if isinstance(module, Meeting):
                module.here = CutTokens(cut) if whole_experts else CutExperts(cut)
            elif prefix not in stacks:
                _join(module, Joined.of(prefix, joined[prefix], module), cut)
    network.register_forward_hook(_whole_output(cut))
    return joined, cut.trail


@torch.no_grad()
def sum_partial(network: nn.Module) -> None:
    """Gradients that each rank has a part of (norms on slices of the sequence) become whole, on every rank.

    Collectives: one all-reduce over "tp" for all of those; what is cut otherwise than its parameter is cut again.
    """
    parts: list[tuple[nn.Parameter, DTensor]] = []
    for parameter in network.parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements == (Partial(),) and parameter.placements == (Replicate(),):
            parts.append((parameter, gradient))
        elif gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
    if not parts:
        return
    mesh = parts[0][1].device_mesh
    flat = torch.cat([gradient.to_local().reshape(-1) for _, gradient in parts])
    dist.all_reduce(flat, group=mesh.get_group())
    sizes = [gradient.numel() for _, gradient in parts]
    for (parameter, gradient), summed in zip(parts, torch.split(flat, sizes), strict=True):
        whole = summed.view(gradient.shape)
        parameter.grad = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)


def _placement(rule: Rule, cut: Cut) -> Placement:
    if isinstance(rule, Heads):
        return Shard(0) if rule.units % cut.ranks == 0 else Replicate()
    dim = CUT_DIMS[rule]
    return Replicate() if dim is None else Shard(dim)


def _distributed(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's part of a whole parameter, as a DTensor: no rank is asked for anything."""
    box = box_in(parameter.shape, mesh, [placement])
    local = parameter.detach()[box.slices].clone(memory_format=torch.contiguous_format)
    held = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(held, requires_grad=parameter.requires_grad)


def _join(module: nn.Module, joined: Joined, cut: Cut) -> None:
    """Hooks (or, for an embedding, a forward of our own) by the rule of the module's weight."""
    rule = joined.rule

    def hook(before: Callable[[Any], Any], after: Callable[[DTensor], Tensor]) -> None:
        def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            cut.trail.note(joined, args[0] if args else None)
            return (before(args[0]), *args[1:]) if args else args

        module.register_forward_pre_hook(take)
        module.register_forward_hook(lambda _, _args, output: after(output))

    if isinstance(module, nn.Embedding) and rule == "vocabulary":
        module.register_forward_pre_hook(lambda _, args: cut.trail.note(joined, args[0]))
        if type(module).forward is nn.Embedding.forward:
            module.forward = partial(_look_up, module, cut)  # type: ignore[method-assign]
        else:
            module.forward = _AroundLookUp(module, cut)  # type: ignore[method-assign, assignment]
    elif isinstance(module, nn.Embedding):
        hook(cut.whole, cut.stream)
    elif isinstance(rule, Heads):
        hook(cut.whole, _own_units(joined, rule, cut))
    elif rule in ("column", "vocabulary"):
        hook(cut.whole, lambda y: y)
    elif rule == "row":
        hook(lambda x: _cut_last(x, cut), cut.stream)
    elif rule == "within heads":
        module.register_forward_pre_hook(lambda _, args: cut.trail.note(joined, args[0] if args else None))
        module.forward = _OnOwn(joined, module)
    else:
        hook(_lifted(joined, cut), lambda y: y)


def _cut_last(x: Tensor, cut: Cut) -> DTensor:
    if isinstance(x, DTensor):
        return x.redistribute(cut.mesh, [Shard(x.ndim - 1)])
    return DTensor.from_local(x, cut.mesh, [Shard(x.ndim - 1)], run_check=False)


class _OnOwn:
    """The forward of a module between Heads and row: on plain tensors, with its parameters as plain ones.

    Each rank has other heads, so that the gradient of a parameter is the sum over ranks of what each computes: its
    placement says so, and whoever reduces gradients adds them up.
    """

    def __init__(self, joined: Joined, module: nn.Module) -> None:
        self._joined, self._module, self._forward = joined, module, module.forward

    def __call__(self, *args: Any, **more: Any) -> Any:
        if any(isinstance(x, DTensor) for x in args):
            raise SpecError(_not_within(self._joined))
        held: dict[str, Any] = self._module._parameters
        whole = dict(held)
        try:
            for key, parameter in whole.items():
                if isinstance(parameter, DTensor):
                    held[key] = parameter.to_local(grad_placements=[Partial()])
            return self._forward(*args, **more)
        finally:
            held.update(whole)


def _own_units(joined: Joined, rule: Heads, cut: Cut) -> Callable[[DTensor], Tensor]:
    """From the projection's output to this rank's whole units of it.

    With fewer units than ranks each rank has computed all of them (the weight is whole on it) and takes the one that
    its share of the others meets; the gradient of the weight is then the sum over ranks.
    """
    if rule.units % cut.ranks == 0:

        def own(y: DTensor) -> Tensor:
            if not y.placements[0].is_shard(y.ndim - 1):
                raise SpecError(_no_units(joined, rule))
            return y.to_local()

        return own
    mine = cut.mesh.get_local_rank() * rule.units // cut.ranks

    def take(y: DTensor) -> Tensor:
        if not y.placements[0].is_replicate():
            raise SpecError(_no_units(joined, rule))
        width = y.shape[-1] // rule.units
        return y.to_local(grad_placements=[Partial()]).narrow(-1, mine * width, width)

    return take


def _look_up(module: nn.Embedding, cut: Cut, tokens: Tensor) -> DTensor:
    """Rows of a table cut over the vocabulary: each rank has those of its own tokens, and zeros; they are summed."""
    weight = module.weight
    assert isinstance(weight, DTensor), "tensor_parallel made it one"
    box = box_of(weight)
    rows, start = box.size[0], box.offset[0]
    table = weight.to_local()
    if isinstance(tokens, DTensor):  # they came in through a module with a parameter of its own
        tokens = tokens.to_local()
    at = tokens - start
    mine = (at >= 0) & (at < rows)
    found = F.embedding(at.masked_fill(~mine, 0), table) * mine.unsqueeze(-1)
    return cut.stream(DTensor.from_local(found, cut.mesh, [Partial()], run_check=False))


class _AroundLookUp:
    """The forward of an embedding that does more than look up, as to scale what it finds: the rest stays its own."""

    def __init__(self, module: nn.Embedding, cut: Cut) -> None:
        self._module, self._cut, self._forward = module, cut, module.forward

    def __call__(self, tokens: Tensor) -> Any:
        with _LookedUp(self._module, self._cut):
            return self._forward(tokens)


class _LookedUp(TorchFunctionMode):
    def __init__(self, module: nn.Embedding, cut: Cut) -> None:
        super().__init__()
        self._module, self._cut = module, cut

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.embedding and args[1] is self._module.weight:
            return _look_up(self._module, self._cut, args[0])
        return func(*args, **(kwargs or {}))


def _lifted(joined: Joined, cut: Cut) -> Callable[[Any], Any]:
    """For a module that is whole on every rank: a plain tensor that it is given must be the same on all of them."""
    seen = False

    def lift(x: Any) -> Any:
        nonlocal seen
        if isinstance(x, DTensor) or not isinstance(x, Tensor):
            return x
        if not seen:
            if not _same(x, cut):
                raise SpecError(_between(joined))
            seen = True
        return cut.whole(x)

    return lift


def _same(x: Tensor, cut: Cut) -> bool:
    """Whether a plain tensor is the same on all ranks. Collectives: one all-reduce of two numbers over "tp"."""
    mark = x.detach().double().sum().to(x.device)
    both = torch.stack([mark, -mark]).nan_to_num(nan=0.0)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cut.mesh.get_group())
    return not has_values(both) or float(both[0]) == float(-both[1])


def _not_within(joined: Joined) -> Problem:
    return Problem(
        asked=f'"within heads" for "{joined.name}"',
        found="it is given the stream, which is the same on all ranks",
        why="its gradient would be added up over ranks that have computed the same one",
        instead=typed({f"{pattern_of(joined.name)}.*": "replicate"}),
    )


def _between(joined: Joined) -> Problem:
    instead = typed({f"{pattern_of(joined.name)}.*": "within heads"})
    return Problem(
        asked=f'"{joined.name}" whole on every tensor-parallel rank ("replicate")',
        found="what it is given differs from rank to rank",
        why="it stands between a Heads module and its row, where each rank computes its own heads: the "
        "gradient of its weight would be one rank's",
        instead=(typed(joined.as_row()) if joined.matrix else instead) + ", or --set layout.tp=1",
    )


def _no_units(joined: Joined, rule: Heads) -> Problem:
    pattern = f"{pattern_of(joined.name)}.*"
    return Problem(
        asked=f'{word(rule)} for "{joined.name}"',
        found="its output is not cut between ranks as its weight is",
        why="Heads are parts of what a Linear puts out, of a weight [outputs, inputs]",
        instead=typed({pattern: "column" if joined.matrix else "replicate"}),
    )


def _whole_output(cut: Cut) -> Callable[[nn.Module, Any, Any], Any]:
    """The network's output: plain, or, cut over its last dim (logits over the vocabulary), left to the loss.

    What it gives as a plain tensor itself must be the same on all ranks: it is looked at in the first forward.
    """
    seen = False

    def look(_module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal seen
        cut.forget()
        outputs = output if isinstance(output, tuple | list) else (output,)
        if not seen:
            plain = [x for x in outputs if isinstance(x, Tensor) and not isinstance(x, DTensor)]
            if not all(_same(x, cut) for x in plain):
                raise SpecError(_own_output(cut.trail.without_row()))
            seen = True
        if not isinstance(output, DTensor) or output.placements[0] == Shard(output.ndim - 1):
            return output
        return output.redistribute(output.device_mesh, [Replicate()]).to_local()

    return look


def _own_output(last: Joined | None) -> Problem:
    return Problem(
        asked="the network's output, the same on every tensor-parallel rank or cut over the vocabulary",
        found="a plain tensor that differs from rank to rank",
        why=f'"{last.name}" gives each rank its own Heads, and no row puts them together'
        if last
        else "some of what it is made of is one rank's own",
        instead=typed({f"{pattern_of(last.name)}.*": "vocabulary"}) + ", or a row after it"
        if last
        else "a row after each Heads, or --set layout.tp=1",
    )
