"""Where routed experts meet what other ranks hold: on one device nothing has to be exchanged.

A model computes on plain tensors of the tokens that are here; `parallel` puts another `Here` in the place of this one
where tokens or experts lie on several ranks.
Letters: B rows, T tokens of a row that this rank has, t those of them that it routes, H features, N what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fourfold.collectives.rehearsed import has_values


class Arrived(NamedTuple):
    """What experts here were sent: [n, H], in their order; how many each; and the way back, [n, H] -> [N, H]."""

    x: Tensor
    counts: Sequence[int]
    back: Callable[[Tensor], Tensor]


class Here:
    """All tokens and all experts are on this device.

    speaks: whether this rank counts where several compute the same.
    """

    speaks = True

    def enter(self, stream: Tensor) -> Tensor:
        """The stream [B, T, H], as a plain tensor of the tokens that this rank routes: [B, t, H]."""
        return stream

    def leave(self, y: Tensor, stream: Tensor) -> Tensor:  # noqa: ARG002
        """What was computed of these, [B, t, H], as a part of the stream like `stream`."""
        return y

    def part(self, of_tokens: Tensor) -> Tensor:
        """[B, T, ...] -> [B, t, ...]: of what every token here has, that of those that are routed here."""
        return of_tokens

    def together(self, of_part: Tensor, length: int) -> Tensor:  # noqa: ARG002
        """The other way, without a gradient; length: T."""
        return of_part

    def own(self, parameter: Tensor) -> Tensor:
        """What is here of a parameter, as a plain tensor."""
        return parameter

    def once(self, parameter: Tensor) -> Tensor:
        """The same of what is added to outputs, of which this rank may have but a part of a sum."""
        return parameter

    def to_experts(self, x: Tensor, counts: Tensor, total: int) -> Arrived:  # noqa: ARG002
        """Send `x` [N, H], sorted by expert, `counts` (int64 [experts]) to each, to where the experts are."""
        return Arrived(x, read(counts, len(x)), lambda y: y)


class Meeting(nn.Module):
    """A module that meets other ranks by `here`."""

    def __init__(self) -> None:
        super().__init__()
        self.here = Here()


class Stacks(nn.Module):
    """Experts whose parameters are stacks, [experts, ...] each.

    experts: how many there are, wherever they lie. each: how many of them a token goes to, by which a pipeline's stages
    are cut to cost alike; None: all.
    """

    def __init__(self, experts: int, each: int | None = None) -> None:
        super().__init__()
        self.experts, self.each = experts, each or experts


def read(counts: Tensor, total: int) -> list[int]:
    """`counts` as numbers; in a rehearsal, where they have no values, as equal as they can be, and `total` together."""
    if has_values(counts):
        return [int(count) for count in counts.tolist()]
    length = counts.numel()
    return [total // length + (index < total % length) for index in range(length)]
