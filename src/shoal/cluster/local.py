"""One start of the workers of this host: start them, watch them, and raise the first cause if one fails.

The launcher imports torch once and forks: four workers start about as fast as one and share the memory of the
import. Forking is safe only in a process with a single thread, so the launcher counts its threads, and starts fresh
interpreters if there are several.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.cluster import worker
from shoal.cluster.output import Output, OutputStreams, open_streams
from shoal.cluster.stalls import HANG_SECONDS, HangLimit, Stalls
from shoal.cluster.watch import FINISHING, Crew, Interrupts, say
from shoal.errors import ConfigError, WorkerFailed
from shoal.types import Value
from shoal.world.launch import from_environment
from shoal.world.progress_page import ProgressPage

if TYPE_CHECKING:
    from shoal.cluster.recovery.liaison import Liaison
    from shoal.cluster.server_broker import ServerBroker

StartProcess = Callable[[worker.Task, OutputStreams, Sequence[int]], int]
"""(task, its streams, descriptors that it closes) -> its process id"""


class Companions(Protocol):
    """Processes beside the workers, which outlive one start of them (stage_processes.py)."""

    def enter(self, crew: Crew, start_process: StartProcess) -> None:
        """Workers have been started, and `crew` watches over them."""

    def leave(self) -> None:
        """The workers of this start have ended."""


@dataclass(frozen=True)
class Job:
    """A script and how many workers run it."""

    script: str
    args: tuple[str, ...] = ()
    workers: int = 1
    """Workers on this host."""
    overrides: Mapping[str, Value] = field(default_factory=dict)
    """Settings of the script's Run that the command line overrides, such as strategy and steps."""
    threads: int | None = None
    """Threads of each worker; None keeps OMP_NUM_THREADS or divides the cores."""
    output: Output = "first"
    environment: Mapping[str, str] = field(default_factory=dict)
    """More environment variables of the workers; they win over the launcher's own."""
    hosts: int = 1
    host: int = 0
    at: str = ""
    """ADDRESS:PORT of host 0, where workers of several hosts meet."""
    seconds: float | None = None
    """The workers are ended after this time, and that is no failure; None: they may take as long as they need."""
    fresh: bool = False
    """Start fresh interpreters always, and keep stdin: the launcher is a user's program, as under `shoal.launch`."""

    hang_limit: float | None = None
    """Seconds after which a worker that hangs is taken for lost; 0: it never is; None: see recovery/patience.py."""
    least: int = 0
    """With fewer workers than these the job does not go on; 0: than all of them. See recovery/elastic.py."""
    preparers: int = 0
    """Processes that make the parts of a PreparedStore beside the workers."""
    evaluators: int = 0
    """Processes that evaluate checkpoints beside the workers."""
    retries: int = 0
    """After a lost worker all are started again, so often in a row without progress. See recovery/."""

    @property
    def size(self) -> int:
        return self.hosts * self.workers

    @property
    def host_name(self) -> str:
        """By which the user knows this host."""
        name = socket.gethostname()
        return name if self.hosts == 1 else f"{self.host}, {name}"


@dataclass
class Attempt:
    """One start of all workers of this host."""

    job: Job
    folder: str
    """Private, and of this start alone."""
    interrupts: Interrupts
    threads: str
    forkable: bool
    kept: Sequence[int] = ()
    """Descriptors that no worker may hold."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What workers are told of this start."""

    liaison: Liaison | None = None
    """With the launchers of other hosts."""
    stages: Companions | None = None
    """Who works beside the workers."""
    hang_limit: HangLimit = lambda _: HANG_SECONDS
    """After so many seconds a worker that hangs is taken for lost; 0: it never is."""

    def run(self, goes_on: Callable[[WorkerFailed, int], bool], yields_in: float | None = None) -> bool:
        """Until all have ended well; raises the first cause where one has not.

        `yields_in`: after so many seconds they are asked to make way for others; whether they have. `goes_on`: given
        the error and the last step that was begun, whether there will be another start. Then nobody is waited for.
        """
        job, folder = self.job, self.folder
        stalls = Stalls(folder, job.size, job.host_name, self.hang_limit, say)
        crew = Crew(folder, job.size, self.interrupts, job.host_name, stalls, hurries=job.retries > 0)
        for descriptor in self.kept:
            crew.keep_from_workers(descriptor)
        broker = _server_broker(folder, self.threads, crew) if self.forkable else None
        starter = WorkerStarter(job, folder, crew, self.threads, self.forkable, broker, self.environment)
        crew.replace = starter.replace
        if broker is not None:
            crew.ended = broker.worker_ended
            crew.independent = lambda: broker.replaces
        if self.liaison is not None:
            self.liaison.alone = crew.independent
            crew.hear_others(self.liaison.descriptor, self.liaison.hear, self.liaison.look)
        try:
            with self.interrupts.held():
                for index in range(job.workers):
                    starter.start(index)
            if self.stages is not None:
                self.stages.enter(crew, starter.start_process)
            crew.watch(job.seconds if yields_in is None else yields_in)
            if yields_in is not None and crew.works:
                crew.ask_to_yield()
                crew.watch()
            return crew.yielded
        except WorkerFailed as failed:
            crew.forget_others()
            if goes_on(failed, crew.reached):
                crew.kill()
            raise
        finally:
            crew.forget_others()
            crew.end()
            if self.stages is not None:
                self.stages.leave()
            if broker is not None:
                broker.close()
            crew.close()


