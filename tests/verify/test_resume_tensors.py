from __future__ import annotations

import pytest
import torch

from fourfold.checkpoint.save import SaveFacts, save
from fourfold.verify.resume_tensors import StoredTensors, difference, same_bits


def test_what_was_saved_is_read_whole_without_the_loader(tmp_path):
    held = {
        "model.weight": torch.arange(6.0).reshape(2, 3),
        "model.count": torch.tensor(7),
        "rank0.torch": torch.arange(5, dtype=torch.uint8),
        "model.half": torch.ones(3, dtype=torch.bfloat16),
        "model.none": torch.empty(0, 2),
    }
    facts = SaveFacts(step=3, position=24, layout={"pp": 1}, spec_hash="0" * 32, data_hash="d")
    stored = StoredTensors(save(held, {"probe_loss": "0x1.8p+1"}, tmp_path, facts))
    assert stored.names == sorted(held)
    assert all(same_bits(stored.tensor(name), value) for name, value in held.items())
    assert (stored.manifest["step"], stored.manifest["position"]) == (3, 24)
    assert stored.probe_loss == "0x1.8p+1"


def test_bits_are_more_than_values():
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.tensor(0.0), torch.tensor(0.0, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.zeros(3, 2).T, torch.zeros(2, 3))
    assert same_bits(torch.empty(0), torch.empty(0))


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            torch.zeros(2, 3),
            torch.tensor([[0.0, 0, 0], [0, 0.5, 1]]),
            ("[1, 1]", "0.0", "0.5", "2 of 6 elements differ"),
        ),
        (torch.tensor(2.0), torch.tensor(0.0), ("", "2.0", "0.0", "")),
        (torch.tensor([False]), torch.tensor([True]), ("[0]", "False", "True", "")),
        (torch.zeros(2), torch.zeros(3), ("", "torch.float32 (2,)", "torch.float32 (3,)", "")),
    ],
)
def test_the_first_difference_is_told(one, other, told):
    assert difference(one, other) == told
