"""What a transform draws from the process's own streams is a function of the sample, too."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fourfold.data.loader import Loader
from fourfold.data.process_streams import drawn_from
from fourfold.data.schedule import BatchSchedule
from fourfold.data.synthetic import SyntheticSource
from fourfold.spec.data import TransformSpec

# As code from elsewhere does, though the generator it is given is at hand.
CARELESS = """
import random
from dataclasses import replace
import numpy as np
import torch

def shift(sample, draws):
    by = random.random() + np.random.random() + torch.rand(())
    return replace(sample, inputs=(sample.inputs + float(by)).astype(sample.inputs.dtype))
"""
TRANSFORM = (TransformSpec(kind="import", target="careless_shift:shift"),)


def inputs(first: int, last: int, workers: int) -> list[Tensor]:
    source = SyntheticSource("regression", 4, 1, 0.1, 0, 0, 24)
    loader = Loader(source, BatchSchedule(24, 4, 2, 1, 2, 7, True, "drop"), 0, 7, workers, TRANSFORM)
    try:
        return [batch.inputs for batches in loader.steps(first, last) for batch in batches]
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_careless_transform_repeats_after_a_resume_and_with_any_number_of_workers(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careless_shift.py").write_text(CARELESS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = inputs(0, 4, 0)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    later = inputs(2, 4, workers)
    assert torch.equal(torch.stack(later), torch.stack(whole[2:]))
    shifts = {float(value) for batch in whole for value in batch[:, 0]}
    assert len(shifts) == 4 * 2


def test_the_streams_are_put_back_and_begin_where_the_draws_say() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random(), float(torch.rand(()))
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    inside = []
    for seed in (3, 3, 4):
        with drawn_from(np.random.default_rng(seed)):
            inside.append((random.random(), np.random.random(), float(torch.rand(()))))
    with suppress(KeyError), drawn_from(np.random.default_rng(3)):
        raise KeyError(random.random())
    assert inside[0] == inside[1]
    assert not set(inside[0]) & set(inside[2])
    assert (random.random(), np.random.random(), float(torch.rand(()))) == expected
