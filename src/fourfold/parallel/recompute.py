"""Recompute: a block keeps what goes into it, and is computed again when backward comes to it.

Chen et al., arXiv 1604.06174, section 4; which operations are kept, "selective", after Korthikanti et al., arXiv
2205.05198, section 5. By torch's checkpoint without reentrance, put around the forward of each block in place: no
module and no name is added, and what hangs on the block itself (FSDP2's gathering, tensor parallel's cuts) stays
outside, so that a block is gathered once for its backward and computed again from that.

The block is computed again under the same autocast, from the same state of torch's random streams and with the same
stand-ins for its parameters. Draws of `models.draws` have no state. Collectives: those of the block's forward once
more, in backward (not of operations that are kept), on all ranks in the same order. A schedule that splits a backward
computes a block again for each of its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fourfold.models.protocol import ModelKit
from fourfold.spec.errors import CheckFailed, Problem, SpecError
from fourfold.spec.schedules import SCHEDULES
from fourfold.spec.settings import typed
from fourfold.spec.training import LayoutSpec

# What torch dispatches for each name of `layout.recompute_keep`, below autograd.
OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "mm": ("aten.mm", "aten.addmm"),  # a Linear, whatever the dims of what it takes
    "bmm": ("aten.bmm", "aten.baddbmm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
    "convolution": ("aten.convolution",),
    "collective": (
        "_c10d_functional.all_reduce",
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.reduce_scatter_tensor",
        "_c10d_functional.all_to_all_single",
    ),
}
# Names of passages, for a profiler: FSDP2 gives them where it gathers, and experts are gathered inside of a block. That
# is not as often when it is computed again, always, and torch counts operations to find what was kept.
_PASSAGES: Any = (torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit)
SAC_IGNORED_OPS.update(getattr(passage, name) for passage in _PASSAGES for name in passage.overloads())
_NONE = typed("layout.recompute", '"none"')
# What torch says where a block that is computed again asks for other operations than it did at first.
_OTHERS = ("encountered during backward", "selective activation checkpoint")


def in_backward() -> bool:
    """Whether this thread is in a backward: what a module computes then, it computes again."""
    return bool(torch._C._current_graph_task_id() != -1)


def recompute(
    network: nn.Module, kit: ModelKit, layout: LayoutSpec, forget: Callable[[], None] = lambda: None
) -> None:
    """Have each of the `kit`'s blocks in `network` computed again in backward, as `layout.recompute` asks.

    To be done when the blocks are cut, and before they are sharded. forget: lets go of what modules keep for those
    after them. Collectives: none here.
    Raises SpecError for a model without blocks.
    """
    if layout.recompute == "none":
        return
    names = kit.blocks(network)
    if not names:
        raise SpecError(_no_blocks(layout.recompute))
    kept = _operations(layout.recompute_keep) if layout.recompute == "selective" else frozenset()
    halves = layout.pp > 1 and SCHEDULES[layout.pp_schedule].splits
    last: list[str] = []
    for name in names:
        block = network.get_submodule(name)
        block.forward = _Again(name, block, kept, halves, forget, last)


@contextmanager
def told_by_block(network: nn.Module) -> Iterator[None]:
    """Around forward and backward: raises CheckFailed, naming the block, where one is computed again otherwise."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, CheckpointError) and not any(mark in text for mark in _OTHERS):
            raise
        again = [m.forward for m in network.modules() if isinstance(m.forward, _Again)]
        if not again or not again[0].last:
            raise  # a checkpoint of the model's own
        raise CheckFailed(_otherwise(again[0].last[-1], text)) from error


