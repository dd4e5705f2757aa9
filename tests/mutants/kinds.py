"""Every planted fault: its kind, where it is planted, and the run that it acts in; settings are those of the tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.parallel.memory_jobs import TINY
from tests.train import invariant_jobs, test_invariants
from tests.train import test_precision_faults as of_precision
from tests.verify import test_context_faults as of_context
from tests.verify import test_exact as of_exact
from tests.verify import test_expert_faults as of_experts
from tests.verify import test_kinds_of_faults as of_kinds
from tests.verify import test_layout_faults as of_layouts
from tests.verify import test_planted_faults as of_steps
from tests.verify import test_resume_faults as of_resume
from tests.verify import test_stage_expert_faults as of_stage_experts
from tests.verify import test_stage_faults as of_stages

Sets = tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    planted: "module:function", called in every rank; None where the model of `sets` is the fault. kinds: numbers of the
    catalogue. sets: over the Spec of tests/verify/small.py. control: the settings of a run without it. adverse: whether
    the equality check makes model and data adversarial. steps: of an equality check.
    """

    name: str
    planted: str | None
    kinds: tuple[int, ...]
    sets: Sets
    control: Sets
    world: int = 2
    adverse: bool = False
    steps: int = 2


# Faults whose kind stands in the catalogue; others are planted, too, and count for none.
NUMBERS: Mapping[str, tuple[int, ...]] = {
    "epoch_not_advanced": (1,),
    "same_samples_everywhere": (2,),
    "split_twice": (3,),
    "unequal_seeds": (5,),
    "validation_filled_up_and_counted": (6,),
    "validation_on_every_rank": (6,),
    "last_sample_dropped": (7,),
    "mask_edited_in_place": (9,),
    "padding_counted": (10,),
    "one_step_short": (11,),
    "mean_of_means": (13,),
    "count_of_one_rank": (13,),
    "divided_by_the_microbatches": (14,),
    "divided_by_microbatches": (14,),
    "accumulated_scaled_each_time": (15,),
    "metrics_of_every_peer": (17,),
    "targets_of_every_peer": (17,),
    "targets_shifted_in_each_slice": (18,),
    "targets_shifted_in_each_part": (18,),
    "targets_shifted_twice": (18,),
    "AuxiliaryOfTheMicrobatch": (19,),
    "auxiliary_of_the_microbatch": (19,),
    "capacity_of_the_tokens_here": (19,),
    "factor_missing": (21,),
    "averaged_not_summed": (21,),
    "auxiliary_by_ranks": (21,),
    "last_microbatch_only": (22,),
    "gradients_cleared_in_mid_step": (22,),
    "wrapper_bypassed": (23,),
    "never_synced": (23,),
    "not_synced_at_last": (23,),
    "doubled_by_a_group_of_one": (25,),
    "bucket_never_sent": (26,),
    "fullest_not_reduced": (27,),
    "buffer_used_again_too_early": (29,),
    "shard_left_out_of_the_norm": (30,),
    "norm_of_own_stages": (30,),
    "replicated_counted_tp_times": (31,),
    "norm_of_some_experts": (33,),
    "clip_without_effect": (34,),
    "not_clipped_on_rank_1": (34,),
    "clipped_before_unscaling": (34,),
    "norm_of_one_share": (35,),
    "skipped_in_silence": (37,),
    "overflow_ignored": (38,),
    "decided_alone": (38,),
    "masters_in_bf16": (39,),
    "reduced_in_bf16": (41,),
    "count_in_bf16": (42,),
    "frozen_cast_too": (43,),
    "rate_of_the_first_step": (45,),
    "every_shard_starts_alike": (46,),
    "dropout_by_place_in_the_slice": (46,),
    "dropout_by_place_in_the_part": (46,),
    "dropout_by_local_row": (47,),
    "recomputed_with_other_draws": (49,),
    "overwritten_before_recompute": (50,),
    "activation_slot_used_again": (51,),
    "bias_shared_out_between_ranks": (53,),
    "bias_of_every_peer": (53,),
    "norm_gradients_not_summed": (54,),
    "backward_sums_equal_losses": (55,),
    "loss_of_every_peer": (55,),
    "compared_in_place": (57,),
    "summed_over_another_group": (58,),
    "untied_when_filled": (59,),
    "tie_reduced_before_its_second_use": (59,),
    "tie_not_summed": (59,),
    "experts_counted_ep_times": (61,),
    "router_gradient_lost": (61,),
    "units_remembered_from_another_module": (62,),
    "replaced_after_the_optimizer_was_built": (63,),
    "everything_decays": (65,),
    "one_shard_does_not_decay": (65,),
    "step_counter_shared": (66,),
    "an_update_for_each_microbatch": (66,),
    "betas_not_read": (67,),
    "one_rank_saves_the_step_before": (69,),
    "never_published": (70,),
    "published_before_it_is_durable": (70,),
    "weights_saved_one_step_late": (71,),
    "moments_saved_one_step_late": (71,),
    "moments_not_restored": (73,),
    "streams_not_restored": (74,),
    "streams_of_rank_0": (74,),
    "masks_of_a_new_run": (74,),
    "position_off_by_one": (75,),
    "epoch_begun_anew": (75,),
    "epoch_repeated_at_its_edge": (75,),
    "only_the_remainder": (75,),
    "layers_by_their_place_in_the_stage": (77,),
    "another_checkpoint_loaded": (78,),
    "buffers_joined_over_ranks": (79,),
    "validation_never_runs": (81,),
    "columns_swapped_on_rank_1": (82,),
    "metrics_not_written": (83,),
    "events_not_written": (83,),
    "kernels_by_chance": (85,),
}

