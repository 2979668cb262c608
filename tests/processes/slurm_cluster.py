"""A Slurm cluster of a few nodes on this machine, for tests: everything on loopback and below one folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

WAIT = 30.0
PORT = 17817

CONF = """
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/socket/s,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
AccountingStoreFlags=job_comment
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PriorityType=priority/multifactor
PriorityWeightPartition=10000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=20
MessageTimeout=5
MpiDefault=none
SlurmdParameters=config_overrides
"""
NODE = "NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN"
PARTITIONS = """
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PriorityJobFactor=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PriorityJobFactor=10 MaxTime=INFINITE State=UP
"""


@contextmanager
def cluster(folder: Path, nodes: int = 4) -> Iterator[Path]:
    """Its configuration; all of it has ended at the end of the block."""
    host = socket.gethostname().partition(".")[0]
    for name in ("key", "socket", "state", *(f"spool-n{n}" for n in range(1, nodes + 1))):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "socket").chmod(0o755)
    (folder / "key").chmod(0o700)
    key = folder / "key" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    lines = [NODE.format(n=n, host=host, port=PORT + 3 + n) for n in range(1, nodes + 1)]
    conf.write_text(CONF.format(host=host, folder=folder, port=PORT) + "\n".join(lines) + PARTITIONS)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\n")
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    munge = [f"--key-file={key}", f"--socket={folder}/socket/s", f"--pid-file={folder}/key/pid"]
    munge += [f"--log-file={folder}/key/log", f"--seed-file={folder}/key/seed", "--force"]
    try:
        subprocess.run(["munged", *munge], check=True, capture_output=True)
        subprocess.run(["slurmctld", "-c"], check=True, env=environment, capture_output=True)
        for n in range(1, nodes + 1):
            subprocess.run(["slurmd", "-c", "-N", f"n{n}"], check=True, env=environment, capture_output=True)
        deadline = time.monotonic() + WAIT
        while _idle(environment) < nodes:
            assert time.monotonic() < deadline, "the nodes do not come up"
            time.sleep(0.1)
        yield conf
    finally:
        _end(folder)


def kill_node(folder: Path, node: str) -> None:
    """`kill -9` of a node: its daemon, and whatever it runs."""
    daemon = psutil.Process(int((folder / f"slurmd-{node}.pid").read_text()))
    steps = [p for p in psutil.process_iter() if p.name() == "slurmstepd" and _spool_of(p) == f"spool-{node}"]
    for process in [daemon, *(child for step in steps for child in step.children(recursive=True)), *steps]:
        with suppress(psutil.Error):
            process.kill()


def _spool_of(process: psutil.Process) -> str:
    """In whose spool folder a step has its log or socket."""
    with suppress(psutil.Error):
        for file in process.open_files():
            if "slurmd-n" in file.path:
                return "spool-" + Path(file.path).stem.removeprefix("slurmd-")
    return ""


def _idle(environment: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-p", "low", "-o", "%t"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return done.stdout.split().count("idle")


def _end(folder: Path) -> None:
    """Daemons by their pid files, then steps that are left in the folder."""
    for file in [*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "key" / "pid"]:
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGTERM)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(folder.glob("slurm*.pid")):
        time.sleep(0.1)
