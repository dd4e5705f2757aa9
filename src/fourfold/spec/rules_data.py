"""Rules about `[data]` and how it meets the model. Each function gives the problem, or None (see `rules`)."""

from __future__ import annotations

from fourfold.spec.data import SyntheticDataSpec
from fourfold.spec.errors import Problem
from fourfold.spec.model import DecoderSpec, ImportSpec, MlpSpec
from fourfold.spec.spec import Spec

BYTES = 256  # different bytes; a document ends with byte 0
BYTE_DATA = ("stdlib", "text", "jsonl")


def model_takes(spec: Spec) -> Problem | None:
    """A decoder reads tokens, an mlp reads vectors; an imported model says itself."""
    synthetic = isinstance(spec.data, SyntheticDataSpec)
    if isinstance(spec.model, DecoderSpec) and synthetic:
        found, why, instead = "vectors", "a decoder reads tokens", "--set data.kind=stdlib"
    elif isinstance(spec.model, MlpSpec) and not synthetic:
        found, why, instead = "tokens", "an mlp reads vectors of features", "--set data.kind=synthetic"
    else:
        return None
    return Problem(
        f'model.kind = "{spec.model.kind}" with data.kind = "{spec.data.kind}"', found, why, instead
    )


def byte_vocabulary(spec: Spec) -> Problem | None:
    model = spec.model
    if not isinstance(model, DecoderSpec) or spec.data.kind not in BYTE_DATA or model.vocabulary >= BYTES:
        return None
    return Problem(
        asked=f'model.vocabulary = {model.vocabulary} with data.kind = "{spec.data.kind}"',
        found=f"text as bytes, which has {BYTES} different tokens",
        why=f"tokens from {model.vocabulary} up would have no embedding",
        instead=f"--set model.vocabulary={BYTES}",
    )


def synthetic_sizes(spec: Spec) -> Problem | None:
    """Sizes of synthetic vectors come from an mlp; an imported model has none to ask, so the data says them."""
    if not isinstance(spec.data, SyntheticDataSpec):
        return None
    given = {key: getattr(spec.data, key) for key in ("inputs", "outputs", "task")}
    if isinstance(spec.model, MlpSpec):
        wrong = [key for key, value in given.items() if value not in (None, getattr(spec.model, key))]
        if not wrong:
            return None
        key = wrong[0]
        return Problem(
            asked=f"data.{key} = {given[key]} with model.{key} = {getattr(spec.model, key)}",
            found="two different sizes" if key != "task" else "two different tasks",
            why="the data is made to the model's measure",
            instead=f"leave data.{key} out or --set data.{key}={getattr(spec.model, key)}",
        )
    missing = [key for key, value in given.items() if value is None]
    if not missing or not isinstance(spec.model, ImportSpec):
        return None
    examples = {"inputs": 32, "outputs": 1, "task": "regression"}
    return Problem(
        asked='data.kind = "synthetic" with model.kind = "import"',
        found=f"no data.{', data.'.join(missing)}",
        why="an imported model does not tell the sizes of its vectors",
        instead=" ".join(f"--set data.{key}={examples[key]}" for key in missing),
    )


def transforms(spec: Spec) -> Problem | None:
    """Noise on tokens for tokens, on features for features; an own transform names its function."""
    synthetic = isinstance(spec.data, SyntheticDataSpec)
    for number, transform in enumerate(spec.data.transforms):
        asked = f'data.transforms.{number}.kind = "{transform.kind}"'
        if transform.kind == "import" and ":" not in transform.target:
            why = 'an own transform is a function, "package.module:function"'
            return Problem(asked, f"target = {transform.target!r}", why, 'target = "package.module:function"')
        if transform.kind == "token_noise" and synthetic:
            return Problem(asked, "vectors", "token_noise replaces tokens", 'kind = "gaussian_noise"')
        if transform.kind == "gaussian_noise" and not synthetic:
            return Problem(asked, "tokens", "gaussian_noise adds to features", 'kind = "token_noise"')
    return None


def paths(spec: Spec) -> Problem | None:
    for key in ("path", "validation_path"):
        if getattr(spec.data, key, None) == "":
            return Problem(
                asked=f'data.{key} = ""',
                found="an empty path",
                why="it names no file; an empty path would mean the folder that the command runs in",
                instead=f"--set data.{key}=PATH",
            )
    return None


def something_to_validate(spec: Spec) -> Problem | None:
    own_set = getattr(spec.data, "validation_path", None) is not None
    if spec.run.validate_every == 0 or spec.data.validation_fraction > 0 or own_set:
        return None
    return Problem(
        asked=f"run.validate_every = {spec.run.validate_every} with data.validation_fraction = 0",
        found="no validation set",
        why="there is nothing to validate on",
        instead="--set data.validation_fraction=0.05 or --set run.validate_every=0",
    )
