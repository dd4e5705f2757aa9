"""The decoder computes what its mathematics says, whatever the packing, the split or the dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.data.batch import Batch
from fourfold.models.decoder import Decoder, DecoderKit
from fourfold.models.draws import draw_key
from fourfold.models.protocol import LossModule, parameter_rules
from fourfold.plan.parameters import count_parameters
from fourfold.spec.errors import SpecError
from fourfold.spec.model import DecoderSpec

Make = Callable[..., Batch]
Take = Callable[..., Batch]
Build = Callable[..., Decoder]

EVERY_PART = DecoderSpec(
    layers=2, width=32, heads=4, kv_heads=2, vocabulary=61, tied=True, biases=True, dropout=0.1
)
GPT2 = DecoderSpec(
    layers=2,
    width=32,
    heads=4,
    vocabulary=61,
    tied=True,
    biases=True,
    norm="layernorm",
    positions="learned",
    max_sequence=64,
    ffn="gelu",
)
LLAMA = DecoderSpec(layers=2, width=32, heads=4, kv_heads=1, head_width=16, ffn_width=48, vocabulary=61)
SPECS = {"every part": EVERY_PART, "gpt2": GPT2, "llama": LLAMA}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def changed(spec: DecoderSpec, **values: Any) -> DecoderSpec:
    return spec.model_copy(update=values)


def gradients(spec: DecoderSpec, module: nn.Module, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the batches' loss sums, and the gradient of it."""
    kit = DecoderKit(spec)
    module.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        part, _ = kit.loss(module, batch)
        part.backward()
        total += part.detach()
    return total, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], bound: float = 1e-12) -> None:
    """By the measure of the house, for each tensor."""
    assert one.keys() == other.keys()
    largest = max(value.abs().max().item() for value in one.values())
    for name, value in one.items():
        scale = max(value.abs().max().item(), 1e-3 * largest)
        assert (value - other[name]).abs().max().item() / scale <= bound, name


@each_spec
def test_a_packed_document_computes_what_it_computes_alone(
    spec: DecoderSpec, tokens: Make, built: Build
) -> None:
    module = built(spec)
    batch = tokens([[5, 11, 1, 7], [24]])
    packed = module(batch.inputs, batch.documents)
    start = 0
    for length in (5, 11, 1, 7):
        alone = module(batch.inputs[:1, start : start + length])
        torch.testing.assert_close(packed[:1, start : start + length], alone, rtol=0, atol=1e-12)
        start += length
    torch.testing.assert_close(packed[1:], module(batch.inputs[1:]), rtol=0, atol=1e-12)


@each_spec
def test_documents_that_may_attend_across_do(spec: DecoderSpec, tokens: Make, built: Build) -> None:
    spec = changed(spec, dropout=0.0)
    module = built(spec)
    batch = tokens([[12, 12]])
    apart, _ = DecoderKit(spec).loss(module, batch)
    across, _ = DecoderKit(spec, attend_across=True).loss(module, batch)
    whole, _ = DecoderKit(spec).loss(module, replace(batch, documents=torch.zeros_like(batch.documents)))
    assert (apart - across).abs() > 1e-3
    torch.testing.assert_close(across, whole, rtol=1e-13, atol=0)


@each_spec
def test_a_later_token_changes_no_earlier_logit(spec: DecoderSpec, tokens: Make, built: Build) -> None:
    module = built(spec)
    batch = tokens([[9, 15]])
    for documents in (None, batch.documents):
        before = module(batch.inputs, documents)
        for place in (3, 12, 23):
            inputs = batch.inputs.clone()
            inputs[0, place] = (inputs[0, place] + 1) % spec.vocabulary
            after = module(inputs, documents)
            assert torch.equal(before[:, :place], after[:, :place])
            assert not torch.equal(before[:, place], after[:, place])


@each_spec
@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3, 4, 5]], [[5, 2], [0, 4, 3], [1]], [[3], [1], [5], [0], [2], [4]]]
)
def test_microbatches_in_any_split_and_order_sum_to_the_same(
    spec: DecoderSpec, split: list[list[int]], tokens: Make, rows_of: Take, built: Build
) -> None:
    """With dropout on and unequal numbers of valid targets."""
    spec = changed(spec, dropout=0.2)
    module = built(spec)
    batch = tokens([[24], [1, 23], [3, 9, 12], [24], [1] * 24, [8, 8, 8]])
    whole_sum, whole = gradients(spec, module, [batch])
    parts_sum, parts = gradients(spec, module, [rows_of(batch, rows) for rows in split])
    torch.testing.assert_close(parts_sum, whole_sum, rtol=1e-13, atol=0)
    assert_same(whole, parts)


