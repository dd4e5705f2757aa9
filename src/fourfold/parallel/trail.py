"""Which modules a forward ran under tensor parallel: an error then says which rule of the sharding table is wrong."""

from __future__ import annotations

import logging
import re
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fourfold.models.protocol import Heads, Rule, pattern_of, typed, word
from fourfold.parallel.recompute import in_backward
from fourfold.spec.errors import Problem, SpecError

# What torch says of tensors that do not meet, in its own words; the tests of wrong tables hold them.
_DO_NOT_MEET = (
    "DTensor",
    "harding propagation failed",
    "sharding strategy",
    "must match",
    "multipl",
    "reduction dim",
    "invalid for input of size",
    "view size is not compatible",
)
_ELSEWHERE = tuple(str(path) for path in (Path(torch.__file__).parent, Path(__file__).parent))


@dataclass(frozen=True, slots=True)
class Joined:
    """A module that has parameters: its name, the rule it is joined by, its weight's shape, what it has and is.

    beside: of a module that has no weight, but modules in it, the parameters that stand beside these.
    """

    name: str
    rule: Rule
    shape: tuple[int, ...]
    bias: bool
    embedding: bool
    beside: tuple[str, ...]

    @classmethod
    def of(cls, name: str, rule: Rule, module: nn.Module) -> Joined:
        own = dict(module.named_parameters(recurse=False))
        beside = tuple(own) if "weight" not in own and any(module.children()) else ()
        shape = max((tuple(p.shape) for p in own.values()), key=len)
        return cls(name, rule, shape, "bias" in own, isinstance(module, nn.Embedding), beside)

    @property
    def matrix(self) -> bool:
        """It is a Linear, and no norm or embedding, which give the stream."""
        return len(self.shape) == 2 and not self.embedding and not self.beside

    def as_row(self) -> dict[str, Rule]:
        """Its part of a table in which it is the row of a pair."""
        pattern = pattern_of(self.name)
        rules: dict[str, Rule] = {f"{pattern}.weight": "row"}
        if self.bias:
            rules[f"{pattern}.bias"] = "replicate"
        return rules

    def as_heads(self, units: int) -> dict[str, Rule]:
        """Its part of a table in which it comes out in `units`."""
        return {f"{pattern_of(self.name)}.*": Heads(units)}


@dataclass(frozen=True, slots=True)
class _Ran:
    module: Joined
    plain: bool  # what it took was a plain tensor
    parts: bool  # what it took was cut over the last dim: it may be what a column gave
    fits: bool  # or is a DTensor of other features than it takes, whatever the table says

    @property
    def units(self) -> int:
        return self.module.rule.units if isinstance(self.module.rule, Heads) else 0


class Trail:
    """The last modules that ran in a forward, not those that are computed again in backward. Collectives: none.

    forget: lets go of what modules keep for those after them.
    """

    def __init__(self, ranks: int, sequence: bool, forget: Callable[[], None] = lambda: None) -> None:
        self._ranks = ranks
        self._sequence = sequence
        self.forget = forget
        self._ran: deque[_Ran] = deque(maxlen=16)

    def note(self, module: Joined, taken: object) -> None:
        """`module` begins. Raises SpecError for half a pair under sequence parallel, on every rank alike."""
        if torch.compiler.is_compiling() or in_backward():
            return
        parts = isinstance(taken, DTensor) and taken.placements[0].is_shard(taken.ndim - 1)
        fits = not (module.matrix and isinstance(taken, DTensor)) or taken.shape[-1] == module.shape[1]
        self._ran.append(_Ran(module, not isinstance(taken, DTensor), parts, fits))
        if self._sequence and module.matrix and parts != (module.rule == "row"):
            half = _pairs(self._tail())
            if half:
                raise SpecError(_half(module, parts, half))

    def fault(self, error: RuntimeError) -> SpecError | None:
        """What a table has to do with an error of torch's in a forward; None where it has nothing to."""
        text = str(error)
        calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        if not any(mark in text for mark in _DO_NOT_MEET):
            return None
        if any(code.co_name == "_engine_run_backward" for code, _ in calls):
            return None  # what ran last is not where it is
        if self._ran and not self._ran[-1].fits:
            return None  # one device would say so, too
        tail = self._tail()
        rules = _pairs(tail) or _as_heads(tail, text)
        own = [(code, line) for code, line in calls if not code.co_filename.startswith(_ELSEWHERE)]
        place = f" ({own[-1][0].co_filename}:{own[-1][1]})" if own else ""
        mixed = "mixed" in text
        beside = self._beside(own[-1][0].co_names if own else ()) if mixed and not rules else []
        return SpecError(
            Problem(
                asked=f"layout.tp = {self._ranks} with the model's sharding table",
                found=f"{text.splitlines()[0]}{place}",
                why="what does not go together: "
                + (_given([ran.module for ran in tail]) or "parameters of the network's own (DTensors)")
                + "".join(f'; "{name}" is a parameter (a DTensor)' for name in beside),
                instead=typed(rules) if rules else _instead(tail, self._ranks, mixed, beside),
            )
        )

    def _beside(self, read: Sequence[str]) -> list[str]:
        """Parameters that stand beside the Heads which no row has put together yet, on modules around them.

        read: what the code reads in which the forward failed; where it reads some of them, these.
        """
        heads: list[str] = []
        for ran in reversed(self._ran):
            if ran.module.rule == "row":
                break
            heads += [ran.module.name] if ran.units else []
        around = {
            f"{ran.module.name}.{key}".removeprefix("."): key
            for ran in self._ran
            for key in ran.module.beside
            if any(name.startswith(f"{ran.module.name}.".removeprefix(".")) for name in heads)
        }
        return [name for name, key in around.items() if key in read] or list(around)

    def without_row(self) -> Joined | None:
        """The last Heads module, unless a row came after it."""
        for ran in reversed(self._ran):
            if ran.module.rule == "row":
                return None
            if ran.units:
                return ran.module
        return None

    def _tail(self) -> list[_Ran]:
        """The last module, and those before it back to the row or norm that made what the first of them took."""
        tail: list[_Ran] = []
        for ran in reversed(self._ran):
            ends = ran.module.rule == "row" or not ran.module.matrix
            if tail and (ends or ran.module in [later.module for later in tail]):
                break
            tail.insert(0, ran)
        return tail


