"""What the tests of states that are cut between ranks run there."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fourfold.models.boxes import box_of
from fourfold.parallel.clip import local
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.train import loop, saving, state
from fourfold.train.setup import open_training
from fourfold.train.step import accumulate, agree_totals
from fourfold.verify.here import joined_here
from fourfold.verify.resume_tensors import StoredTensors, same_bits


def held_after_loading(sets: tuple[str, ...], folder: str) -> list[str]:
    """What of a loaded state is not, in bits, what the files hold for this rank, or not the memory that is updated."""
    asked = settle(load_spec("tiny", sets).spec, dist.get_world_size())
    wrong: list[str] = []
    with open_training(asked, joined_here()) as training:
        loop.warm_up(training)
        saving.load_state(training, Path(folder))
        files = StoredTensors(Path(folder))
        batches = next(training.loader.steps(0, 1))
        for moment in ("loaded", "used"):
            for name, tensor in state.tensors_of(training).items():
                saved = files.tensor(name)
                part = saved[box_of(tensor).slices] if isinstance(tensor, DTensor) else saved
                if not same_bits(local(tensor), part):
                    wrong.append(f"{moment}: {name}")
            for name, parameter in training.named_parameters().items():
                if local(parameter).data_ptr() != training.optimizer._held[name].data_ptr():
                    wrong.append(f"{moment}: memory of {name}")
            accumulate(training, batches, agree_totals(training, batches, False))
            training.optimizer.drop_gradients()
    return wrong
