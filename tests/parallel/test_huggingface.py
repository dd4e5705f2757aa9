"""Models of transformers on two and four ranks equal one device: by their own plan, and by our attention."""

from __future__ import annotations

import pytest

from tests.parallel import huggingface_jobs as jobs

TP, SP = {"tp": 2}, {"tp": 2, "sp": True}
ZERO3 = {"dp_shard": 2, "zero": 3}


def cp(method: str) -> dict[str, object]:
    return {"cp": 2, "cp_method": method}


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("llama", TP),
        ("llama", SP),
        ("llama", ZERO3),
        ("llama", cp("ring")),
        ("qwen3", SP),  # norms of each head
        ("gemma3_text", TP),  # an embedding that is scaled, and tied
        ("gemma3_text", cp("gather")),  # one layer of two in a window
        ("mistral", cp("ring")),
        ("gemma3_text", cp("ulysses")),
        ("gpt_neox", TP),  # query, key and value of each head in one Linear
        ("gpt2", ZERO3),
        ("gpt2", cp("gather")),  # a position table
        ("mixtral", ZERO3),
        ("mixtral", cp("gather")),
        ("llama", {"cp": 2, "recompute": "full"}),
        ("qwen3", {**SP, "recompute": "full"}),
    ],
)
def test_two_ranks_equal_one_device(ranks, architecture, layout):
    for seen in ranks(2).run(jobs.trained, architecture, layout):
        assert seen.worst < 1e-12, seen.gaps


@pytest.mark.parametrize("layout", [{**TP, **ZERO3}, {"tp": 4}])
def test_four_ranks_equal_one_device(ranks, layout):
    """With tp 4 two ranks have the same one of two key/value heads, and other queries for the norm of its keys."""
    for seen in ranks(4).run(jobs.trained, "qwen3", layout):
        assert seen.worst < 1e-12, seen.gaps


def test_the_gradient_of_a_norm_of_heads_that_is_not_summed_is_seen(ranks):
    seen = ranks(2).run(jobs.norms_of_own_heads_alone, TP)
    assert all(one.gaps["gradient"] > 1e-3 for one in seen)
