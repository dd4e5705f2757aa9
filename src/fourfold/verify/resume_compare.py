"""Two runs of the same Spec, bit for bit: where they deviate, in the order of the run, and what that may come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fourfold.checkpoint.validate import validate
from fourfold.data.schedule import BatchSchedule
from fourfold.spec.grid import Grid
from fourfold.spec.spec import Spec
from fourfold.train.schedule import learning_rate
from fourfold.verify.resume_record import Life, Lines, Trail, published
from fourfold.verify.resume_tensors import StoredTensors, difference, same_bits

IDS, TARGETS, RATE, LOSS, NORM = "sample ids", "tokens and targets", "learning rate", "loss", "gradient norm"
SCALE = "loss scale"
PARAMETER, BUFFER, MOMENT, COUNTER = "parameter", "buffer or frozen parameter", "moment", "step counter"
STREAM, POSITION, PROBE, VALIDATION = "random stream", "data position", "saved probe loss", "validation"

# Of one step, in the order in which they come about.
KINDS = (
    *(IDS, TARGETS, RATE, SCALE, LOSS, NORM),
    *(PARAMETER, BUFFER, MOMENT, COUNTER, STREAM, POSITION, PROBE, VALIDATION),
)

_IN_STEP = (
    *((TARGETS, key) for key in ("tokens", "nonpadding", "loss_tokens")),
    *((RATE, "lr"), (SCALE, "scale"), (SCALE, "skipped"), (LOSS, "loss"), (NORM, "grad_norm")),
)
_IN_VALIDATION = tuple((VALIDATION, f"validation_{what}") for what in ("loss", "tokens", "samples"))
_SHOWN_IDS = 6


@dataclass(frozen=True, slots=True)
class Deviation:
    """A value of a run that is not the expected one. life: 0 before the first interruption; loading: right after the
    checkpoint of `step` was loaded; rank: None where all ranks share the value."""

    run: str
    life: int
    step: int
    kind: str
    rank: int | None
    name: str
    expected: str
    found: str
    note: str = ""
    loading: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        return self.life, self.step, KINDS.index(self.kind)

    def __str__(self) -> str:
        where = f"loading the checkpoint of step {self.step}" if self.loading else f"step {self.step}"
        if self.rank is not None:
            where += f", rank {self.rank}"
        what = f"{self.kind} {self.name}".rstrip()
        text = f"{where}, {what}: {self.found} in place of {self.expected}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, slots=True)
class Rules:
    """What every run of the Spec must do, by arithmetic alone."""

    spec: Spec
    schedule: BatchSchedule

    def ids(self, rank: int, step: int) -> list[int]:
        """Sample ids of the rank's microbatches of `step` (from 1), in order."""
        part = Grid.of(self.spec.layout).index(rank, "dp")
        micros = range(self.schedule.accumulation)
        return [i for micro in micros for i in self.schedule.micro_ids(step - 1, part, micro).tolist()]

    def rate(self, step: int) -> float:
        """Learning rate of `step` (from 1)."""
        return learning_rate(self.spec.optimizer, self.spec.run.steps, step - 1)

    def broken_by(self, trail: Trail) -> list[Deviation]:
        """Where a run's ids, rates and positions are not those of the rules; in order."""
        found: list[Deviation] = []
        for number, life in enumerate(trail.lives):
            expected = [
                {step: self.ids(rank, step) for step in by_step} for rank, by_step in enumerate(life.ids)
            ]
            found += self._ids(trail, number, life, expected)
            rates = {step: {"lr": self.rate(step)} for step in life.steps}
            found += self._lines(trail, number, life.steps, rates, ((RATE, "lr"),))
        for step, folder in published(trail.run).items():
            expected_position = self.schedule.position(step)
            position = StoredTensors(folder).manifest["position"]
            if position != expected_position:
                place = (trail.life_that_saved(step), step, POSITION, None, "")
                found.append(Deviation(trail.scenario.title, *place, str(expected_position), str(position)))
        return in_order(found)

    def compare(self, trail: Trail, undisturbed: Trail) -> list[Deviation]:
        """Where a run deviates from the undisturbed one, in all that both did; in order."""
        right = undisturbed.lives[0]
        found: list[Deviation] = []
        for number, life in enumerate(trail.lives):
            found += self._ids(trail, number, life, right.ids)
            found += self._lines(trail, number, life.steps, right.steps, _IN_STEP)
            found += self._lines(trail, number, life.validations, right.validations, _IN_VALIDATION)
        saved, expected = published(trail.run), published(undisturbed.run)
        for step in sorted(saved.keys() & expected.keys()):
            if validate(saved[step], hashes=False):  # what is not whole is told of elsewhere
                continue
            found += _checkpoints(
                trail, step, StoredTensors(saved[step]), StoredTensors(expected[step]), expected
            )
        return in_order(found)

    def _ids(
        self, trail: Trail, number: int, life: Life, expected: Sequence[Mapping[int, Sequence[int]]]
    ) -> Iterator[Deviation]:
        for rank, by_step in enumerate(life.ids):
            for step, ids in by_step.items():
                right = expected[rank].get(step)
                if right is not None and ids != right:
                    place = (number, step, IDS, rank, "")
                    said = (_ids_shown(right), _ids_shown(ids), self._guess_ids(ids))
                    yield Deviation(trail.scenario.title, *place, *said)

    def _guess_ids(self, ids: Sequence[int]) -> str:
        for step in range(1, self.spec.run.steps + self.schedule.steps_per_epoch + 1):
            for rank in range(Grid.of(self.spec.layout).world):
                if self.ids(rank, step) == ids:
                    of_rank = f", rank {rank}" if self.schedule.degree > 1 else ""
                    return f"those of step {step}{of_rank}"
        return ""

    def _lines(
        self, trail: Trail, number: int, lines: Lines, expected: Lines, names: Sequence[tuple[str, str]]
    ) -> Iterator[Deviation]:
        for step, line in lines.items():
            for kind, key in names:
                right = expected.get(step, {}).get(key)
                # Floats stand in the record with all their digits: equal text is equal bits.
                if right is not None and repr(line.get(key)) != repr(right):
                    first = trail.lives[number].first
                    note = self._guess_rate(line[key], right, first) if kind == RATE else ""
                    note = note or (_of_other_step(line.get(key), key, expected) if kind != TARGETS else "")
                    name = key.removeprefix("validation_") if kind in (TARGETS, VALIDATION) else ""
                    place = (number, step, kind, None, name)
                    yield Deviation(trail.scenario.title, *place, repr(right), repr(line.get(key)), note)

    def _guess_rate(self, rate: float, right: float, first: int) -> str:
        # A rate that comes twice (a constant schedule) tells of no step.
        same = [step for step in range(1, self.spec.run.steps + 1) if self.rate(step) == rate]
        if len(same) == 1:
            return f"that of step {same[0]}"
        decayed = [step for step in (first, first + 1) if 0 < step <= self.spec.run.steps]
        for step in decayed:
            if abs(rate - right * self.rate(step) / self.spec.optimizer.lr) <= 1e-9 * abs(right):
                return f"the schedule's share of the rate of step {step}, not of optimizer.lr: applied twice"
        return ""


