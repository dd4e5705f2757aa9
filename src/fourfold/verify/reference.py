"""The oracle: the same training on one device in fp64, written as a textbook would.

Shared with the product: the model and its loss, the data source and the order of its samples, the learning rate.
Not shared: anything of the trainer's step. Here the whole global batch goes through the model (in chunks of rows,
for memory only), the loss is (sum over valid targets / count of them), and norm, clipping and AdamW are written
out below from their papers.

Results go to files, so that every rank maps them into memory and compares its own values; nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fourfold.data.batch import Batch
from fourfold.data.sample import Source
from fourfold.data.schedule import BatchSchedule
from fourfold.data.transforms import make_transforms, transformed
from fourfold.models.mixture import BIAS_SPEED, Routed
from fourfold.models.protocol import LossModule
from fourfold.models.registry import kit_for
from fourfold.record.writer import JsonLines
from fourfold.spec.spec import Spec
from fourfold.spec.training import OptimizerSpec
from fourfold.train.schedule import learning_rate
from fourfold.verify.measure import largest
from fourfold.verify.trace import tracing

# Elements (tokens or features) that go through the model at once: keeps fp64 activations within the caches.
CHUNK_ELEMENTS = 2048


@dataclass(frozen=True, slots=True)
class StepReference:
    """What one device computed in one step. `norm`, `sizes` and `largest_gradient` are of gradients before clipping.

    sizes: by name, the largest magnitude in each, not finite where one is not; largest_gradient: the largest finite.
    """

    loss: float
    count: int
    norm: float
    largest_gradient: float
    without_gradient: frozenset[str]
    rate: float
    sizes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reference:
    """Where the reference's tensors lie, and its numbers. A value: ranks get a copy.

    names, shapes: of the parameters, tied ones once; every file holds them one after the other, flat, in fp64.
    """

    folder: Path
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[StepReference, ...]
    largest_parameter: float
    written: Mapping[
        int, Mapping[str, float]
    ]  # steps whose parameters were kept: the largest magnitude in each
    corrections: Mapping[str, tuple[float, ...]] = field(
        default_factory=dict
    )  # of routers, after the last step

    def gradients(self, step: int) -> dict[str, NDArray[np.float64]]:
        """Gradients of `step` (from 0) before clipping; those that have one. Mapped, read-only."""
        absent = self.steps[step].without_gradient
        return {name: value for name, value in self._open(f"gradients-{step}") if name not in absent}

    def parameters(self, step: int | None = None) -> dict[str, NDArray[np.float64]]:
        """Parameters after `step`, or after the last one. After an earlier one only if every step was kept."""
        return dict(self._open(f"parameters-{self._last(step)}"))

    def parameter_sizes(self, step: int | None = None) -> Mapping[str, float]:
        """The largest magnitude in each of `parameters(step)`."""
        return self.written[self._last(step)]

    def _last(self, step: int | None) -> int:
        return len(self.steps) - 1 if step is None else step

    def _open(self, name: str) -> Iterator[tuple[str, NDArray[np.float64]]]:
        flat = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        offset = 0
        for parameter, shape in zip(self.names, self.shapes, strict=True):
            size = int(np.prod(shape, dtype=np.int64))
            yield parameter, flat[offset : offset + size].reshape(shape)
            offset += size


class TextbookAdamW:
    """AdamW as in Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, with decoupled decay.

    θ ← θ − η (m̂ / (√v̂ + ε) + λ θ), η the learning rate of the step, λ `weight_decay` on tensors of two or more
    dims but biases, and 0 on others (the paper's own λ is η λ here). A parameter without a gradient is left as it is,
    and its step is not counted.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], spec: OptimizerSpec) -> None:
        self._spec = spec
        self._parameters = parameters
        self._first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self._second = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self._times = dict.fromkeys(parameters, 0)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        """One update from `gradients` (by name)."""
        beta1, beta2 = self._spec.betas
        for name, gradient in gradients.items():
            theta = self._parameters[name]
            self._times[name] += 1
            t = self._times[name]
            m = self._first[name] = beta1 * self._first[name] + (1 - beta1) * gradient
            v = self._second[name] = beta2 * self._second[name] + (1 - beta2) * gradient * gradient
            m_hat = m / (1 - beta1**t)
            v_hat = v / (1 - beta2**t)
            decay = self._spec.weight_decay if theta.ndim >= 2 and not name.endswith("bias") else 0.0
            theta.copy_(theta - rate * (m_hat / (v_hat.sqrt() + self._spec.eps) + decay * theta))


