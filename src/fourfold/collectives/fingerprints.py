"""Which collectives this rank calls, from which line: noted as they are called, compared between ranks now and then.

Noted are the calls of torch.distributed's Python functions, and of the functional ones that DTensor and autograd use:
those of FSDP2, tensor, context, pipeline and expert parallel, of a model and of this package. What torch's DDP calls
from C++ is not: there one order of buckets is agreed on. Messages from one rank to another are noted, not compared.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fourfold.collectives.agree import all_of
from fourfold.record.calls import Call, CallsFile, first_difference, packed, told_of, what_and_where
from fourfold.spec.errors import CheckFailed, Problem

# Not isend and irecv: torch's P2POp asks whether it is given these very functions.
_MESSAGES = ("send", "recv", "batch_isend_irecv", "send_object_list", "recv_object_list")
_NOTED: dict[ModuleType, str] = {
    dist: "all_reduce all_reduce_coalesced all_gather all_gather_coalesced all_gather_object all_gather_into_tensor "
    "all_gather_single reduce_scatter reduce_scatter_single reduce_scatter_tensor all_to_all all_to_all_single "
    "broadcast broadcast_object_list reduce gather gather_object scatter scatter_object_list barrier "
    "monitored_barrier " + " ".join(_MESSAGES),
    functional: "all_reduce all_reduce_coalesced broadcast permute_tensor all_gather_single all_gather_tensor "
    "all_gather_single_autograd all_gather_tensor_autograd all_gather_single_coalesced "
    "all_gather_into_tensor_coalesced reduce_scatter_single reduce_scatter_tensor reduce_scatter_single_autograd "
    "reduce_scatter_tensor_autograd reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced "
    "all_to_all_single all_to_all_single_autograd",
}
# How these functions name what this rank gives.
_GIVEN = ("tensor", "input_tensor", "input", "self", "tensors", "input_list", "input_tensor_list", "inputs")
_KEPT = 2**16  # calls of one group between two looks that can be named; the newest
# FSDP2's own lines are the same for every unit: which one it is, its group of parameters knows.
_OF_UNITS = inspect.getfile(FSDPParamGroup)
_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_RECENT = 64  # calls that are told to other ranks when nothing moves
_LINES = 3  # that are kept of a call: it may come by a function that serves several
_FURTHER = 8  # frames beyond those in which a unit is looked for


class Fingerprints:
    """The record of this rank's calls."""

    def __init__(self, file: CallsFile | None = None) -> None:
        """file: where the last calls are kept beside, for those who look after a crash. Collectives: none."""
        self._file = file
        self.count = 0  # calls so far
        # While this rank waits in a message, from whom or to whom.
        self.receives: tuple[int, ...] = ()
        self.sends: tuple[int, ...] = ()
        self._counter = itertools.count(1)
        self._numbers: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
        self._since_look: dict[str, deque[tuple[int, int, int]]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_RECENT)
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._known: list[tuple[Call, bytes, bytes]] = []  # of each kind: as a call, in the file, its digest

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While it is entered, calls of this process are noted."""
        plain = [
            (module, name, getattr(module, name))
            for module, names in _NOTED.items()
            for name in names.split()
        ]
        for module, name, function in plain:
            setattr(module, name, self._noted(name, function))
        try:
            yield
        finally:
            for module, name, function in plain:
                setattr(module, name, function)

    def compare(self, step: int) -> None:
        """Hold what was called since the last time against the other ranks of each group, in order.

        step: that just ended, from 1. Collectives: one all-gather of objects over the world, of a hash a group;
        another one only if they differ. Raises CheckFailed, on every rank, naming the first call that differs.
        """
        since, self._since_look = self._since_look, defaultdict(lambda: deque(maxlen=_KEPT))
        by_rank = all_of({group: self._digest(calls) for group, calls in since.items()})
        groups = {group for held in by_rank for group in held}
        odd = {g for g in groups if len({held[g] for held in by_rank if g in held}) > 1}
        if not odd:
            return
        own = [self._call(*each) for group in sorted(odd) for each in since.get(group, ())]
        gathered: list[list[Call]] = [own]
        if dist.is_initialized():
            gathered = [[] for _ in by_rank]
            dist.all_gather_object(gathered, own)
        raise CheckFailed(_out_of_order(dict(enumerate(gathered)), step))

    def recent(self) -> tuple[Call, ...]:
        """The last calls, but for messages; from any thread."""
        return tuple(self._call(*each) for each in self._recent.copy())

    def _digest(self, calls: Sequence[tuple[int, int, int]]) -> str:
        known = self._known
        return f"{len(calls)} {xxhash.xxh3_128_hexdigest(b''.join(known[kind][2] for _, _, kind in calls))}"

    def _call(self, count: int, number: int, kind: int) -> Call:
        # The clocks of ranks differ: by how many calls a rank has made they are in order well enough.
        return self._known[kind][0].model_copy(
            update={"count": count, "number": number, "time": float(count)}
        )

    def _noted(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(function).parameters)
        group_at = parameters.index("group") if "group" in parameters else None
        given = next((name for name in _GIVEN if name in parameters), "")
        given_at = parameters.index(given) if given else None
        message = op in _MESSAGES

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            group = _argument(args, kwargs, "group", group_at)
            peer = _peer(function, group, args, kwargs) if message else None
            self._note(op, group, _argument(args, kwargs, given, given_at), message, peer)
            if peer is None or op not in ("send", "recv"):
                return function(*args, **kwargs)
            self.receives, self.sends = ((peer,), ()) if op == "recv" else ((), (peer,))
            try:
                return function(*args, **kwargs)
            finally:
                self.receives = self.sends = ()

        return call

    def _note(self, op: str, group: Any, given: Any, message: bool, peer: int | None) -> None:
        name = _name_of(group)
        if name is None:
            return  # this rank is not in it
        frames, unit = asked_from(sys._getframe(2))
        if peer is not None:
            unit = f"rank {peer}"
        several = isinstance(given, (list, tuple))
        key = (op, name, several, *_form(given), *((f.f_code, f.f_lineno) for f in frames), unit)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._learn(op, name, given, lines_of(frames), unit)
        self.count = count = next(self._counter)
        number = 0
        if not message:
            number = next(self._numbers[name])
            self._since_look[name].append((count, number, kind))
            self._recent.append((count, number, kind))
        if self._file is not None:
            self._file.write(count, number, time.time(), self._known[kind][1])

    def _learn(self, op: str, group: str, given: Any, site: str, unit: str) -> int:
        """A kind of call that was not met before: its words, and a digest that is the same in every process."""
        shape, dtype = _words(given)
        call = Call(count=0, group=group, number=0, op=op, shape=shape, dtype=dtype, site=site, unit=unit)
        digest = xxhash.xxh3_64_digest(repr(what_and_where(call)).encode())
        self._known.append((call, packed(group, op, shape, dtype, site, unit), digest))
        return len(self._known) - 1


def asked_from(frame: FrameType) -> tuple[list[FrameType], str]:
    """The innermost frames that asked for a call, and FSDP2's unit whose it is, or ""."""
    frames: list[FrameType] = []
    unit, further = "", 0
    at: FrameType | None = frame
    while at is not None and (len(frames) < _LINES or (not unit and further < _FURTHER)):
        code = at.f_code
        if code.co_filename == _OF_UNITS and isinstance(own := at.f_locals.get("self"), FSDPParamGroup):
            unit = own._module_fqn or "the rest"
        elif len(frames) == _LINES:
            further += 1
        elif not passes_on(code):
            frames.append(at)
        at = at.f_back
    return frames or [frame], unit


