"""What the tests of the precision exercise plant in its ranks."""

from __future__ import annotations

from contextlib import nullcontext

from fourfold.train import loop


def no_checks() -> None:
    """The loop trains whatever it is given."""
    for name in ("check_masters", "check_clipped", "check_unscaled", "check_step"):
        setattr(loop, name, lambda *_: None)
    from fourfold.train import meter

    meter.check_line = lambda *_: None
    loop.Invariants.around = lambda *_: nullcontext()
