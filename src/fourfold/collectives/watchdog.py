"""A thread beside each rank's work: when nothing moves ranks tell one another where they stand, and who is amiss ends.

It talks through the rendezvous store, over a connection of its own. As long as ranks move it reads a few counters
twice a second, and says nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from fourfold.collectives.fingerprints import Fingerprints
from fourfold.collectives.standing import Standing, Verdict, counts, standing, verdict
from fourfold.record.aloud import say
from fourfold.spec.errors import CheckFailed, FourfoldError, RankLate, RankWaits

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.5
# Without any call or beat for so long a rank says where it stands; for a tenth of timeout_s where that is less.
_STILL_S = 5.0
_SAID_SHARE = 0.25  # of timeout_s: waited so long, the late rank is named on the screen
_BEFORE_S = 5.0  # before the group's own timeout a wait is given up; a tenth of timeout_s where that is less


class Place(NamedTuple):
    """Where a rank is by its own word: step from 1, 0 before the first; beats: how many signs of life so far."""

    step: int
    phase: str
    beats: int


class Watchdog:
    """Of one rank. Without others it has nothing to do."""

    def __init__(
        self,
        rank: int,
        world: int,
        store: Store,
        timeout_s: float,
        fingerprints: Fingerprints,
        at: Callable[[], Place],
        end: Callable[[FourfoldError], object],
    ) -> None:
        """at: where the rank is. end: writes down an error and ends the process; the main thread may be stuck.

        Told to it are CheckFailed where ranks differ or wait for one another in a circle, RankLate in the rank that
        the others wait for, RankWaits in those, the latter two shortly before `timeout_s`. Collectives: none.
        """
        self._rank, self._world = rank, world
        self._store = store
        self._timeout_s = timeout_s
        self._fingerprints, self._at, self._end = fingerprints, at, end
        self._over = threading.Event()
        self._mark, self._since = "", time.monotonic()
        self._told = self._said = False
        self._before: Verdict | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it is entered."""
        if self._world == 1:
            yield
            return
        thread = threading.Thread(target=self._run, daemon=True, name="watchdog")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_POLL_S)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: so is the launcher, or rank 0
            self._store = _connection_of_its_own(self._store)
            while not self._over.wait(_POLL_S):
                self._look()
            self._moved()

    def _look(self) -> None:
        now = time.monotonic()
        place, (entered, done) = self._at(), counts()
        mark = f"{self._fingerprints.count} {place.beats} {sum(entered.values())} {sum(done.values())}"
        if mark != self._mark:
            self._mark, self._since, self._before, self._said = mark, now, None, False
            self._moved()
        elif now - self._since >= min(_STILL_S, 0.1 * self._timeout_s):
            own = standing(self._rank, mark, place.step, place.phase, now - self._since, self._fingerprints)
            self._store.set(self._key(self._rank), own.model_dump_json())
            self._told = True
            self._judge(own)

    def _moved(self) -> None:
        """Take back where this rank stood."""
        if self._told:
            self._store.set(self._key(self._rank), "")
            self._told = False

    def _judge(self, own: Standing) -> None:
        """Twice the same is a verdict: meanwhile a rank that moved again has taken back what it said."""
        standings = {self._rank: own}
        for other in set(range(self._world)) - {self._rank}:
            if self._store.check([self._key(other)]) and (told := self._store.get(self._key(other))):
                standings[other] = Standing.model_validate_json(told)
        found, before = verdict(standings, self._world), self._before
        self._before = found
        if found is None or before is None or found[1:] != before[1:]:
            return
        if found.final:
            self._end(CheckFailed(found.problem))
            return
        waited = max(standings[rank].waiting_s for rank in found.waiting)
        if waited >= self._timeout_s - min(_BEFORE_S, 0.1 * self._timeout_s):
            if self._rank in found.late:
                self._end(RankLate(found.problem))
            elif self._rank in found.waiting:
                self._end(RankWaits(found.problem))
        elif waited >= _SAID_SHARE * self._timeout_s and self._rank == found.waiting[0] and not self._said:
            self._said = True
            say(f"waiting for {waited:.0f} of at most {self._timeout_s:g} s: {found.problem.found}")

    @staticmethod
    def _key(rank: int) -> str:
        return f"standing/{rank}"


def _connection_of_its_own(store: Any) -> Store:
    """Else this thread would wait behind the main one."""
    own: Store = store.clone()
    return own