class _Again:
    """The forward of a block that is computed again in backward.

    kept: operations whose results are kept all the same. halves: whether it is computed again more than once, for each
    part of a backward. last: the block, of all, that was computed again last.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        kept: Collection[object],
        halves: bool,
        forget: Callable[[], None],
        last: list[str],
    ) -> None:
        self._name, self._block, self._forward = name, block, block.forward
        self._kept, self._halves, self._forget, self.last = kept, halves, forget, last

    def __call__(self, *args: Any, **more: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **more)
        before = self._buffers()
        run = partial(self._run, self._stand_ins(), **more)
        made = checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts)
        after = self._buffers()
        changed = [name for name, state in after.items() if before.get(name) != state]
        if changed:
            raise SpecError(_changes(self._name, changed))
        return made

    def _run(self, stand_ins: Mapping[tuple[nn.Module, str], Tensor], *args: Any, **more: Any) -> Any:
        with _standing(stand_ins):
            return self._forward(*args, **more)

    def _stand_ins(self) -> dict[tuple[nn.Module, str], Tensor]:
        """What stands in the place of parameters for the time of a forward, rounded ones (`narrow.Rounded`)."""
        found: dict[tuple[nn.Module, str], Tensor] = {}
        for child in self._block.modules():
            held: Mapping[str, Tensor | None] = child._parameters
            found |= {
                (child, key): stand_in
                for key, stand_in in held.items()
                if stand_in is not None and not isinstance(stand_in, nn.Parameter)
            }
        return found

    def _buffers(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._block.named_buffers()}

    def _contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Around the forward, and around what is computed again."""
        first: Any = nullcontext()
        again: Any = nullcontext()
        if self._kept:
            first, again = create_selective_checkpoint_contexts(self._policy)  # type: ignore[no-untyped-call]
            again = _Unspent(again) if self._halves else again
        return _Region(first, self._forget), _Region(again, self._begin, self._forget)

    def _begin(self) -> None:
        self.last[:] = [self._name]
        self._forget()

    def _policy(self, _context: object, operation: object, *_args: Any, **_more: Any) -> CheckpointPolicy:
        keep = operation in self._kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Region:
    """`mode`, with `begin` before it and `end` after it: what modules keep for each other stays inside of a block.

    Else the first of a block might find what another made, and no longer when it is computed again.
    """

    def __init__(
        self,
        mode: AbstractContextManager[object],
        begin: Callable[[], None],
        end: Callable[[], None] | None = None,
    ) -> None:
        self._mode, self._begin, self._end = mode, begin, end or begin

    def __enter__(self) -> None:
        self._begin()
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._end()


class _Unspent:
    """`mode`, torch's that hands out what was kept, once each; after it all of it is there for the next half."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._kept: dict[object, dict[int, object]] = {}

    def __enter__(self) -> None:
        self._kept = {key: dict(results) for key, results in self._mode.storage.items()}
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._mode.storage.update(self._kept)
        self._kept = {}


@contextmanager
def _standing(stand_ins: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """While it lasts, these stand in the place of parameters."""
    own = {at: at[0]._parameters[at[1]] for at in stand_ins}
    try:
        for (child, key), held in stand_ins.items():
            child._parameters[key] = held  # type: ignore[assignment]
        yield
    finally:
        for (child, key), parameter in own.items():
            child._parameters[key] = parameter


def _operations(names: Collection[str]) -> frozenset[object]:
    """torch's operations by the names of `layout.recompute_keep`."""
    found = set()
    for path in (path for name in names for path in OPERATIONS[name]):
        space, _, operation = path.partition(".")
        packet = getattr(getattr(torch.ops, space), operation)
        found |= {getattr(packet, overload) for overload in packet.overloads() if "out" not in overload}
    return frozenset(found)


def _no_blocks(asked: str) -> Problem:
    return Problem(
        asked=f'layout.recompute = "{asked}"',
        found="a model whose blocks() names none",
        why="blocks are what is computed again, each from what goes into it",
        instead=f"{_NONE}, or the names of the repeated submodules in the kit's blocks() (docs/own_model.md)",
    )


def _changes(name: str, buffers: list[str]) -> Problem:
    more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
    return Problem(
        asked=f'layout.recompute with block "{name}"',
        found=f'its forward changes its buffer "{buffers[0]}"{more}',
        why="computed again, it would change it a second time, and may compute from another value than at first",
        instead=f"{_NONE}, or a block that changes no buffer (LayerNorm, or BatchNorm's track_running_stats=False)",
    )


def _otherwise(name: str, text: str) -> Problem:
    told = [line.removeprefix("torch.utils.checkpoint: ").strip() for line in text.splitlines()]
    found = next(filter(None, told), "")
    return Problem(
        asked=f'block "{name}" computed again in backward as it was in forward (layout.recompute)',
        found=f"it was computed otherwise: {found}",
        why="its gradients would be those of another forward; it depends on something that changed in between, "
        "such as a counter, a cache or a module's global",
        instead=f"a forward that depends on its arguments, parameters and draws alone; or {_NONE}",
    )
