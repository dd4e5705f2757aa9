"""A Spec made adversarial: its decoder (`adversary.py`), and what must be set to go with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.data.sample import Source
from fourfold.data.schedule import BatchSchedule
from fourfold.spec.data import SyntheticDataSpec
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.model import DecoderSpec, ImportSpec
from fourfold.spec.spec import Spec
from fourfold.verify.adversary import DROPOUT, TARGET, AdversaryKit, frozen
from fourfold.verify.reference import whole_batch


def adversarial(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """A settled Spec of a decoder, made adversarial as far as it needs no data; and what was changed, in words.

    Which rows use the sometimes-used part is for `chosen` to say. Raises SpecError for another kind of model.
    """
    model, data, batch = spec.model, spec.data, spec.batch
    if not isinstance(model, DecoderSpec) or isinstance(data, SyntheticDataSpec):
        raise SpecError(
            Problem(
                asked="the adversarial model",
                found=f'model.kind = "{model.kind}"',
                why="it is the Spec's decoder with awkward parts added",
                instead="the same command without --adversarial: the model is judged as it is",
            )
        )
    assert batch.micro_batch and batch.global_batch, "the Spec is not settled"
    changes = [
        f"model.{name} {_word(getattr(model, name))} -> {_word(value)}"
        for name, value in (("tied", True), ("biases", True), ("dropout", model.dropout or DROPOUT))
        if getattr(model, name) != value
    ]
    changes.append(f"{frozen(model)} frozen")
    changes.append("every row has two documents or more, and half of the rows end in padding")
    if data.attend_across_documents:
        changes.append("data.attend_across_documents true -> false")
    if not spec.layout.unused_parameters:
        changes.append("layout.unused_parameters false -> true")
    if batch.micro_batch == 1 and batch.accumulation == 1:
        changes.append(
            f"batch.global_batch {batch.global_batch} -> {2 * batch.global_batch}: two microbatches"
        )
        batch = batch.model_copy(update={"global_batch": 2 * batch.global_batch, "accumulation": 2})
    update: dict[str, Any] = {
        "model": _import(model, 16, 0),
        "data": data.model_copy(update={"attend_across_documents": False}),
        "layout": spec.layout.model_copy(update={"unused_parameters": True}),
        "batch": batch,
    }
    return spec.model_copy(update=update), tuple(changes)


def chosen(spec: Spec, source: Source, schedule: BatchSchedule, steps: int) -> tuple[Spec, str]:
    """The adversarial Spec with the property of a row by which it uses the sometimes-used part; and that, in words.

    Best is one that few rows have, in one step some and in a later one none: then it has moments when it has no
    gradient, and a gradient of zeros, which is not none, moves it.
    """
    assert isinstance(spec.model, ImportSpec)
    sums = []
    for step in range(steps):
        rows = whole_batch(spec, source, schedule, step)
        sums.append([int(row.inputs.sum()) for row in rows if bool(row.valid.any())])
    size = schedule.global_batch
    candidates = (
        (every, residue) for every in (max(2, size // 2), size, 2 * size) for residue in range(every)
    )
    every, residue = max(candidates, key=lambda pair: _worth(sums, *pair))
    decoder = DecoderSpec.model_validate(spec.model.args["decoder"])
    told = (
        f"a feed-forward (blocks.{decoder.layers}) that only those rows use whose tokens add up to {residue} modulo "
        f"{every}"
    )
    return spec.model_copy(update={"model": _import(decoder, every, residue)}), told


def _worth(sums: Sequence[Sequence[int]], every: int, residue: int) -> tuple[int, int, int]:
    using = [sum(value % every == residue for value in step) for step in sums]
    later_none = sum(any(using[:step]) and not count for step, count in enumerate(using))
    return min(later_none, 1), sum(count > 0 for count in using), -max(using)


def _import(decoder: DecoderSpec, every: int, residue: int) -> ImportSpec:
    made = AdversaryKit(decoder, every, residue).spec.model_dump(mode="json", exclude_none=True)
    return ImportSpec(
        kind="import", target=TARGET, args={"decoder": made, "every": every, "residue": residue}
    )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
