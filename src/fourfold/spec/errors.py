"""What can go wrong, for people: every error says what was asked, what was found, why, and what to type instead.

FourfoldError                 1  a bug of ours, or a failure with no better class
├── SpecError (ValueError)    2  the request is wrong: usage, Spec, layout
├── CheckFailed               3  a check was run and did not hold
├── NoLayoutFits              4  nothing legal fits the memory given
├── DataError (OSError)       5  data, record or checkpoint cannot be read or written
├── Stopped                  75  stopped by a signal, in good order
├── RankWaits                 1  a rank gave up waiting for another in a collective
├── RankLate                137  a rank kept the others waiting for too long
└── RankFailed               128+n or the failing rank's own code
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_CHECK_FAILED = 3
EXIT_NO_LAYOUT = 4
EXIT_UNREADABLE = 5
EXIT_STOPPED = 75
EXIT_KILLED_BASE = 128


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, in four parts; `where` is the file and line or the `--set` it came from."""

    asked: str
    found: str
    why: str
    instead: str
    where: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: " if self.where else ""
        lines = [f"{head}{self.asked}", f"  found: {self.found}", f"  why:   {self.why}"]
        if self.instead:
            lines.append(f"  type:  {self.instead}")
        return "\n".join(lines)


class FourfoldError(Exception):
    """Base of every error raised on purpose; carries all problems found, not only the first."""

    exit_code = EXIT_BUG
    secondary = False  # True where a rank only follows what another rank failed of
    passing = False  # True where the same may go well when it is tried again

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[FourfoldError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class SpecError(FourfoldError, ValueError):
    """The request is wrong: a key, a value, a combination, a command line."""

    exit_code = EXIT_USAGE


class CheckFailed(FourfoldError):
    """A check was run and did not hold."""

    exit_code = EXIT_CHECK_FAILED


class NoLayoutFits(FourfoldError):
    """No legal layout fits what was given."""

    exit_code = EXIT_NO_LAYOUT


class DataError(FourfoldError, OSError):
    """Data, a record or a checkpoint cannot be read or written."""

    exit_code = EXIT_UNREADABLE

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class Stopped(FourfoldError):
    """Stopped by a signal, in good order."""

    exit_code = EXIT_STOPPED


class RankWaits(FourfoldError):
    """Another rank did not come to a collective in time: what this one ends with."""

    secondary = True


class RankLate(FourfoldError):
    """The others wait in a collective that this rank did not come to in time; as if it had been killed for it."""

    exit_code = EXIT_KILLED_BASE + 9  # SIGKILL, by which a launcher would end it


class RankFailed(FourfoldError):
    """A rank was killed, hung or raised; `exit_code` is that rank's. told: the problems of an error of ours."""

    def __init__(
        self,
        problems: Problem | Sequence[Problem],
        rank: int = -1,
        exit_code: int = EXIT_BUG,
        told: Sequence[Problem] = (),
    ) -> None:
        super().__init__(problems)
        self.rank = rank
        self.exit_code = exit_code
        self.told = tuple(told)

    def __reduce__(self) -> tuple[type[RankFailed], tuple[object, ...]]:  # type: ignore[override]
        return type(self), (self.problems, self.rank, self.exit_code, self.told)

    def refusal(self) -> FourfoldError | None:
        """What the rank raised, where it refused the request or could not read or write: no check has failed then."""
        return refusal(self.exit_code, self.told)


def refusal(exit_code: int, problems: Sequence[Problem]) -> FourfoldError | None:
    """The error of a rank that refused the request, or could not read or write; None for one of another kind."""
    kinds = {EXIT_USAGE: SpecError, EXIT_UNREADABLE: DataError}
    return kinds[exit_code](problems) if problems and exit_code in kinds else None