def test_dropout_is_drawn_anew_each_step_and_only_in_training(tokens: Make, built: Build) -> None:
    kit, module, batch = DecoderKit(EVERY_PART), built(EVERY_PART), tokens([[24], [24]])
    first, _ = kit.loss(module, batch)
    again, _ = kit.loss(module, batch)
    later, _ = kit.loss(module, replace(batch, step=batch.step + 1))
    moved, _ = kit.loss(module, replace(batch, rows=batch.rows + 1))
    module.eval()
    still, _ = kit.loss(module, batch)
    without, _ = DecoderKit(changed(EVERY_PART, dropout=0.0)).loss(module, batch)
    assert first == again
    assert len({value.item() for value in (first, later, moved, still)}) == 4
    assert still == without


def test_dropout_acts_in_each_of_its_places_with_its_own_name(
    tokens: Make, monkeypatch: Any, built: Build
) -> None:
    seen: list[int] = []

    def note(self: object, x: Tensor, p: float, name: str | Tensor) -> Tensor:  # noqa: ARG001
        assert p == EVERY_PART.dropout
        seen.append(int(draw_key(name) if isinstance(name, str) else name))
        return x

    monkeypatch.setattr("fourfold.models.draws.Draws.dropout", note)
    module = built(EVERY_PART)
    DecoderKit(EVERY_PART).loss(module, tokens([[24]]))
    places = [f"blocks.{i}.{part}" for i in range(2) for part in ("attention.output", "ffn.down")]
    assert seen == [int(draw_key(name)) for name in ("embedding", *places)]
    assert set(places) <= {name for name, _ in module.named_modules()}


def test_what_is_kept_from_a_forward_without_gradients_serves_training(tokens: Make, built: Build) -> None:
    kit, module, batch = DecoderKit(EVERY_PART), built(EVERY_PART), tokens([[24]])
    with torch.inference_mode():
        kit.loss(module, batch)
    kit.loss(module, batch)[0].backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_tensor(tied: bool, tokens: Make) -> None:
    spec = changed(EVERY_PART, tied=tied)
    for dtype in (torch.float32, torch.float64):
        module = DecoderKit(spec).build(0, dtype)
        assert (module.head.weight is module.embedding.weight) == tied
        assert ("head.weight" in dict(module.named_parameters())) != tied
    DecoderKit(spec).loss(module, tokens([[24]]))[0].backward()
    assert module.embedding.weight.grad is not None


@each_spec
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_its_parameters(spec: DecoderSpec, tied: bool) -> None:
    for each in (spec, changed(spec, tied=tied), changed(spec, biases=not spec.biases)):
        module = DecoderKit(each).build(0, torch.float32)
        assert sum(p.numel() for p in module.parameters()) == count_parameters(each)


@each_spec
@pytest.mark.parametrize("tied", [True, False])
def test_each_parameter_has_exactly_one_sharding_rule(spec: DecoderSpec, tied: bool) -> None:
    kit = DecoderKit(changed(spec, tied=tied))
    module = kit.build(0, torch.float32)
    rules = parameter_rules(kit, module)
    assert rules.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        if rules[name] == "row":
            assert parameter.dim() == 2
        if parameter.dim() == 1 and "norm" in name:
            assert rules[name] == "replicate"
    assert kit.blocks(module) == ("blocks.0", "blocks.1")


def test_initial_values_are_functions_of_seed_and_name() -> None:
    spec = changed(LLAMA, width=128, ffn_width=256, vocabulary=512)
    state = torch.random.get_rng_state()
    narrow = DecoderKit(spec).build(5, torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state), "building advanced the global generator"
    wide = dict(DecoderKit(spec).build(5, torch.float64).named_parameters())
    other = dict(DecoderKit(spec).build(6, torch.float32).named_parameters())
    for name, value in narrow.named_parameters():
        assert torch.equal(value, wide[name].float()), name
        if value.dim() == 1:
            assert torch.equal(value, torch.ones_like(value)), name
            continue
        assert not torch.equal(value, other[name]), name
        onto_stream = name.endswith(("attention.output.weight", "ffn.down.weight"))
        std = 0.02 / math.sqrt(2 * spec.layers) if onto_stream else 0.02
        spread = 5 / math.sqrt(2 * value.numel())
        assert value.std().item() == pytest.approx(std, rel=spread), name
    biased = DecoderKit(GPT2).build(0, torch.float32)
    assert all(not p.any() for name, p in biased.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (GPT2, {"norm_eps": 0.5}),
        (LLAMA, {"norm_eps": 0.5}),
        (LLAMA, {"rope_theta": 50.0}),
        (LLAMA, {"init_std": 0.1}),
    ],
)
def test_every_number_of_the_spec_acts(spec: DecoderSpec, values: dict[str, float], tokens: Make) -> None:
    batch = tokens([[24], [24]])

    def loss(of: DecoderSpec) -> float:
        kit = DecoderKit(of)
        return float(kit.loss(kit.build(0, torch.float64).eval(), batch)[0].detach())

    assert loss(changed(spec, **values)) != loss(spec)


