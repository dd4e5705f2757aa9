"""Models of transformers in ranks, held against one device; and a fault that is planted in one of their rules."""

from __future__ import annotations

from typing import Any

from fourfold.parallel import tensor_parallel
from fourfold.parallel.apply import is_cut
from fourfold.spec.training import LayoutSpec
from tests.models.hf_models import kit_for
from tests.parallel.one_device import Seen, changed, compare


def trained(architecture: str, layout: dict[str, Any]) -> Seen:
    """Two steps; made in parts where no rank has the whole."""
    layout = {"dp_replicate": 1} | layout
    tokens = 16 if layout.get("cp", 1) > 1 else 13
    return compare(kit_for(architecture), layout, tokens=tokens, meta=is_cut(LayoutSpec(**layout)))


def norms_of_own_heads_alone(layout: dict[str, Any]) -> Seen:
    """The norms of heads as if a rank's own gradient were the whole one."""

    class OfOwn(tensor_parallel._OnOwn):
        def __call__(self, *args: Any, **more: Any) -> Any:
            held: dict[str, Any] = self._module._parameters
            whole = dict(held)
            held.update({key: parameter.to_local() for key, parameter in whole.items()})
            try:
                return self._forward(*args, **more)
            finally:
                held.update(whole)

    with changed(tensor_parallel, "_OnOwn", OfOwn):
        return trained("qwen3", layout)
