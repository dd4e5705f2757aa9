"""What it is trained on: `[data]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from fourfold.spec.value import Value


class TransformSpec(Value):
    """One augmentation; draws from a stream keyed by (seed, epoch, sample id), never from the layout."""

    kind: Literal["token_noise", "gaussian_noise", "import"]
    probability: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0  # token_noise: share of input tokens replaced
    std: Annotated[float, Field(ge=0.0)] = 0.0  # gaussian_noise: added to every input feature
    target: str = ""  # import: "package.module:function"(sample, generator) -> sample


class _Common(Value):
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    shuffle: bool = True
    last_batch: Literal["drop", "keep"] = "drop"  # the partial global batch that ends an epoch
    workers: int = Field(default=0, ge=0)  # loader processes per rank; change nothing but speed
    transforms: tuple[TransformSpec, ...] = Field(default=(), strict=False)


class _Tokens(_Common):
    sequence: PositiveInt = 128  # tokens of one sample
    packing: Literal["pack", "pad"] = "pack"  # pack: documents back to back; pad: each its own samples
    attend_across_documents: bool = False


class StdlibDataSpec(_Tokens):
    """The sources of the running Python's standard library, as bytes: real text on every machine."""

    kind: Literal["stdlib"] = "stdlib"


class TextDataSpec(_Tokens):
    """Local UTF-8 text: a file, or a folder whose `*.txt` files are documents."""

    kind: Literal["text"]
    path: str
    validation_path: str | None = None


class JsonlDataSpec(_Tokens):
    """Local JSON lines; each line one document in `field`."""

    kind: Literal["jsonl"]
    path: str
    field: str = "text"
    validation_path: str | None = None


class TokensDataSpec(_Tokens):
    """A token file made by `fourfold data prepare`."""

    kind: Literal["tokens"]
    path: str
    validation_path: str | None = None


class SyntheticDataSpec(_Common):
    """Vectors with a known rule behind them; sizes come from the model (for an imported one, from here)."""

    kind: Literal["synthetic"]
    samples: PositiveInt = 4096
    noise: Annotated[float, Field(ge=0.0)] = 0.1  # standard deviation added to a regression target
    inputs: PositiveInt | None = None
    outputs: PositiveInt | None = None
    task: Literal["regression", "classification"] | None = None


DataSpec = Annotated[
    StdlibDataSpec | TextDataSpec | JsonlDataSpec | TokensDataSpec | SyntheticDataSpec,
    Field(discriminator="kind"),
]
