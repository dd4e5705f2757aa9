"""The tensors of a checkpoint, read here by the manifest and safetensors alone: nothing of the loader is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from fourfold.checkpoint.manifest import MANIFEST, STATE


class Difference(NamedTuple):
    """The first element in which two tensors differ: its index, its value in each; and how many do."""

    at: str
    one: str
    other: str
    many: str


class StoredTensors:
    """Whole tensors by name; of each file only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        self._files: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self.manifest["tensors"])

    @property
    def probe_loss(self) -> str:
        """The loss of its step's batch as it was saved, in hexadecimal digits."""
        return str(json.loads((self.folder / STATE).read_bytes()).get("probe_loss"))

    def tensor(self, name: str) -> Tensor:
        """Its chunks, each put at its offset."""
        record = self.manifest["tensors"][name]
        whole = torch.empty(record["shape"], dtype=getattr(torch, record["dtype"]))
        for chunk in record["chunks"]:
            place = tuple(
                slice(at, at + size) for at, size in zip(chunk["offset"], chunk["size"], strict=True)
            )
            whole[place] = self._file(chunk["file"]).get_tensor(chunk["key"])
        return whole

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, framework="pt")
        return self._files[name]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and every bit: NaN is itself, and 0.0 is not -0.0."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def difference(one: Tensor, other: Tensor) -> Difference:
    """Where two tensors that are not `same_bits` first differ; in dtype or shape, if in these."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return Difference("", f"{one.dtype} {tuple(one.shape)}", f"{other.dtype} {tuple(other.shape)}", "")
    unequal = (_bits(one) != _bits(other)).view(one.numel(), -1).any(1)
    first = int(unequal.nonzero()[0])
    place = [int(at) for at in torch.unravel_index(torch.tensor(first), one.shape)] if one.dim() else ""
    many = f"{int(unequal.sum()):,} of {one.numel():,} elements differ" if one.numel() > 1 else ""
    return Difference(
        str(place), repr(one.reshape(-1)[first].item()), repr(other.reshape(-1)[first].item()), many
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
