"""The checks that ship, each asked about one run with one fault planted in its ranks; and what each says of it."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fourfold.checkpoint.validate import examine
from fourfold.launch.pool import RankPool
from fourfold.plan.run_plan import make_run_plan
from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import EXIT_CHECK_FAILED, DataError, RankFailed, SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.spec import Spec
from fourfold.train.start import open_run
from fourfold.verify.coverage import run_coverage, verify_coverage
from fourfold.verify.equal import verify_equal
from fourfold.verify.exact import verify_exact
from fourfold.verify.resume import verify_resume
from tests.mutants.in_rank import at_file, trained
from tests.mutants.kinds import Mutant, Sets

STEPS = 4  # of a run
# Short, and looked at in every step; two checkpoints, two validations.
RUN = (
    f"run.steps={STEPS}",
    *("run.log_every=1", "run.check_every=1", "run.validate_every=2", "run.validation_batches=1"),
    *("checkpoint.every=2", "optimizer.warmup_steps=0"),
)
RANKS_S = 60.0  # a rank that does not answer for so long hangs

Outcome = Literal["caught", "missed", "no effect", "crash", "hang", "not applicable"]


@dataclass(frozen=True)
class Result:
    """What one check says of one run.

    step: the one it names, from 1; 0: before the first; None: none is named. told: its words, cut short. bits: of what
    a run left, to be held against those of a run without the fault.
    """

    check: str
    outcome: Outcome
    step: int | None = None
    told: str = ""
    bits: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Asked:
    """One run to be checked: a fault, or none, under these settings."""

    spec: str
    sets: Sets
    world: int
    planted: str | None
    adverse: bool = False
    steps: int = 2

    def with_run(self, *more: str) -> Spec:
        return load_spec(self.spec, (*self.sets, *more)).spec


def asked_of(mutant: Mutant, spec: str, control: bool = False) -> Asked:
    """The run of a mutant, or the same without its fault."""
    planted, sets = (None, mutant.control) if control else (mutant.planted, mutant.sets)
    return Asked(spec, sets, mutant.world, planted, mutant.adverse, mutant.steps)


def run(asked: Asked, folder: Path) -> Iterator[Result]:
    """Train for some steps; then look at what the run wrote down, and at its checkpoints."""
    plan = make_run_plan(load_spec(asked.spec, (*asked.sets, *RUN)), asked.world, ("make", "mutants"))
    spec = plan.spec.model_copy(update={"run": plan.spec.run.model_copy(update={"dir": str(folder / "run")})})
    plan = plan.model_copy(update={"spec": spec})
    room, since = open_run(plan, "# of make mutants\n"), time.perf_counter()
    found = Result("run", "missed")
    try:
        with RankPool(asked.world, timeout_s=RANKS_S, setup=asked.planted) as pool:
            pool.run(trained, plan, str(room.path))
    except RankFailed as failure:
        found = _of_failure("run", failure, _where(room.path, failure.rank))
    yield replace(found, bits=_bits_left(room, asked.world), seconds=time.perf_counter() - since)
    if found.outcome != "missed" and not _steps(room, asked.world):
        yield Result("audit", "not applicable", told="the run ended before a step was written down")
    else:
        yield _timed("audit", lambda: _of_document("audit", run_coverage(room.path)))
    yield _timed("ckpt", lambda: _of_checkpoints(room, finished=found.outcome == "missed"))


def equal(asked: Asked, folder: Path) -> Iterator[Result]:
    """`fourfold verify equal`."""
    yield _timed(
        "equal",
        lambda: _of_document(
            "equal",
            verify_equal(
                asked.with_run(),
                asked.world,
                steps=asked.steps,
                adverse=asked.adverse,
                out=folder,
                setup=asked.planted,
                timeout_s=RANKS_S,
            ),
        ),
    )


def coverage(asked: Asked, folder: Path) -> Iterator[Result]:
    """`fourfold verify coverage`."""
    spec = asked.with_run()
    yield _timed(
        "coverage",
        lambda: _of_document(
            "coverage",
            verify_coverage(spec, asked.world, out=folder, setup=asked.planted, timeout_s=RANKS_S),
        ),
    )


def resume(asked: Asked, folder: Path) -> Iterator[Result]:
    """`fourfold verify resume`."""
    spec = asked.with_run()
    yield _timed(
        "resume",
        lambda: _of_document(
            "resume", verify_resume(spec, asked.world, out=folder, setup=asked.planted, timeout_s=RANKS_S)
        ),
    )


def exact(asked: Asked, folder: Path) -> Iterator[Result]:
    """`fourfold verify exact`, of what is data parallel alone."""
    spec = asked.with_run()
    inside = {key: getattr(spec.layout, key) for key in ("pp", "cp", "tp", "ep")}
    if cut := [f"{key} = {degree}" for key, degree in inside.items() if degree > 1]:
        yield Result("exact", "not applicable", told=f"{', '.join(cut)} is refused there")
        return
    yield _timed(
        "exact",
        lambda: _of_document(
            "exact",
            verify_exact(spec, asked.world, steps=3, out=folder, setup=asked.planted, timeout_s=RANKS_S),
        ),
    )


CHECKS: Mapping[str, Callable[[Asked, Path], Iterator[Result]]] = {
    "run": run,
    "equal": equal,
    "coverage": coverage,
    "exact": exact,
    "resume": resume,
}
OF_RUN = ("run", "audit", "ckpt")  # what one run answers
COLUMNS = (*OF_RUN, "equal", "coverage", "exact", "resume")


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="fourfold-mutants-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- what was said


def _timed(check: str, ask: Callable[[], Result]) -> Result:
    since = time.perf_counter()
    try:
        found = ask()
    except (SpecError, DataError) as error:
        found = Result(check, "caught", 0, f"refused: {error.problems[0].asked}: {error.problems[0].found}")
    return replace(found, seconds=time.perf_counter() - since)


def _of_document(check: str, document: Mapping[str, Any]) -> Result:
    if document["verdict"] != "fail":
        return Result(check, "missed")
    failed = [finding for finding in document["findings"] if finding["verdict"] == "fail"]
    first = document.get("first_deviation")
    told = str(first) if first else "; ".join(f"{one['claim']}: {one['measured']}" for one in failed[:2])
    if first is None and (broken := _broken(failed)):
        return Result(check, broken, None, _short(told))
    step = first["step"] if isinstance(first, Mapping) else _step_in(told)
    return Result(check, "caught", step, _short(told))


_HANGS = re.compile(r"rank \d+ hung")
# An error of ours begins with what was asked, any other with its class (launch.failure.describe).
_RAW = re.compile(r"rank \d+ (?:was killed|(?:failed|could not go on): \w+: )")


def _broken(failed: list[dict[str, Any]]) -> Outcome | None:
    """Where all that a check has to say is that a rank failed, of what it failed, if not of an error of ours."""
    told = " ".join(str(one["measured"]) for one in failed)
    if _HANGS.search(told):
        return "hang"
    return "crash" if _RAW.search(told) else None


def _of_failure(check: str, failure: RankFailed, at: tuple[int, str]) -> Result:
    found = failure.problems[0].found
    step, phase = at
    if _HANGS.search(found):
        return Result(check, "hang", step, _short(f"{phase}: {found}"))
    if not failure.told:
        return Result(check, "crash", step, _short(f"{phase}: {found}"))
    by = "" if failure.exit_code == EXIT_CHECK_FAILED else f"exit code {failure.exit_code}: "
    told = f"{phase}: {by}{failure.told[0].asked}: {failure.told[0].found}"
    return Result(check, "caught", _step_in(failure.told[0].asked) or step, _short(told))


def _where(folder: Path, rank: int) -> tuple[int, str]:
    note = at_file(folder, max(rank, 0))
    if not note.exists():
        return 0, "before the warm-up"
    step, _, phase = note.read_text().partition(" ")
    return int(step or 0), phase


def _of_checkpoints(room: RunDir, finished: bool) -> Result:
    """Every checkpoint that the record tells of is whole; a finished run has some."""
    events = read_lines(room.events(0)) if room.events(0).exists() else ()
    saved = [event["checkpoint"] for event in events if event["kind"] == "saved"]
    if finished and not saved:
        return Result("ckpt", "caught", STEPS, "a finished run that saves has saved nothing")
    for name in saved:
        problems = [one for of_claim in examine(room.checkpoints / name).values() for one in of_claim]
        if problems:
            told = f"{name}: {problems[0].asked}: {problems[0].found}"
            return Result("ckpt", "caught", int(name.partition("-")[2]), _short(told))
    return Result("ckpt", "missed" if saved else "not applicable", told="" if saved else "nothing was saved")


def _step_in(text: str) -> int | None:
    found = re.search(r"\bstep (\d+)", text)
    return int(found[1]) if found else None


def _short(text: str, most: int = 300) -> str:
    return " ".join(text.split())[:most]


def _bits_left(room: RunDir, world: int) -> str:
    """A digest of what a run wrote down of its steps, and of every tensor that it saved."""
    digest = hashlib.blake2b(repr(_steps(room, world)).encode(), digest_size=16)
    if room.metrics.exists():
        names = ("step", "loss", "grad_norm", "lr", "loss_tokens", "validation_loss", "validation_samples")
        digest.update(repr([[line.get(n) for n in names] for line in read_lines(room.metrics)]).encode())
    for shard in sorted(room.checkpoints.glob("step-*/*.safetensors")):
        digest.update(f"{shard.parent.name}/{shard.name}".encode() + shard.read_bytes())
    return digest.hexdigest()


def _steps(room: RunDir, world: int) -> list[tuple[int, int, list[int]]]:
    """Rank, step and sample ids of every step in the record."""
    return [
        (rank, event["step"], event["sample_ids"])
        for rank in range(world)
        if room.events(rank).exists()
        for event in read_lines(room.events(rank))
        if event["kind"] == "step"
    ]


def as_line(result: Result, **more: Any) -> dict[str, Any]:
    """For a file of JSON lines."""
    return {**more, **asdict(result), "seconds": round(result.seconds, 1)}
