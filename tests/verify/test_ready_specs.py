"""The long matrix: the ready Specs, whole, through the shipped checks."""

from __future__ import annotations

import pytest

from fourfold.spec.load import load_spec
from fourfold.verify.coverage import verify_coverage
from fourfold.verify.equal import verify_equal
from fourfold.verify.measure import GRADIENT_TOLERANCE

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("name", "world", "steps"),
    [
        ("tiny", 2, 5),
        ("tiny", 3, 5),
        ("tiny", 4, 5),
        ("tiny", 6, 5),
        ("tiny", 8, 5),
        ("small", 2, 2),
        ("small", 4, 2),
    ],
)
def test_equal_to_one_device(tmp_path, name, world, steps):
    document = verify_equal(load_spec(name).spec, world, steps=steps, out=tmp_path)
    print(f"\n{name} on {world} ranks: worst {document['worst_relative']:.2e}")
    assert document["verdict"] == "pass", document["first_deviation"]
    assert document["worst_relative"] <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_sample_once(tmp_path, world):
    document = verify_coverage(load_spec("tiny").spec, world, out=tmp_path)
    assert document["verdict"] == "pass"
    assert (document["duplicates"], document["missing"]) == (0, 0)
