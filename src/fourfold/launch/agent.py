"""The launcher: N ranks on this machine, started, watched and ended by an elastic agent of our own."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fourfold.launch.failure import signal_name
from fourfold.launch.processes import Leash, RankProcess
from fourfold.launch.pulse import clear_ranks
from fourfold.launch.rank import ATTEMPT, loopback
from fourfold.launch.restarts import Attempts, Restarts
from fourfold.launch.stop import SignalsTaken, StopRequest
from fourfold.launch.story import on_screen
from fourfold.launch.watch import Outcome, Watch, log_path
from fourfold.record.aloud import say
from fourfold.record.calls import CALLS
from fourfold.record.environment import cores
from fourfold.record.problems import unwritable
from fourfold.spec.errors import EXIT_STOPPED, Problem, SpecError
from fourfold.spec.words import counted

_HOST = "127.0.0.1"
_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start: `command` (an argv) nproc times, and when to give up on it.

    run_dir: gets failures.md and the folders failures, logs, pulse and stacks. timeout_s: the longest wait in
    one collective, as the ranks set it too. grace_s: from the first signal to the end of every rank.
    threads_per_rank: CPU threads of each rank; None: this machine's cores divided by nproc. typed: what a person
    typed to have this started, for failures.md; empty: the command. holds: as for a `RankProcess`. restarts: when
    to start ranks again that failed; None: never. may_refuse: what the ranks refuse before any step
    (`Outcome.refusal`) is the caller's to tell.
    """

    command: tuple[str, ...]
    nproc: int
    run_dir: Path
    timeout_s: float = 120.0
    grace_s: float = 30.0
    threads_per_rank: int | None = None
    typed: tuple[str, ...] = ()
    holds: bool = False
    restarts: Restarts | None = None
    may_refuse: bool = False


