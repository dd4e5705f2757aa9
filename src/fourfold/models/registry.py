"""From a Spec to the model it asks for."""

from __future__ import annotations

from fourfold.models.decoder import DecoderKit
from fourfold.models.imported import imported_kit
from fourfold.models.mlp import MlpKit
from fourfold.models.protocol import ModelKit
from fourfold.spec.data import SyntheticDataSpec
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.model import DecoderSpec, HuggingFaceSpec, ImportSpec, MlpSpec
from fourfold.spec.spec import Spec


def kit_for(spec: Spec) -> ModelKit:
    """The kit of `spec.model`; nothing is built yet.

    Raises SpecError for parts of a decoder that cannot be built yet, and for an imported model that cannot be found
    or is none.
    """
    model = spec.model
    if isinstance(model, ImportSpec):
        return imported_kit(model)
    if isinstance(model, MlpSpec):
        return MlpKit(model)
    across = not isinstance(spec.data, SyntheticDataSpec) and spec.data.attend_across_documents
    if isinstance(model, HuggingFaceSpec):
        # Here, and not above: transformers is asked only by who wants a model of it.
        from fourfold.models.huggingface import HuggingFaceKit

        return HuggingFaceKit(model, attend_across=across)
    problems = _not_built(model)
    if problems:
        raise SpecError(problems)
    return DecoderKit(model, attend_across=across)


def _not_built(model: DecoderSpec) -> list[Problem]:
    asked = {
        "model.mla": (model.mla is not None, "remove [model.mla]"),
        "model.mtp_layers": (model.mtp_layers > 0, "--set model.mtp_layers=0"),
    }
    return [
        Problem(
            asked=key,
            found="a decoder without it is all that can be built",
            why="it is planned for but cannot be trained yet",
            instead=instead,
        )
        for key, (is_asked, instead) in asked.items()
        if is_asked
    ]
