from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fourfold.data.batch import Batch
from fourfold.record.reader import read_lines
from fourfold.record.writer import JsonLines
from fourfold.verify.deviation import first_deviation
from fourfold.verify.trace import BACKWARD, FORWARD, GRADIENT, REDUCED, WEIGHT, fingerprint, tracing


class Twice(nn.Module):
    """One layer called twice, and a head tied to it: three uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.head = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.head.weight = self.layer.weight

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = self.head(torch.tanh(self.layer(torch.tanh(self.layer(batch.inputs)))))
        return (x.square().sum(1) * batch.valid).sum(), batch.valid.sum()


def batch(rows: Sequence[int], step: int = 0) -> Batch:
    rows = list(rows)
    inputs = torch.tensor([[float(r), float(r * r), 1.0] for r in rows], dtype=torch.float64) / 7
    return Batch(
        inputs=inputs,
        targets=inputs,
        valid=torch.ones(len(rows), dtype=torch.bool),
        documents=None,
        sample_ids=torch.tensor(rows) + 100,
        rows=torch.tensor(rows),
        seed=0,
        step=step,
        epoch=0,
        processed=len(rows),
        nonpadding=len(rows),
    )


def trace(path, blocks, model=None, scale=0.25, touch=lambda _model: None):
    """Trace forward and backward of the blocks; returns what the tracer kept of the gradients."""
    torch.manual_seed(0)
    model = model or Twice()
    with JsonLines(path) as lines, tracing([model], [model], lines) as tracer:
        touch(model)
        for rows in blocks:
            total, _ = model(batch(rows))
            (total * scale).backward()
        tracer.flush()
        own, last = dict(tracer.own), dict(tracer.last)
        lines.write({"step": 0, "stage": REDUCED, "gaps": {}})
    return model, own, last


def test_calls_and_uses_are_told_apart_and_summed(tmp_path):
    model, own, last = trace(tmp_path / "t.jsonl", [[0, 1], [2, 3]])
    lines = list(read_lines(tmp_path / "t.jsonl"))
    first = [(x["kind"], x["name"], x["call"]) for x in lines if x.get("micro") == 0]
    forwards = [entry for entry in first if entry[0] == FORWARD]
    assert forwards[:3] == [(FORWARD, "layer", 0), (FORWARD, "layer", 1), (FORWARD, "head", 0)]
    backwards = [entry[1:] for entry in first if entry[0] == BACKWARD]
    assert backwards[-3:] == [("head", 0), ("layer", 1), ("layer", 0)]
    assert [entry[1] for entry in first if entry[0] == GRADIENT] == ["layer.weight"], "tied: once"
    assert torch.equal(own["layer.weight"], model.layer.weight.grad)
    assert torch.allclose(own["layer.weight"] - last["layer.weight"], first_block_gradient())
    weights = [x["values"] for x in lines if x.get("kind") == WEIGHT]
    assert weights == [[[0.25]], [[0.25]]]


def first_block_gradient():
    torch.manual_seed(0)
    model = Twice()
    (model(batch([0, 1]))[0] * 0.25).backward()
    return model.layer.weight.grad


def test_hooks_are_gone_afterwards(tmp_path):
    model, _, _ = trace(tmp_path / "t.jsonl", [[0]])
    before = (tmp_path / "t.jsonl").read_text()
    model(batch([5]))[0].backward()
    assert (tmp_path / "t.jsonl").read_text() == before


def test_a_fingerprint_is_by_row_and_sees_one_element():
    x = torch.zeros(4, 5, 6)
    plain = torch.tensor(fingerprint(x, 4))
    assert plain.shape == (4, 3)
    x[2, 3, 1] = 1e-8
    moved = torch.tensor(fingerprint(x, 4)) != plain
    assert moved.any(1).tolist() == [False, False, True, False]
    assert fingerprint(x, 3) == [], "other rows than the batch's cannot be compared by row"
    assert fingerprint(torch.tensor(2.0), 1) == []
    assert fingerprint(torch.zeros(2, 0), 2) == [[0.0] * 3] * 2


def rows_of(rank, micro):
    start = (micro * 2 + rank) * 2
    return range(start, start + 2)


@pytest.fixture
def two_ranks(tmp_path):
    """All eight rows on one device, and by twos on two ranks that weigh their losses twice as much."""
    trace(tmp_path / "reference.jsonl", [range(5), range(5, 8)])

    def ranks(**touch):
        for rank, blocks in enumerate(([(0, 1), (4, 5)], [(2, 3), (6, 7)])):
            trace(
                tmp_path / f"rank{rank}.jsonl",
                blocks,
                scale=0.5,
                touch=touch.get(f"rank{rank}", lambda _model: None),
            )
        paths = {rank: tmp_path / f"rank{rank}.jsonl" for rank in (0, 1)}
        return first_deviation(tmp_path / "reference.jsonl", paths, rows_of, ["dp_replicate"])

    return ranks


def test_the_same_work_on_two_ranks_does_not_deviate(two_ranks):
    assert two_ranks() is None


def test_the_second_call_of_a_module_is_named(two_ranks):
    calls = []

    def wrong(model):
        def hook(_module, _inputs, output):
            calls.append(1)
            return output * (1 + 1e-9) if len(calls) == 4 else output  # the second call in microbatch 1

        model.layer.register_forward_hook(hook, prepend=True)

    found = two_ranks(rank1=wrong)
    assert (found.step, found.microbatch, found.rank) == (1, 1, 1)
    assert (found.phase, found.place) == ("forward", "layer (call 2)")
    assert found.after == "forward of layer"
    assert "rows 0, 1" in found.note


def test_a_wrong_backward_is_named_though_every_forward_agrees(two_ranks):
    def wrong(model):
        model.head.register_full_backward_hook(lambda _module, into, _out: (into[0] * 1.5,))

    found = two_ranks(rank0=wrong)
    assert (found.microbatch, found.rank, found.phase, found.place) == (0, 0, "backward", "layer (call 2)")


def test_nan_is_a_deviation(two_ranks):
    def wrong(model):
        model.head.register_forward_hook(lambda _module, _inputs, output: output * float("nan"), prepend=True)

    found = two_ranks(rank1=wrong)
    assert (found.rank, found.phase, found.place, found.gap) == (1, "forward", "head", float("inf"))


class Silent(nn.Module):
    """The head, of which no hook hears."""

    def __init__(self, weight: Tensor, factor: float) -> None:
        super().__init__()
        self.held = [weight, factor]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.held[0]) * self.held[1]


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_what_did_not_run_is_named_only_if_it_spoils_something(two_ranks, factor):
    def replaced(model):
        model._modules["head"] = Silent(model.layer.weight, factor)

    found = two_ranks(rank1=replaced)
    if factor == 1.0:
        assert found is None, "another way to the right values is no fault"
    else:
        assert (found.rank, found.phase, found.place, found.note) == (
            1,
            "forward",
            "head",
            "it did not run here",
        )


def test_mixing_rows_shows_though_all_do_the_same(tmp_path):
    """A layer that takes something from the other rows of its microbatch, on one device as on the ranks."""

    def mixing(model):
        model.layer.register_forward_hook(lambda _m, _i, output: output - output.mean(0), prepend=True)

    trace(tmp_path / "reference.jsonl", [range(8)], touch=mixing)
    for rank, blocks in enumerate(([(0, 1), (4, 5)], [(2, 3), (6, 7)])):
        trace(tmp_path / f"rank{rank}.jsonl", blocks, touch=mixing)
    paths = {rank: tmp_path / f"rank{rank}.jsonl" for rank in (0, 1)}
    found = first_deviation(tmp_path / "reference.jsonl", paths, rows_of, ["dp_replicate"])
    assert (found.microbatch, found.rank, found.phase, found.place) == (0, 0, "forward", "layer")
