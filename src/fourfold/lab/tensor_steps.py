"""Tensor parallel in steps: what each rank has at each of them, and how it relates to what one device has. No torch.

Letters: x activations, s the scale of a norm before the layer, U and D the weights of up and down (column and row
parallel), u and d their biases, z and h before and after the ReLU, y the output; ∂x is the loss's gradient by x.
Column and row parallel: Megatron-LM, arXiv 1909.08053, section 3. Sequence parallel: arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Place = Literal["whole", "rows", "columns", "partial"]

PLACES: dict[Place, str] = {
    "whole": "whole on every rank",
    "rows": "cut by rows",
    "columns": "cut by columns",
    "partial": "a partial sum on every rank",
}


class Step(NamedTuple):
    """One value. of: what it is on one device. place: how ranks have it. collective: what made it, if one did."""

    name: str
    text: str
    of: str
    place: Place
    collective: str = ""
    why: str = ""


class Part(NamedTuple):
    """One way to do it."""

    name: str
    title: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them in order."""
        return self.forward + self.backward


_UP = (
    Step(
        "U",
        "weight of up",
        "U",
        "rows",
        why="column parallel: each rank has some outputs; torch keeps a weight as outputs × inputs, so they are rows",
    ),
    Step("u", "bias of up", "u", "rows"),
    Step("z", "x Uᵀ + u", "z", "columns", why="whole input, own outputs: nothing to add up"),
    Step("h", "relu(z)", "h", "columns", why="element by element, so no rank needs another's"),
    Step("D", "weight of down", "D", "columns", why="row parallel: each rank has some inputs"),
    Step("part", "h Dᵀ", "sum", "partial", why="own inputs only: every output lacks the others' share"),
)
_DOWN_BACK = (
    Step("∂D", "∂yᵀ h", "∂D", "columns", why="of the rank's own share: no sum"),
    Step("∂h", "∂y D", "∂h", "columns"),
    Step("∂z", "∂h where z > 0", "∂z", "columns"),
    Step("∂u", "∂z added over tokens", "∂u", "rows"),
    Step("∂U", "∂zᵀ x", "∂U", "rows", why="of the rank's own share: no sum"),
    Step(
        "∂part",
        "∂z U",
        "∂x",
        "partial",
        why="x went to every rank's outputs: each gives back its share alone",
    ),
)

TENSOR = Part(
    "tensor",
    "column parallel, then row parallel",
    (
        Step("x0", "tokens × width", "x0", "whole"),
        Step("s", "scale of the norm before", "s", "whole"),
        Step("x", "x0 × s", "x", "whole"),
        *_UP,
        Step("sum", "part, added over ranks", "sum", "whole", "all-reduce"),
        Step("d", "bias of down", "d", "whole"),
        Step(
            "y", "sum + d", "y", "whole", why="once, after the sum: a bias on every rank would count for each"
        ),
    ),
    (
        Step("∂y", "from what follows", "∂y", "whole"),
        Step("∂d", "∂y added over tokens", "∂d", "whole"),
        *_DOWN_BACK,
        Step("∂x", "∂part, added over ranks", "∂x", "whole", "all-reduce"),
        Step("∂s", "∂x × x0, over tokens", "∂s", "whole"),
        Step("∂x0", "∂x × s", "∂x0", "whole"),
    ),
)

SEQUENCE = Part(
    "sequence",
    "the same with sequence parallel: before and after, each rank has some tokens",
    (
        Step("x0", "tokens × width", "x0", "rows"),
        Step("s", "scale of the norm before", "s", "whole"),
        Step("x slice", "x0 × s", "x", "rows", why="norms and dropout work on the rank's tokens alone"),
        Step("x", "x slice, of all ranks", "x", "whole", "all-gather"),
        *_UP,
        Step("sum", "part, added; each rank gets its tokens", "sum", "rows", "reduce-scatter"),
        Step("d", "bias of down", "d", "whole"),
        Step("y", "sum + d", "y", "rows"),
    ),
    (
        Step("∂y slice", "from what follows", "∂y", "rows"),
        Step("∂d part", "∂y slice added over tokens", "∂d", "partial", why="of the rank's tokens alone"),
        Step("∂d", "∂d part, added over ranks", "∂d", "whole", "all-reduce"),
        Step("∂y", "∂y slice, of all ranks", "∂y", "whole", "all-gather"),
        *_DOWN_BACK,
        Step("∂x", "∂part, added; each rank gets its tokens", "∂x", "rows", "reduce-scatter"),
        Step("∂s part", "∂x × x0, over tokens", "∂s", "partial", why="of the rank's tokens alone"),
        Step("∂s", "∂s part, added over ranks", "∂s", "whole", "all-reduce"),
        Step("∂x0", "∂x × s", "∂x0", "rows"),
    ),
)

PARTS = (TENSOR, SEQUENCE)


class Mistake(NamedTuple):
    """Something left out, or done too often. part: where. wrong: the first value that it spoils."""

    name: str
    part: str
    title: str
    why: str
    wrong: str


MISTAKES = (
    Mistake(
        "no-sum-forward",
        "tensor",
        "the all-reduce after row parallel is left out",
        "Each rank goes on with its share of the output. Shapes are right, and the loss is a plausible number. "
        "(∂y is given here, and stays as it is; in a training it would be wrong, too.)",
        "sum",
    ),
    Mistake(
        "no-sum-backward",
        "tensor",
        "the all-reduce of column parallel's input gradient is left out",
        "The output is right, so is the loss, and so are the layer's own gradients. All that stands before the layer "
        "is trained by a share of its gradient, another one on each rank.",
        "∂x",
    ),
    Mistake(
        "bias-on-every-rank",
        "tensor",
        "the bias of row parallel is added on every rank, before the sum",
        "It counts once for each rank. A bias begins at 0, so the first step looks right.",
        "sum",
    ),
    Mistake(
        "no-sum-of-slices",
        "sequence",
        "under sequence parallel the gradient of a norm's scale is not summed",
        "Every rank saw its own tokens only. What should be the same parameter on all ranks drifts apart.",
        "∂s",
    ),
)
