"""The Spec: everything that was asked for, as one frozen value."""

from __future__ import annotations

from pydantic import Field

from fourfold.spec.data import DataSpec, StdlibDataSpec
from fourfold.spec.model import ModelSpec
from fourfold.spec.training import (
    BatchSpec,
    CheckpointSpec,
    HardwareSpec,
    LayoutSpec,
    OptimizerSpec,
    PrecisionSpec,
    RunSpec,
)
from fourfold.spec.value import Value


class Spec(Value):
    """A training, asked for. `name` comes from the file's stem unless the file gives one."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    note: str = ""
    model: ModelSpec
    data: DataSpec = StdlibDataSpec()
    batch: BatchSpec = BatchSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    precision: PrecisionSpec = PrecisionSpec()
    layout: LayoutSpec = LayoutSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    run: RunSpec = RunSpec()
    hardware: HardwareSpec = HardwareSpec()
