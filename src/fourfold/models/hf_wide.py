"""fp32 as transformers' models mean it: "fp32 or wider".

Their norms, rotary turns and routers compute in fp32 whatever the parameters are. In a proof, where these are fp64,
that would round values in the middle of the network: two layouts that differ by 1e-16 there would differ by 1e-8
behind it. `widened` has them compute in fp64 then, and in fp64 only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def widened(network: nn.Module, blocks: Collection[str]) -> None:
    """Have `blocks`, and what stands outside of them, compute in fp64 where their code says fp32; in place."""
    inside = tuple(f"{name}." for name in blocks)
    for name, module in network.named_modules():
        leaf = not name.startswith(inside) and not any(module.children())
        if name in blocks or leaf:
            module.forward = _Widened(module.forward)


class _Widened:
    """A forward under `_Wide`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **more: Any) -> Any:
        with _Wide():
            return self._forward(*args, **more)


class _Wide(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        more = {key: _wider(value) for key, value in (kwargs or {}).items()}
        if func is Tensor.float:
            return args[0].to(torch.float64, **more)
        return func(*(_wider(arg) for arg in args), **more)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
