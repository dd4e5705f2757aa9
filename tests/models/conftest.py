"""Batches for the models' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from fourfold.data.batch import Batch
from fourfold.models.decoder import Decoder, DecoderKit
from fourfold.spec.model import DecoderSpec

VOCABULARY = 61


def token_batch(lengths: Sequence[Sequence[int]], seed: int = 7, step: int = 3, first_row: int = 0) -> Batch:
    """Rows of random tokens in documents of these lengths; the last target of a document carries no loss."""
    generator = torch.Generator().manual_seed(seed)
    length = sum(lengths[0])
    shape = (len(lengths), length)
    documents = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    ).to(torch.int32)
    ends = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True)
    rows = torch.arange(first_row, first_row + len(lengths))
    return Batch(
        inputs=torch.randint(VOCABULARY, shape, generator=generator),
        targets=torch.randint(VOCABULARY, shape, generator=generator),
        valid=~ends,
        documents=documents,
        sample_ids=rows + 100,
        rows=rows,
        seed=seed,
        step=step,
        epoch=0,
        processed=shape[0] * shape[1],
        nonpadding=shape[0] * shape[1],
    )


def vector_batch(rows: int, inputs: int, targets: Tensor, seed: int = 7) -> Batch:
    """Rows of random features."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        inputs=torch.randn(rows, inputs, generator=generator, dtype=torch.float64),
        targets=targets,
        valid=torch.ones(rows, dtype=torch.bool),
        documents=None,
        sample_ids=torch.arange(rows),
        rows=torch.arange(rows),
        seed=seed,
        step=0,
        epoch=0,
        processed=rows,
        nonpadding=rows,
    )


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows of a batch, in this order."""
    picked = {
        field.name: getattr(batch, field.name)[list(rows)]
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor)
    }
    return replace(batch, **picked)


def build_random(spec: DecoderSpec, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """With every value random: at the real start biases are 0 and logits small, which hides mistakes."""
    module = DecoderKit(spec).build(seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return module


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """These tensors are too small to share, and on busy cores threads that wait for each other cost seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokens() -> Callable[..., Batch]:
    return token_batch


@pytest.fixture
def vectors() -> Callable[..., Batch]:
    return vector_batch


@pytest.fixture
def rows_of() -> Callable[[Batch, Sequence[int]], Batch]:
    return take


@pytest.fixture
def built() -> Callable[..., Decoder]:
    return build_random
