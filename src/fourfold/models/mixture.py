"""A mixture of experts in place of a feed-forward: each token goes to the few experts that a router chooses for it.

Sources: Shazeer et al., arXiv 1701.06538; Switch (arXiv 2101.03961); Mixtral (arXiv 2401.04088, section 2.1);
DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). What is defined over several tokens is defined over one row, never over
what happens to be computed together, so that every layout can agree: see `models.routing`.
Letters: B rows, t tokens of them that are routed here, T all tokens of a row, H features, E experts, K of them for a
token, F hidden features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.carried import carried
from fourfold.models.exchange import Here, Meeting, Stacks, read
from fourfold.models.loss import wide
from fourfold.models.routing import Rows, auxiliary, capacities, chosen_experts, counted, fitting
from fourfold.spec.model import DecoderSpec, MoeSpec
from fourfold.spec.widths import expert_width

LOSS_WEIGHT, BIAS_SPEED = 0.01, 0.001  # arXiv 2101.03961, section 2.2; arXiv 2412.19437, section 4.2


class Experts(Stacks):
    """All routed experts, their weights in stacks: up and gate [E, F, H], down [E, H, F]."""

    def __init__(self, spec: DecoderSpec, moe: MoeSpec) -> None:
        super().__init__(moe.experts, moe.top_k)
        hidden, width, experts = expert_width(spec), spec.width, moe.experts
        inward = {"gate": (hidden, width)} if spec.ffn == "swiglu" else {}
        shapes = inward | {"up": (hidden, width), "down": (width, hidden)}
        for name in ("gate", "up", "down"):
            shape = shapes.get(name)
            self.register_parameter(name, _empty(experts, *shape) if shape else None)
            bias = shape is not None and spec.biases
            self.register_parameter(f"{name}_bias", _empty(experts, shape[0]) if bias and shape else None)

    def forward(self, x: Tensor, counts: Sequence[int], here: Here) -> Tensor:
        """[n, H], sorted by expert, `counts` of each -> [n, H]. Experts without a token take part, with none."""
        gates, gate_biases = self._of_each("gate", here.own), self._of_each("gate_bias", here.own)
        ups, up_biases = self._of_each("up", here.own), self._of_each("up_bias", here.own)
        downs, down_biases = self._of_each("down", here.own), self._of_each("down_bias", here.once)
        outputs = []
        for part, gate, gate_bias, up, up_bias, down, down_bias in zip(
            torch.split(x, list(counts)), gates, gate_biases, ups, up_biases, downs, down_biases, strict=False
        ):
            hidden = F.linear(part, _given(up), up_bias)
            if gate is None:
                hidden = F.gelu(hidden, approximate="tanh")
            else:
                hidden = F.silu(F.linear(part, gate, gate_bias)) * hidden
            outputs.append(F.linear(hidden, _given(down), down_bias))
        return torch.cat(outputs)

    def _of_each(self, name: str, own: Callable[[Tensor], Tensor]) -> Sequence[Tensor | None] | repeat[None]:
        """One part of it for each expert. (By unbind, of which backward makes the stack once.)"""
        held = self._parameters[name]
        return repeat(None) if held is None else own(held).unbind(0)


class Routed(Meeting):
    """The router and the experts that it chooses from.

    correction: what is added to the scores when experts are chosen, and nowhere else; a buffer, moved by load.
    load: how many tokens have chosen each expert since it was last looked at, int64 [E]; None: not counted.
    """

    correction: Tensor | None

    def __init__(self, spec: DecoderSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.moe = moe
        self.router = _empty(moe.experts, spec.width)
        self.experts = Experts(spec, moe)
        self.register_buffer("correction", None)
        self.load: Tensor | None = None
        if moe.balance == "bias":
            self.begin_anew(torch.get_default_dtype())

    def begin_anew(self, dtype: torch.dtype) -> None:
        """A correction of zeros, on the CPU whatever the default device is."""
        self.register_buffer("correction", torch.zeros(self.moe.experts, dtype=dtype, device="cpu"))

    def forward(self, stream: Tensor, rows: Rows | None) -> Tensor:
        """[B, T, H] -> [B, T, H]. rows: None: every token is live, and nothing is balanced."""
        x = self.here.enter(stream)
        scores, chosen, weights = self._choose(x)
        live = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        every = None
        if rows is not None:
            live = self.here.part(rows.live_here)
            if self.moe.capacity_factor is not None or self.moe.balance == "loss":
                every = rows.whole(
                    self.here.together(chosen, stream.shape[1])
                )  # [B, T, K], in the order of the row
        kept = live.unsqueeze(-1).expand_as(chosen)
        if self.moe.capacity_factor is not None:
            kept = kept & self._fits(chosen, live if rows is None else rows.live, every, rows)
        y = self._through_experts(x, chosen, weights, kept)
        if rows is not None and torch.is_grad_enabled():
            y = self._balanced(y, scores, chosen, live, every, rows)
        return self.here.leave(y, stream)

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [B, t, E], chosen experts and their weights [B, t, K]; in fp32 or wider under autocast, too."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(wide(x), wide(self.here.own(self.router)))
            return chosen_experts(logits, self.moe, self.correction)

    def _fits(self, chosen: Tensor, live: Tensor, every: Tensor | None, rows: Rows | None) -> Tensor:
        """Which choices are within the capacity of their expert: bool [B, t, K]."""
        limits = capacities(live.sum(1), self.moe)
        if every is None or rows is None:
            return fitting(chosen, live, limits, self.moe.experts)
        return self.here.part(rows.here(fitting(every, live, limits, self.moe.experts)))

    def _balanced(
        self, y: Tensor, scores: Tensor, chosen: Tensor, live: Tensor, every: Tensor | None, rows: Rows
    ) -> Tensor:
        """`y`, which carries the auxiliary loss, and in whose backward the load is counted."""
        moe = self.moe
        if moe.balance == "loss":
            assert every is not None, "it was asked for"
            counts = counted(every, rows.live, moe.experts)
            given = LOSS_WEIGHT if moe.balance_weight is None else moe.balance_weight
            loss = auxiliary(scores, live, counts, rows, moe) * (given * self.here.speaks)
            return carried(y, loss, rows.weight, _nothing)
        if moe.balance == "bias":
            counts = counted(chosen, live, moe.experts).sum(0) * int(self.here.speaks)
            return carried(y, y.new_zeros(()), rows.weight, partial(self._note, counts))
        return y

    def _note(self, counts: Tensor) -> None:
        self.load = counts if self.load is None else self.load + counts

    @torch.no_grad()
    def rebalance(self, load: Tensor) -> None:
        """Move the correction by the load of a whole step, int64 [E].

        Each expert's by `balance_speed`, down where it has more than the mean, up where it has less; as integers, so
        that every rank moves the same (arXiv 2412.19437, section 2.1.2).
        """
        assert self.correction is not None, "balance is by bias"
        speed = BIAS_SPEED if self.moe.balance_speed is None else self.moe.balance_speed
        self.correction += speed * (load.sum() - len(load) * load).sign().to(self.correction)

    def _through_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
        """The weighted sum of what its experts make of each token: [B, t, H]; 0 of choices that are not kept.

        Choices are sorted by expert, in the order of tokens; each place is written once, so that nothing depends on
        the order in which a device does things.
        """
        experts, width, each = self.moe.experts, x.shape[-1], self.moe.top_k
        flat = chosen.masked_fill(~kept, experts).reshape(-1)  # those that go nowhere come last
        counts = counted(flat[None, :, None], None, experts)[0]
        total = sum(read(counts, flat.numel()))
        places = flat.sort(stable=True).indices[:total]
        copies = x.reshape(-1, 1, width).expand(-1, each, -1).reshape(-1, width)
        arrived = self.here.to_experts(copies.index_select(0, places), counts, total)
        made = arrived.back(self.experts(arrived.x, arrived.counts, self.here))
        filled = made.new_zeros(flat.numel(), width).index_copy(0, places, made)
        shares = weights.reshape(-1, each, 1)
        return (filled.view(-1, each, width) * shares).sum(1).to(made.dtype).view_as(x)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


def _given(weight: Tensor | None) -> Tensor:
    assert weight is not None, "every expert has it"
    return weight


def _nothing() -> None:
    """No load is counted."""
