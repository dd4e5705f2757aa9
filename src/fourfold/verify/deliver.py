"""What each rank does in a coverage check: read the trainer's own loader to the end, and keep the ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.data import loader as data_loader
from fourfold.spec.model import DecoderSpec, MlpSpec, MoeSpec
from fourfold.spec.schedules import stages_in_all
from fourfold.spec.spec import Spec
from fourfold.train import setup as train_setup
from fourfold.train.setup import Training
from fourfold.verify.here import joined_here
from fourfold.verify.ledger import FILLER, Ids, RankLedger


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """What one rank was given. validation: sample ids of one pass, filler left out, int64 [n]."""

    ledger: RankLedger
    validation: Ids


def deliver(spec: Spec, steps: int) -> Delivery:
    """Open the training as a run does, with the smallest model of its kind; read `steps` steps and a validation pass.

    Collectives: those of opening a training. None while reading: a rank with fewer steps is seen, not waited for.
    """
    with train_setup.open_training(smallest_model(spec), joined_here()) as training:
        ids, rows, valid = [], [], []
        for batches in training.loader.steps(0, steps):
            ids.append(np.concatenate([batch.sample_ids.numpy() for batch in batches]))
            rows.append(np.concatenate([batch.rows.numpy() for batch in batches]))
            valid.append(sum(batch.valid_count() for batch in batches))
        shape = (len(ids), training.schedule.accumulation * training.schedule.micro_batch)
        ledger = RankLedger(
            training.joined.rank.rank,
            np.asarray(ids, dtype=np.int64).reshape(shape),
            np.asarray(rows, dtype=np.int64).reshape(shape),
            np.asarray(valid, dtype=np.int64),
        )
        return Delivery(ledger, _validation(training))


def smallest_model(spec: Spec) -> Spec:
    """The Spec with a model that takes the same data and no memory to speak of: reading asks nothing more of it.

    Under tensor parallel each rank has one head, under expert parallel one expert; a stage of a pipeline has one layer.
    A user's own model stays as it is.
    """
    model, tp, ep, stages = spec.model, spec.layout.tp, spec.layout.ep, stages_in_all(spec.layout)
    if isinstance(model, DecoderSpec):
        small: dict[str, object] = {
            "layers": stages,
            "width": 2 * tp,
            "heads": tp,
            "kv_heads": tp,
            "ffn_width": tp,
        }
        experts = MoeSpec(experts=ep, top_k=1, expert_width=tp) if ep > 1 else None
        small |= {"head_width": 2, "moe": experts, "mla": None, "mtp_layers": 0}
    elif isinstance(model, MlpSpec):
        small = {"hidden": tp, "layers": stages}
    else:
        return spec
    one_each = spec.layout.model_copy(update={"pp_split": None, "wrap": 1, "prefetch": 0})
    return spec.model_copy(update={"model": model.model_copy(update=small), "layout": one_each})


def _validation(training: Training) -> Ids:
    source, batch = training.sources.validation, training.spec.batch
    if source is None:
        return np.empty(0, dtype=np.int64)
    assert batch.micro_batch, "the Spec is not settled"
    parallel = training.parallel
    passes = data_loader.validation_batches(
        source, batch.micro_batch, parallel.degree, parallel.dp_rank, training.spec.run.seed
    )
    ids: Ids = np.concatenate([np.empty(0, dtype=np.int64), *(batch.sample_ids.numpy() for batch in passes)])
    held: Ids = ids[ids != FILLER]
    return held