def lines_of(frames: Iterable[FrameType]) -> str:
    """step:80 in clip < loop:50 in train"""
    return " < ".join(
        f"{frame.f_globals.get('__name__', '')}:{frame.f_lineno} in {frame.f_code.co_name}"
        for frame in frames
    )


@functools.cache
def passes_on(code: CodeType) -> bool:
    """Whether code only passes a call on: the line that asked for it is further up."""
    return code.co_filename.startswith(_INSIDE)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], name: str, at: int | None) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[at] if at is not None and at < len(args) else None


def _peer(
    function: Callable[..., Any], group: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int | None:
    """The rank of the world that a message goes to or comes from; None: of several, or of any."""
    names = inspect.signature(function).parameters
    given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    if (of_world := given.get("src", given.get("dst"))) is not None:
        return int(of_world)
    of_group = given.get("group_src", given.get("group_dst"))
    if of_group is None or "group" not in names:
        return None
    whole = dist.group.WORLD
    assert whole is not None, "a message is sent in a group"
    return dist.get_global_rank(group or whole, of_group)


def _name_of(group: Any) -> str | None:
    """torch's name of a group, the same on all its ranks; None where this rank is not in it."""
    if group is None:
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        group = group.get_group()
    elif isinstance(group, tuple):
        mesh, dim = group
        group = mesh.get_group(dim)
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    return str(group) if isinstance(group, (str, list)) else None


def _form(given: Any) -> tuple[Any, ...]:
    if isinstance(given, Tensor):
        return given.shape, given.dtype
    return (len(given), *_form(given[0])) if isinstance(given, (list, tuple)) and given else ()


def _words(given: Any) -> tuple[str, str]:
    """Shape and dtype in words; of several tensors how many, and those of the first."""
    if isinstance(given, Tensor):
        return str(list(given.shape)), str(given.dtype).removeprefix("torch.")
    if isinstance(given, (list, tuple)) and given:
        shape, dtype = _words(given[0])
        return f"{len(given)} x {shape}" if shape else "", dtype
    return "", ""


def _out_of_order(calls: Mapping[int, Sequence[Call]], step: int) -> Problem:
    difference = first_difference(calls, what_and_where)
    if difference is not None:
        problem = difference.problem()
        return replace(problem, asked=f"{problem.asked}, since the last look before step {step} ended")
    return Problem(
        asked=f"as many collectives on every rank of a group, by the end of step {step}",
        found=told_of(calls) or "ranks called other numbers of them",
        why="a rank that calls one more, or one fewer, takes from then on the values of another call",
        instead="look for a branch on the rank, or on its data, around that line",
    )
