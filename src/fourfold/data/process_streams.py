"""Python's, numpy's and torch's process-wide random streams, for a while as a function of something else.

A transform of a user's own may draw from them instead of from the generator that it is given. What it then draws would
depend on the process that computes the sample: with forked workers all the same numbers, with another number of workers
or ranks others, after a resume others again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def drawn_from(draws: np.random.Generator) -> Iterator[None]:
    """Inside, the streams begin at seeds that `draws` gives; afterwards they are as they were before.

    torch's only where torch is imported: a loader's worker need not.
    """
    seeds = draws.integers(2**32, size=3).tolist()
    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    if torch is not None:
        torch.default_generator.manual_seed(seeds[2])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch is not None:
            torch.set_rng_state(before[2])
