"""Operations whose result would have no length without values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from fourfold.train.as_real import AsReal


def test_masks_pick_all_forward_and_backward():
    with FakeTensorMode(), AsReal():
        x = torch.zeros(3, 4, 5, requires_grad=True)
        mask = torch.ones(3, 4, dtype=torch.bool)
        picked = x[mask]
        assert picked.shape == (12, 5)
        assert x[:, mask[0]].shape == (3, 4, 5)
        assert torch.masked_select(x, mask.unsqueeze(-1)).shape == (60,)
        assert mask.nonzero().shape == (12, 2)
        picked.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        x.detach()[mask] = 1.0


def test_indices_that_are_numbers_are_left_alone():
    with AsReal():
        x = torch.arange(6)
        assert x[torch.tensor([1, 1, 5])].tolist() == [1, 1, 5]


def test_without_it_such_a_mask_has_no_shape():
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        torch.zeros(3)[torch.ones(3, dtype=torch.bool)]
