"""How `fourfold lab pipeline` prints its document: a drawing for each schedule, a table, and what real ranks did."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fourfold.cli.output import WIDTH, paint, table, wrapped

# (stage, kind, microbatch, start, end)
Slots = Sequence[tuple[int, str, int, float, float]]

LEGEND = (
    "F3  forward of microbatch 3, 1 unit         B3  its backward, 2 units",
    "I3  its backward for inputs alone, 1 unit   W3  for weights alone, 1 unit",
    "f3 b3 i3 w3  the same on the rank's second stage     ..  idle",
)


def pipeline_lines(document: Mapping[str, Any]) -> list[str]:
    """Every schedule: a row a rank, its bubble and what it holds; then all over microbatches, and on real ranks."""
    count, world = document["microbatches"], document["ranks"]
    lines = [
        f"{world} ranks, {count} microbatches; the order of actions is torch's, time is computed:",
        *(f" {line}" for line in LEGEND),
        *wrapped("a unit: a forward of one stage; of two stages on a rank each has half of its layers"),
    ]
    for entry in document["schedules"]:
        lines += ["", *_schedule(entry)]
    lines += ["", *_over(document), "", *_on_ranks(document), "", *_sharded(document)]
    failed = [finding for finding in document["findings"] if finding["verdict"] == "fail"]
    lines += [""] if failed else []
    for finding in failed:
        lines += wrapped(f"failed: {finding['claim']}: {finding['measured']}", 0)
    return [*lines, "", f"{document['verdict']}  {document['findings_file']}"]


def drawing(ranks: Sequence[Slots], width: int = WIDTH) -> list[str]:
    """A row a rank, a cell a unit of time, in pieces of at most `width` columns; all times are whole units."""
    span = round(max(slots[-1][4] for slots in ranks))
    cell = 1 + len(str(max(microbatch for slots in ranks for _, _, microbatch, _, _ in slots)))
    label = len(f"rank {len(ranks) - 1}  ")
    rows = [_cells(slots, span, cell) for slots in ranks]
    fit = (width - label - 1) // cell
    pieces = -(-span // fit)
    fit = -(-span // pieces)  # all of about the same length
    lines = []
    for start in range(0, span, fit):
        if pieces > 1:
            lines.append(f" units {start}-{min(start + fit, span) - 1}")
        for rank, row in enumerate(rows):
            lines.append(f" {f'rank {rank}  ':<{label}}{''.join(row[start : start + fit])}")
    return lines


def _cells(slots: Slots, span: int, cell: int) -> list[str]:
    first = min(slot[0] for slot in slots)
    cells = ["." * cell] * span
    for stage, kind, microbatch, start, end in slots:
        name = f"{kind if stage == first else kind.lower()}{microbatch}"
        for at in range(round(start), round(end)):
            cells[at] = f"{name:-<{cell}}" if at == round(start) else "-" * cell
    return cells


def _schedule(entry: Mapping[str, Any]) -> list[str]:
    per_rank = entry["stages_per_rank"]
    title = f"{entry['name']}, {'a stage' if per_rank == 1 else f'{per_rank} stages'} a rank"
    lines = [paint(title, "bold", sys.stdout), *wrapped(entry["source"])]
    figures = entry["figures"]
    if "demands" in figures:
        return [*lines, *wrapped(f"not drawn: it demands {figures['demands']}")]
    formula = figures["bubble_by_formula"]
    told = f"idle {figures['bubble']:.1%} of {figures['span']:g} units"
    told += f"; by formula {formula:.1%}" if formula is not None else "; no formula for so few microbatches"
    if figures["bubble_inside"] < figures["bubble"] - 1e-9:
        told += f"; {figures['bubble_inside']:.1%} between a rank's own first and last action"
    held = ", ".join(f"{most:g}" for most in figures["most_alive"])
    unit = "microbatches" if per_rank == 1 else "microbatches (each of its stages counts 1/2)"
    return [
        *lines,
        *drawing(entry["timeline"]),
        *wrapped(told),
        *wrapped(f"at most alive on ranks 0, 1, ..: {held} {unit}"),
    ]


def _over(document: Mapping[str, Any]) -> Iterator[str]:
    """Bubbles by schedule and microbatches, and what the fullest rank holds."""
    heads = [f"m = {row['microbatches']}" for row in document["schedules"][0]["over_microbatches"]]
    shares, held = [], []
    for entry in document["schedules"]:
        rows = entry["over_microbatches"]
        shares.append([entry["name"], *("-" if "demands" in row else _shares(row) for row in rows)])
        held.append(
            [entry["name"], *("-" if "demands" in row else f"{max(row['most_alive']):g}" for row in rows)]
        )
    yield paint("the bubble over m microbatches: % idle, computed (by formula)", "bold", sys.stdout)
    yield from table(["", *heads], shares).splitlines()
    yield from wrapped("-: the schedule does not take so few, or its formula does not hold")
    yield from wrapped(
        "dualpipe-v: its formula is taken without overlap (F&B = F + B), since torch runs the two one after the other"
    )
    yield ""
    yield paint("the most microbatches alive on a rank: its activation memory", "bold", sys.stdout)
    yield from table(["", *heads], held).splitlines()


def _shares(row: Mapping[str, Any]) -> str:
    formula = row["bubble_by_formula"]
    return f"{100 * row['bubble']:.1f} ({'-' if formula is None else f'{100 * formula:.1f}'})"


def _on_ranks(document: Mapping[str, Any]) -> Iterator[str]:
    yield paint("on real ranks", "bold", sys.stdout)
    yield from wrapped(
        f"torch's PipelineStage on {document['ranks']} processes with gloo; a unit is {1000 * document['unit_s']:g} ms "
        "that each pass sleeps, so that few cores do",
    )
    rows = []
    for entry in document["schedules"]:
        ran, figures = entry["ran"], entry["figures"]
        if ran is None:
            continue
        rows.append(
            [
                entry["name"],
                f"{figures['bubble']:.1%}",
                f"{ran['bubble']:.1%}",
                f"{figures['span']:g}",
                f"{ran['span']:.1f}",
                f"{ran['gradient_gap']:.0e}",
                "as drawn" if ran["same_order"] else "NOT as drawn",
            ]
        )
    heads = ["", "idle", "measured", "units", "measured", "gradients", "order"]
    yield from table(heads, rows).splitlines()


def _sharded(document: Mapping[str, Any]) -> Iterator[str]:
    """ZeRO-3 under every schedule, and what goes wrong without a word."""
    yield paint("a mistake that nothing tells: ZeRO-3 under a split backward", "bold", sys.stdout)
    yield from wrapped(
        "Stages are sharded with FSDP2 on 2 × 2 ranks. If parameters are dropped after each forward, torch 2.13 gives "
        "wrong gradients under the schedules that split the backward. No error, no warning; kept after forward they "
        "are right. Gradients against one device, in fp64:"
    )
    by_name: dict[str, dict[bool, str]] = {}
    for one in document["sharded"]:
        told = f"{one['gap']:.1e}"
        if missing := one["stages_without_gradient"]:
            stages = "stage" if len(missing) == 1 else "stages"
            told += f"  (no gradient at all on {stages} {', '.join(map(str, missing))})"
        by_name.setdefault(one["name"], {})[one["dropped_after_forward"]] = told
    rows = [[name, gaps[False], gaps[True]] for name, gaps in by_name.items()]
    yield from table(["", "kept", "dropped after forward"], rows).splitlines()
