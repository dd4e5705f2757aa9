"""Every operation that torch dispatches, looked at, on what this rank itself holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, each operation of this thread goes through `run`, those of backwards in it too.

    A DTensor's own dispatch comes first: what that asks for, on this rank's part and of the others, comes here.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do it; what it gives."""
        return func(*args, **kwargs)