def test_a_deeper_model_begins_with_the_same_embedding() -> None:
    two = DecoderKit(LLAMA).build(0, torch.float32)
    three = DecoderKit(changed(LLAMA, layers=3)).build(0, torch.float32)
    assert torch.equal(two.embedding.weight, three.embedding.weight)
    assert torch.equal(two.blocks[1].ffn.up.weight, three.blocks[1].ffn.up.weight)


@each_spec
def test_no_valid_target_gives_zero_and_zero_gradients(spec: DecoderSpec, tokens: Make, built: Build) -> None:
    spec = changed(spec, dropout=0.1)
    module, batch = built(spec, torch.float32), tokens([[24], [24]])
    batch = replace(batch, valid=torch.zeros_like(batch.valid), targets=torch.full_like(batch.targets, -7))
    total, count = DecoderKit(spec).loss(module, batch)
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@each_spec
def test_padding_changes_nothing_and_is_never_nan(spec: DecoderSpec, tokens: Make, built: Build) -> None:
    """Padding at the end of a row, and a filler row that is nothing else, each a document of its own."""
    spec = changed(spec, dropout=0.0)
    module, batch = built(spec), tokens([[7, 9, 8], [24]])
    padding = torch.zeros(2, 24, dtype=torch.bool)
    padding[0, 16:] = padding[1] = True
    batch = replace(batch, valid=batch.valid & ~padding, inputs=batch.inputs.masked_fill(padding, 0))
    _, padded = gradients(spec, module, [batch])
    other = replace(batch, inputs=batch.inputs.masked_fill(padding, 1))
    _, changed_padding = gradients(spec, module, [other])
    assert all(value.isfinite().all() for value in padded.values())
    assert_same(padded, changed_padding)


@each_spec
def test_bf16_autocast_runs_near_fp32(spec: DecoderSpec, tokens: Make) -> None:
    module, batch = DecoderKit(spec).build(0, torch.float32), tokens([[10, 14], [24]])
    exact, _ = DecoderKit(spec).loss(module, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, count = DecoderKit(spec).loss(module, batch)
    total.backward()
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=2e-2)
    assert count == batch.valid.sum()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_is_a_sum_in_the_models_width(dtype: torch.dtype, tokens: Make) -> None:
    kit, batch = DecoderKit(LLAMA), tokens([[24], [24]])
    total, count = LossModule(kit, kit.build(0, dtype))(batch)
    assert (total.dtype, total.shape) == (dtype, ())
    assert (count.dtype, count.item()) == (torch.int64, 46)
    assert total.item() == pytest.approx(46 * math.log(61), rel=0.01)


@each_spec
def test_forward_never_reads_a_value_back(spec: DecoderSpec) -> None:
    """On the meta device a value that is read back raises: so no forward waits for its device."""
    module = Decoder(spec).to("meta")
    ids = torch.zeros(2, 24, dtype=torch.int64, device="meta")
    batch = Batch(
        ids,
        ids,
        ids.bool(),
        ids.int(),
        ids[:, 0],
        ids[:, 0],
        seed=0,
        step=0,
        epoch=0,
        processed=48,
        nonpadding=48,
    )
    total, count = DecoderKit(spec).loss(module, batch)
    total.backward()
    assert total.is_meta
    assert count.is_meta


def test_learned_positions_need_a_table_and_stay_inside_it(tokens: Make) -> None:
    with pytest.raises(SpecError, match="max_sequence"):
        DecoderKit(changed(GPT2, max_sequence=None)).build(0, torch.float32)
    module = DecoderKit(changed(GPT2, max_sequence=23)).build(0, torch.float32)
    with pytest.raises(IndexError):
        module(tokens([[24]]).inputs)


@each_spec
def test_one_token_and_one_row(spec: DecoderSpec, tokens: Make, built: Build) -> None:
    module, batch = built(spec), tokens([[1]])
    assert module(batch.inputs, batch.documents).shape == (1, 1, 61)


def test_loss_falls_on_a_batch_seen_again_and_again(tokens: Make) -> None:
    kit, batch = DecoderKit(EVERY_PART), tokens([[24], [12, 12]])
    module = kit.build(0, torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        total, count = kit.loss(module, replace(batch, step=step))
        losses.append((total / count).item())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0]
