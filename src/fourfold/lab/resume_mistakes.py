"""The classic mistakes of going on from a checkpoint: what each does where nobody checks, and what catches it."""

from __future__ import annotations

from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.header import read_header
from fourfold.checkpoint.publish import step_name
from fourfold.checkpoint.validate import read_manifest
from fourfold.lab import resume_ranks
from fourfold.lab.resume_disk import (
    cut_off,
    flip_bit,
    hash_of,
    read_where_the_mark_points,
    said,
    sample_ids,
    saved,
    streams_in,
    tensors_there,
)
from fourfold.lab.resume_exercise import EARLIER, SAVED, STEPS, WORLD, Lab, Shown
from fourfold.verify.coverage import run_coverage

FLIPPED = "model.norm.weight"  # float32, each about 1
BIT = 29  # of its first; in the exponent: without it, the number is about 2**-64


def weights_only(lab: Lab) -> Shown:
    """The optimizer's state is lost."""
    shown = Shown(
        "weights-only",
        "weights only: AdamW's moments and step counter are lost",
        "Moments are the memory of all gradients so far. Without them the model is the same, but its next updates "
        f"are not: step {SAVED + 1} still makes the same loss, step {SAVED + 2} does not. (All else was kept, to see "
        "this alone.)",
    )
    run = lab.interrupted(shown.name)
    lab.in_ranks(resume_ranks.save_in_part, lab.plan, lab.good, run.checkpoints, ("optimizer.",))
    shown.seen.append(f"on disk: {tensors_there(run, SAVED, lab.good)}; none of the optimizer")
    lab.go_on_carelessly(shown, run, SAVED + 2)
    lab.refused(shown, run, "tensor optimizer.", "missing from the checkpoint")
    return shown


def position_lost(lab: Lab) -> Shown:
    """The loader begins the epoch anew."""
    shown = Shown(
        "position-lost",
        "the data position is lost: the loader begins the epoch anew",
        "Samples at the epoch's beginning come twice, those at its end perhaps never; with frequent restarts a model "
        "never sees most of its data.",
    )
    run = lab.interrupted(shown.name)
    due = lab.plan.samples_per_step * SAVED
    lab.in_ranks(resume_ranks.save_in_part, lab.plan, lab.good, run.checkpoints, (), 0)
    shown.seen.append(
        f"on disk: {tensors_there(run, SAVED, lab.good)}; the position is 0, and should be {due}"
    )
    lab.go_on_carelessly(shown, run, SAVED + 1, epoch_anew=True)
    ids = sample_ids(run)
    before = {one for step in range(1, SAVED + 1) for rank in ids[step] for one in rank}
    again = [
        one for step in range(SAVED + 1, STEPS + 1) for rank in ids[step] for one in rank if one in before
    ]
    shown.seen.append(
        f"{len(again)} samples of steps 1-{SAVED} come again: {', '.join(map(str, again[:5]))} …"
    )
    coverage = run_coverage(run.path, command=f"fourfold verify coverage {run.path}")
    failed = [finding for finding in coverage["findings"] if finding["verdict"] == "fail"]
    shown.fourfold += [
        f"verify coverage of the run fails: {finding['claim'].removeprefix('this run: ')}: {finding['measured']}"
        for finding in failed[:1]
    ]
    lab.fact(
        shown,
        "the ledger tells that every sample of the first steps came twice",
        f"{due} duplicates",
        f"{coverage['duplicates']} duplicates in the ledger, {len(again)} by counting ids",
        coverage["duplicates"] == len(again) == due,
    )
    lab.refused(shown, run, "after 0 samples", f"{due} come before step {SAVED + 1}")
    return shown


def seed_reset(lab: Lab) -> Shown:
    """The random streams begin again."""
    shown = Shown(
        "seed-reset",
        "the seed is set again: the random streams begin as at step 1",
        "Noise that repeats is no noise: after every restart the model meets the same dropout masks in the same order.",
    )
    run = lab.interrupted(shown.name)
    lab.in_ranks(resume_ranks.save_in_part, lab.plan, lab.good, run.checkpoints, ("rank",))
    shown.seen.append(f"on disk: {tensors_there(run, SAVED, lab.good)}; no random stream")
    drawn = lab.go_on_carelessly(shown, run, SAVED + 1)
    again = [
        sum(after[step] == before[step - SAVED] for step in range(SAVED, STEPS))
        for after, before in zip(drawn, lab.drawn, strict=True)
    ]
    steps = STEPS - SAVED
    counts = ", ".join(f"{count} of {steps} on rank {rank}" for rank, count in enumerate(again))
    shown.seen.append(f"streams that stand where they stood {SAVED} steps before: {counts}")
    lab.fact(
        shown,
        f"steps {SAVED + 1}-{STEPS} draw what steps 1-{SAVED} drew",
        f"in {steps} of {steps} steps, on each rank",
        counts,
        again == [steps] * WORLD,
    )
    lab.refused(shown, run, "tensor rank0.", "missing from the checkpoint")
    return shown


