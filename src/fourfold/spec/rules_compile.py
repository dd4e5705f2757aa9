"""Rules about compiled blocks. Each function gives the problem, or None."""

from __future__ import annotations

from fourfold.spec.errors import Problem
from fourfold.spec.schedules import SCHEDULES
from fourfold.spec.settings import typed
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec

_PLAIN = LayoutSpec()
_NONE = typed("layout.compile", '"none"')


def backend_is_used(spec: Spec) -> Problem | None:
    layout = spec.layout
    if layout.compile != "none" or layout.compile_backend == _PLAIN.compile_backend:
        return None
    return Problem(
        asked=f'layout.compile_backend = "{layout.compile_backend}" with layout.compile = "none"',
        found="nothing is compiled",
        why="what compiles is read where something is compiled: it would be silently ignored",
        instead="leave layout.compile_backend out, or --set layout.compile=blocks",
    )


def compiled_keeps_no_operations(spec: Spec) -> Problem | None:
    """What is kept is chosen as torch calls each operation; compiled code calls its kernels itself."""
    if spec.layout.compile == "none" or spec.layout.recompute != "selective":
        return None
    return Problem(
        asked='layout.recompute = "selective" with layout.compile = "blocks"',
        found="blocks whose operations are kernels of one piece of code",
        why="what is kept is chosen when torch calls an operation: compiled code calls kernels of other names, and "
        'nothing of it would be kept, as with "full"',
        instead=f"--set layout.recompute=full or {_NONE}",
    )


def compiled_goes_back_at_once(spec: Spec) -> Problem | None:
    """A compiled block has one backward, for its input and for its weights: to ask for one of them computes both."""
    layout = spec.layout
    if layout.compile == "none" or layout.pp == 1 or not SCHEDULES[layout.pp_schedule].splits:
        return None
    return Problem(
        asked=f'layout.compile = "blocks" with layout.pp_schedule = "{layout.pp_schedule}"',
        found="a schedule that goes back for inputs first, and for weights later",
        why="code of torch's compiler goes back for both at once: each half would be a whole backward",
        instead=f"--set layout.pp_schedule=1f1b or {_NONE}",
    )
