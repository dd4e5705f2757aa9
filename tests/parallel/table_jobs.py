"""An attention block of a user's own with sharding tables right and wrong; what their tests run in ranks."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.loss import cross_entropy
from fourfold.models.protocol import BatchLike, Heads, LossModule, Rule
from fourfold.parallel.apply import parallelize
from fourfold.spec.errors import FourfoldError
from fourfold.spec.training import LayoutSpec
from tests.parallel.one_device import compare, part, spread

WIDTH, HEADS, TOKENS = 8, 4, 32
TABLE: dict[str, Rule] = {
    "embedding.weight": "vocabulary",
    "blocks.*.norm.*": "replicate",
    **{f"blocks.*.{name}.*": Heads(HEADS) for name in ("query", "key", "value")},
    "blocks.*.output.weight": "row",
    "blocks.*.output.bias": "replicate",
    "blocks.*.up.*": "column",
    "blocks.*.down.weight": "row",
    "blocks.*.down.bias": "replicate",
    "head.weight": "vocabulary",
}


class Block(nn.Module):
    """Attention and a feed-forward; how many heads there are is read off a tensor's shape, or a number of its own."""

    def __init__(self, heads: int | None, scaled: str, scales: tuple[int, ...]) -> None:
        super().__init__()
        self.heads, self.scaled = heads, scaled
        if scaled:
            self.scale = nn.Parameter(torch.full(scales, 1.5))
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.scaled == "before":
            y = y * self.scale
        parts = (self.query(y), self.key(y), self.value(y))
        size = (self.heads or -1, WIDTH // HEADS)
        query, key, value = (part.view(*part.shape[:-1], *size).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if self.scaled == "between":
            seen = seen * self.scale
        x = x + self.output(seen.transpose(1, 2).flatten(-2)) * (self.scale if self.scaled == "after" else 1)
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(
        self,
        heads: int | None,
        idle: bool,
        tied: bool,
        masked: bool,
        scaled: str,
        scales: tuple[int, ...],
        places: bool,
    ) -> None:
        super().__init__()
        self.masked = masked
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        if places:
            self.places = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block(heads, scaled, scales)])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if idle:
            self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if hasattr(self, "places"):
            x = x + self.places
        if self.masked:
            x = x * torch.ones(*tokens.shape, 1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Kit:
    """`Net` with `TABLE`, changed as asked; a rule of None takes the pattern out."""

    def __init__(self, change: dict[str, Rule | None], **made: Any) -> None:
        self._table = {name: rule for name, rule in (TABLE | change).items() if rule is not None}
        plain = {"heads": None, "idle": False, "tied": False, "masked": False, "places": False}
        self._made = plain | {"scaled": "", "scales": (WIDTH,)} | made
        self._spec = SimpleNamespace(kind="decoder", vocabulary=TOKENS)  # of its batches

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Net(**self._made).to(dtype)

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        return cross_entropy(module(batch.inputs), batch.targets, batch.valid)

    def sharding(self) -> dict[str, Rule]:
        return self._table

    def blocks(self, module: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        return ("blocks.0",)


def told(change: dict[str, Rule | None], layout: dict[str, Any], made: dict[str, Any]) -> str:
    """What refuses the model when it is spread or trained, and what torch logs; else how far it is from one device."""
    screen = io.StringIO()
    handler = logging.StreamHandler(screen)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # torch's loggers do not propagate
    logger.addHandler(handler)
    try:
        worst = compare(Kit(change, **made), {"dp_replicate": 1} | layout).worst
    except FourfoldError as error:
        return screen.getvalue() + str(error)
    finally:
        logger.removeHandler(handler)
    return "equal" if worst < 1e-12 else f"off by {worst}"


def misfit() -> list[str]:
    """What is raised of a right table where a Linear of the model takes other features than it is given."""
    raised = []
    for place, takes in (("blocks.0.down", 2 * WIDTH), ("head", WIDTH + 1), ("blocks.0.query", WIDTH + 8)):
        kit = Kit({})
        network = kit.build(0, torch.float64)
        parent, _, name = place.rpartition(".")
        linear = network.get_submodule(place)
        new = nn.Linear(takes, linear.out_features, bias=linear.bias is not None, dtype=torch.float64)
        setattr(network.get_submodule(parent), name, new)
        parallel = parallelize(
            LossModule(kit, network), LayoutSpec(dp_replicate=1, tp=2), torch.device("cpu")
        )
        try:
            with parallel.microbatch(last=True):
                parallel.module(SimpleNamespace(inputs=torch.zeros(1, 8, dtype=torch.int64)))
        except Exception as error:
            raised.append(type(error).__name__)
    return raised


def idle_layer(layout: dict[str, Any], unused: bool) -> str:
    """What refuses a step in which a layer took no part; else which parameters have no gradient."""
    kit = Kit({"idle.*": "replicate"}, idle=True)
    module, parallel = spread(kit, LayoutSpec(**layout, unused_parameters=unused), meta=False)
    try:
        with parallel.microbatch(last=True):
            parallel.module(part(kit, parallel.dp_rank, 0, 7, True))[0].backward()
        parallel.finish()
    except FourfoldError as error:
        return str(error)
    return ", ".join(name for name, p in module.module.named_parameters() if p.grad is None)
