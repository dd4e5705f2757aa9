"""What one step of a run was seen to hold and to send, where it was rehearsed: the real step, without its values."""

from __future__ import annotations

from collections.abc import Mapping

from fourfold.plan.state_bytes import Category, Instant
from fourfold.spec.value import Value


class Traffic(Value):
    """One sort of collective in one step of one rank.

    over: the mesh axis, or product of axes; "world" where all ranks take part. bytes: of the wholes, all `count`
    together: what is reduced, the output of a gathering. sent_bytes: what this rank sends of them at least, as a ring
    does (see `sent_bytes`).
    """

    kind: str
    over: str
    ranks: int
    count: int
    bytes: int
    sent_bytes: int


class Rehearsal(Value):
    """A step as `rank` does it, with moments: not a run's first, which has none before its update.

    parameters: of the whole model, tied ones once. state: bytes by instant and category, as in `plan.state_bytes`.
    activations_bytes: kept by the forward of one microbatch for its backward. peak_bytes: the most alive at any
    operation, in `peak_phase`: the categories of `peak_state`, and beside them `peak_beside_bytes`: activations,
    gradients that are not yet in their place, workspaces that are tensors. A kernel's own workspace is none.
    """

    rank: int
    parameters: int
    state: Mapping[Instant, Mapping[Category, int]]
    activations_bytes: int
    peak_bytes: int
    peak_phase: str
    peak_state: Mapping[Category, int]
    peak_beside_bytes: int
    traffic: tuple[Traffic, ...]


def sent_bytes(kind: str, whole_bytes: int, ranks: int) -> int:
    """Bytes that each rank sends at least in one collective of `whole_bytes` over `ranks`, rounded up.

    An all-reduce takes 2 (n - 1) / n of the whole, its halves, an all-gather and a reduce-scatter, (n - 1) / n each
    (Patarasuk & Yuan, J. Parallel Distrib. Comput. 69 (2009), theorem 1 and section 3); so does an all-to-all of as
    much on every rank. A broadcast, or a send, passes the whole on once; who receives sends nothing.
    """
    if kind in ("barrier", "receive"):
        return 0
    parts = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}.get(kind)
    return whole_bytes if parts is None else -(-parts * (ranks - 1) * whole_bytes // ranks)
