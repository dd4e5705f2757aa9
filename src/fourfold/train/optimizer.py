"""AdamW over two groups: tensors that decay, and norms and biases that do not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import Parameter

from fourfold.spec.training import OptimizerSpec


def decays(parameter: Parameter) -> bool:
    """Weight decay acts on matrices and embeddings, never on norms and biases (tensors of one dim)."""
    return parameter.ndim >= 2


def build_optimizer(parameters: Mapping[str, Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over every trainable parameter, each exactly once; moments in the parameter's dtype.

    parameters: by qualified name, tied ones once. Frozen ones (requires_grad False) are left out.
    """
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if decays(p)], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if not decays(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=True,  # one kernel for a whole group; exists for CPU and CUDA
    )