UNEVEN = of_steps.UNEVEN  # targets that differ from row to row; the equality check makes them so by itself
PLAIN = ("data.sequence=32", UNEVEN)
EXACT = (
    *(one for one in TINY if not one.startswith("model.layers")),
    "model.layers=2",
    *(one for one in of_exact.BATCH if not one.startswith("batch.global")),
    "batch.global_batch=12",
)
FP16 = ("precision.compute=fp16", "precision.scale_start=16.0", "precision.scale_every=1")
HIGH = tuple(one for one in of_precision.HIGH if not one.startswith("run."))


def _mutant(module: str, name: str, sets: Sequence[str], **more: object) -> Mutant:
    kinds = NUMBERS.get(name, ())
    return Mutant(name, f"{module}:{name}", kinds, tuple(sets), tuple(sets), **more)  # type: ignore[arg-type]


def _of_steps() -> Iterator[Mutant]:
    for name in of_steps.IN_DATA:
        yield _mutant(of_steps.DATA, name, ('data.last_batch="keep"',) if name == "wrap_around" else PLAIN)
    for name in of_steps.IN_STEP:
        unused = ("layout.unused_parameters=true",) if name == "layer_unused_on_rank_1" else ()
        yield _mutant(of_steps.STEP, name, (*PLAIN, *unused))
    for module, found in ((of_kinds.STEP, of_kinds.IN_STEP), (of_kinds.LAYOUT, of_kinds.IN_LAYOUT)):
        for name, one in found.items():
            yield _mutant(module, name, one.sets)
    yield _mutant(of_kinds.LAYOUT, "summed_over_another_group", of_kinds.CROSSED, world=4)
    yield _mutant(of_kinds.LAYOUT, "metrics_of_every_peer", of_kinds.TP)
    every_other = (*of_kinds.model("EveryOtherStep"), "layout.unused_parameters=true")
    yield _mutant(of_kinds.STEP, "step_counter_shared", every_other, steps=3)
    name = "AuxiliaryOfTheMicrobatch"
    yield Mutant(
        name, None, NUMBERS[name], of_kinds.model(name), of_kinds.model("AuxiliaryOfTheSample"), steps=2
    )


