"""What can be planned with but not trained yet: one row a setting, with the value that can be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fourfold.spec.errors import Problem
from fourfold.spec.keys import toml_word
from fourfold.spec.rules_model import decoder_of
from fourfold.spec.spec import Spec


@dataclass(frozen=True, slots=True)
class Planned:
    """A setting that training does not support yet: `value` reads it, `plain` is what is supported in its place."""

    key: str
    value: Callable[[Spec], object]
    plain: object
    what: str

    def __call__(self, spec: Spec) -> Problem | None:
        value = self.value(spec)
        if value == self.plain:
            return None
        table = self.plain is None
        return Problem(
            asked=f"train with [{self.key}]" if table else f"train with {self.key} = {toml_word(value)}",
            found=f"{self.what}, which is planned for but not trained yet",
            why="this version trains dense models and mixtures of experts, in data, tensor, context, pipeline and "
            "expert parallel"
            if self.key.startswith(("layout.", "model."))
            else "it is not built yet, and nothing asked for is silently left out",
            instead=f"a Spec without [{self.key}]" if table else self._instead(spec),
        )

    def _instead(self, spec: Spec) -> str:
        word = toml_word(self.plain).strip('"')
        axis = self.key.startswith("layout.") and isinstance(self.value(spec), int | str) and self.plain == 1
        refill = axis and spec.layout.dp_replicate != "auto"
        return f"--set {self.key}={word}" + (" --set layout.dp_replicate=auto" if refill else "")


PLANNED = (
    Planned("model.mla", lambda spec: getattr(decoder_of(spec), "mla", None), None, "latent attention"),
    Planned(
        "model.mtp_layers", lambda spec: getattr(spec.model, "mtp_layers", 0), 0, "multi-token prediction"
    ),
)
