"""A transform that takes a while. No torch here: loader workers import it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any


def slowly(sample: Any, generator: Any) -> Any:
    """Adds noise, slowly."""
    time.sleep(0.01)
    noise = generator.normal(0.0, 0.1, sample.inputs.shape)
    return replace(sample, inputs=sample.inputs + noise.astype(sample.inputs.dtype))
