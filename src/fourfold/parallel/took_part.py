"""Which parameters took part in a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.collectives.rehearsed import with_values
from fourfold.parallel.compile import surfaces
from fourfold.spec.errors import CheckFailed, Problem


class TookPart:
    """Which parameters took part in a step's backwards: FSDP2 gives the others zeros, and AdamW would move them."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """Watch every trainable parameter of `module`, which is not wrapped yet.

        group: the ranks that have it, if not all do.
        """
        self._group = group
        self._names: dict[tuple[int, str], str] = {}
        self._used: set[str] = set()
        self._hooked: dict[int, Any] = {}
        first: dict[int, str] = {}
        for prefix, child in module.named_modules():
            for key, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
                name = first.setdefault(id(parameter), f"{prefix}.{key}" if prefix else key)
                if parameter.requires_grad:
                    self._names[id(child), key] = name
        self._trained = list(dict.fromkeys(self._names.values()))  # in the order of the model, on every rank
        owners = {owner for owner, _ in self._names}
        for child, surface in surfaces(module).items():
            if id(child) in owners:
                surface.register_forward_pre_hook(partial(self._watch, child))

    def _watch(self, module: nn.Module, _surface: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # In every forward: named_parameters takes far longer.
        for key, parameter in module._parameters.items():
            name = self._names.get((id(module), key))
            if name is None or parameter is None or not parameter.requires_grad:
                continue  # none that is trained; `Sharded` refuses one that was frozen since
            if id(parameter) not in self._hooked:
                parameter.register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
                self._hooked[id(parameter)] = parameter  # kept, so that its id stays its own

    def _note(self, name: str, _gradient: Tensor) -> None:
        self._used.add(name)

    def trained(self, module: nn.Module, key: str) -> bool:
        """Whether this parameter of `module` was to be trained when it was wrapped."""
        return (id(module), key) in self._names

    def settle(self, module: nn.Module, may_be_unused: bool) -> None:
        """Forget the step; what took part on no rank has no gradient.

        Collectives: one small all-reduce over the ranks that have the module, if parameters may be unused.
        """
        names = self._trained
        idle = [name for name in names if name not in self._used]
        if may_be_unused:
            with with_values():
                mask = torch.tensor([name in self._used for name in names], dtype=torch.uint8)
                dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._group)
                used = mask.tolist()
            parameters = dict(module.named_parameters())
            for name, took_part in zip(names, used, strict=True):
                if not took_part:
                    parameters[name].grad = None
        self._used.clear()
        if idle and not may_be_unused:
            raise CheckFailed(unused(idle))


def unused(names: Sequence[str]) -> Problem:
    """Parameters that took no part in backward; names: those of the loss module."""
    names = [name.removeprefix("module.") for name in names]
    return Problem(
        asked="a gradient for every parameter that is trained",
        found="took no part in backward: "
        + (", ".join(names[:5]) or "parameters of an earlier microbatch only (replicas count the last)")
        + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
        why="with layout.unused_parameters = false every parameter must take part in every step, on every rank",
        instead="--set layout.unused_parameters=true",
    )
