"""Exact mode: does every number of data-parallel ranks, at every stage of ZeRO, train to the same bits?"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fourfold.launch.pool import RankPool
from fourfold.record.finding import Finding, document, fact, write_findings
from fourfold.spec.errors import Problem, RankFailed, SpecError
from fourfold.spec.rules import require
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.spec.training import EXACT_THREADS, LayoutSpec
from fourfold.spec.words import counted
from fourfold.verify.case import TIMEOUT_S
from fourfold.verify.equal import require_steps
from fourfold.verify.exact_rank import RunBits, train_exactly
from fourfold.verify.layout_words import words
from fourfold.verify.out import open_folder

SCHEMA = "fourfold.verify.exact/1"


def verify_exact(
    spec: Spec,
    world: int,
    *,
    steps: int = 20,
    out: Path | None = None,
    setup: str | None = None,
    timeout_s: float = TIMEOUT_S,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train the first steps of a Spec on 1, 2, 4, ... `world` ranks in exact mode, and compare every bit.

    spec: not settled; its own dp_replicate, dp_shard and zero are not looked at. Others as in `equal.verify_equal`.
    Compared are losses, gradients, norms and parameters of every step, and the whole state after the last.
    Returns the document fourfold.verify.exact/1, with one finding and one entry for each layout.
    Raises SpecError or DataError for a request or data that cannot be trained on, in a rank too.
    """
    require_steps(steps)
    if steps > spec.run.steps:
        raise SpecError(_beyond_the_run(spec, steps))
    asked = [_settled(spec, layout) for layout in exact_layouts(world)]
    findings: list[Finding] = []
    entries: list[dict[str, Any]] = []
    first: RunBits | None = None
    with open_folder(out, spec.name) as folder:
        for number, one in enumerate(asked, 1):
            since = time.perf_counter()
            digest = ""
            try:
                bits = _bits_of(one, steps, setup, timeout_s)
            except RankFailed as failure:
                if (refused := failure.refusal()) is not None:
                    raise refused from failure
                found = f"a rank failed: {failure}"
            else:
                first = first or bits
                digest, found = digest_of(bits.steps[-1].parameters), deviation(first, bits)
            seconds = time.perf_counter() - since
            measured = found or f"SHA-256 of all parameters {digest[:16]}"
            findings.append(
                fact(words(one.layout), "the bits of one rank", measured, not found, command=command)
            )
            entries.append({"words": words(one.layout), "sha256": digest, "seconds": seconds})
            say(f"[{number}/{len(asked)}] {words(one.layout)}: {measured}, {seconds:.1f} s")
            if first is None:
                break  # one rank has failed: there is nothing to compare the others with
        facts = {"spec": spec.name, "world": world, "steps": steps, "layouts": entries}
        path = write_findings(folder, "exact", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, changes=[], findings_file=str(path))


def exact_layouts(world: int) -> Iterator[LayoutSpec]:
    """Every power of two up to `world` data-parallel ranks, as replicas, as shards of each stage, and as both."""
    if world < 2 or world & (world - 1):
        raise SpecError(_no_halves(world))
    yield LayoutSpec(dp_replicate=1)
    ranks = 2
    while ranks <= world:
        yield LayoutSpec(dp_replicate=ranks)
        replicas = 1
        while replicas < ranks:
            for zero in (1, 2, 3):
                yield LayoutSpec.model_validate(
                    {"dp_replicate": replicas, "dp_shard": ranks // replicas, "zero": zero}
                )
            replicas *= 2
        ranks *= 2


def digest_of(tensors: Mapping[str, str]) -> str:
    """One SHA-256 for those of many tensors, by name."""
    return hashlib.sha256(
        "".join(f"{name} {tensors[name]}\n" for name in sorted(tensors)).encode()
    ).hexdigest()


def deviation(first: RunBits, other: RunBits) -> str:
    """The first value in order of execution of which `other` has other bits than `first`; "" if there is none."""
    for number, (one, two) in enumerate(zip(first.steps, other.steps, strict=True), 1):
        if one.loss != two.loss:
            return f"step {number}: loss {float.fromhex(two.loss)!r}, on one rank {float.fromhex(one.loss)!r}"
        if differing := _differing(one.gradients, two.gradients):
            return f"step {number}: gradient of {differing}"
        if one.norm != two.norm:
            return f"step {number}: norm {float.fromhex(two.norm)!r}, on one rank {float.fromhex(one.norm)!r}"
        if differing := _differing(one.parameters, two.parameters):
            return f"step {number}: {differing} after the update"
    differing = _differing(first.state, other.state)
    return f"after the last step: {differing}" if differing else ""


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return "" if not names else names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _settled(spec: Spec, layout: LayoutSpec) -> Spec:
    degrees = layout.model_dump(include={"dp_replicate", "dp_shard", "zero"})
    run = spec.run.model_copy(update={"exact": True})
    asked = spec.model_copy(update={"layout": spec.layout.model_copy(update=degrees), "run": run})
    require(asked, "train")  # other axes are refused as such, not for the world that they would need
    settled = settle(asked, int(layout.dp_replicate) * int(layout.dp_shard))
    require(settled, "train")
    return settled


def _bits_of(spec: Spec, steps: int, setup: str | None, timeout_s: float) -> RunBits:
    """What ranks of a settled Spec train to. Raises RankFailed."""
    world = int(spec.layout.dp_replicate) * int(spec.layout.dp_shard)
    threads = spec.hardware.threads_per_rank or EXACT_THREADS
    with closing(
        RankPool(world, timeout_s=timeout_s, setup=setup, threads=threads, device=spec.hardware.device)
    ) as pool:
        bits: RunBits | None = pool.run(train_exactly, spec, steps)[0]
    assert bits is not None, "rank 0 tells"
    return bits


def _beyond_the_run(spec: Spec, steps: int) -> Problem:
    return Problem(
        asked=f"--steps {steps}",
        found=f"run.steps = {spec.run.steps}",
        why="the learning rate is known for the steps of the run",
        instead=f"--steps {spec.run.steps} or --set run.steps={steps}",
    )


def _no_halves(world: int) -> Problem:
    below = 1 << max(1, world.bit_length() - 1)
    return Problem(
        asked=f"the same bits on one and on {counted(world, 'rank')}",
        found="nothing to compare" if world < 2 else f"{world} is no power of two",
        why="in exact mode each rank forms a branch of one binary tree of sums",
        instead=f"--world {below}" if world < 2 else f"--world {below} or --world {2 * below}",
    )
