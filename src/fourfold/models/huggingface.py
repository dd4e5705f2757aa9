"""A causal LM of transformers as a `BoxedKit`: its code, our initial values, attention, loss and sharding table.

Nothing is fetched and no weight is loaded: it starts from random values. docs/hugging_face.md is its page.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.models.decoder import places_in
from fourfold.models.hf_attention import Attending, registered
from fourfold.models.hf_plan import table_of
from fourfold.models.hf_start import starts_of
from fourfold.models.hf_wide import widened
from fourfold.models.initial import initial_values
from fourfold.models.loss import cross_entropy
from fourfold.models.protocol import BatchLike, Rule, Start
from fourfold.spec.errors import FourfoldError, Problem, SpecError
from fourfold.spec.huggingface import Facts, configuration, facts
from fourfold.spec.model import HuggingFaceSpec


class HuggingFaceKit:
    """See the module. attend_across: documents packed into one row see each other."""

    def __init__(self, spec: HuggingFaceSpec, attend_across: bool = False) -> None:
        self._spec = spec
        self._attend_across = attend_across
        self._facts: Facts = facts(spec)

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        """See `ModelKit.build`."""
        network = self.skeleton(dtype)
        named = list(network.named_parameters())
        made = {
            id(parameter): nn.Parameter(
                initial_values(seed, name, self.start(name), parameter.shape).to(dtype)
            )
            for name, parameter in named
        }
        for module in network.modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                module.register_parameter(key, made[id(parameter)])  # a tied one in each of its places
        return network

    def skeleton(self, dtype: torch.dtype) -> nn.Module:
        """See `BoxedKit.skeleton`. Raises SpecError for a network that trains otherwise on other layouts."""
        network: nn.Module = self._made()
        starts_of(network)
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)
        if dtype == torch.float64:
            widened(network, self.blocks(network))
        return network

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        """See `ModelKit.loss`. Raises SpecError where not every layer attends by ours."""
        context = batch.context
        length = batch.inputs.shape[1] if context is None else context.length
        documents = None if self._attend_across else batch.documents
        places = places_in(length, documents, batch.inputs.device)
        if documents is None:
            places = places.expand(batch.inputs.shape[0], -1)
        attending = Attending(documents, context, length)
        logits = module(
            input_ids=batch.inputs,
            position_ids=places if context is None else context.here(places, -1),
            use_cache=False,
            return_dict=False,
            attending=attending,
        )[0]
        self._require_attended(attending)
        return cross_entropy(logits, batch.targets, batch.valid)

    def sharding(self) -> dict[str, Rule]:
        """See `ModelKit.sharding`: the model's own plan, where it has one."""
        if not self._facts.plan:
            return {"*": "replicate"}
        return table_of(self._bare)

    def blocks(self, module: nn.Module) -> tuple[str, ...]:
        """See `ModelKit.blocks`."""
        for name, child in module.named_modules():
            if isinstance(child, nn.ModuleList) and len(child) == self._facts.layers:
                return tuple(f"{name}.{index}" for index in range(len(child)))
        return ()

    def start(self, name: str) -> Start:
        """See `BoxedKit.start`."""
        return self._starts[name]

    @cached_property
    def _bare(self) -> Any:
        """The network without values, to ask for names, shapes and the plan."""
        return self._made()

    @cached_property
    def _starts(self) -> dict[str, Start]:
        return starts_of(self._made())

    def _made(self) -> Any:
        """The network of transformers, its parameters on the meta device; buffers are on the CPU, without values."""
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config = configuration(self._spec)
        # No token is padding here: rows say which targets are valid. Else its embedding would never be trained.
        config.pad_token_id = None
        config.use_cache = False
        # Experts one after the other: torch's product of groups takes no fp64, and what is proved is what trains.
        config._experts_implementation = "eager"
        try:
            with torch.device("meta"), no_init_weights():
                network = AutoModelForCausalLM.from_config(
                    config, attn_implementation=registered(), dtype=torch.float32
                )
        except KeyError as error:
            raise SpecError(self._own_attention()) from error
        except FourfoldError:
            raise
        except Exception as error:
            raise SpecError(self._refused(error)) from error
        network.tie_weights()
        for module in network.modules():
            for key, buffer in module.named_buffers(recurse=False):
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
        _check(network)
        return network

    def _require_attended(self, attending: Attending) -> None:
        """Every layer attended once by ours, and in its window."""
        known, seen = self._facts, attending.windows
        windows = sum(window is not None for window in seen)
        if len(seen) == known.layers and windows == known.windows:
            return
        found = f"{len(seen)} of {known.layers} layers attend by transformers' table of attention functions"
        raise SpecError(self._own_attention(f"{found}, {windows} of {known.windows} say their window"))

    def _own_attention(
        self, found: str = "attention that does not go by transformers' table of attention functions"
    ) -> Problem:
        return Problem(
            asked=f'model.kind = "huggingface" of {self._facts.architecture}',
            found=found,
            why="what goes from token to token in another way is not kept inside documents",
            instead="an architecture of plain attention, as llama",
        )

    def _refused(self, error: Exception) -> Problem:
        return Problem(
            asked=f'model.kind = "huggingface" of {self._facts.architecture}',
            found=f"{type(error).__name__}: {' '.join(str(error).split())}",
            why="transformers does not build a causal LM of this configuration",
            instead="model.args that it takes",
        )


def _check(network: Any) -> None:
    """Raises SpecError for modules that look from token to token, or from row to row, beside attention."""
    strange = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.modules.batchnorm._BatchNorm)
    found = [
        (name, type(child).__name__) for name, child in network.named_modules() if isinstance(child, strange)
    ]
    if not found:
        return
    name, kind = found[0]
    raise SpecError(
        Problem(
            asked=f'model.kind = "huggingface" with {type(network).__name__}',
            found=f'a {kind} ("{name}")',
            why="it looks from token to token, or from row to row: across the documents of a row",
            instead="an architecture of attention alone, as llama",
        )
    )
