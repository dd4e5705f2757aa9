"""Where a step is only rehearsed: its tensors have shapes and no values (torch's fake tensors), and nobody answers."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def has_values(tensor: Tensor) -> bool:
    """Whether `tensor` can be read: not in a rehearsal."""
    return not isinstance(tensor, FakeTensor)


def with_values() -> AbstractContextManager[object]:
    """Tensors made inside have values even in a rehearsal: numbers of ranks and targets, not of the model."""
    return unset_fake_temporarily()
