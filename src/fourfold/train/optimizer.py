"""AdamW over what this rank holds, in two groups: tensors that decay, and norms and biases that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from fourfold.parallel.clip import local
from fourfold.parallel.offload import SLOTS, MappedMoments
from fourfold.parallel.sharded import replaced
from fourfold.spec.errors import CheckFailed
from fourfold.spec.training import OptimizerSpec


def decays(name: str, parameter: Parameter) -> bool:
    """Weight decay acts on matrices and embeddings, never on norms and biases: of one dim, or in stacks."""
    return parameter.ndim >= 2 and not name.endswith("bias")


class Optimizer:
    """torch's AdamW over every trainable parameter, each exactly once; moments in the parameter's dtype.

    Of a DTensor it updates the box that this rank holds, in place, as a plain tensor: an update is elementwise, so no
    mesh concerns it, and tensors of several meshes are updated together. Where moments lie on disk and parameters on a
    device, copies on the CPU are updated, made of the parameters before each update.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        spec: OptimizerSpec,
        room: Callable[[Mapping[str, Tensor]], MappedMoments] | None = None,
        elementwise: bool = False,
    ) -> None:
        """parameters: by qualified name, tied ones once. Frozen ones (requires_grad False) are left out.

        room: makes room on disk for the moments of what is held, by name; None: they are in memory, where that is.
        elementwise: an element is updated to the same bits wherever it stands in what is held.
        """
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._lies = {name: local(p).untyped_storage()._cdata for name, p in self._parameters.items()}
        self._held = {name: _held(p, room is not None) for name, p in self._parameters.items()}
        self._copied = [name for name, p in self._parameters.items() if p.device != self._held[name].device]
        self._mapped = room(self._held) if room is not None else None
        trained = self._parameters.items()
        groups = [
            {
                "params": [self._held[n] for n, p in trained if decays(n, p)],
                "weight_decay": spec.weight_decay,
            },
            {"params": [self._held[n] for n, p in trained if not decays(n, p)], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            # One kernel for a whole group; exists for CPU and CUDA. What it does at the end of a tensor differs in bits
            # from what it does before; the loop's own operations do not.
            fused=not elementwise,
            foreach=False,
        )

    @property
    def trained(self) -> Mapping[str, Parameter]:
        """The parameters it updates, by name."""
        return self._parameters

    def step(self, parameters: Mapping[str, Parameter], rate: float) -> None:
        """Update with learning rate `rate`, then drop all gradients.

        parameters: the model's as they are now. Collectives: none.
        Raises CheckFailed if one of them is not, or no longer lies where, it was when this optimizer was built.
        """
        self._check(parameters)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        for name, parameter in self._parameters.items():
            held = self._held[name]
            if held is not parameter:
                held.grad = None if parameter.grad is None else local(parameter.grad).to(held.device)
            if self._mapped is not None and held.grad is not None and held not in self.adamw.state:
                self.make_state(name)
        self._copy(to_held=True)
        self.adamw.step()
        self._copy(to_held=False)
        self.drop_gradients()

    @torch.no_grad()
    def _copy(self, to_held: bool) -> None:
        """Between parameters on a device and what is updated on the CPU in their place, if anything is."""
        for name in self._copied:
            own, held = local(self._parameters[name]), self._held[name]
            (held if to_held else own).copy_(own if to_held else held)

    def drop_gradients(self) -> None:
        """None, not zero: a parameter that takes no part in a step has no gradient and is not moved."""
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None

    def held(self, name: str) -> Parameter:
        """What is updated for a parameter: itself, or what this rank holds of it."""
        return self._held[name]

    def state_of(self, name: str) -> dict[str, Any]:
        """The live state of a parameter, of what is held of it here; empty where it was never updated."""
        return dict(self.adamw.state.get(self._held[name], {})) if name in self._held else {}

    def set_state(self, name: str, slots: dict[str, Tensor]) -> None:
        """Give a parameter its state; tensors of the shape that is held here."""
        self.adamw.state[self._held[name]] = slots

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of its state that is there; with moments on disk, the room for all of them."""
        held = [t for slots in self.adamw.state.values() for t in slots.values() if isinstance(t, Tensor)]
        return held if self._mapped is None else [self._mapped.room, *held]

    def make_state(self, name: str) -> None:
        """Give a parameter the state that it has before its first update: zeros."""
        held = self._held[name]
        if self._mapped is not None:
            slots = self._mapped.slots(name)
        else:
            slots = {slot: torch.zeros_like(held, memory_format=torch.preserve_format) for slot in SLOTS}
        step = torch.zeros((), dtype=torch.float32, device=held.device)
        self.set_state(name, {"step": step} | slots)

    def _check(self, parameters: Mapping[str, Parameter]) -> None:
        strangers = [
            name
            for name, p in self._parameters.items()
            if parameters.get(name) is not p
            or local(p).untyped_storage()._cdata != self._lies[name]
            or not p.requires_grad
        ]
        new = [name for name, p in parameters.items() if p.requires_grad and name not in self._parameters]
        if strangers or new:
            raise CheckFailed(replaced(strangers + new))


def _held(parameter: Parameter, on_cpu: bool) -> Parameter:
    """What is updated: the parameter itself, or a plain one over the box of it that this rank holds, or its copy."""
    if on_cpu and parameter.device.type != "cpu":
        return Parameter(local(parameter).cpu())
    return Parameter(local(parameter)) if isinstance(parameter, DTensor) else parameter
