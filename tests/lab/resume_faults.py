"""Faults that the tests plant in the ranks of the resume exercise."""

from __future__ import annotations

from typing import Any

from fourfold.checkpoint import load as checkpoint_load
from fourfold.spec.errors import DataError, Problem
from fourfold.train import saver


def moments_are_dropped() -> None:
    """The product's load puts everything back, and then loses what AdamW knew."""
    right = saver.load_state

    def load_state(training: Any, folder: Any) -> Any:
        restored = right(training, folder)
        assert training.optimizer.adamw.state, "there is something to lose"
        training.optimizer.adamw.state.clear()
        return restored

    saver.load_state = load_state


def streams_are_not_restored() -> None:
    """The product's load leaves the random streams as they are at a start."""
    from fourfold.train import saving

    saving.restore_streams = lambda *_: None


def load_fails() -> None:
    def load_state(*_: Any) -> Any:
        raise DataError(Problem("put it back", "no such luck", "a test wants it so", ""))

    saver.load_state = load_state


def no_census() -> None:
    """The product's load takes what is there, and does not miss the rest."""
    checkpoint_load.census = lambda *_: []
