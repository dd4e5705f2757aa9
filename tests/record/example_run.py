"""A run directory as a real run leaves it, written through the one writer; what tests of readers start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold.record.environment import environment
from fourfold.record.finding import Finding, write_findings
from fourfold.record.run_dir import RunDir, claim
from fourfold.record.writer import JsonLines, write_json, write_request, write_text
from fourfold.spec.model import DecoderSpec
from fourfold.spec.spec import Spec
from fourfold.spec.training import BatchSpec, LayoutSpec, OptimizerSpec, RunSpec

STEPS = 60
START = 1_700_000_000.0

COVERAGE = Finding(
    claim="every sample of an epoch was used exactly once",
    kind="fact",
    expected="0 duplicates, 0 missing of 11,904",
    measured="0 duplicates, 0 missing",
    tolerance="exact",
    verdict="pass",
    evidence="findings/coverage.json",
    command="fourfold verify coverage tiny --world 2",
)
EQUAL = Finding(
    claim="two ranks compute what one device computes",
    kind="fact",
    expected="worst gradient difference <= 1e-12",
    measured="3.1e-15",
    tolerance="max|Δ| / max(max|ref|, 1e-3 × largest of its kind) <= 1e-12",
    verdict="pass",
    evidence="findings/equal.json",
    command="fourfold verify equal tiny --world 2",
)
EIGHT = Finding(
    claim="any data-parallel degree sees the same global batches",
    kind="inference",
    expected="the order depends on (seed, epoch, step) only",
    measured="degrees 1, 2, 3 and 8 agree",
    verdict="pass",
    basis=(COVERAGE.claim, "batches of degree 1, 2, 3 and 8 were compared"),
)
GPU = Finding(
    claim="the step is as fast as a plain loop on accelerators",
    kind="open",
    expected="",
    measured="",
    verdict="open",
    would_test="benchmarks/data_parallel_step.py on a machine with accelerators",
)


def example_spec(note: str = "tiny decoder on the standard library's text") -> Spec:
    """As a settled ready Spec: two ranks, two samples at once, twelve times a step."""
    return Spec(
        name="tiny",
        note=note,
        model=DecoderSpec(layers=4, width=64, heads=4, kv_heads=2, tied=True, dropout=0.1),
        batch=BatchSpec(global_batch=48, micro_batch=2, accumulation=12),
        optimizer=OptimizerSpec(lr=3e-3, warmup_steps=20),
        layout=LayoutSpec(dp_replicate=2),
        run=RunSpec(steps=STEPS, validate_every=20),
    )


def write_example_run(
    path: Path,
    steps: int = STEPS,
    ending: str | None = "finished",
    findings: Sequence[Finding] = (COVERAGE, EQUAL, EIGHT, GPU),
    spec: Spec | None = None,
    failures: str = "",
) -> RunDir:
    """A run of two ranks that did `steps` steps; `ending` None leaves it unfinished."""
    run = claim(path)
    spec = spec or example_spec()
    provenance = {
        "note": "tiny.toml:3",
        "model.layers": "tiny.toml:7",
        "model.width": "tiny.toml:8",
        "batch.global_batch": "tiny.toml:21",
        "batch.micro_batch": "tiny.toml:22",
        "optimizer.lr": "--set #1",
    }
    write_request(run, spec, provenance, "# as typed\n[model]\nkind = 'decoder'\n")
    write_json(run.plan_json, _plan(spec, provenance))
    write_json(run.env_json, environment())
    _write_metrics(run, steps)
    for rank in (0, 1):
        _write_events(run, rank, steps, ending)
    if findings:
        write_findings(run, "checks", findings)
    if failures:
        write_text(run.failures_md, failures)
    return run


def _plan(spec: Spec, provenance: dict[str, str]) -> dict[str, Any]:
    return {
        "schema": "fourfold.plan/1",
        "spec": spec,
        "provenance": provenance,
        "world": 2,
        "nproc": 2,
        "command": ["fourfold", "train", "tiny", "--nproc", "2", "--set", "optimizer.lr=3e-3"],
        "steps": spec.run.steps,
        "samples_per_step": 48,
        "tokens_per_step": 6144,
        "parameters": 213_952,
        "parameter_terms": {"embedding": 16_384, "attention": 49_536, "norms": 576, "feed-forward": 147_456},
        "state_bytes": {
            "parameters": 855_808,
            "gradients": 855_808,
            "moments": 1_711_616,
            "total": 3_423_232,
        },
        "gradient_bytes_per_step": 855_808,
        "not_predicted": [
            "activations: they depend on the kernels",
            "time: no speed of this machine is known",
        ],
        "notes": [],
    }


def _write_metrics(run: RunDir, steps: int) -> None:
    with JsonLines(run.metrics) as file:
        for step in range(1, steps + 1):
            loss = 2.2 + 3.3 * math.exp(-step / 15) + 0.06 * math.sin(step * 2.3)
            when = START + 2 + step * 0.4
            line = {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 3e-3, "time": when, "step_s": 0.4}
            line |= {"tokens": 6144, "nonpadding": 6144, "loss_tokens": 6060}
            line |= {"tokens_per_s": 15360.0, "nonpadding_per_s": 15360.0, "loss_tokens_per_s": 15150.0}
            file.write(line)
            if step % 20 == 0:
                file.write(
                    {"step": step, "time": when, "validation_loss": loss + 0.1, "validation_tokens": 9000}
                )


def _write_events(run: RunDir, rank: int, steps: int, ending: str | None) -> None:
    with JsonLines(run.events(rank)) as file:
        base = {"t": START, "rank": rank, "step": 0}
        file.write({**base, "kind": "census", "training data": "9f2c0d7e", "code": "51be77aa"})
        file.write({**base, "t": START + 1, "kind": "start", "world": 2, "device": "cpu"})
        for step in range(1, steps + 1):
            ids = [48 * step + 2 * rank, 48 * step + 2 * rank + 1]
            file.write({**base, "t": START + 2 + step * 0.4, "step": step, "kind": "step", "sample_ids": ids})
        if ending is not None:
            file.write({**base, "t": START + 3 + steps * 0.4, "step": steps, "kind": "end", "ending": ending})
