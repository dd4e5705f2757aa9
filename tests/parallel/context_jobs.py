"""What the tests of context parallel run in ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.data.batch import Batch
from fourfold.models.attention import Cached, mask_between
from fourfold.models.draws import Draws
from fourfold.models.protocol import LossModule
from fourfold.parallel.apply import parallelize
from fourfold.parallel.context_parallel import ContextParallel
from fourfold.spec.errors import SpecError
from fourfold.spec.training import LayoutSpec
from fourfold.verify.measure import relative_gap
from tests.parallel.one_device import DECODER, make_kit

_MESHES: list[DeviceMesh] = []


def mesh() -> DeviceMesh:
    if not _MESHES:  # once in a process
        _MESHES.append(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))
    return _MESHES[0]


def batch(rows: int, length: int) -> Batch:
    """Documents of unequal lengths, a different cut in each row."""
    tokens = torch.arange(rows * length).view(rows, length)
    documents = torch.zeros(rows, length, dtype=torch.int32)
    for row in range(rows):
        documents[row, length // 3 + row :] += 1
        documents[row, length - 2 - row :] += 1
    ids = torch.arange(rows)
    return Batch(tokens, tokens + 1, tokens % 3 > 0, documents, ids, ids, 0, 0, 0, tokens.numel(), 7)


def attention_gap(
    method: str, heads: int, kv_heads: int, length: int, dtype: torch.dtype, whole_rows: bool
) -> float:
    """Output and gradients of attention over cut rows, beside one device's over whole ones."""
    generator = torch.Generator().manual_seed(3)
    rows, width = 2, 4
    sizes = ((rows, heads, length, width), (rows, kv_heads, length, width), (rows, kv_heads, length, width))
    whole = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    of_output = torch.randn(sizes[0], generator=generator, dtype=torch.float64).to(dtype)
    cached, given = Cached(width, 10000.0), batch(rows, length)
    documents = torch.zeros_like(given.documents) if whole_rows else given.documents
    leaves = [x.clone().requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(
        *leaves, attn_mask=cached.mask(documents, dtype), enable_gqa=heads != kv_heads
    )
    expected.backward(of_output)
    context = ContextParallel(mesh(), method).own(given).context
    assert context is not None
    mine = [context.here(x, 2).clone().requires_grad_() for x in whole]

    def mask(one: Tensor, other: Tensor) -> Tensor:
        return mask_between(documents, one, other, dtype)

    for _ in range(2):  # masks are made once
        for leaf in mine:
            leaf.grad = None
        found = context.attend(*mine, mask)
        found.backward(context.here(of_output, 2))
    pairs = [(found, context.here(expected, 2))]
    pairs += [(own.grad, context.here(leaf.grad, 2)) for own, leaf in zip(mine, leaves, strict=True)]
    return max(relative_gap(one.detach().double(), other.detach().double(), 0.0) for one, other in pairs)


def parts(rows: int, length: int) -> dict[str, object]:
    """What this rank takes of a batch."""
    whole = batch(rows, length)
    own = ContextParallel(mesh(), "gather").own(whole)
    assert own.context is not None and own.documents is not None
    return {
        "places": [place for run in own.context.runs for place in range(*run)],
        "told": (own.processed, own.nonpadding),
        "valid": own.valid_count(),
        "valid_of_whole": whole.valid_count(),
        "inputs": own.inputs.tolist(),
        "documents": list(own.documents.shape),
    }


def same_draws() -> bool:
    """Dropout of this rank's tokens, beside that of whole rows; of all features and of one tensor-parallel part."""
    whole = batch(3, 8)
    context = ContextParallel(mesh(), "gather").own(whole).context
    assert context is not None
    rows, x = torch.arange(3), torch.ones(3, 8, 5, dtype=torch.float64)
    of_all = Draws(1, 2, rows).dropout(x, 0.4, "name")
    mine = Draws(1, 2, rows, context).dropout(context.here(x, 1), 0.4, "name")
    kept = Draws(1, 2, rows, context).keep("name", 0.4, (3, 4, 5))
    return torch.equal(mine, context.here(of_all, 1)) and torch.equal(kept, mine != 0)


class _Blind(nn.Module):
    """A model that takes each token for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 3, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens].sum(-1)


class _BlindKit:
    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:  # noqa: ARG002
        return _Blind()

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return module(batch.inputs).sum(), batch.valid.sum()

    def sharding(self) -> dict[str, str]:
        return {"*": "replicate"}

    def blocks(self, module: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        return ()


def refusal(fault: str) -> str:
    """What is said of a model under context parallel."""
    world = dist.get_world_size()
    layout = LayoutSpec(dp_replicate=1, cp=world)
    kit = _BlindKit() if fault == "blind" else make_kit(DECODER)
    module = LossModule(kit, kit.build(0, torch.float64))
    parallel = parallelize(module, layout, torch.device("cpu"))
    try:
        with parallel.microbatch(True):
            parallel.module(parallel.own(batch(2, 8)))[0].backward()
    except SpecError as error:
        return str(error)
    return ""
