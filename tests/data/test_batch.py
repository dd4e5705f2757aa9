from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from fourfold.data.batch import Batch


def batch(floats=False):
    inputs = torch.arange(6, dtype=torch.float32 if floats else torch.int64).reshape(2, 3)
    one = torch.tensor([4, 5])
    valid = torch.tensor([[True, True, False], [True, False, False]])
    return Batch(inputs, inputs, valid, None, one, one, 1, 2, 0, 6, 5)


def test_the_count_is_of_valid_targets():
    assert batch().valid_count() == 3


def test_on_the_cpu_nothing_is_copied_but_what_is_cast():
    held = batch(floats=True)
    moved = held.to(torch.device("cpu"), torch.float64)
    assert moved.inputs.dtype is torch.float64 and torch.equal(moved.inputs.float(), held.inputs)
    assert moved.valid is held.valid and moved.sample_ids is held.sample_ids and moved.documents is None
    assert batch().to(torch.device("cpu"), torch.float64).inputs.dtype is torch.int64


def test_to_a_cuda_device_every_copy_is_from_pinned_memory_and_nothing_waits_for_it(monkeypatch):
    pinned, sent = [], []
    with FakeTensorMode():
        held = batch(floats=True)
        to = torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda value: pinned.append(id(value)) or value)
        monkeypatch.setattr(
            torch.Tensor, "to", lambda value, **more: sent.append((id(value), more)) or to(value, "cpu")
        )
        held.to(torch.device("cuda", 0))
    every = [id(one) for one in (held.inputs, held.targets, held.valid, held.sample_ids, held.rows)]
    assert pinned == every and [at for at, _ in sent] == every
    assert all(more["non_blocking"] and more["device"] == torch.device("cuda", 0) for _, more in sent)
