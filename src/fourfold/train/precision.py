"""The dtypes of a run: of parameters, of forward; and whether a device has them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.parallel.narrow import narrow_dtype
from fourfold.spec.errors import CheckFailed, Problem, SpecError
from fourfold.spec.spec import Spec
from fourfold.spec.training import PrecisionSpec

# CUDA compute capability from which arithmetic is in hardware (CUDA C++ Programming Guide, table "Feature Support per
# Compute Capability"): half precision from 5.3, bfloat16 and TF32 from 8.0.
_CAPABILITY = {torch.float16: (5, 3), torch.bfloat16: (8, 0)}
_TF32_CAPABILITY = (8, 0)


def parameter_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Of what AdamW updates, of its moments and of gradients: fp32; in fp64, fp64."""
    return torch.float64 if precision.compute == "fp64" else torch.float32


def autocast(precision: PrecisionSpec, device: torch.device) -> AbstractContextManager[object]:
    """Around every forward: matrix products and attention in bf16 or fp16 where asked; norms and loss stay fp32."""
    dtype = narrow_dtype(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def settle_products(precision: PrecisionSpec) -> None:
    """Have this process's fp32 products and convolutions computed as the Spec says, whatever was set before.

    torch's own default is IEEE for matrix products and TF32 for convolutions. Collectives: none.
    """
    backends = torch.backends
    asked = "tf32" if precision.tf32 else "ieee"
    backends.cuda.matmul.fp32_precision = asked
    backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = asked  # type: ignore[attr-defined]


def settle_order(threads: int) -> None:
    """Have every operation of this process sum in one order, whatever the number of ranks: exact mode.

    threads: of an operation on the CPU; where it is cut between them depends on their number. Collectives: none.
    """
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # what torch asks for, before its first product
        torch.use_deterministic_algorithms(True)


def require_device(precision: PrecisionSpec, device: torch.device) -> None:
    """Refuse a dtype that `device` does not have. Collectives: none. Raises SpecError with those it has."""
    if precision.tf32 and device.type == "cuda" and (below := _below(_TF32_CAPABILITY, device)):
        raise SpecError(
            Problem(
                asked=f"precision.tf32 = true on {device}",
                found=below,
                why="it has no TF32: the setting would be silently ignored",
                instead="--set precision.tf32=false",
            )
        )
    missing = lacking(precision.compute, device)
    if missing is None:
        return
    names = get_args(PrecisionSpec.model_fields["compute"].annotation)
    others = [name for name in ("bf16", "fp16", "fp32") if name in names and name != precision.compute]
    raise SpecError(
        Problem(
            asked=f'precision.compute = "{precision.compute}" on {device}',
            found=missing,
            why="each matrix product of forward and backward would be refused, or be computed in another dtype "
            "than was asked for",
            instead=" or ".join(
                f"--set precision.compute={name}" for name in others if lacking(name, device) is None
            ),
        )
    )


def lacking(compute: str, device: torch.device) -> str | None:
    """What `device` has not that `compute` needs; None if it has all."""
    dtype = narrow_dtype(PrecisionSpec.model_validate({"compute": compute}))
    if dtype is None:
        return None
    if device.type == "cuda":
        return _below(_CAPABILITY[dtype], device)
    try:
        _try(dtype, device)
    except RuntimeError as error:
        return f"a device on which torch {torch.__version__} says: {str(error).splitlines()[0]}"
    return None


def _below(needed: tuple[int, int], device: torch.device) -> str | None:
    """What a CUDA device is, in words, if it is older than that."""
    there = torch.cuda.get_device_capability(device)
    if there >= needed:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} of compute capability {there[0]}.{there[1]}, below {needed[0]}.{needed[1]}"


def _try(dtype: torch.dtype, device: torch.device) -> None:
    """What a model does most: a matrix product and attention, with their gradients."""
    x = torch.ones(1, 1, 8, 8, dtype=dtype, device=device, requires_grad=True)
    with torch.enable_grad():
        F.scaled_dot_product_attention(F.linear(x, x[0, 0]), x, x, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]


def check_loss(loss_sum: Tensor) -> None:
    """Refuse a loss that a model summed in a narrow dtype. Raises CheckFailed."""
    if loss_sum.dtype not in (torch.float32, torch.float64):
        raise CheckFailed(
            Problem(
                asked="a loss summed in fp32 or wider (precision.output)",
                found=f"the model's loss is {loss_sum.dtype}",
                why="a sum over many targets stops growing in a narrow dtype (bf16 has 8 bits): part of the batch "
                "would not count",
                instead="logits.float() before the loss, in the model's loss",
            )
        )


def notes(spec: Spec, degree: int, device: torch.device) -> tuple[str, ...]:
    """What the dtypes that were asked for cost, where it is not plain."""
    asked, told = spec.precision, []
    narrow = narrow_dtype(asked)
    if asked.reduce == "bf16" and degree > 1:
        told.append(
            f"gradients are summed over {degree} ranks in bf16: half the bytes, and each sum is rounded to 8 bits, a "
            "relative error of up to 2^-8 for each rank; runs on other layouts differ by as much"
        )
    if narrow is not None and spec.layout.zero == 3 and asked.parameters == "fp32":
        told.append(
            f"autocast keeps {asked.compute} copies of all gathered weights from forward to backward: with "
            "precision.parameters=compute they are gathered in half the bytes, and dropped"
        )
    if asked.tf32 and device.type == "cpu":
        told.append("precision.tf32 concerns CUDA devices: this CPU computes fp32 as ever")
    if narrow is torch.float16 and device.type == "cpu":
        told.append(
            "most CPUs have no fp16 arithmetic: torch computes it many times slower than fp32, in the same dtype"
        )
    return tuple(told)