@contextmanager
def held_back() -> Iterator[list[logging.LogRecord]]:
    """What torch logs, with tracebacks, of tensors that do not meet: it comes after the block, unless taken out."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield held
    finally:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)


def _given(modules: list[Joined]) -> str:
    """What each puts out, by its rule; those of one rule together."""
    told = []
    for (rule, embedding), same in groupby(modules, key=lambda module: (module.rule, module.embedding)):
        names = [f'"{module.name}"' for module in same]
        if isinstance(rule, Heads):
            what = "each rank its own part, a plain tensor"
        elif rule in ("column", "vocabulary") and not embedding:
            what = "one tensor that is cut between ranks (a DTensor)"
        else:
            what = "what is whole on every rank (a DTensor)"
        told.append(f"{', '.join(names)}: {word(rule)} gives {what}")
    return "; ".join(told)


def _half(module: Joined, parts: bool, pair: dict[str, Rule]) -> Problem:
    takes = "takes what a column has cut" if parts else "takes what no column has cut"
    return Problem(
        asked="layout.sp = true with the model's sharding table",
        found=f'"{module.name}", {word(module.rule)}, {takes}',
        why="it would be cut anew, from features to tokens or back: torch's DTensor does not always do that",
        instead=f"{typed(pair)}, or --set layout.sp=false",
    )


def _pairs(ran: list[_Ran]) -> dict[str, Rule]:
    """The table's entries that make a pair of what ran as half of one: a row, or the column before it."""
    rules: dict[str, Rule] = {}
    heads, last = False, None  # whether Heads wait for their row; the Linear that ran before
    for one in (each for each in ran if each.module.matrix):
        if one.module.rule != "row" and (one.parts or (one.plain and heads)):
            rules |= one.module.as_row()
        elif one.module.rule == "row" and not (one.parts or one.plain) and last and last.rule == "replicate":
            rules[f"{pattern_of(last.name)}.*"] = "column"
        heads = one.module.rule != "row" and (heads or one.units > 0)
        last = one.module
    return rules


def _as_heads(tail: list[_Ran], text: str) -> dict[str, Rule]:
    """The table's entries by which all that ran comes out in units of one width, where some of it does."""
    rules: dict[str, Rule] = {}
    width = _width(tail, text)
    for module in (ran.module for ran in tail if ran.module.matrix and ran.module.rule != "row"):
        if width and module.shape[0] % width == 0 and module.rule != Heads(module.shape[0] // width):
            rules |= module.as_heads(module.shape[0] // width)
    return rules


def _width(tail: list[_Ran], text: str) -> int:
    """The features of a head: what torch's error says was asked for; else as most have; else as the largest, query."""
    heads = [(ran.module.shape[0] // ran.units, ran.module.shape[0]) for ran in tail if ran.units]
    widths = [width for width, _ in heads]
    asked = re.search(r"(?:shape '|sizes )\[[^\]]*?(\d+)\]", text)  # by view or unflatten
    if asked and int(asked[1]) in widths:
        return int(asked[1])
    return max(heads, key=lambda one: (widths.count(one[0]), one[1]), default=(0, 0))[0]


def _instead(tail: list[_Ran], ranks: int, mixed: bool, beside: list[str]) -> str:
    """What would do where no rule is missing, as far as what ran shows. mixed: a plain tensor met a DTensor."""
    units = max((ran.units for ran in tail), default=0)
    if tail and tail[-1].module.rule == "row" and 0 < units < ranks:
        return f"--set layout.tp={units}  (only key and value may have fewer heads than there are ranks)"
    names = [pattern_of(ran.module.name) for ran in tail if ran.module.matrix and ran.module.rule != "row"]
    if names and not units and not mixed:
        table = ", ".join(f'"{name}.*": Heads(n)' for name in names)
        return f"{{{table}}}  (n: its heads), or only functions that DTensor has, or --set layout.tp=1"
    if beside:
        named = ", ".join(f'"{name}"' for name in beside)
        return f"{named} before the Heads or after the row, where it meets DTensors; or --set layout.tp=1"
    return (
        "plain tensors of your own between Heads and row only, their sizes read off the shapes; or column in place of "
        "every Heads; or --set layout.tp=1"
    )
