"""The process-wide random streams of a rank: torch, numpy, python.

Fourfold's own randomness needs none of them: it is a function of (seed, step, name, logical index). They are for models
and transforms of a user's own, which then repeat too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def seed_streams(seed: int, rank: int) -> None:
    """Start every stream from (seed, rank): another one on each rank, the same in every run."""
    words = np.random.SeedSequence((seed, rank)).generate_state(3, np.uint32)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


def streams_of(rank: int) -> dict[str, Tensor]:
    """This rank's random streams as tensors."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    streams = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), int(position), int(has_gauss)], dtype=torch.int64),
        "numpy_gauss": torch.tensor(float(gauss), dtype=torch.float64),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if next_gauss is None else next_gauss, dtype=torch.float64),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        streams["cuda"] = torch.cuda.get_rng_state()
    return {f"rank{rank}.{name}": stream for name, stream in streams.items()}


def restore_streams(rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Set this rank's random streams to what `tensors` (as of `streams_of`) hold."""
    own = {
        name.partition(".")[2]: value for name, value in tensors.items() if name.startswith(f"rank{rank}.")
    }
    torch.set_rng_state(own["torch"])
    *keys, position, has_gauss = own["numpy"].tolist()
    gauss = float(own["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, *words = own["python"].tolist()
    next_gauss = float(own["python_gauss"])
    random.setstate((version, tuple(words), None if next_gauss != next_gauss else next_gauss))
    if "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])
