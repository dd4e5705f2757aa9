"""Which blocks each stage of a pipeline has: runs of them that cost about as much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod

from fourfold.plan.shapes import Shape
from fourfold.spec.schedules import stages_in_all, stages_of
from fourfold.spec.training import LayoutSpec


def split(costs: Sequence[int], last: int, stages: int) -> list[int]:
    """How many blocks each of `stages` gets, at least one, so that the dearest stage is as cheap as can be.

    costs: of each block, in order; last: of what the last stage has besides (the head). Among equally good ways the one
    whose stages before the last are even. There must be as many blocks as stages.
    """
    blocks = len(costs)
    assert 0 < stages <= blocks, "the rules have refused it"
    sums = [0, *accumulate(costs)]
    # best[i]: of blocks[i:] in the stages left the least (dearest stage, sum of squares), and where the first one ends
    best: list[tuple[int, int, int]] = [
        (sums[blocks] - sums[at] + last, (sums[blocks] - sums[at] + last) ** 2, blocks)
        for at in range(blocks)
    ]
    ends = [[end for _, _, end in best]]
    for left in range(2, stages + 1):
        best = [
            min(
                (
                    max((own := sums[end] - sums[at]), best[end][0]),
                    own**2 + best[end][1],
                    end,
                )
                for end in range(at + 1, blocks - left + 2)
            )
            if at <= blocks - left
            else (0, 0, at)
            for at in range(blocks)
        ]
        ends.append([end for _, _, end in best])
    counts, at = [], 0
    for ends_here in reversed(ends):
        counts.append(ends_here[at] - at)
        at = ends_here[at]
    return counts


def blocks_of_stages(layout: LayoutSpec, costs: Sequence[int], last: int) -> list[range]:
    """The blocks of each stage: as `layout.pp_split` says, or else by cost."""
    counts = layout.pp_split or split(costs, last, stages_in_all(layout))
    ends = [0, *accumulate(counts)]
    return [range(ends[at], ends[at + 1]) for at in range(len(counts))]


def cost_of(shapes: Iterable[Sequence[int]]) -> int:
    """What a part of the network costs: elements of its matrices, each taken times something for every token.

    Embeddings are looked up, and are left out by the caller; of a stack of experts it gives those that a token goes to.
    """
    return sum(prod(shape) for shape in shapes if len(shape) > 1)


def block_costs(blocks: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """The cost of each of `blocks` (names), by the `shapes` of the network's parameters, as one token meets them."""
    return [
        cost_of(shape for name, shape in shapes.items() if name.startswith(f"{block}.")) for block in blocks
    ]


TIED = "embedding.weight"  # what a decoder's first and last stage share, if it is tied


def held_by(layout: LayoutSpec, shapes: Mapping[str, Shape], place: int, tied: bool) -> list[str]:
    """The parameters, by name, of the stages at `place` of "pp". tied: whether the last stage has `TIED`, too."""
    if layout.pp == 1:
        return list(shapes)
    blocks = 1 + max(shape.block for shape in shapes.values() if shape.block is not None)
    costs = [cost_of(shape.active for shape in shapes.values() if shape.block == at) for at in range(blocks)]
    last = cost_of(shape.size for name, shape in shapes.items() if shape.after or (tied and name == TIED))
    spans, stages = blocks_of_stages(layout, costs, last), stages_of(layout, place)
    mine = {block for stage in stages for block in spans[stage]}
    first, end = 0 in stages, len(spans) - 1 in stages
    return [
        name
        for name, shape in shapes.items()
        if (shape.block in mine)
        or (shape.block is None and (end if shape.after else first))
        or (end and tied and name == TIED)
    ]
