"""Rules about context parallel: rows of tokens, cut between ranks. Each function gives the problem, or None."""

from __future__ import annotations

from fourfold.spec.degrees import divisors
from fourfold.spec.errors import Problem
from fourfold.spec.rules_model import decoder_of, either, multiples_near
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted

CHUNKS = 2  # of a row for each rank: one of the head, one of the tail


def cp_needs_tokens(spec: Spec) -> Problem | None:
    if spec.layout.cp == 1 or (spec.model.kind != "mlp" and spec.data.kind != "synthetic"):
        return None
    return Problem(
        asked=f'layout.cp = {spec.layout.cp} with model.kind = "{spec.model.kind}" and '
        f'data.kind = "{spec.data.kind}"',
        found="vectors, which have no sequence",
        why="context parallel gives every rank other tokens of a row",
        instead="--set layout.cp=1",
    )


def cp_divides_sequence(spec: Spec) -> Problem | None:
    sequence: int | None = getattr(spec.data, "sequence", None)
    cp = spec.layout.cp
    if cp == 1 or sequence is None or sequence % (CHUNKS * cp) == 0:
        return None
    legal = [n for n in divisors(sequence) if sequence % (CHUNKS * n) == 0] or [1]
    near = [max(n for n in legal if n <= cp), *[n for n in legal if n > cp][:1]]
    return Problem(
        asked=f"layout.cp = {cp} with data.sequence = {sequence}",
        found=f"{counted(sequence, 'token')}, which make no {CHUNKS * cp} equal chunks",
        why="each rank takes a chunk of the head of a row and its mirror image of the tail, so that causal attention "
        "costs all ranks the same",
        instead=f"{either('layout.cp', near)} or {either('data.sequence', multiples_near(sequence, CHUNKS * cp))}",
    )


def ulysses_divides_heads(spec: Spec) -> Problem | None:
    """Heads that a tensor-parallel rank has; a key/value head may be copied to several ranks, never cut."""
    model, layout = decoder_of(spec), spec.layout
    if layout.cp == 1 or layout.cp_method != "ulysses" or model is None:
        return None
    heads = model.heads // layout.tp
    kv = max((model.kv_heads or model.heads) // layout.tp, 1)
    if heads % layout.cp == 0 and (kv % layout.cp == 0 or layout.cp % kv == 0):
        return None
    # Of the degrees that leave whole ranks to another axis the largest, if it cuts at all.
    fewer = [n for n in divisors(layout.cp) if n > 1 and heads % n == 0 and (kv % n == 0 or n % kv == 0)]
    of_rank = " on a tensor-parallel rank" if layout.tp > 1 else ""
    return Problem(
        asked=f'layout.cp_method = "ulysses" with layout.cp = {layout.cp}',
        found=f"{counted(heads, 'head')} and {counted(kv, 'key/value head')}{of_rank}, of which some would be cut",
        why="tokens are exchanged for heads: each rank attends with equally many whole ones",
        instead="--set layout.cp_method=gather or --set layout.cp_method=ring"
        + (f" or {either('layout.cp', fewer[-1:])}" if fewer else ""),
    )
