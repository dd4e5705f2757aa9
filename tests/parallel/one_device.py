"""A model trained for some steps in ranks, in fp64, held against the same steps on one device, box by box."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.data.batch import Batch
from fourfold.models.boxes import box_of
from fourfold.models.decoder import DecoderKit
from fourfold.models.mlp import MlpKit
from fourfold.models.protocol import LossModule, ModelKit
from fourfold.parallel.apply import Parallel, parallelize
from fourfold.parallel.clip import local, scale
from fourfold.parallel.initial import fill_boxes
from fourfold.spec.huggingface import vocabulary_of
from fourfold.spec.model import DecoderSpec, MlpSpec
from fourfold.spec.training import LayoutSpec, OptimizerSpec
from fourfold.train.optimizer import Optimizer

CPU = torch.device("cpu")
SEED = 11
ADAMW = OptimizerSpec(lr=3e-4, warmup_steps=0, eps=1e-5)  # of the gate: a smaller eps lifts rounding
CLIP = 0.5

DECODER: dict[str, Any] = {
    "kind": "decoder",
    "vocabulary": 33,  # uneven on 2 and on 4 ranks
    "width": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_width": 24,
    "init_std": 0.3,  # large enough for the loss to bend
    "biases": True,
    "tied": True,
    "dropout": 0.2,
    "max_sequence": 16,
}
MLP: dict[str, Any] = {
    "kind": "mlp",
    "inputs": 5,
    "hidden": 8,
    "outputs": 3,
    "dropout": 0.2,
    "task": "regression",
}


@dataclass(frozen=True)
class Seen:
    """What a rank saw. gaps: worst max|Δ| / max|reference| by kind; cut: which parameters it holds a part of."""

    gaps: dict[str, float]
    cut: frozenset[str]
    held: int
    without_gradient: tuple[str, ...]

    @property
    def worst(self) -> float:
        return max(self.gaps.values())


class Freezing:
    """A kit of which some parameters are built frozen."""

    def __init__(self, kit: Any, frozen: Sequence[str]) -> None:
        self._kit, self._frozen = kit, frozen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kit, name)

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        return self._freeze(self._kit.build(seed, dtype))

    def skeleton(self, dtype: torch.dtype) -> nn.Module:
        return self._freeze(self._kit.skeleton(dtype))

    def _freeze(self, module: nn.Module) -> nn.Module:
        for name in self._frozen:
            module.get_parameter(name).requires_grad_(False)
        return module


def make_kit(model: Mapping[str, Any]) -> ModelKit:
    """The kit of a decoder or a perceptron, given as a dict so that it travels to the ranks."""
    if model["kind"] == "mlp":
        return MlpKit(MlpSpec.model_validate(model))
    return DecoderKit(DecoderSpec.model_validate(model))


def part(kit: ModelKit, number: int, step: int, tokens: int, packed: bool) -> Batch:
    """Two rows of the global batch, the `number`th part of it, with targets that carry no loss."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    rows = torch.arange(2 * number, 2 * number + 2)
    more: dict[str, Any] = {"sample_ids": rows, "rows": rows, "seed": SEED, "step": step, "epoch": 0}
    asked: Any = kit._spec  # type: ignore[attr-defined]
    if asked.kind == "mlp":
        inputs = torch.randn(2, asked.inputs, generator=generator, dtype=torch.float64)
        targets = torch.randn(2, asked.outputs, generator=generator, dtype=torch.float64)
        if asked.task == "classification":
            targets = torch.randint(asked.outputs, (2,), generator=generator)
        valid = torch.tensor([True, number % 2 == 0])
        return Batch(inputs, targets, valid, None, processed=2, nonpadding=2, **more)
    vocabulary = getattr(asked, "vocabulary", None) or vocabulary_of(asked)[1]
    tokens_of = [torch.randint(vocabulary, (2, tokens), generator=generator) for _ in range(2)]
    valid = torch.arange(tokens).expand(2, -1) < tokens - number % 3
    documents = (torch.arange(tokens) >= tokens // 2).int().expand(2, -1).contiguous() if packed else None
    return Batch(*tokens_of, valid, documents, processed=2 * tokens, nonpadding=2 * tokens, **more)


def spread(kit: ModelKit, layout: LayoutSpec, meta: bool) -> tuple[LossModule, Parallel]:
    """The model in ranks, built on the meta device and filled, or whole and then cut."""
    if meta:
        module = LossModule(kit, kit.skeleton(torch.float64))  # type: ignore[attr-defined]
        parallel = parallelize(module, layout, CPU)
        fill_boxes(module, kit, SEED, CPU)  # type: ignore[arg-type]
        return module, parallel
    module = LossModule(kit, kit.build(SEED, torch.float64))
    return module, parallelize(module, layout, CPU)


def compare(
    model: Mapping[str, Any] | ModelKit,
    layout: Mapping[str, Any],
    micros: int = 2,
    steps: int = 2,
    tokens: int = 7,
    packed: bool = True,
    meta: bool = False,
    frozen: Sequence[str] = (),
) -> Seen:
    """Train in ranks and on one device; the gaps of losses, norms, gradients and parameters of this rank's boxes."""
    kit = make_kit(model) if isinstance(model, Mapping) else model
    kit = Freezing(kit, frozen) if frozen else kit
    asked = LayoutSpec(**layout)
    whole = kit.build(SEED, torch.float64)
    module, parallel = spread(kit, asked, meta)
    network = module.module
    here = Optimizer(dict(network.named_parameters()), ADAMW)
    there = Optimizer(dict(whole.named_parameters()), ADAMW)
    gaps = dict.fromkeys(("loss", "norm", "gradient", "parameter"), 0.0)
    without: set[str] = set()
    for step in range(steps):
        parts = [part(kit, n, step, tokens, packed) for n in range(micros * parallel.degree)]
        count = sum(batch.valid_count() for batch in parts)
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(micros):
            with parallel.microbatch(last=micro == micros - 1):
                loss, _ = parallel.module(parallel.own(parts[micro * parallel.degree + parallel.dp_rank]))
                (loss * (parallel.loss_factor / count)).backward()
            total += loss.detach() * parallel.counts
        parallel.finish()
        dist.all_reduce(total)
        expected = [kit.loss(whole, batch)[0] for batch in parts]
        (torch.stack(expected).sum() / count).backward()
        _note(gaps, "loss", total, torch.stack(expected).sum().detach())
        without |= _gradient_gaps(gaps, network, whole)
        norm = parallel.norm(list(network.parameters()), CPU)
        one = torch.stack([p.grad.norm() for p in whole.parameters() if p.grad is not None]).norm()
        _note(gaps, "norm", norm, one)
        for which, found in ((network, norm), (whole, one)):
            scale(list(which.parameters()), torch.clamp(CLIP / found, max=1.0))
        here.step(dict(network.named_parameters()), ADAMW.lr)
        there.step(dict(whole.named_parameters()), ADAMW.lr)
    largest = max(float(p.detach().abs().max()) for p in whole.parameters())
    for name, parameter in network.named_parameters():
        expected_box = boxed(whole.get_parameter(name).detach(), parameter)
        _note(gaps, "parameter", local(parameter), expected_box, 1e-3 * largest)
    held = sum(local(p).untyped_storage().nbytes() for p in network.parameters())
    cut = {n for n, p in network.named_parameters() if local(p).numel() < p.numel()}
    return Seen(gaps, frozenset(cut), held, tuple(sorted(without)))


def boxed(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `like`."""
    return whole[box_of(like).slices] if isinstance(like, DTensor) else whole


def _gradient_gaps(gaps: dict[str, float], network: nn.Module, whole: nn.Module) -> set[str]:
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    without = set()
    for name, parameter in network.named_parameters():
        expected = whole.get_parameter(name).grad
        if parameter.grad is None or expected is None:
            if parameter.grad is not expected:
                gaps["gradient"] = float("inf")
            without.add(name)
            continue
        assert local(parameter.grad).shape == local(parameter).shape, name
        _note(gaps, "gradient", local(parameter.grad), boxed(expected, parameter), 1e-3 * largest)
    return without


def _note(gaps: dict[str, float], kind: str, actual: Tensor, expected: Tensor, floor: float = 1e-9) -> None:
    if expected.numel():
        gap = float((actual - expected).abs().max()) / max(float(expected.abs().max()), floor)
        gaps[kind] = max(gaps[kind], gap) if gap == gap else float("inf")


@contextmanager
def changed(target: Any, name: str, value: Any) -> Iterator[None]:
    """`target.name` is `value` inside: a fault that is planted in this rank."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
