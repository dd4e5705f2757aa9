"""Products of four and five axes on sixteen ranks, against one device in fp64, with the adversarial model and batch."""

from __future__ import annotations

import pytest

from fourfold.spec.load import load_spec
from fourfold.spec.training import LayoutSpec
from fourfold.verify.every_layout import verify_every_layout
from fourfold.verify.measure import GRADIENT_TOLERANCE

FOUR = {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2, "sp": True}
DENSE = [
    FOUR | {"pp": 2, "zero": 3},
    FOUR | {"pp": 2, "zero": 1, "pp_schedule": "zbv", "cp_method": "ring"},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2, "zero": 2, "pp_schedule": "interleaved-1f1b"},
    FOUR | {"dp_replicate": 2, "zero": 3, "recompute": "full", "cp_method": "ulysses"},
]
EXPERTS = [
    FOUR | {"dp_replicate": 2, "zero": 3, "ep": 4},  # five axes
    FOUR | {"dp_replicate": 2, "zero": 1, "ep": 2},
    FOUR | {"pp": 2, "zero": 3, "ep": 4},  # five axes, with stages
    FOUR | {"pp": 2, "zero": 1, "ep": 2, "pp_schedule": "zbv", "cp_method": "ring"},
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "layouts"), [("tiny", DENSE), ("moe-tiny", EXPERTS)])
def test_products_of_many_axes_are_equal_to_one_device(tmp_path, name, layouts):
    spec = load_spec(name).spec
    asked = [LayoutSpec.model_validate(layout) for layout in layouts]
    document = verify_every_layout(spec, 16, steps=2, only=asked, out=tmp_path)
    assert not {one["words"]: one["failed"] for one in document["layouts"] if one["failed"]}
    assert document["count"] == len(layouts) and document["worst_relative"] <= GRADIENT_TOLERANCE