class TextbookBalance:
    """Corrections of routers as in DeepSeek-V3, arXiv 2412.19437, section 2.1.2, at the end of a step.

    An expert's goes down by the speed where more tokens of the whole batch than the mean chose it, up where fewer did.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, Routed) and module.correction is not None
        }

    @torch.no_grad()
    def step(self) -> None:
        """One update, from what the backwards of the step have counted."""
        for router in self._routers.values():
            assert router.load is not None and router.correction is not None, "a step has a backward"
            speed = BIAS_SPEED if router.moe.balance_speed is None else router.moe.balance_speed
            load = router.load.tolist()
            mean = Fraction(sum(load), len(load))
            for expert, tokens in enumerate(load):
                router.correction[expert] += speed * ((tokens < mean) - (tokens > mean))
            router.load = None

    def corrections(self) -> dict[str, tuple[float, ...]]:
        """By the names of the buffers."""
        return {
            f"{name}.correction": tuple(router.correction.tolist())
            for name, router in self._routers.items()
            if router.correction is not None
        }


def global_norm(gradients: dict[str, Tensor]) -> float:
    """The L2 norm of all gradients together: the root of the sum of all squares."""
    return float(torch.stack([(g * g).sum() for g in gradients.values()]).sum().sqrt()) if gradients else 0.0


def clipped(gradients: dict[str, Tensor], norm: float, clip_norm: float) -> dict[str, Tensor]:
    """Gradients scaled to `clip_norm` if their norm exceeds it (Pascanu et al., arXiv 1211.5063, algorithm 1)."""
    if clip_norm == 0.0 or norm <= clip_norm:
        return gradients
    return {name: g * (clip_norm / norm) for name, g in gradients.items()}


def whole_batch(spec: Spec, source: Source, schedule: BatchSchedule, step: int) -> list[Batch]:
    """Every row of the global batch of `step`, one Batch of one row each; filler rows hold no valid target."""
    epoch, rows = schedule.epoch(step), []
    transforms = make_transforms(spec.data.transforms, source.vocabulary)
    for row, sample_id in enumerate(schedule.global_ids(step).tolist()):
        filler = sample_id < 0
        sample = source.largest() if filler else source.sample(sample_id)
        if not filler:
            sample = transformed(transforms, sample, spec.run.seed, epoch, sample_id)
        valid = np.zeros_like(sample.valid) if filler else sample.valid
        inputs = torch.from_numpy(np.asarray(sample.inputs)[None])
        rows.append(
            Batch(
                inputs=inputs.double() if inputs.is_floating_point() else inputs,
                targets=torch.from_numpy(np.asarray(sample.targets)[None]),
                valid=torch.from_numpy(np.asarray(valid)[None]),
                documents=None if sample.documents is None else torch.from_numpy(sample.documents[None]),
                sample_ids=torch.tensor([sample_id]),
                rows=torch.tensor([row]),
                seed=spec.run.seed,
                step=step,
                epoch=epoch,
                processed=0,
                nonpadding=0,
            )
        )
    return rows


def joined_rows(rows: Sequence[Batch]) -> Batch:
    """Rows put together into one Batch."""
    arrays = {}
    for name in ("inputs", "targets", "valid", "documents", "sample_ids", "rows"):
        parts = [getattr(row, name) for row in rows]
        arrays[name] = None if parts[0] is None else torch.cat(parts)
    return replace(rows[0], **arrays)  # type: ignore[arg-type]


def run_reference(
    spec: Spec, source: Source, steps: int, folder: Path, trace: Path | None = None
) -> Reference:
    """Train `steps` steps on one device in fp64 and write gradients of every step and the final parameters.

    spec: settled; its layout is not looked at. folder: exists, gets about 8 bytes × parameters × (steps + 1).
    trace: a file for the fingerprints of all it computes; parameters are then written after every step.
    """
    batch = spec.batch
    assert batch.global_batch, "the Spec is not settled"
    kit = kit_for(spec)
    model = kit.build(spec.run.seed, torch.float64)
    module = LossModule(kit, model)
    parameters = dict(model.named_parameters())
    # Degree 1: the product's order of samples, without its way of cutting a batch over ranks.
    whole = batch.global_batch
    schedule = BatchSchedule(
        len(source), whole, whole, 1, 1, spec.run.seed, spec.data.shuffle, spec.data.last_batch
    )
    optimizer, balance = TextbookAdamW(parameters, spec.optimizer), TextbookBalance(model)
    results, written = [], {}
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        tracer = None
        if trace is not None:
            lines = stack.enter_context(JsonLines(trace))
            tracer = stack.enter_context(tracing([module], [model], lines))
        for step in range(steps):
            rows = whole_batch(spec, source, schedule, step)
            total, count = _loss_and_gradients(module, rows, _rows_of_chunk(rows[0]))
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            sizes = _write(folder / f"gradients-{step}.npy", parameters, gradients)
            norm = global_norm(gradients)
            rate = learning_rate(spec.optimizer, spec.run.steps, step)
            results.append(
                StepReference(
                    loss=total / max(count, 1),
                    count=count,
                    norm=norm,
                    largest_gradient=largest(g.numpy() for g in gradients.values()),
                    without_gradient=frozenset(parameters.keys() - gradients.keys()),
                    rate=rate,
                    sizes=sizes,
                )
            )
            optimizer.step(clipped(gradients, norm, spec.optimizer.clip_norm), rate)
            balance.step()
            model.zero_grad(set_to_none=True)
            if step + 1 == steps or tracer is not None:
                written[step] = _write(folder / f"parameters-{step}.npy", parameters, parameters)
            if tracer is not None:
                tracer.flush()
                tracer.forget()
    return Reference(
        folder=folder,
        names=tuple(parameters),
        shapes=tuple(tuple(p.shape) for p in parameters.values()),
        steps=tuple(results),
        largest_parameter=largest(p.detach().numpy() for p in parameters.values()),
        written=written,
        corrections=balance.corrections(),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """As a rank has; and threads of one process that share cores with others mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _loss_and_gradients(module: LossModule, rows: Sequence[Batch], chunk: int) -> tuple[float, int]:
    """Backward of (sum / count) over the whole global batch, chunk by chunk; returns the sum and the count."""
    count = sum(row.valid_count() for row in rows)
    total = 0.0
    for start in range(0, len(rows), chunk):
        loss_sum, _ = module(joined_rows(rows[start : start + chunk]))
        (loss_sum / max(count, 1)).backward()
        total += float(loss_sum.detach())
    return total, count


def _rows_of_chunk(row: Batch) -> int:
    return max(1, CHUNK_ELEMENTS // row.inputs.numel())


def _write(path: Path, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, float]:
    """All of `values`, flat, in the order of `parameters`, zeros where there is none; returns the size of each."""
    flat = [values.get(name, torch.zeros_like(p)).detach().reshape(-1) for name, p in parameters.items()]
    np.save(path, torch.cat(flat).numpy())
    return {
        name: float(value.abs().max()) if len(value) else 0.0
        for name, value in zip(parameters, flat, strict=True)
    }
