"""What makes an equality check sharp: targets that are unequally many on every rank, clipping, accumulation.

With equal counts a mean of means is right by luck; with one microbatch accumulation cannot go wrong; a norm below
the bound never clips. So the Spec's own data and model are kept, and these three are forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fourfold.data.order import key_of, mix
from fourfold.data.sample import Sample, Source
from fourfold.data.schedule import BatchSchedule
from fourfold.spec.spec import Spec
from fourfold.verify.torn import TornSource

# Of the samples, this share loses all its targets; the others keep a share of theirs, from none to all.
FULLY_MASKED = 0.125
_SALTS = 64  # masks tried until every step has what the check needs


@dataclass(frozen=True, slots=True)
class Masking:
    """How the data of a check is made from the Spec's own. torn: see `torn.TornSource`."""

    salt: int
    torn: bool = False

    def over(self, source: Source) -> UnevenSource:
        """`source` as the check has it."""
        return UnevenSource(self.torn_only(source), self.salt)

    def torn_only(self, source: Source) -> Source:
        """The same without the mask that `salt` chooses."""
        return TornSource(source) if self.torn else source


@dataclass(frozen=True, slots=True)
class UnevenSource:
    """A source of the same samples of which the last targets carry no loss: how many, a hash of the sample id says.

    As the mask belongs to the sample, the reference and every layout see the same.
    """

    source: Source
    salt: int

    @property
    def vocabulary(self) -> int | None:
        return self.source.vocabulary

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, index: int) -> Sample:
        """The sample, its tail of targets masked."""
        sample = self.source.sample(index)
        return replace(sample, valid=masked(sample.valid, index, self.salt))

    def largest(self) -> Sample:
        return self.source.largest()

    def counts(self) -> dict[str, int]:
        return self.source.counts()


def masked(valid: NDArray[np.bool_], sample_id: int, salt: int) -> NDArray[np.bool_]:
    """`valid` [T] with its tail masked, or [] (one target) masked or not."""
    word = mix(np.array([sample_id], dtype=np.uint64), key_of("verify", salt))[0]
    share = float(word >> np.uint64(11)) / 2.0**53
    if valid.ndim == 0:
        return valid & np.bool_(share >= 0.4)
    kept = valid.copy()
    kept[0 if share < FULLY_MASKED else int(np.ceil(share * len(valid))) :] = False
    return kept


def choose_salt(source: Source, schedule: BatchSchedule, steps: int) -> int:
    """The first mask under which the first `steps` global batches are as unequal as the check needs.

    Every step must keep a valid target and hold a row without one, and not all ranks may have equally many; where
    no mask does all of it, the one that does it in most steps.
    """
    rows = np.arange(schedule.global_batch, dtype=np.int64)
    ids = schedule.ids(range(steps), rows)
    valid = {i: source.sample(i).valid for i in np.unique(ids[ids >= 0]).tolist()}

    def suited(salt: int) -> int:
        counts = {i: int(masked(v, i, salt).sum()) for i, v in valid.items()}
        return sum(_suits([counts.get(i, 0) for i in step], schedule) for step in ids.tolist())

    best, most = 0, -1
    for salt in range(_SALTS):
        number = suited(salt)
        if number > most:
            best, most = salt, number
        if most == steps:
            break
    return best


def _suits(counts: Sequence[int], schedule: BatchSchedule) -> bool:
    by_rank = valid_by_rank(counts, schedule)
    return sum(counts) > 0 and min(counts) == 0 and (len(by_rank) == 1 or len(set(by_rank)) > 1)


def valid_by_rank(counts: Sequence[int], schedule: BatchSchedule) -> list[int]:
    """Valid targets of each data-parallel rank, from those of each row of the global batch."""
    return [
        sum(
            counts[row]
            for micro in range(schedule.accumulation)
            for row in schedule.rows(rank, micro).tolist()
        )
        for rank in range(schedule.degree)
    ]


def sharpened(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """A settled Spec, to be judged in fp64 over two microbatches or more; and what was changed, in words.

    On the CPU, but where CUDA devices were asked for by name.
    """
    batch, changes = spec.batch, []
    device = "cuda" if spec.hardware.device == "cuda" else "cpu"
    assert batch.micro_batch and batch.accumulation, "the Spec is not settled"
    if batch.accumulation == 1 and batch.micro_batch > 1:
        divisors = [d for d in range(1, batch.micro_batch) if batch.micro_batch % d == 0]
        micro = divisors[-1]
        changes.append(
            f"batch.micro_batch {batch.micro_batch} -> {micro}, so that gradients accumulate over "
            f"{batch.micro_batch // micro} microbatches"
        )
        batch = batch.model_copy(update={"micro_batch": micro, "accumulation": batch.micro_batch // micro})
    if spec.precision.compute != "fp64":
        changes.append(
            f"precision.compute {spec.precision.compute} -> fp64: logic is judged without rounding"
        )
    return (
        spec.model_copy(
            update={
                "batch": batch,
                "precision": spec.precision.model_copy(update={"compute": "fp64", "tf32": False}),
                "hardware": spec.hardware.model_copy(update={"device": device}),
                "data": spec.data.model_copy(update={"workers": 0}),
            }
        ),
        tuple(changes),
    )


def with_optimizer(spec: Spec, **changes: float) -> Spec:
    """The Spec with other optimizer settings, such as eps or clip_norm."""
    return spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update=changes)})