def _of_layouts() -> Iterator[Mutant]:
    for name, (layout, world, *_) in of_layouts.FOUND.items():
        rows = () if "layout.tp=2" in layout else ("batch.micro_batch=2",)
        rows = ("batch.micro_batch=1",) if world == 4 else rows
        yield _mutant(of_layouts.FAULTS, name, (*of_layouts.SMALL, *rows, *layout), world=world, adverse=True)
    for name, (sets, *_) in of_context.FOUND.items():
        yield _mutant(of_context.FAULTS, name, sets, adverse=True)
    for name, (layout, *_) in of_stages.FOUND.items():
        yield _mutant(of_stages.FAULTS, name, (*of_stages.SMALL, *layout), adverse=True)
    for name, (layout, *_) in of_experts.FOUND.items():
        yield _mutant(of_experts.FAULTS, name, (*of_experts.SMALL, *layout))
    for name, (layout, world, *_) in of_stage_experts.FOUND.items():
        yield _mutant(of_stage_experts.FAULTS, name, (*of_stage_experts.SMALL, *layout), world=world)


def _of_runs() -> Iterator[Mutant]:
    for name in of_resume.CAUGHT:
        yield _mutant(of_resume.FAULTS, name, of_resume.MLP)
    for name in of_resume.CAUGHT_IN_OWN:
        yield _mutant(of_resume.FAULTS, name, of_resume.OWN)
    for name, (sets, _) in of_precision.IN_RUN.items():
        own = HIGH if sets == of_precision.HIGH else sets
        yield _mutant(of_precision.FAULTS, name, ("data.sequence=32", *own))
    yield _mutant(of_precision.FAULTS, "decided_alone", ("data.sequence=32", *HIGH, "layout.zero=2"))
    for name in ("reduced_in_bf16", "norms_in_bf16"):
        yield _mutant(of_precision.FAULTS, name, ("data.sequence=32",))
    yield _mutant(of_precision.FAULTS, "scale_not_restored", ("data.sequence=32", *FP16))
    for name in of_exact.FAULTS:
        yield _mutant("tests.verify.faults.exact_faults", name, EXACT, world=4)
    moe = next(sets for name, sets, _ in test_invariants.MORE if name == "a_buffer")
    more = {
        "draws": EXACT,
        "a_buffer": ("data.sequence=32", *moe),
        "a_narrow_moment": (*PLAIN, "layout.zero=2"),
    }
    for name in invariant_jobs.FAULTS:
        yield _mutant("tests.mutants.planted_run", f"broken_{name}", more.get(name, PLAIN))


def _of_this_folder() -> Iterator[Mutant]:
    for name in ("split_twice", "validation_filled_up_and_counted"):
        yield _mutant("tests.mutants.planted_data", name, PLAIN)
    for name in ("last_sample_dropped", "mask_edited_in_place"):  # of packed rows
        yield _mutant("tests.mutants.planted_data", name, ("data.sequence=32",))
    own = {
        "one_rank_saves_the_step_before": (*PLAIN, "layout.zero=2"),
        "buffers_joined_over_ranks": of_resume.OWN,
        "layers_by_their_place_in_the_stage": (*of_stages.SMALL, *of_stages.PP),
        "kernels_by_chance": of_resume.MLP,
    }
    for name in (
        "replaced_after_the_optimizer_was_built",
        "kernels_by_chance",
        "validation_never_runs",
        "columns_swapped_on_rank_1",
        "metrics_not_written",
        "events_not_written",
        "one_rank_saves_the_step_before",
        "never_published",
        "published_before_it_is_durable",
        "another_checkpoint_loaded",
        "buffers_joined_over_ranks",
        "layers_by_their_place_in_the_stage",
    ):
        yield _mutant("tests.mutants.planted_run", name, own.get(name, PLAIN))
    for name in ("swapped", "missed", "of_another_shape", "of_another_kind", "of_another_dtype"):
        yield _mutant("tests.mutants.planted_collectives", name, PLAIN)


MUTANTS: tuple[Mutant, ...] = (*_of_steps(), *_of_layouts(), *_of_runs(), *_of_this_folder())