def check(job: Job) -> None:
    """Refuse what cannot work, in one sentence, before anything is imported or started."""
    if not Path(job.script).is_file():
        raise ConfigError(
            f"there is no script {job.script!r} in {os.getcwd()}; give the path of a Python file."
        )
    for name, value in (("--workers", job.workers), ("--hosts", job.hosts), ("--threads", job.threads)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} is too few; it must be at least 1.")
    for name, value in (("--preparers", job.preparers), ("--evaluators", job.evaluators)):
        if value < 0:
            raise ConfigError(f"{name} {value} is negative; 0 starts none.")
    if job.retries < 0:
        raise ConfigError(f"--retries {job.retries} is negative; 0 starts nothing again.")
    if job.hang_limit is not None and job.hang_limit < 0:
        raise ConfigError(
            f"--hang-limit {job.hang_limit:g} is negative; give seconds, or 0 for a run that waits for ever."
        )
    if not 0 <= job.host < job.hosts:
        raise ConfigError(
            f"--host {job.host} does not exist: with --hosts {job.hosts} it is 0 to {job.hosts - 1}."
        )
    if job.hosts > 1 and job.least not in (0, job.workers):
        raise ConfigError(
            f"--workers {job.least}:{job.workers} is for one host; with --hosts {job.hosts} give one number."
        )
    if job.hosts > 1 and not job.at:
        raise ConfigError("--hosts needs --at ADDRESS:PORT, an address of host 0 that all hosts can reach.")
    if job.at:
        address, port = address_of(job.at)
        if job.host == 0:
            _check_port(address, port)


def address_of(at: str) -> tuple[str, int]:
    """The two parts of `--at`."""
    address, _, port = at.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--at {at} is not ADDRESS:PORT; write it like --at 10.0.0.1:29500.")
    if ":" in address:
        raise ConfigError(
            f"--at {at} is an IPv6 address; give an IPv4 address or a name, like 10.0.0.1:29500."
        )
    return address, int(port)


