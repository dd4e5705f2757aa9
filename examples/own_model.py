"""A model of your own: each byte from a window of bytes before it (after Bengio et al., JMLR 3 (2003)).

    fourfold train examples/own_model.toml --nproc 2

from the folder that holds `examples`.  It is ordinary single-device PyTorch that knows no ranks; the kit at the end
is all that Fourfold asks for.  docs/own_model.md explains each part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.draws import Draws
from fourfold.models.initial import fill
from fourfold.models.loss import cross_entropy
from fourfold.models.protocol import BatchLike, ModelKit, Rule, Start


class Layer(nn.Module):
    """A residual feed-forward."""

    def __init__(self, name: str, width: int, dropout: float) -> None:
        super().__init__()
        self.name = name
        self.dropout = dropout
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:
        change: Tensor = self.down(torch.tanh(self.up(x)))
        if draws is not None:  # a function of (seed, step, name, place), so the same on every layout
            change = draws.dropout(change, self.dropout, f"{self.name}.down")
        return x + change


class WindowModel(nn.Module):
    """Embeddings of the last `window` bytes of the same document, joined, and a stack of feed-forwards."""

    def __init__(self, window: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.window = window
        self.embedding = nn.Embedding(256, width)
        self.join = nn.Linear(window * width, width)
        self.layers = nn.ModuleList(Layer(f"layers.{index}", width, dropout) for index in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, documents: Tensor, draws: Draws | None) -> Tensor:
        x = self.embedding(tokens)
        length = tokens.shape[1]
        seen = []
        for back in range(self.window):
            earlier = F.pad(x, (0, 0, back, 0))[:, :length]
            same_document = F.pad(documents, (back, 0), value=-1)[:, :length] == documents
            seen.append(earlier * same_document.unsqueeze(-1))
        x = self.join(torch.cat(seen, -1))
        for layer in self.layers:
            x = layer(x, draws)
        logits: Tensor = self.head(x)
        return logits


class WindowKit:
    """What Fourfold asks of a model."""

    def __init__(self, window: int, width: int, layers: int, dropout: float) -> None:
        self.sizes = (window, width, layers, dropout)
        self.dropout = dropout

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        module = WindowModel(*self.sizes)
        fill(module, self.start, seed, dtype)  # every rank builds the same network
        return module

    def skeleton(self, dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):  # shapes alone; with `start`, each rank fills in the part that it holds
            return WindowModel(*self.sizes).to(dtype)

    def start(self, name: str) -> Start:
        window, width, _, _ = self.sizes
        if name.endswith("bias"):
            return Start(mean=0.0, std=0.0)
        inputs = {"embedding.weight": 1, "join.weight": window * width}.get(name, width)
        return Start(mean=0.0, std=inputs**-0.5)

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        dropping = module.training and self.dropout > 0
        draws = Draws(batch.seed, batch.step, batch.rows) if dropping else None
        logits = module(batch.inputs, batch.documents, draws)
        return cross_entropy(logits, batch.targets, batch.valid)  # a sum and a count, never a mean

    def sharding(self) -> dict[str, Rule]:
        return {
            "embedding.weight": "vocabulary",
            "join.*": "replicate",
            "layers.*.up.*": "column",
            "layers.*.down.weight": "row",
            "layers.*.down.bias": "replicate",
            "head.*": "vocabulary",
        }

    def blocks(self, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, child in module.named_modules() if isinstance(child, Layer))


def factory(window: int = 8, width: int = 32, layers: int = 2, dropout: float = 0.0) -> ModelKit:
    """Named by `model.target`; called with `[model.args]`."""
    return WindowKit(window, width, layers, dropout)