def one_file(lab: Lab) -> Shown:
    """Every rank writes to the same path."""
    shown = Shown(
        "one-file",
        "all ranks write one file, at the same time",
        "Ranks are alike only in their parameters. Of what is each rank's own (here its random streams) the file "
        "keeps one rank's at best, and chance says whose.",
    )
    run = lab.interrupted(shown.name)
    folder = saved(run, SAVED)
    wrote = lab.in_ranks(resume_ranks.save_all_to_one_file, lab.plan, lab.good, folder)
    file = folder / resume_ranks.ONE_FILE
    found, due = streams_in(read_header(file)), streams_in(read_manifest(lab.good).tensors)
    counts = ", ".join(f"{found.get(rank, 0)} of {count} of {rank}" for rank, count in due.items())
    on_disk = hash_of(file)
    whose = f"what rank {wrote.index(on_disk)} wrote" if on_disk in wrote else "a mixture of what both wrote"
    shown.seen.append(f"on disk: {file.name} is {whose}; random streams in it: {counts}")
    lab.fact(
        shown,
        "one rank's own state is in the file at best, the rest is lost",
        f"{sum(due.values()) // WORLD} random streams of {sum(due.values())}",
        counts,
        sum(found.values()) == sum(due.values()) // WORLD,
    )
    lab.go_on_carelessly(shown, run, SAVED + 1)
    choice = newest_valid(run.checkpoints)
    shown.fourfold += said(choice)
    lab.fact(
        shown,
        "the product passes the checkpoint over: hashes and tensors are those that each rank wrote",
        f"{file.name}: another hash, or without a rank's tensors",
        shown.fourfold[0],
        choice.path is None and file.name in shown.fourfold[0],
    )
    return shown


def mark_first(lab: Lab) -> Shown:
    """The success mark is written before the shards."""
    shown = Shown(
        "mark-first",
        "the success mark is written before the shards",
        "A mark can only vouch for what was on disk before it. Whoever is killed between the two leaves a mark on "
        "something that is not there.",
    )
    newest = saved(lab.undisturbed, STEPS)
    theirs, ours = lab.interrupted(shown.name, SAVED), lab.interrupted("mark-last", SAVED)
    ends = [
        lab.killed(resume_ranks.save_mark_first, newest, theirs.checkpoints),
        lab.killed(resume_ranks.save_and_die, lab.plan, newest, ours.checkpoints),
    ]
    mark = (theirs.checkpoints / resume_ranks.MARK).read_text()
    shown.seen.append(
        f'on disk: the mark says "{mark}"; killed: {cut_off(theirs.checkpoints / mark, newest)}'
    )
    failure = read_where_the_mark_points(theirs.checkpoints)
    shown.seen.append(f"a reader that trusts the mark: {failure or 'no error'}")
    lab.fact(
        shown,
        "both writers were killed inside a shard",
        "SIGXFSZ, SIGXFSZ",
        ", ".join(ends),
        ends == ["SIGXFSZ"] * 2,
    )
    lab.fact(
        shown, "who trusts the mark has nothing to go on from", "an error", failure or "none", bool(failure)
    )
    passed, choice = newest_valid(theirs.checkpoints), newest_valid(ours.checkpoints)
    shown.fourfold += [*said(passed), *(f"its own save, killed likewise: {line}" for line in said(choice))]
    lab.fact(
        shown,
        "a folder with a mark and no manifest is passed over",
        f"{mark} passed over, {step_name(SAVED)} taken",
        "; ".join(said(passed)),
        passed.step == SAVED and [path.name for path, _ in passed.passed_over] == [mark],
    )
    lab.fact(
        shown,
        "a killed save of the product is no checkpoint, and the one before it is whole",
        f"an unfinished save passed over, {step_name(SAVED)} taken",
        "; ".join(said(choice)),
        choice.step == SAVED
        and [reason for _, reason in choice.passed_over] == ["a save that was not finished"],
    )
    return shown


def damaged_shard(lab: Lab) -> Shown:
    """One bit of a shard flips."""
    shown = Shown(
        "damaged-shard",
        "a damaged shard: one bit has flipped on disk",
        "Any bits are a number: a file without a hash is read as it lies, and nothing tells a loss that is a little "
        "other from a right one.",
    )
    run = lab.interrupted(shown.name, SAVED)
    flip = flip_bit(saved(run, SAVED), FLIPPED, BIT)
    shown.seen.append(
        f"on disk: one of the {flip.bits:,} bits of {flip.file.name} is another: in {FLIPPED} "
        f"{flip.before:.3g} has become {flip.after:.1g}; a plain reader loads it without a word"
    )
    lab.go_on_carelessly(shown, run, SAVED + 1)
    ours = lab.interrupted("damaged-shard-passed-over", EARLIER, SAVED)
    flip_bit(saved(ours, SAVED), FLIPPED, BIT)
    choice = newest_valid(ours.checkpoints)
    shown.fourfold += said(choice)
    lab.fact(
        shown,
        "the file is named, and the checkpoint before it is taken",
        f"{flip.file.name}: its hash is another; {step_name(EARLIER)} taken",
        "; ".join(said(choice)),
        choice.step == EARLIER and f"{flip.file.name}: its hash" in shown.fourfold[0],
    )
    if choice.step == EARLIER:
        differing = sum(not row.same for row in lab.go_on(ours, choice))
        steps = STEPS - SAVED
        shown.fourfold.append(
            f"steps {SAVED + 1}-{STEPS} from there: {differing} of {steps} differ from the undisturbed"
        )
        lab.fact(
            shown,
            "from the checkpoint before it, the run is the same one again",
            f"0 of {steps} steps differ",
            f"{differing} of {steps} steps differ",
            differing == 0,
        )
    return shown
