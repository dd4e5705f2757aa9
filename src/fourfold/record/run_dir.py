"""The run directory: what each file in it is called, how a name is claimed, and how one is found again."""

from __future__ import annotations

import difflib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from shlex import quote

from fourfold.record.problems import unwritable
from fourfold.spec.errors import Problem, SpecError


@dataclass(frozen=True, slots=True)
class RunDir:
    """The names in a run directory; makes nothing and reads nothing.

    stood: it was an empty folder when claimed; around: the folders made to hold it, the innermost first.
    """

    path: Path
    stood: bool = field(default=False, compare=False)
    around: tuple[Path, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def spec_toml(self) -> Path:
        """The request, verbatim."""
        return self.path / "spec.toml"

    @property
    def spec_json(self) -> Path:
        """The request, resolved, with where each non-default came from."""
        return self.path / "spec.json"

    @property
    def plan_json(self) -> Path:
        """What was predicted."""
        return self.path / "plan.json"

    @property
    def env_json(self) -> Path:
        """The machine, the versions and the code."""
        return self.path / "env.json"

    @property
    def metrics(self) -> Path:
        """One line per optimizer step, one per validation; reduced over all ranks."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, a folder each."""
        return self.path / "ckpt"

    @property
    def offload(self) -> Path:
        """Where moments are mapped that `layout.offload = "disk"` keeps out of memory; empty between runs."""
        return self.path / "offload"

    @property
    def events_dir(self) -> Path:
        """One file of events per rank."""
        return self.path / "events"

    def events(self, rank: int) -> Path:
        """What one rank did."""
        return self.events_dir / f"rank{rank}.jsonl"

    @property
    def findings(self) -> Path:
        """What was checked: one JSON document per check."""
        return self.path / "findings"

    @property
    def failures_md(self) -> Path:
        """What went wrong, for people; there only if something did."""
        return self.path / "failures.md"

    @property
    def failures_dir(self) -> Path:
        """What went wrong, rank by rank, and the failure bundles."""
        return self.path / "failures"

    @property
    def attempts(self) -> Path:
        """When the ranks were started, how that ended, and why they were started again."""
        return self.path / "attempts.jsonl"

    @property
    def report_html(self) -> Path:
        """The report, for people."""
        return self.path / "report.html"

    @property
    def report_json(self) -> Path:
        """The report, for programs."""
        return self.path / "report.json"

    @property
    def log(self) -> Path:
        """What was said on stderr."""
        return self.path / "log.txt"

    @property
    def is_run(self) -> bool:
        """Whether this is a run directory: the resolved request is the first thing written into one."""
        return os.path.isfile(self.spec_json)  # False, not an error, where we may not look


def claim(path: Path | str) -> RunDir:
    """Make a new run directory; of several processes that try, exactly one succeeds.

    SpecError names the next free name if the path exists already; DataError if it cannot be made.
    """
    run = RunDir(Path(path), around=absent(Path(path).parent))
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir()
    except FileExistsError as error:
        if not os.path.exists(run.path):  # it was a parent that is a file
            raise unwritable(run.path, error, "make the run directory", "nothing was written") from error
        raise _used(run) from error
    except OSError as error:
        raise unwritable(run.path, error, "make the run directory", "nothing was written") from error
    return run


def claim_filled(path: Path | str, fill: Callable[[RunDir], None], resumes: bool = False) -> RunDir:
    """The same for one that holds, from its first moment on, what `fill` writes into the folder that it is given.

    It is made beside its place and moved there: who is killed meanwhile leaves a hidden folder, never half a run
    directory. An empty folder of that name is nobody's, and taken. resumes: whether who claims it could also go on with
    a run. Raises what `fill` raises, too.
    """
    run = RunDir(Path(path))
    try:
        made = _beside(run)
        run = RunDir(run.path, stood=os.path.lexists(run.path), around=absent(run.path.parent))
        if run.stood and not is_empty(run.path):
            raise _used(run, resumes)
        made.mkdir(parents=True)
    except OSError as error:
        raise unwritable(run.path, error, "make the run directory", "nothing was written") from error
    try:
        fill(RunDir(made))
        os.rename(made, run.path)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _used(run, resumes) from error
        raise unwritable(run.path, error, "make the run directory", "nothing was written") from error
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return run


def give_back(run: RunDir) -> None:
    """Undo `claim_filled`: the name is as before, free or an empty folder. Where that cannot be, it stays used.

    What was made around it goes too, unless something else is in there by now.
    """
    gone = _beside(run)
    with suppress(OSError):
        os.rename(run.path, gone)
        if run.stood:
            run.path.mkdir()
        shutil.rmtree(gone, ignore_errors=True)
    remove_empty(run.around)


def absent(folder: Path) -> tuple[Path, ...]:
    """Of a folder and those around it, the ones that are not there; the innermost first."""
    return tuple(takewhile(lambda path: not os.path.lexists(path), (folder, *folder.parents)))


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, given the innermost first, but for those with something in them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _beside(run: RunDir) -> Path:
    """A hidden name of its own, next to the run directory."""
    return run.path.parent / f".{run.path.name}-{secrets.token_hex(4)}"


def next_free(root: Path | str, name: str) -> Path:
    """`root/<name>-<n>`, n one above the largest in use (so later runs sort later); claims nothing."""
    root = Path(root)
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    used = [int(match[1]) for child in _children(root) if (match := pattern.fullmatch(child.name))]
    return root / f"{name}-{max(used, default=0) + 1}"


def next_free_beside(path: Path) -> Path:
    """`next_free` for the name that `path` has, numbered or not."""
    return next_free(path.parent, _stem(path.name))


def claim_next(root: Path | str, name: str, fill: Callable[[RunDir], None] | None = None) -> RunDir:
    """Claim `next_free(root, name)`; tries the following number when another process was quicker."""
    while True:
        path = next_free(root, name)
        try:
            return claim(path) if fill is None else claim_filled(path, fill)
        except SpecError:
            if not path.exists():
                raise


def nearest_run(path: Path | str) -> Path | None:
    """The run directory probably meant: around, inside, then beside `path`; else the newest in `runs`."""
    path = Path(path)
    for around in (path, *path.absolute().parents):
        if RunDir(around).is_run:
            return around
    inside = _runs_in(path) or _runs_in(path / "runs")
    if inside:
        return inside[0]
    beside = {run.name: run for run in reversed(_runs_in(path.parent))}
    close = difflib.get_close_matches(path.name, list(beside), n=1)
    if close:
        return beside[close[0]]
    others = _runs_in(Path("runs"))
    return others[0] if others else None


def _runs_in(folder: Path) -> list[Path]:
    """Run directories directly in a folder, newest first."""
    runs = [child for child in _children(folder) if RunDir(child).is_run]
    return sorted(runs, key=lambda run: (run.stat().st_mtime_ns, run.name), reverse=True)


def _children(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def is_empty(path: Path) -> bool:
    """Whether this is a folder with nothing in it: not a link, nor a file."""
    return path.is_dir() and not path.is_symlink() and next(path.iterdir(), None) is None


def _used(run: RunDir, resumes: bool = False) -> SpecError:
    free = f"--set {quote(f'run.dir={next_free_beside(run.path)}')}"
    return SpecError(
        Problem(
            asked=f"run.dir = {str(run.path)!r}",
            found="that name is used already",
            why="a run never writes over another one's record",
            instead=f"{free}, or --resume auto to go on with it" if resumes and run.is_run else free,
        )
    )


def _stem(name: str) -> str:
    """`tiny` of `tiny-3`: the part that is numbered."""
    return re.sub(r"-\d+$", "", name) or name
