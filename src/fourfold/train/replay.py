"""Run the step of a failure bundle again, on one device, and say where it goes wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fourfold.data.batch import Batch
from fourfold.models.registry import kit_for
from fourfold.parallel.narrow import loss_module
from fourfold.spec.errors import DataError, Problem
from fourfold.spec.spec import Spec
from fourfold.train.bundle import SCHEMA
from fourfold.train.census import named_state
from fourfold.train.precision import autocast, parameter_dtype

REPLAY_SCHEMA = "fourfold.replay/1"


def replay(folder: Path) -> dict[str, Any]:
    """Forward and backward of the bundle's microbatches from the parameters of that moment, on the CPU.

    Returns a document: for each microbatch loss sum, the targets that the loss counted and those that are valid; the
    first module whose output, or whose output's gradient, is not finite; the gradient norm of these microbatches;
    whether the failure came again.
    Raises DataError if the bundle cannot be read, holds parts of parameters, or another model's tensors.
    """
    bundle, tensors = _read(folder)
    spec = Spec.model_validate_json(json.dumps(bundle["spec"]))
    if bundle.get("boxes") or bundle.get("stage"):
        raise DataError(_in_parts(folder, bundle, spec))
    kit = kit_for(spec)
    dtype = parameter_dtype(spec.precision)
    model = kit.build(spec.run.seed, dtype)
    _put_back(folder, model, tensors)
    device = torch.device("cpu")
    module = loss_module(kit, model, spec.precision, held=False)
    # The other ranks' counts are not in the bundle: the mean is over this rank's targets.
    count = max(sum(bundle["valid_targets"]), 1)
    scale = float(bundle.get("loss_scale", 1.0))  # those of before fp16 have none
    rows, error = [], None
    with first_nonfinite(model) as found:
        for index, batch in enumerate(_batches(bundle, tensors)):
            try:
                with autocast(spec.precision, device):
                    # As the trainer hands them over: in fp64 the vectors are widened too.
                    loss_sum, targets = module(batch.to(device, dtype if dtype is torch.float64 else None))
                (loss_sum * (scale / count)).backward()
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
                break
            rows.append(
                {
                    "microbatch": index,
                    "loss_sum": float(loss_sum.detach()),
                    "targets": int(targets),
                    "valid_targets": batch.valid_count(),
                }
            )
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))) if gradients else 0.0
    norm /= scale
    miscounted = any(row["targets"] != row["valid_targets"] for row in rows)
    return {
        "schema": REPLAY_SCHEMA,
        "bundle": str(folder),
        "step": bundle["step"],
        "rank": bundle["rank"],
        "recorded_error": bundle["error"],
        "microbatches": rows,
        "grad_norm": norm,
        "error": error,
        "first_nonfinite": found[0] if found else None,
        "reproduced": error is not None or bool(found) or miscounted or not math.isfinite(norm),
    }


@contextmanager
def first_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """Collect, in execution order, "module: forward|backward" wherever a non-finite value shows first."""
    found: list[str] = []

    def check(name: str, phase: str, value: object) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            found.append(f"{name or '(the model)'}: {phase}")

    def watch(name: str, module: nn.Module) -> list[Any]:
        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            for value in output if isinstance(output, tuple) else (output,):
                check(name, "forward", value)
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(partial(check, name, "backward"))  # type: ignore[no-untyped-call]

        return [module.register_forward_hook(after_forward)]

    handles = [handle for name, module in model.named_modules() for handle in watch(name, module)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        bundle = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "tensors.safetensors")
        if not isinstance(bundle, dict) or bundle.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        Spec.model_validate_json(json.dumps(bundle["spec"]))
    except (OSError, ValueError, KeyError, SafetensorError, ValidationError) as error:
        raise DataError(
            Problem(
                asked=f"the failure bundle {folder}",
                found=str(error),
                why="a bundle is a folder with bundle.json and tensors.safetensors, as a failed run leaves it",
                instead="fourfold replay RUN/failures/step-…-rank…",
            )
        ) from error
    return bundle, tensors


def _in_parts(folder: Path, bundle: dict[str, Any], spec: Spec) -> Problem:
    asked = {"zero": spec.layout.zero, "tp": spec.layout.tp, "pp": spec.layout.pp, "ep": spec.layout.ep}
    cutting = " and ".join(
        f"layout.{key} = {value}" for key, value in asked.items() if value > (key != "zero")
    )
    held = f"stages, of {len(bundle.get('stage') or ())} parameters"
    if bundle.get("boxes"):
        name, (offset, size) = next(iter(bundle["boxes"].items()))
        held = f"part of {len(bundle['boxes'])} parameters: {size} at {offset} of {name} ..."
    return Problem(
        asked=f"replay {folder} on one device",
        found=f"rank {bundle['rank']}'s {held}",
        why=f"{cutting} cuts parameters between ranks, and one that fails may ask no other for its part",
        instead=f"fourfold train SPEC --nproc {bundle['world']} --resume auto  (with the Spec and run.dir of the run: "
        f"step {bundle['step']} is computed from its last checkpoint again, with the same data and draws)",
    )


def _put_back(folder: Path, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The parameters and buffers of that moment; DataError where the model that is built now has others."""
    state = named_state(model)
    now = {f"model.{name}": tuple(held.shape) for name, held in state.items()}
    then = {name: tuple(value.shape) for name, value in tensors.items() if name.startswith("model.")}
    differing = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if differing:
        name = differing[0]
        raise DataError(
            Problem(
                asked=f"the failure bundle {folder}",
                found=f"{name.removeprefix('model.')} has shape {then.get(name, 'none')} in the bundle, "
                f"{now.get(name, 'none')} in the model as it is built now",
                why="the model's code has changed since the run failed",
                instead="the code the run was started with (env.json names the commit)",
            )
        )
    with torch.no_grad():
        for name, held in state.items():
            held.copy_(tensors[f"model.{name}"])


def _batches(bundle: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[Batch]:
    for index, facts in enumerate(bundle["microbatches"]):
        prefix = f"batch.{index}."
        arrays = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
        yield Batch(
            **{"documents": None, **arrays},  # type: ignore[arg-type]
            seed=facts["seed"],
            step=facts["step"],
            epoch=facts["epoch"],
            processed=facts["processed"],
            nonpadding=facts["nonpadding"],
        )
