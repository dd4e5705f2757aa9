"""Parameters of both ends of a pipeline, in steps where only one end uses them."""

from __future__ import annotations

import torch
from torch import nn

from fourfold.parallel.tied import Tied
from tests.parallel import pipeline_jobs


def test_an_end_without_a_gradient_takes_that_of_the_other_rank(ranks):
    """The last rank waited for a sum in which the first took no part."""
    assert ranks(2).run(pipeline_jobs.summed_of_one_end, True) == [3.0, 3.0]
    assert ranks(2).run(pipeline_jobs.summed_of_one_end, False) == [None, None]


def test_an_end_without_a_gradient_takes_that_of_the_other_stage_here():
    """It was lost: the tied weight was not updated."""
    first, last = (nn.ModuleDict({"embedding": nn.Linear(2, 2, bias=False)}) for _ in range(2))
    last.get_parameter("embedding.weight").grad = torch.full((2, 2), 3.0)
    Tied(["embedding.weight"], first, last, None, True, may_be_unused=True).sum()
    gradient = first.get_parameter("embedding.weight").grad
    assert gradient is not None and gradient.eq(3.0).all()
    assert last.get_parameter("embedding.weight").grad is None
