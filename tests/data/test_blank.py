"""Blank samples have the shapes, dtypes and lengths of the Spec's own, and open nothing."""

from __future__ import annotations

import pytest

from fourfold.data.blank import blank_sources
from fourfold.data.source import open_sources
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle

MLP = ('model={kind="mlp", inputs=5, hidden=7, layers=3}', 'data={kind="synthetic", samples=64}')


@pytest.mark.parametrize(
    "sets", [(), ("data.sequence=7",), ("data.packing=pad", "data.sequence=32"), MLP], ids=str
)
def test_they_are_shaped_as_real_ones(sets):
    spec = settle(load_spec("tiny", ["optimizer.warmup_steps=0", *sets]).spec, 1)
    blank, real = blank_sources(spec).train, open_sources(spec).train
    one, other = blank.largest(), real.largest()
    for field in ("inputs", "targets", "valid", "documents"):
        mine, theirs = getattr(one, field), getattr(other, field)
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    assert bool(one.valid.all())
    assert blank.vocabulary == real.vocabulary
    assert len(blank) >= spec.batch.global_batch
    assert (blank.sample(0).inputs == one.inputs).all()


def test_data_that_is_not_there_is_not_missed(tmp_path):
    sets = (f'data={{kind="tokens", path="{tmp_path}/none", sequence=16}}', "optimizer.warmup_steps=0")
    spec = settle(load_spec("tiny", sets).spec, 1)
    assert blank_sources(spec).train.largest().inputs.shape == (16,)