def in_order(found: Sequence[Deviation]) -> list[Deviation]:
    """Deviations as a run comes upon them."""
    return sorted(found, key=lambda deviation: deviation.order)


def both(*parts: str) -> str:
    """What there is to say, as one text."""
    return "; ".join(part for part in parts if part)


def kind_of(name: str, manifest: Mapping[str, Any]) -> str:
    """What a checkpoint's tensor of this name is."""
    if name.startswith("rank"):
        return STREAM
    if name.startswith("optimizer."):
        return COUNTER if name.endswith(".step") else MOMENT
    moved = f"optimizer.{name.removeprefix('model.')}.exp_avg" in manifest["tensors"]
    return PARAMETER if moved else BUFFER


def _checkpoints(
    trail: Trail, step: int, saved: StoredTensors, right: StoredTensors, others: Mapping[int, Path]
) -> Iterator[Deviation]:
    """Where two checkpoints of the same step differ."""
    title, life = trail.scenario.title, trail.life_that_saved(step)
    for name in sorted({*saved.names, *right.names}):
        kind = kind_of(name, right.manifest)
        if name not in saved.names or name not in right.names:
            there = ("nothing", "a tensor") if name in saved.names else ("a tensor", "nothing")
            yield Deviation(title, life, step, kind, None, name, *there)
            continue
        held, expected = saved.tensor(name), right.tensor(name)
        if not same_bits(held, expected):
            found = difference(expected, held)
            note = both(_guess_tensor(name, held, step, right, others), found.many)
            yield Deviation(title, life, step, kind, None, name + found.at, found.one, found.other, note)
    for kind, one, other in (
        (POSITION, saved.manifest["position"], right.manifest["position"]),
        (PROBE, saved.probe_loss, right.probe_loss),
    ):
        if one != other:
            yield Deviation(title, life, step, kind, None, "", str(other), str(one))


def _guess_tensor(
    name: str, held: Tensor, step: int, right: StoredTensors, others: Mapping[int, Path]
) -> str:
    if not bool(held.any()):
        return "all zeros"
    rank, _, stream = name.partition(".")
    if rank.startswith("rank"):
        for other in right.names:
            if other.partition(".")[2] == stream and other != name and same_bits(held, right.tensor(other)):
                return f"that of {other.partition('.')[0].replace('rank', 'rank ')}"
    for other_step, folder in others.items():
        stored = StoredTensors(folder)
        if other_step != step and name in stored.names and same_bits(held, stored.tensor(name)):
            return f"that of step {other_step}"
    return ""


def _of_other_step(value: object, key: str, expected: Lines) -> str:
    same = [step for step, line in expected.items() if repr(line.get(key)) == repr(value)]
    return f"that of step {same[0]}" if len(same) == 1 else ""


def _ids_shown(ids: Sequence[int]) -> str:
    more = f", … ({len(ids)})" if len(ids) > _SHOWN_IDS else ""
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS]))}{more}]"
