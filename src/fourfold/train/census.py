"""Before the first step: all ranks hold the same Spec, code, data and parameters, in a world of the size asked for.

It runs before the model is spread: spreading copies rank 0's parameters over those of the others, after which a
difference could no longer be seen.
"""

from __future__ import annotations

import platform

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.collectives.agree import agree
from fourfold.launch.rank import Rank
from fourfold.models.boxes import box_of
from fourfold.parallel.clip import local
from fourfold.record.environment import source_hash
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.spec.grid import Grid
from fourfold.spec.huggingface import described
from fourfold.spec.model import HuggingFaceSpec, ImportSpec
from fourfold.spec.spec import Spec
from fourfold.spec.target import source_file
from fourfold.spec.words import counted


def parameter_hash(model: nn.Module) -> str:
    """xxh3-128 over names, shapes, dtypes and bytes of every parameter and buffer, in order of name."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(named_state(model).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes(tensor))
    return str(digest.hexdigest())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _hash(tensor: Tensor) -> str:
    return str(xxhash.xxh3_128_hexdigest(_bytes(tensor)))


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by each of its names: what a forward reads, and nothing that is no tensor."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def code_hash(spec: Spec) -> str:
    """The package's sources, and the files of an imported model and of imported transforms; a whole configuration."""
    digest = xxhash.xxh3_128(source_hash().encode())
    targets = [transform.target for transform in spec.data.transforms if transform.kind == "import"]
    if isinstance(spec.model, ImportSpec):
        targets.append(spec.model.target)
    if isinstance(spec.model, HuggingFaceSpec):
        digest.update(repr(described(spec.model)).encode())
    for target in targets:
        file = source_file(target)
        digest.update(b"no file" if file is None else file.read_bytes())
    return str(digest.hexdigest())


def check_world(spec: Spec, rank: Rank) -> None:
    """The settled layout's product is the number of ranks there are, or CheckFailed."""
    asked = Grid.of(spec.layout).world
    if asked != rank.world:
        raise CheckFailed(
            Problem(
                asked=f"a world of {counted(asked, 'rank')}",
                found=f"{counted(rank.world, 'rank')} joined",
                why="batch arithmetic, sample order and learning rate were settled for another world",
                instead=f"start {counted(asked, 'rank')}, or ask for a layout of {rank.world}",
            )
        )


def check_request(spec: Spec, rank: Rank, data_hash: str) -> dict[str, str]:
    """Compare what was asked, the code, the data and the versions over ranks; returns what was compared.

    Collectives: one all-gather of objects.
    Raises CheckFailed naming what differs and on which rank.
    """
    held = {
        "Spec": str(xxhash.xxh3_128_hexdigest(spec.model_dump_json().encode())),
        "code": code_hash(spec),
        "training data": data_hash,
        "torch version": torch.__version__,
        "Python version": platform.python_version(),
    }
    agree(held)
    check_world(spec, rank)
    return held


def check_parameters(model: nn.Module) -> dict[str, str]:
    """Compare the initial parameters and buffers over ranks. Collectives and errors as in `check_request`."""
    held = {"initial parameters": parameter_hash(model)}
    agree(held)
    return held


def check_boxes(model: nn.Module) -> dict[str, str]:
    """The same of a model that is spread: what ranks hold in common of each tensor must be equal.

    Collectives and errors as in `check_request`.
    """
    held: dict[str, str] = {}
    for name, tensor in named_state(model).items():
        box = f", {box_of(tensor)}" if isinstance(tensor, DTensor) else ""
        held[f"initial {name}{box}"] = _hash(local(tensor))
    every = {entry for of_rank in agree(held, partly=True) for entry in of_rank.items()}
    return {"initial parameters": str(xxhash.xxh3_128_hexdigest(repr(sorted(every)).encode()))}
