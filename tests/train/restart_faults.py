"""Transforms that end the rank they run in. No torch here: loader workers import it.

Each changes the samples as `slowly` does, so that a run which gets past the fault is the undisturbed one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

_LATE = 13  # samples that a process has made by step 3, at four in a step
_calls = 0
_rename = os.rename


def slowly(sample: Any, generator: Any) -> Any:
    """Adds noise; so slowly that a run of few steps can be met in the middle of one."""
    time.sleep(0.04)
    noise = generator.normal(0.0, 0.1, sample.inputs.shape)
    return replace(sample, inputs=sample.inputs + noise.astype(sample.inputs.dtype))


def always_dies(sample: Any, generator: Any) -> Any:
    """Rank 1 is killed in its third step, in every attempt."""
    if _late():
        os.kill(os.getpid(), signal.SIGKILL)
    return slowly(sample, generator)


def never_finite(sample: Any, generator: Any) -> Any:
    """Rank 1 makes infinite samples from its third step on."""
    changed = slowly(sample, generator)
    return replace(changed, inputs=changed.inputs * float("inf")) if _late() else changed


def dies_in_the_second_save(sample: Any, generator: Any) -> Any:
    """In the first attempt the rank that publishes is killed when all files of its second checkpoint are there."""
    os.rename = _rename_once if os.environ["FOURFOLD_ATTEMPT"] == "0" else _rename
    return slowly(sample, generator)


def damages_the_second_checkpoint(sample: Any, generator: Any) -> Any:
    """In the first attempt rank 1 changes a byte of the checkpoint of step 8, and is killed."""
    if os.environ["FOURFOLD_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
        for shard in (Path(sys.argv[1]) / "ckpt" / "step-00000008").glob("*.safetensors"):
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
            os.kill(os.getpid(), signal.SIGKILL)
    return slowly(sample, generator)


def _late() -> bool:
    global _calls
    _calls += 1
    return os.environ["RANK"] == "1" and _calls > _LATE


def _rename_once(source: Any, target: Any) -> None:
    if str(target).endswith("step-00000008"):
        os.kill(os.getpid(), signal.SIGKILL)
    _rename(source, target)
