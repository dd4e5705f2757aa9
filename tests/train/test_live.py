"""Bytes alive, after every operation."""

from __future__ import annotations

import torch

from fourfold.train.live import LiveBytes


def test_a_storage_counts_once_and_until_it_is_gone():
    with LiveBytes() as live:
        x = torch.zeros(10)
        view = x[2:5].view(3, 1)
        assert live.now == 40
        y = x + 1
        assert (live.now, live.most) == (80, 80)
        del x
        assert live.now == 80, "its view is there"
        del view
        assert (live.now, live.most) == (40, 80)
        del y
        assert live.now == 0


def test_a_storage_that_is_emptied_takes_nothing_until_it_is_filled():
    resize = torch.UntypedStorage.resize_
    with LiveBytes() as live:
        x = torch.zeros(10)
        x.untyped_storage().resize_(0)
        assert live.now == 0
        x.untyped_storage().resize_(20)
        assert live.now == 20
    assert torch.UntypedStorage.resize_ is resize


def test_what_lies_elsewhere_takes_nothing():
    with LiveBytes() as live:
        room = torch.zeros(10)
        live.elsewhere(room)
        part = room[:5]
        assert (live.now, len(part)) == (0, 5)


def test_the_operation_of_the_peak_is_found_again():
    seen = []

    def work():
        x = torch.zeros(10)
        y = torch.zeros(100) + 1
        del y
        return x + 1

    with LiveBytes() as live:
        live.begin()
        kept = work()
        del kept
        at, most = live.at, live.most
        live.begin(at, lambda: seen.append(live.now))
        kept = work()
    assert most == 840
    assert seen == [most]
    assert len(kept) == 10


def test_backward_is_watched_too():
    with LiveBytes() as live:
        x = torch.ones(1000, requires_grad=True)
        y = (x.exp() * 2).sum()
        live.begin()
        y.backward()
        assert live.most >= live.now
        del y
        assert live.now == 8000, "the parameter and its gradient"
