"""Compilation: torch's compiler makes one piece of code for all blocks that are alike, in place of single operations.

Put around the forward of each block in place, as `recompute` is: no module and no name is added, and what hangs on the
block itself (FSDP2's gathering) stays outside. Parameters, draws and whatever else differs from block to block are
inputs of the code, so that there is one for training and one without gradients, whatever the number of blocks.

What reads values or counts calls stays as it is, and cuts the code of its block in two: routed experts
(`models.exchange.Meeting`), attention across context parallel. Hooks inside of a block would become a part of its code:
who watches modules does it at their `surfaces`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fourfold.models.exchange import Meeting
from fourfold.models.protocol import ModelKit
from fourfold.spec.errors import CheckFailed, Problem, SpecError
from fourfold.spec.settings import typed
from fourfold.spec.training import LayoutSpec

_NONE = typed("layout.compile", '"none"')
# For each block: one code with gradients and one without, of a rank's whole batches and of shorter ones, ...
_CODES_OF_A_BLOCK = 8


def require_compiler(layout: LayoutSpec, device: torch.device) -> None:
    """Raise SpecError where this machine cannot make code for `device`. To be asked before the first forward."""
    if layout.compile == "none" or layout.compile_backend != "inductor":
        return
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise SpecError(
                _no_compiler("no Triton for this device", "the compiler makes its kernels with it")
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise SpecError(
            _no_compiler("no C++ compiler (g++, clang++)", "on CPUs the compiler writes C++ and has it built")
        ) from None


def compiled(
    network: nn.Module, kit: ModelKit, layout: LayoutSpec, forget: Callable[[], None] = lambda: None
) -> None:
    """Have each of the `kit`'s blocks in `network` compiled in its first forward, as `layout.compile` asks.

    To be done when the blocks are cut, before they are computed again and before they are sharded. forget: lets go of
    what modules keep for those after them. Collectives: none here.
    Raises SpecError for a model without blocks.
    """
    if layout.compile == "none":
        return
    names = kit.blocks(network)
    if not names:
        raise SpecError(_no_blocks())
    _settle(len(names))
    for name in names:
        block = network.get_submodule(name)
        for module in block.modules():
            if isinstance(module, Meeting):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        block.forward = _Compiled(name, block.forward, layout.compile_backend, forget)
        block.is_compiled = True  # type: ignore[assignment]


def surfaces(network: nn.Module) -> dict[nn.Module, nn.Module]:
    """Where a hook on each module of `network` belongs: on itself, or on the block in whose code it is."""
    found = {module: module for module in network.modules()}
    for block in (module for module in network.modules() if getattr(module, "is_compiled", False)):
        found |= dict.fromkeys(_inside(block), block)
    return found


def _inside(module: nn.Module) -> list[nn.Module]:
    """`module` and what is in it, but for what is left as it is."""
    if isinstance(module, Meeting):
        return []
    return [module, *(each for child in module.children() for each in _inside(child))]


def _settle(blocks: int) -> None:
    """What torch's compiler is told, in this process.

    Its own limit of 8 codes for one function would make it go on without a word as if nothing were compiled. Workers
    that compile would outlive a rank that is killed. Replicas reduce by themselves: blocks are cut small enough.
    """
    import torch._dynamo.config
    import torch._inductor.config

    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _CODES_OF_A_BLOCK * blocks)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 2 * dynamo.recompile_limit)
    dynamo.fail_on_recompile_limit_hit = True
    dynamo.optimize_ddp = False
    inductor.compile_threads = 1
    # Rotary turns are complex: the kernel for them is the one that is called without a compiler, too.
    warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex")


class _Compiled:
    """The forward of a block as compiled code, which is made when it is called for the first time."""

    def __init__(
        self, name: str, forward: Callable[..., Any], backend: str, forget: Callable[[], None]
    ) -> None:
        self._name, self._forget = name, forget
        self._run = torch.compile(forward, backend=backend)

    def __call__(self, *args: Any, **more: Any) -> Any:
        from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit

        self._forget()
        try:
            return self._run(*args, **more)
        except FailOnRecompileLimitHit as error:
            raise CheckFailed(_always_anew(self._name, str(error))) from error
        except BackendCompilerFailed as error:
            raise SpecError(_not_made(self._name, error.inner_exception)) from error
        finally:
            self._forget()


def _no_blocks() -> Problem:
    return Problem(
        asked='layout.compile = "blocks"',
        found="a model whose blocks() names none",
        why="blocks are what is compiled, each with the code of those alike",
        instead=f"{_NONE}, or the names of the repeated submodules in the kit's blocks() (docs/own_model.md)",
    )


def _no_compiler(found: str, why: str) -> Problem:
    return Problem(
        asked='layout.compile = "blocks" with layout.compile_backend = "inductor"',
        found=f"{found} on this machine",
        why=why,
        instead=f"install it, or {_NONE}",
    )


def _not_made(name: str, error: Exception) -> Problem:
    return Problem(
        asked=f'code for block "{name}" (layout.compile)',
        found=f"{type(error).__name__}: {_first(str(error))}",
        why="torch's compiler could not make it",
        instead=f"{_NONE}, or {typed('layout.compile_backend', chr(34) + 'aot_eager' + chr(34))} to see whether it is "
        "the kernels",
    )


def _always_anew(name: str, text: str) -> Problem:
    return Problem(
        asked=f'code for block "{name}" that serves again (layout.compile)',
        found=f"it was made anew again and again ({_first(text)})",
        why="something that the block reads, and that is a constant of its code, is another one in every call; torch "
        "has told above which",
        instead=f"a forward that depends on its arguments and parameters alone; or {_NONE}",
    )


def _first(text: str) -> str:
    return next(filter(None, (line.strip() for line in text.splitlines())), "no reason given")
