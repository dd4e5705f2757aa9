"""Models of transformers through the shipped checks: what is legal, a rehearsed step, every layout equal."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.plan.rehearsal import Rehearsal
from fourfold.spec.keys import toml_word
from fourfold.spec.layouts import layouts
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.train.rehearsal import Unreadable, rehearse
from fourfold.verify.equal import verify_equal
from fourfold.verify.every_layout import verify_every_layout, words
from fourfold.verify.measure import GRADIENT_TOLERANCE
from tests.models.hf_models import ARGS

# architecture -> how many layouts are legal on two ranks
ON_TWO = {"llama": 10, "qwen3": 10, "gemma3_text": 10, "gpt_neox": 10, "gpt2": 8, "phi3": 8, "mixtral": 8}


def spec_of(architecture: str, *sets: str) -> Spec:
    """hf-tiny, small, of another architecture."""
    args: dict[str, Any] = {**ARGS[architecture], "vocab_size": 256}
    small = ("data.sequence=32", "batch.global_batch=8", "run.validate_every=0")
    model = (f"model.architecture={architecture}", f"model.args={toml_word(args)}")
    return load_spec("hf-tiny", (*model, *small, *sets)).spec


@pytest.mark.parametrize(("architecture", "count"), ON_TWO.items())
def test_layouts_that_are_legal(architecture, count):
    found = layouts(spec_of(architecture), 2)
    assert len(found.legal) == count
    assert all(layout.pp == layout.ep == 1 for layout in found.legal)
    refused = {refused.rule for refused in found.refused}
    assert {"stages of transformers", "experts of transformers"} <= refused
    assert ("tp by the model's own plan" in refused) == (count == 8)


def test_key_value_heads_that_tp_does_not_divide_are_refused_before_anything_starts():
    """Report B064: 4 key/value heads on 8 ranks died in a reshape; here each of them is whole on two ranks."""
    args = "model.args={hidden_size=96,num_attention_heads=24,num_key_value_heads=%d,intermediate_size=96,"
    args += "num_hidden_layers=1,vocab_size=256}"
    of_four = layouts(load_spec("hf-tiny", (args % 4,)).spec, 8)
    assert "tp 8" in {words(layout) for layout in of_four.legal}
    of_three = layouts(load_spec("hf-tiny", (args % 3,)).spec, 8)
    assert all(layout.tp == 1 for layout in of_three.legal)


def test_a_step_is_rehearsed():
    seen = rehearse(settle(spec_of("qwen3", "layout.tp=2", "layout.sp=true"), 2))
    assert isinstance(seen, Rehearsal)
    assert {each.over for each in seen.traffic} == {"tp"}


@pytest.mark.long
def test_of_experts_only_what_is_held_is_known():
    mixture = rehearse(settle(spec_of("mixtral", "layout.dp_shard=2", "layout.zero=3"), 2))
    assert isinstance(mixture, Unreadable) and mixture.parameters > 0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_neox", "gpt2", "mixtral"])
def test_every_layout_of_two_ranks(tmp_path, architecture):
    document = verify_every_layout(spec_of(architecture), 2, out=tmp_path)
    assert document["verdict"] == "pass", document["first_deviation"]
    assert document["count"] >= ON_TWO[architecture]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_of_the_ready_spec(tmp_path, world):
    document = verify_every_layout(load_spec("hf-tiny").spec, world, out=tmp_path)
    count = document["count"]
    print(f"\nhf-tiny on {world} ranks: {count} layouts, worst {document['worst_relative']:.2e}")
    assert document["verdict"] == "pass", document["first_deviation"]
    assert count >= 10


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_context_parallel_in_windows_with_tp(tmp_path, method):
    layout = ("layout.cp=2", f"layout.cp_method={method}", "layout.tp=2", "layout.sp=true")
    document = verify_equal(spec_of("gemma3_text", *layout), 4, steps=3, out=tmp_path)
    assert document["verdict"] == "pass", document["first_deviation"]
    assert document["worst_relative"] <= GRADIENT_TOLERANCE