def launch(request: Launch, stop: StopRequest | None = None) -> Outcome:
    """Run the ranks to their end and say how they ended; no process of theirs is left behind.

    Rank 0's output passes through, that of the others goes to `logs/rank<r>.txt`. SIGTERM, SIGUSR1 and SIGINT
    are passed on once, also one that `stop` has seen before; ranks that then all end with 75 make 75 the outcome.
    On a failure the story is printed to stderr, the cause last, and written to `failures.md`, the cause first; with
    `restarts` all ranks may then be started again, under the same store, lock and run directory.
    Collectives: none; no port is picked, the store binds its own, to this machine only.
    Raises SpecError for a request that cannot start, DataError if the run directory cannot be written.
    """
    _check(request)
    run_dir = Path(request.run_dir)
    try:
        for name in ("failures", "logs", "pulse", "stacks"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(run_dir, error, "make the folders of the ranks", "no rank was started") from error
    attempts = Attempts(run_dir, request.restarts, request.typed or request.command, request.nproc)
    with (
        closing(attempts),
        SignalsTaken(stop.seen if stop else None) as signals,
        Leash() as leash,
    ):
        agent = RankAgent(request, attempts, signals, leash)
        agent.run()
    assert agent.outcome is not None
    if agent.outcome.exit_code == EXIT_STOPPED and signals.seen and not agent.outcome.told:
        number, at = signals.seen[0]
        took = f"{time.monotonic() - at:.1f} s after {signal_name(number)}"
        say(f"every rank had ended {took}; run.grace_s gives them {request.grace_s:g}")
    if not request.may_refuse or agent.outcome.refusal() is None:
        _tell(agent.outcome)
    return agent.outcome


class RankAgent(LocalElasticAgent):
    """Torch's agent for one machine, with our own processes, watch and idea of an end.

    Torch's own starts again after exit 75, waits 30 s before it kills, and tells failures apart by time alone.
    """

    def __init__(self, request: Launch, attempts: Attempts, signals: SignalsTaken, leash: Leash) -> None:
        self._rendezvous_here = LoopbackRendezvous(timedelta(seconds=request.timeout_s))
        spec = WorkerSpec(
            role="rank",
            local_world_size=request.nproc,
            rdzv_handler=self._rendezvous_here,
            entrypoint=request.command[0],
            args=request.command[1:],
            max_restarts=0,
            monitor_interval=_TICK_S,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self._attempts = attempts
        self._request = request
        self._signals = signals
        self._leash = leash
        self._processes: list[RankProcess] = []
        self._watch: Watch | None = None
        self.outcome: Outcome | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        run_dir = Path(self._request.run_dir)
        clear_ranks(run_dir / "pulse")
        clear_ranks(run_dir / CALLS)
        self._processes = []
        since = time.time()
        for worker in worker_group.workers:
            env = self._environment(worker_group, worker.local_rank, worker.global_rank, worker.world_size)
            log = log_path(run_dir, worker.global_rank) if worker.global_rank else None
            self._processes.append(self._start(worker.global_rank, env, log))
            self._leash.hold(self._processes[-1])
        limits = self._request.timeout_s, self._request.grace_s
        self._watch = Watch(self._processes, run_dir, *limits, since, self._attempts.number)
        self._attempts.begin([process.pid for process in self._processes])
        return {rank: process.pid for rank, process in enumerate(self._processes)}

    def _start(self, rank: int, env: dict[str, str], log: Path | None) -> RankProcess:
        try:
            return RankProcess(rank, self._request.command, env, log, self._request.holds)
        except OSError as error:
            raise SpecError(
                Problem(
                    asked=f"start rank {rank}: {' '.join(self._request.command)}",
                    found=str(error),
                    why="the system refused to start the program",
                    instead="which " + self._request.command[0],
                )
            ) from error

    def _environment(self, group: WorkerGroup, local: int, rank: int, world: int) -> dict[str, str]:
        """This process's environment, with what makes a rank."""
        nproc = self._request.nproc
        threads = self._request.threads_per_rank or max(1, cores() // nproc)
        attempt = str(self._attempts.number)
        env = dict(os.environ)
        env.pop("TORCHELASTIC_ERROR_FILE", None)  # an outer launcher's
        interface = loopback()
        if interface:
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
        return env | {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(nproc),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self._rendezvous_here.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": attempt,
            ATTEMPT: attempt,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",  # else a killed rank's last words stay in its buffer
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._watch is not None
        self.outcome = self._watch.tick(self._signals.seen)
        if self.outcome is None:
            return RunResult(WorkerState.HEALTHY)
        if self.outcome.failures or self.outcome.told:
            return RunResult(WorkerState.FAILED)
        ended = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(WorkerState.SUCCEEDED, return_values=ended)

    def _invoke_run(self, role: str = "rank") -> RunResult:  # noqa: ARG002
        while True:
            self._rendezvous_here.attempt = self._attempts.number
            self._initialize_workers(self._worker_group)
            while (result := self._monitor_workers(self._worker_group)).state is WorkerState.HEALTHY:
                time.sleep(_TICK_S)
            assert self._watch is not None and self.outcome is not None
            for process in self._processes:
                self._leash.let_go(process)
            self.outcome = self._attempts.end(self.outcome, self._signals.seen, self._watch.bad_at)
            if self.outcome is not None:
                return result

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,  # noqa: ARG002
        timeout: int = 30,  # noqa: ARG002
    ) -> None:
        RankProcess.kill_all(self._processes)

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # Nobody takes these events; torch's own would ask the resolver for this machine's name each time.
        return Event(f"fourfold.{state}", source=source)


class LoopbackRendezvous(RendezvousHandler):
    """One machine's rendezvous: a store listening on the loopback interface, with a part of it for each attempt."""

    def __init__(self, timeout: timedelta) -> None:
        self.attempt = 0
        with socket.socket() as listener:
            listener.bind((_HOST, 0))
            listener.listen(1024)
            self._port = int(listener.getsockname()[1])
            self._store = TCPStore(
                _HOST,
                self._port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # the store owns it from here
            )

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(f"agent{self.attempt}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "fourfold"

    def shutdown(self) -> bool:
        return True


def _check(request: Launch) -> None:
    if request.nproc < 1 or not request.command:
        raise SpecError(
            Problem(
                asked=f"{counted(request.nproc, 'rank')} of {' '.join(request.command) or 'nothing'}",
                found="no rank to start",
                why="a launch needs a command and at least one rank",
                instead="--nproc 1",
            )
        )


def _tell(outcome: Outcome) -> None:
    if outcome.told:
        say(outcome.told)
    if outcome.failures:
        say(on_screen(outcome.failures))
