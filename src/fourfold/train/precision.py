"""The dtype of parameters and the autocast of forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fourfold.spec.training import PrecisionSpec


def parameter_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Parameters, moments and reductions are fp32; in fp64 they are fp64."""
    return torch.float64 if precision.compute == "fp64" else torch.float32


def autocast(precision: PrecisionSpec, device: torch.device) -> AbstractContextManager[object]:
    """Around every forward: bf16 matrix products where asked; norms, softmax and loss stay fp32."""
    if precision.compute == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