def _check_port(address: str, port: int) -> None:
    """Host 0 will listen here: better to learn now than from a worker's timeout that it cannot."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--at: the address {address} is not known ({error.strerror}).") from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store itself does
        try:
            probe.bind(place)
            probe.listen()
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = "choose another port, or end the program that listens there"
            if not reason.startswith("Address already in use"):
                remedy = "host 0 must own the address and may use the port"
            raise ConfigError(f"cannot listen at {address}:{port} ({reason}); {remedy}.") from error


def threads_of(job: Job) -> str:
    """OMP_NUM_THREADS of the workers: what the user said, else an equal share of the cores."""
    if job.threads is not None:
        return str(job.threads)
    share = max(1, len(os.sched_getaffinity(0)) // job.workers)
    return job.environment.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or str(share)


def import_torch(job: Job) -> bool:
    """Import torch for all workers at once; True if this process may then be forked."""
    if not _single_threaded():
        return False
    with forkable_imports(job):
        importlib.import_module("torch.distributed")
        # The first optimizer of a process imports torch._dynamo, which takes as long as torch itself. This is
        # only a guess about speed: a wrong one costs or misses a second and changes nothing else.
        if any(word in Path(job.script).read_bytes() for word in (b"optim", b"shoal")):
            importlib.import_module("torch._dynamo")
        if b"shoal" in Path(job.script).read_bytes():
            importlib.import_module("shoal.train.run")
    return _single_threaded()


def _single_threaded() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


@contextmanager
def forkable_imports(job: Job) -> Iterator[None]:
    """Import torch before workers start only inside this context, or the workers start as fresh interpreters.

    OpenBLAS, which numpy loads, starts its threads at import unless told not to; OpenMP waits for first use.
    """
    changes = {"OMP_NUM_THREADS": threads_of(job)}
    changes["OPENBLAS_NUM_THREADS"] = os.environ.get("OPENBLAS_NUM_THREADS", "1")
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _server_broker(folder: str, threads: str, crew: Crew) -> ServerBroker:
    from shoal.cluster.server_broker import ServerBroker  # imports torch, which the launcher has done by now

    return ServerBroker(folder, threads, crew.attend, crew.forget)


@dataclass
class WorkerStarter:
    """Starts workers, and replaces one that was killed, if the others can go on without it."""

    job: Job
    folder: str
    crew: Crew
    threads: str
    forkable: bool
    broker: ServerBroker | None
    said: Mapping[str, str] = field(default_factory=dict)
    """What all workers of this start are told."""
    times: dict[int, list[float]] = field(default_factory=dict)

    def start(self, index: int) -> None:
        """Start one worker of this host."""
        job = self.job
        folder = self.folder
        rank = job.host * job.workers + index
        environment = worker_environment(job, index, f"file://{folder}/store", self.threads)
        environment["SHOAL_FINISHING"] = os.path.join(folder, f"{FINISHING}{rank}")
        page = os.path.join(folder, f"progress-{rank}")
        environment["SHOAL_PROGRESS"] = page
        environment |= self.said
        if self.broker is not None:
            environment["SHOAL_LAUNCHER"] = self.broker.path
        script = str(Path(job.script).absolute())
        task = worker.Task(rank, script, job.args, environment, folder, os.getpid())
        streams = open_streams(job.output, folder, rank, first=index == 0, reads=not job.fresh)
        self.times.setdefault(rank, []).append(time.monotonic())
        descriptors = [*self.crew.descriptors, *(self.broker.descriptors if self.broker else [])]
        progress = ProgressPage.create(page)
        try:
            pid = self.start_process(task, streams, descriptors)
        finally:
            streams.close()
        self.crew.add(rank, pid, streams.relays, progress)

    def start_process(self, task: worker.Task, streams: OutputStreams, descriptors: Sequence[int]) -> int:
        """A process for a task; it closes these descriptors of the launcher."""
        if not self.forkable:
            return _spawn(task, streams)
        return _fork(task, streams, descriptors, task.environment["OMP_NUM_THREADS"])

    def replace(self, rank: int) -> bool:
        """A worker was killed: start another in its place. False if the others need this one, or it keeps dying."""
        if self.broker is None or not self.broker.replaces:
            return False
        recent = [at for at in self.times[rank] if time.monotonic() - at < worker.AGAIN_SECONDS]
        if len(recent) >= worker.AGAIN_TIMES:
            return False
        print(f"shoal: worker {rank} was killed; another takes its place.", file=sys.stderr)
        self.start(rank - self.job.host * self.job.workers)
        return True


def worker_environment(job: Job, index: int, file: str, threads: str) -> dict[str, str]:
    """The contract of `shoal.world.launch`."""
    environment = {
        "RANK": str(job.host * job.workers + index),
        "WORLD_SIZE": str(job.size),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(job.workers),
        "SHOAL_RENDEZVOUS": f"tcp://{job.at}" if job.at else file,
        "SHOAL_OVERRIDES": json.dumps(dict(job.overrides)),
        "OMP_NUM_THREADS": threads,
    }
    if job.at:
        address, port = address_of(job.at)
        environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if job.hosts > 1:
        environment["SHOAL_HOST"] = from_environment().host or f"host-{job.host}"
    else:
        # Nothing of a job on one host should listen to strangers.
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return environment | dict(job.environment)


def _fork(task: worker.Task, streams: OutputStreams, descriptors: Sequence[int], threads: str) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the worker would print what is still buffered here once more
    pid = os.fork()
    if pid:
        return pid
    try:
        for target, source in enumerate((streams.stdin, streams.stdout, streams.stderr)):
            os.dup2(source, target)
        for descriptor in set(descriptors):
            os.close(descriptor)
        streams.close()
        for relay in streams.relays:
            os.close(relay.source)
        worker.leave_parent(threads)
        worker.run(task)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # never back into the launcher's code


def _spawn(task: worker.Task, streams: OutputStreams) -> int:
    command = [sys.executable, "-m", "shoal.cluster.worker", task.to_json()]
    moves = [
        (os.POSIX_SPAWN_DUP2, source, target)
        for target, source in enumerate((streams.stdin, streams.stdout, streams.stderr))
    ]
    environment = {**os.environ, **task.environment}
    return os.posix_spawn(sys.executable, command, environment, file_actions=moves)
