"""How it is trained: `[batch]`, `[optimizer]`, `[precision]`, `[layout]`, `[checkpoint]`, `[run]`, `[hardware]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from fourfold.spec.value import Value

Degree = PositiveInt | Literal["auto"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # of tensors, or patterns with * and ?; of operations
STATE_PARTS = ("model.", "optimizer.")  # how those names begin


class BatchSpec(Value):
    """global_batch = micro_batch × accumulation × data-parallel degree; give two, the layout gives the third."""

    global_batch: PositiveInt | None = None  # samples of one optimizer step, over all ranks
    micro_batch: PositiveInt | None = None  # samples of one forward on one rank
    accumulation: PositiveInt | None = None  # forwards of one optimizer step on one rank


class OptimizerSpec(Value):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with warm-up and decay of the learning rate."""

    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    betas: tuple[Share, Share] = Field(default=(0.9, 0.95), strict=False)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = (
        0.1  # on tensors of two or more dims; never norms or biases
    )
    clip_norm: Annotated[float, Field(ge=0.0)] = 1.0  # global gradient norm; 0 = no clipping
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt | None = None  # wsd: the last steps that decay; default: a tenth of run.steps
    final_lr_share: Share = 0.1  # learning rate at the last step, as a share of lr


class PrecisionSpec(Value):
    """Dtypes, the same on every layout. What AdamW updates, its moments and gradients are fp32, fp64 in fp64.

    Norms, softmax, loss and rotary tables are computed in fp32 or wider in every case. The constants of fp16's loss
    scale are those of torch's GradScaler; the method is that of Micikevicius et al., arXiv 1710.03740, section 3.2.
    """

    compute: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"  # of matrix products and of attention
    # How parameters take part in forward, and are gathered under zero: whole, or rounded to `compute` first. The
    # stream between blocks is then of that dtype, too; under zero 3 its copies are half as large and are dropped.
    parameters: Literal["fp32", "compute"] = "fp32"
    # In what gradients travel and are summed between data-parallel ranks. bf16: half the bytes, 8 bits of mantissa.
    reduce: Literal["fp32", "bf16"] = "fp32"
    output: Literal["fp32"] = "fp32"  # of the network's output and the loss; fp64 in fp64
    # CUDA: matrix products of fp32 in TF32, of 10 bits of mantissa; without, all 23, whatever torch's own default is.
    tf32: bool = False
    scale_start: Annotated[float, Field(ge=1.0, le=2.0**64)] = (
        2.0**16
    )  # fp16: the loss scale of the first step
    scale_growth: Annotated[float, Field(gt=1.0, le=2.0**16)] = 2.0  # fp16: the scale times this ...
    scale_every: PositiveInt = 2000  # ... after so many good steps in a row
    scale_backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = (
        0.5  # fp16: the scale times this after an overflow
    )


CpMethod = Literal["gather", "ring", "ulysses"]
PpSchedule = Literal[
    "gpipe", "1f1b", "looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipe-v"
]
KEPT = ("mm", "attention")  # by default, of what takes longest to compute
KEEPABLE = (*KEPT, "bmm", "convolution", "collective")


class LayoutSpec(Value):
    """Degrees of the mesh axes; at most one of dp_replicate and dp_shard is "auto" (what the world leaves)."""

    pp: PositiveInt = 1
    dp_replicate: Degree = "auto"
    dp_shard: Degree = 1
    cp: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    zero: Literal[0, 1, 2, 3] = 0
    # How attention meets tokens of other cp ranks: keys and values gathered, in a ring, or tokens exchanged for heads.
    cp_method: CpMethod = "gather"
    sp: bool = False  # sequence parallel: a property of tp
    pp_schedule: PpSchedule = "1f1b"  # in what order the microbatches of a step pass through the stages
    pp_virtual: PositiveInt | None = (
        None  # stages of one rank; default: 1, or 2 where the schedule has several
    )
    # Blocks of each stage, in order; default: so that all stages cost about the same.
    pp_split: Annotated[tuple[PositiveInt, ...], Field(strict=False)] | None = None
    unused_parameters: bool = False  # some parameters take no part in some steps (costs a search per step)
    bucket_mib: Annotated[float, Field(gt=0.0)] = 25.0  # gradient bucket of data parallel
    # What of a block's forward is computed again in backward, not kept: all; all but `recompute_keep` ("selective").
    recompute: Literal["none", "full", "selective"] = "none"
    recompute_keep: Names = KEPT  # also: bmm, convolution, collective (between ranks)
    # Blocks of the network as code of torch's compiler: one for all blocks alike. Nothing outside of blocks.
    compile: Literal["none", "blocks"] = "none"
    # What makes it: inductor, fused kernels; aot_eager, the same graphs by torch's own operations (no C++ compiler).
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    wrap: PositiveInt | Literal["model"] = (
        1  # zero 1-3: blocks in one unit of sharding; "model": all is one unit
    )
    prefetch: NonNegativeInt = 0  # zero 3: units gathered ahead of the one that computes; 0: as torch does it
    offload: Literal["none", "cpu", "disk"] = (
        "none"  # cpu: parameters and moments; disk: moments, in mapped files
    )
    offload_dir: str | None = None  # where those files are; default: a folder in the run directory


class CheckpointSpec(Value):
    """Saving: after `every` steps or `every_s` seconds, whichever comes first, and then after the last step too.

    A signal always saves. What the `keep` settings do not keep goes, never the newest valid one.
    """

    every: NonNegativeInt = 0  # steps between checkpoints; 0 = not by steps
    every_s: Seconds = 0.0  # wall time between checkpoints, by rank 0's clock; 0 = not by time
    keep_last: PositiveInt = 3  # the newest so many stay
    keep_every: NonNegativeInt = 0  # those of every so many steps stay too; 0 = none
    keep_every_s: Seconds = 0.0  # of older ones the first of every so many seconds stays too; 0 = none
    on_error: Literal["stop", "go_on"] = "stop"  # when a save fails; the last, and a signal's, always stop
    allow_missing: Names = ()  # tensors (model.head.*) a checkpoint need not have: they begin as in a new run
    allow_surplus: Names = ()  # tensors of a checkpoint that the model need not have: they are left out


class RunSpec(Value):
    """One run: length, place, seed, and how it is watched."""

    steps: PositiveInt = 100
    dir: str | None = None  # default: the next free runs/<name>-<n>
    seed: NonNegativeInt = 0
    exact: bool = False  # the same bits on 1, 2, 4, ... data-parallel ranks, at every stage of ZeRO
    log_every: PositiveInt = 10  # steps between reductions of the metrics
    check_every: PositiveInt = (
        20  # steps between looks at what must hold: equal copies, ties, movement, dtypes
    )
    validate_every: NonNegativeInt = 0  # steps between validations, and after the last; 0: only at the end
    validation_batches: NonNegativeInt = 0  # global batches of one validation; 0 = the whole set
    timeout_s: Annotated[float, Field(gt=0.0)] = 120.0  # longest wait in one collective
    grace_s: Annotated[float, Field(gt=0.0)] = 30.0  # from the first signal to the end of every rank


EXACT_THREADS = (
    1  # of a rank: sums inside an operation are cut between threads, so that their number is part of a run
)


class HardwareSpec(Value):
    """The machine. Unknown is said, not guessed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices_per_node: PositiveInt = 8
    threads_per_rank: PositiveInt | None = None  # default: cores / local ranks; in exact mode EXACT_THREADS
