from __future__ import annotations

import random

import numpy as np
import torch

from fourfold.train.streams import restore_streams, seed_streams, streams_of


def draw() -> tuple[object, ...]:
    return (
        torch.rand(3).tolist(),
        np.random.rand(3).tolist(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
    )


def test_streams_go_on_where_they_were():
    seed_streams(3, 0)
    draw()  # leaves numpy and python with half of a pair of normals
    held = {name: tensor.clone() for name, tensor in streams_of(5).items()}
    after = draw()
    assert draw() != after
    restore_streams(5, held)
    assert draw() == after
    assert all(name.startswith("rank5.") for name in held)


def test_streams_repeat_and_differ_between_ranks_and_seeds():
    drawn = []
    for seed, rank in ((0, 0), (0, 0), (0, 1), (1, 0)):
        seed_streams(seed, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert len({str(one) for one in drawn}) == 3
