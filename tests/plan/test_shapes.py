"""Names, shapes, blocks and cuts are those of the built model and of its sharding table."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import TypeAdapter

from fourfold.models.decoder import DecoderKit
from fourfold.models.mlp import MlpKit
from fourfold.models.protocol import BoxedKit, Heads, Rule, StagedKit, parameter_rules
from fourfold.parallel.table import CUT_DIMS
from fourfold.plan.parameters import count_parameters
from fourfold.plan.shapes import Shape, parameter_shapes
from fourfold.spec.model import DecoderSpec, ImportSpec, MlpSpec, ModelSpec

DECODER = {"kind": "decoder", "layers": 3, "width": 24, "heads": 4, "kv_heads": 2, "vocabulary": 33}
MODELS = [
    DECODER,
    DECODER | {"tied": True, "biases": True},
    DECODER | {"norm": "layernorm", "positions": "learned", "max_sequence": 10, "ffn": "gelu"},
    DECODER | {"kv_heads": None, "head_width": 10, "ffn_width": 7},
    DECODER
    | {"moe": {"experts": 4, "top_k": 2, "shared_experts": 2, "first_dense_layers": 1, "expert_width": 5}},
    DECODER | {"moe": {"experts": 3, "top_k": 1}, "biases": True, "ffn": "gelu"},
    {"kind": "mlp", "layers": 3},
    {"kind": "mlp", "layers": 2, "biases": False, "inputs": 5, "outputs": 4},
    {"kind": "mlp", "layers": 1},
]


def cut_of(rule: Rule, ndim: int) -> tuple[int | None, int | None]:
    """The dim that a rule cuts, and in how many parts it is never cut."""
    if isinstance(rule, Heads):
        return 0, rule.units
    cut = CUT_DIMS[rule]
    return (None if cut is not None and cut >= ndim else cut), None


@pytest.mark.parametrize("asked", MODELS)
def test_shapes_are_those_of_the_built_model(asked):
    spec = TypeAdapter[ModelSpec](ModelSpec).validate_python(asked)
    assert isinstance(spec, DecoderSpec | MlpSpec)
    kit: BoxedKit = DecoderKit(spec) if isinstance(spec, DecoderSpec) else MlpKit(spec)
    network = kit.skeleton(torch.float32)
    assert isinstance(kit, StagedKit)
    rules, blocks, (_, after) = parameter_rules(kit, network), kit.blocks(network), kit.ends(network)
    expected = {}
    for name, parameter in network.named_parameters():
        cut, parts = cut_of(rules[name], parameter.ndim)
        block = next((at for at, prefix in enumerate(blocks) if name.startswith(f"{prefix}.")), None)
        behind = any(name.startswith(f"{end}.") for end in after)
        each = getattr(network.get_submodule(name.rpartition(".")[0]), "each", 1)
        expected[name] = Shape(tuple(parameter.shape), block, cut, parts, ".experts." in name, behind, each)
    found = parameter_shapes(spec)
    assert found is not None and dict(found) == expected
    assert list(found) == list(expected)
    assert sum(math.prod(shape.size) for shape in found.values()) == count_parameters(spec)


def test_what_is_not_known_is_none():
    mla = {"kv_rank": 4, "nope_head_width": 4, "rope_head_width": 4, "value_head_width": 4}
    assert parameter_shapes(DecoderSpec.model_validate(DECODER | {"mla": mla})) is None
    assert parameter_shapes(DecoderSpec.model_validate(DECODER | {"mtp_layers": 1})) is None
    assert parameter_shapes(ImportSpec(kind="import", target="a:b")) is None
