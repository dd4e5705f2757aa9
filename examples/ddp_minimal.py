"""One page of plain torchrun and DDP, done right. It needs torch and nothing else of this project.

    torchrun --standalone --nproc-per-node 2 examples/ddp_minimal.py

What is right here, and usually is not: the sample order is a function of (seed, epoch) and is cut by rank, so
that nothing is read twice; the loss is divided by the *global* number of valid targets, known before backward;
the logged loss is the global one; an error on one rank ends all of them at once, with its cause on the screen.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

SAMPLES, FEATURES, GLOBAL_BATCH, EPOCHS, SEED = 1024, 32, 64, 3, 0


def sample(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [B, F], targets [B, 1] and a mask [B] of the valid ones; the same for an id wherever it is read."""
    inputs = torch.stack(
        [torch.randn(FEATURES, generator=torch.Generator().manual_seed(int(i))) for i in ids]
    )
    targets = inputs[:, :4].sum(dim=1, keepdim=True).tanh()
    return inputs, targets, ids % 5 != 0


def global_batches(epoch: int) -> Tensor:
    """[steps, GLOBAL_BATCH] ids, the same on every rank; another order in every epoch."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED * 1_000_003 + epoch))
    return order.view(-1, GLOBAL_BATCH)


def all_agree_no_error(error: Exception | None) -> None:
    """Every rank learns whether any rank failed, before the next collective could wait for it for ever."""
    failed = torch.tensor(int(error is not None))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if failed:
        sys.exit(1)  # the failing rank's own error is the one to read


@record  # torchrun shows the cause of a failure only with this
def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world:
        raise ValueError(f"{world} ranks do not divide a global batch of {GLOBAL_BATCH}: start 1, 2, 4 or 8")
    torch.manual_seed(SEED)  # the same initial values everywhere
    model = DistributedDataParallel(nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(EPOCHS):
        totals = torch.zeros(2, dtype=torch.float64)  # loss sum, valid count of this rank
        for ids in global_batches(epoch):
            error: Exception | None = None
            try:
                inputs, targets, valid = sample(ids[rank::world])
            except Exception as raised:  # a broken file on one rank, say
                error = raised
            all_agree_no_error(error)

            count = valid.sum()
            dist.all_reduce(count)
            loss_sum = ((model(inputs) - targets).square().squeeze(1) * valid).sum()
            (loss_sum * world / count).backward()  # DDP averages over ranks; the global mean asks for the sum
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            totals += torch.tensor([loss_sum.item(), float(valid.sum())], dtype=torch.float64)

        dist.all_reduce(totals)  # the metric of all ranks, not of rank 0
        if rank == 0:
            print(f"epoch {epoch}  loss {totals[0] / totals[1]:.6f}  over {int(totals[1])} valid targets")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("type: torchrun --standalone --nproc-per-node 2 examples/ddp_minimal.py")
    main()
