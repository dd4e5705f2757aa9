"""From a Spec to its kit."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.models.decoder import DecoderKit
from fourfold.models.imported import ImportedKit
from fourfold.models.mlp import MlpKit
from fourfold.models.registry import kit_for
from fourfold.spec.errors import SpecError
from fourfold.spec.spec import Spec

DECODER = {"kind": "decoder", "layers": 1, "width": 8, "heads": 2}


def spec(model: dict[str, Any], **more: Any) -> Spec:
    return Spec.model_validate({"model": model, **more})


@pytest.mark.parametrize(
    ("model", "kit"),
    [
        (DECODER, DecoderKit),
        ({"kind": "mlp"}, MlpKit),
        ({"kind": "import", "target": "examples.own_model:factory"}, ImportedKit),
    ],
)
def test_each_kind_has_its_kit(model: dict[str, Any], kit: type) -> None:
    assert isinstance(kit_for(spec(model)), kit)


@pytest.mark.parametrize("across", [True, False])
def test_the_data_say_whether_documents_see_each_other(across: bool) -> None:
    kit = kit_for(spec(DECODER, data={"kind": "stdlib", "attend_across_documents": across}))
    assert isinstance(kit, DecoderKit)
    assert kit._attend_across == across
    synthetic = kit_for(spec(DECODER, data={"kind": "synthetic"}))
    assert isinstance(synthetic, DecoderKit)


def test_what_is_not_built_is_refused_all_at_once() -> None:
    model = {
        **DECODER,
        "mla": {"kv_rank": 4, "nope_head_width": 4, "rope_head_width": 4, "value_head_width": 4},
        "mtp_layers": 1,
    }
    with pytest.raises(SpecError) as error:
        kit_for(spec(model))
    assert [problem.asked for problem in error.value.problems] == [
        "model.mla",
        "model.mtp_layers",
    ]
    assert all(problem.instead for problem in error.value.problems)
