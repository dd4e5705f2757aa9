from __future__ import annotations

import numpy as np
import pytest
import torch

from fourfold.data.source import open_sources
from fourfold.models.initial import initial_values
from fourfold.models.protocol import BoxedKit, parameter_rules
from fourfold.models.registry import kit_for
from fourfold.spec.errors import SpecError
from fourfold.spec.settle import settle
from fourfold.train.setup import batch_schedule
from fourfold.verify.adversarial import adversarial, chosen
from fourfold.verify.adversary import sometimes_used, uses
from fourfold.verify.reference import joined_rows, whole_batch
from fourfold.verify.torn import TornSource, torn
from fourfold.verify.uneven import Masking


@pytest.fixture(scope="module")
def adverse(small):
    """The small Spec, adversarial, with its data and schedule, for three steps."""
    spec, changes = adversarial(settle(small("model.tied=false", "model.dropout=0.0"), 2))
    source = Masking(0, torn=True).over(open_sources(spec).train)
    schedule = batch_schedule(spec, len(source), 2)
    spec, told = chosen(spec, source, schedule, 3)
    return spec, (*changes, told), source, schedule


def test_the_model_has_every_awkward_part_and_says_so(adverse):
    spec, changes, _, _ = adverse
    kit = kit_for(spec)
    assert isinstance(kit, BoxedKit), "an imported kit that can be made in parts is one"
    model = kit.build(spec.run.seed, torch.float64)
    assert model.head.weight is model.embedding.weight
    assert model.blocks[0].attention.query.bias is not None and model.dropout == 0.1
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["blocks.0.ffn.up.weight"]
    assert sometimes_used(spec) in dict(model.named_parameters())
    text = " ".join(changes)
    for part in (
        "model.tied false -> true",
        "model.dropout 0.0 -> 0.1",
        "frozen",
        "two documents",
        "only those rows",
    ):
        assert part in text


def test_in_parts_it_is_the_same_model(adverse):
    spec, *_ = adverse
    kit = kit_for(spec)
    whole, bare = kit.build(3, torch.float64), kit.skeleton(torch.float64)
    assert all(p.is_meta for p in bare.parameters())
    held = dict(whole.named_parameters())
    assert {n: (p.shape, p.requires_grad) for n, p in bare.named_parameters()} == {
        n: (p.shape, p.requires_grad) for n, p in held.items()
    }
    for name, parameter in held.items():
        assert torch.equal(initial_values(3, name, kit.start(name), parameter.shape), parameter.detach())
    rules = parameter_rules(kit, bare)
    assert rules["blocks.2.up.weight"] == "column" and rules["blocks.2.down.weight"] == "row"


def test_a_part_is_used_in_one_step_and_by_no_row_in_a_later_one(adverse):
    spec, _, source, schedule = adverse
    kit = kit_for(spec)
    model = kit.build(0, torch.float64)
    part = model.get_parameter(sometimes_used(spec))
    used = []
    for step in range(3):
        rows = whole_batch(spec, source, schedule, step)
        model.zero_grad(set_to_none=True)
        total, count = kit.loss(model, joined_rows(rows))
        total.backward()
        used.append(part.grad is not None)
        assert int(count) == sum(row.valid_count() for row in rows)
    assert True in used and False in used[used.index(True) :], used


def test_which_rows_use_it_is_a_property_of_the_sample():
    inputs = torch.tensor([[1, 2], [3, 4], [3, 4]])
    valid = torch.tensor([[True, False], [True, True], [False, False]])
    assert uses(inputs, valid, 7, 0).tolist() == [False, True, False], "a row without a target never does"
    assert uses(inputs, valid, 1, 0).tolist() == [True, True, False]


def test_every_row_has_two_documents_and_some_have_padding(small):
    source = open_sources(small()).train
    torn_ones = TornSource(source)
    padded = 0
    for index in range(40):
        plain, sample = source.sample(index), torn_ones.sample(index)
        filled = sample.nonpadding
        assert len(set(sample.documents[:filled].tolist())) >= 2
        assert (np.diff(sample.documents) >= 0).all()
        inside = sample.documents[1:] == sample.documents[:-1]
        assert not sample.valid[:-1][~inside].any(), "no document predicts the next one's first token"
        assert not sample.valid[filled:].any() and not sample.inputs[filled:].any()
        assert (sample.inputs[:filled] == plain.inputs[:filled]).all()
        padded += filled < len(sample.inputs)
        again = torn(plain, index)
        assert (again.valid == sample.valid).all() and (again.documents == sample.documents).all()
    assert 8 < padded < 38
    assert len(torn_ones) == len(source) and torn_ones.vocabulary == source.vocabulary


def test_vectors_are_left_as_they_are(small):
    mlp = ('model.kind="mlp"', 'data.kind="synthetic"', "data.samples=64")
    spec = settle(small(*mlp), 2)
    sample = open_sources(spec).train.sample(0)
    assert torn(sample, 0) is sample
    with pytest.raises(SpecError, match="adversarial"):
        adversarial(spec)


def test_one_microbatch_of_one_row_becomes_two(small):
    spec, changes = adversarial(settle(small("batch.global_batch=2", "batch.micro_batch=1"), 2))
    assert (spec.batch.global_batch, spec.batch.accumulation) == (4, 2)
    assert any("batch.global_batch 2 -> 4" in change for change in changes)
