"""What a checkpoint holds, and how each byte of it is known to be right: `manifest.json`, written last.

    ckpt/step-00000010/
      manifest.json               this value; a folder without a valid one is no checkpoint
      rank00000.safetensors …     tensors, each rank's chunks in a file of its own
      state.json                  everything that is no tensor

A save fills `ckpt/.saving-step-00000010-<token>/`; one rename makes it a checkpoint. Nothing is overwritten in place.
The manifest holds the hash of every file, and its own: whoever writes it as JSON writes its seal too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import xxhash
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from fourfold.spec.value import Value

SCHEMA: Literal["fourfold.checkpoint/1"] = "fourfold.checkpoint/1"
MANIFEST = "manifest.json"
STATE = "state.json"
SEAL = "seal"  # of the JSON, not of the value: the hash of all the rest
SAVING = ".saving-"  # a folder being filled, or what is left of one
REMOVING = ".removing-"  # a checkpoint being removed
YEAR_10000 = 253_402_300_800  # in unix seconds: the first moment that calendars cannot write


class FileRecord(Value):
    """One file, as it was hashed while it was written."""

    bytes: NonNegativeInt
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class Chunk(Value):
    """A box of a tensor (offset and size per dim) and where its bytes lie: `key` in the safetensors file `file`."""

    file: str
    key: str
    offset: tuple[NonNegativeInt, ...] = Field(strict=False)
    size: tuple[NonNegativeInt, ...] = Field(strict=False)


class TensorRecord(Value):
    """A whole tensor: dtype as torch names it ("float32"), shape, and the chunks that cover it exactly once."""

    dtype: str
    shape: tuple[NonNegativeInt, ...] = Field(strict=False)
    chunks: tuple[Chunk, ...] = Field(strict=False)


class Manifest(Value):
    """A checkpoint after `step` optimizer steps. `position`: samples passed over, the whole data state."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_version: Literal["fourfold.checkpoint/1"] = Field(default=SCHEMA, alias="schema")
    step: NonNegativeInt
    position: NonNegativeInt
    world: PositiveInt
    layout: dict[str, int | bool | float | str | list[int | str] | None]  # the settled [layout]
    spec_hash: str  # xxh3-128 of the settled Spec's JSON
    data_hash: str  # content hash of the training data
    versions: dict[str, str]  # fourfold, torch, python
    created: float = Field(ge=0, lt=YEAR_10000)  # unix seconds
    files: dict[str, FileRecord]  # all but the manifest itself
    tensors: dict[str, TensorRecord]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(file.bytes for file in self.files.values())

    @model_serializer(mode="wrap")
    def _sealed(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        body: dict[str, Any] = serialize(self)
        return {**body, SEAL: seal(body)}

    @model_validator(mode="before")
    @classmethod
    def _seal_holds(cls, body: Any) -> Any:
        if not isinstance(body, Mapping) or SEAL not in body:
            return body
        rest = {key: value for key, value in body.items() if key != SEAL}
        if body[SEAL] != seal(rest):
            raise ValueError("its seal is broken: it is not as it was written")
        return rest


def seal(body: Mapping[str, Any]) -> str:
    """xxh3-128 of a manifest's JSON without its seal: keys sorted, no white space."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
