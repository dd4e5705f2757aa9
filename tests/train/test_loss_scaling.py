from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from safetensors.numpy import load_file

from tests.train import precision_jobs as jobs

TP = ("layout.tp=2", "layout.sp=true")


@pytest.mark.parametrize(
    ("where", "layout"),
    [
        ("loss", ()),
        ("backward", ()),
        ("share", ()),
        ("backward", ("layout.zero=2",)),
        ("share", ("layout.zero=3",)),
        ("backward", TP),
        ("share", TP),
    ],
)
def test_what_overflows_on_one_rank_makes_every_rank_skip_and_back_off(ranks, where, layout):
    for seen in ranks(2).run(jobs.overflow, where, *layout):
        assert seen["scaled"] == [(65536.0, False), (65536.0, True), (32768.0, False)]
        assert seen["scale"] == 32768.0
        # Parameters, moments and AdamW's counts are those of before, bit for bit; no decay; the schedule goes on.
        assert seen["same"] == [False, True, False]
        assert seen["updates"] == {2}
        assert len(set(seen["rates"])) == 3


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def skips(folder, rank):
    events = [json.loads(line) for line in (folder / "events" / f"rank{rank}.jsonl").read_text().splitlines()]
    return [(event["step"], event["scale"], event["next"]) for event in events if event["kind"] == "skipped"]


def test_a_skipped_step_is_told_in_metrics_events_and_story(ranks, tmp_path):
    sets = (
        "precision.compute=fp16",
        f"precision.scale_start={2.0**40}",
        "precision.scale_backoff=0.001",
        "run.steps=8",
    )
    assert ranks(2).run(jobs.live, str(tmp_path), *sets) == ["finished"] * 2
    found = lines(tmp_path)
    skipped = [line["step"] for line in found if line["skipped"]]
    assert skipped and skipped[0] == 1 and len(skipped) < 8
    for line, later in pairwise(found):
        assert later["scale"] == line["scale"] * (0.001 if line["skipped"] else 1)
        assert (line["grad_norm"] in ("inf", "nan")) == bool(line["skipped"])
    for rank in (0, 1):
        assert [step for step, *_ in skips(tmp_path, rank)] == skipped
    assert skips(tmp_path, 0)[0][1:] == (2.0**40, 2.0**40 * 0.001)
    log = " ".join((tmp_path / "log.txt").read_text().split())
    assert "step 1 makes no update: a gradient overflowed under a loss scale of 1.09951e+12" in log


def test_other_precisions_have_no_scale_in_their_record(ranks, tmp_path):
    assert ranks(1).run(jobs.live, str(tmp_path), "precision.compute=bf16") == ["finished"]
    assert all("scale" not in line and "skipped" not in line for line in lines(tmp_path))


@pytest.mark.parametrize("layout", [(), ("layout.zero=1",)])
def test_fp16_goes_on_bit_for_bit_with_its_scale(ranks, tmp_path, layout):
    # It grows every 3 good steps, over the checkpoint after step 4, and backs off before and after it.
    sets = (
        "precision.compute=fp16",
        *(f"precision.scale_start={2.0**18}", "precision.scale_every=2", "run.steps=8", "checkpoint.every=3"),
        *layout,
    )
    whole, again = tmp_path / "whole", tmp_path / "again"
    for folder in (whole, again):
        folder.mkdir()
    assert ranks(2).run(jobs.live, str(whole), *sets) == ["finished"] * 2
    assert {line["skipped"] for line in lines(whole)} == {0, 1}
    assert len({line["scale"] for line in lines(whole)[3:]}) > 1
    from_here = whole / "ckpt" / "step-00000003"
    state = json.loads((from_here / "state.json").read_text())
    assert state["loss_scale"]["good"] == 1, "in the middle of a count"
    assert ranks(2).run(jobs.resumed, str(again), str(from_here), *sets) == ["finished"] * 2
    for one, other in zip(lines(whole)[3:], lines(again), strict=True):
        for key in ("step", "loss", "grad_norm", "lr", "scale", "skipped"):
            assert one[key] == other[key], key
    first, second = (held(folder / "ckpt" / "step-00000008") for folder in (whole, again))
    assert first == second


def held(folder):
    return {
        f"{file.name} {name}": array.tobytes()
        for file in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }


def test_a_checkpoint_of_fp16_without_its_scale_is_refused(ranks, tmp_path):
    for told in ranks(1).run(jobs.loads_without_scale, str(tmp_path), "precision.compute=fp16"):
        assert "loss_scale: missing" in told
        assert "skip other steps" in told


def test_a_checkpoint_from_before_fp16_still_loads(ranks, tmp_path):
    assert ranks(1).run(jobs.loads_without_scale, str(tmp_path), "precision.compute=bf16") == [""]


def test_a_scale_below_one_ends_the_run_and_the_rank_is_named(ranks, tmp_path):
    sets = ("precision.compute=fp16", "precision.scale_start=2.0", "run.steps=6")
    first, second = ranks(2).run(jobs.loss_of_rank_1_is_inf, str(tmp_path), *sets)
    for told in (first, second):
        assert "NonFinite" in told and "in step 3" in told, told
        assert "the scale is 1, and still the loss is not finite on rank 1" in told
        assert "precision.compute=bf16" in told
    assert "failure bundle" in second and "failure bundle" not in first  # rank 0 only follows
    assert [(step, scale) for step, scale, _ in skips(tmp_path, 0)] == [(2, 2.0)]


def test_an_unscaled_run_ends_with_its_first_overflow(ranks, tmp_path):
    sets = ("precision.compute=fp16", "precision.scale_start=1.0")
    told = ranks(2).run(jobs.loss_of_rank_1_is_inf, str(tmp_path), *sets)[1]
    assert "in step 2" in told and "the scale is 1," in told


def test_a_bundle_of_fp16_replays_with_its_scale(ranks, tmp_path):
    from fourfold.train.replay import replay

    sets = ("precision.compute=fp16", "precision.scale_start=4096.0", "precision.scale_backoff=0.0001")
    ranks(1).run(jobs.loss_of_rank_1_is_inf, str(tmp_path), *sets)
    document = replay(next((tmp_path / "failures").iterdir()))
    assert math.isfinite(document["grad_norm"]) and document["grad_norm"] < 100
