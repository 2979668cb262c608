"""Slurm: what the batch script says, and jobs on a real cluster of four nodes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import SCRIPT, SOURCE, losses
from slurm_cluster import cluster, kill_node

from shoal.errors import ConfigError
from shoal.jobs import TABLE, accept
from shoal.jobs.job import JobSpec
from shoal.jobs.slurm.engine import Slurm
from shoal.jobs.slurm.script import batch_script
from shoal.jobs.sweep.drive import Sweep, run_sweep
from shoal.jobs.sweep.grid import parse_axis, trials_of
from shoal.jobs.sweep.state import read_state

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
missing = [program for program in NEEDED if shutil.which(program) is None]
real = pytest.mark.skipif(
    bool(missing) or os.geteuid() != 0,
    reason=f"a Slurm cluster needs root and scripts/services --all: {missing}",
)
WAIT = 120.0


def spec(folder: Path, *words: str, **more: object) -> JobSpec:
    made = JobSpec(("train.py", *words), folder=str(folder), name="train")
    return replace(made, **more)  # type: ignore[arg-type]


def test_the_script_is_bash_and_says_what_was_asked(tmp_path: Path) -> None:
    asked = spec(
        tmp_path / "a folder",
        "--data",
        "it's here; $(touch no)",
        least=2,
        most=8,
        hosts=4,
        cores=2,
        memory=8 * 2**30,
        seconds=7200,
        after=("7", "9"),
        devices=1,
        retries=2,
        engine=("partition=debug",),
    )
    text = batch_script([asked])
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for line in (
        "nodes=1-4",
        "cpus-per-task=4",
        "mem=2048M",
        "gpus-per-node=2",
        "time=120",
        "dependency=afterok:7:9",
        f'chdir="{tmp_path}/a folder"',
        "partition=debug",
    ):
        assert f"#SBATCH --{line}\n" in text
    words = next(line for line in text.splitlines() if line.startswith("set -- "))
    shown = subprocess.run(
        ["bash", "-c", words + '; printf "%s\\n" "$@"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == list(asked.command), "what belongs to the script reaches it as it is"
    assert not (tmp_path / "no").exists()


def test_an_array_gives_each_task_its_own_command(tmp_path: Path) -> None:
    text = batch_script([spec(tmp_path, str(n)) for n in range(3)], at_once=2)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --array=0-2%2\n" in text
    case = text[text.index("case") : text.index("esac") + 4]
    for n in range(3):
        script = f'SLURM_ARRAY_TASK_ID={n}; {case}; echo "$@"'
        shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert shown.stdout == f"train.py {n}\n"


def test_what_slurm_cannot_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--on slurm has no --not-preemptible: which jobs make way is for the"
    ):
        accept(Slurm(), "slurm", spec(tmp_path, preemptible=False))
    with pytest.raises(ConfigError, match="--engine Partition is no option of sbatch"):
        accept(Slurm(), "slurm", spec(tmp_path, engine=("Partition",)))
    assert TABLE["slurm"] is Slurm


# The real cluster.

TRAIN = (
    SCRIPT
    + """
import time
slow = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
run = shoal.Run(**settings, checkpoint="checkpoints", checkpoint_every=2)
for step in run.steps(int(sys.argv[2]) if len(sys.argv) > 2 else 12):
    time.sleep(slow)
if rank == 0:
    print("ended at", step.number, flush=True)
"""
)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("slurm")
    with cluster(folder) as conf, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        patch.setenv("PYTHONPATH", str(SOURCE))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield folder


def wait_for(true: Callable[[], bool], seconds: float = WAIT) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.1)


def state(job: str) -> str:
    return next((one.state for one in Slurm().jobs() if one.id == job), "gone")


def steps(folder: Path) -> int:
    """How many steps the event log has seen."""
    log = folder / "log" / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines if '"step"' in line), default=0)


def folder_of(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    (made / "train.py").write_text(TRAIN)
    return made


def submit(asked: JobSpec) -> str:
    accept(Slurm(), "slurm", asked)
    return Slurm().submit(asked)


@real
@pytest.mark.all_only
@pytest.mark.timeout(400)
def test_jobs_on_a_real_cluster(nodes: Path, tmp_path: Path) -> None:
    """A gang over two nodes; a lost node; one that makes way: each ends with the bits of the undisturbed run."""
    plain = folder_of(tmp_path, "plain")
    job = submit(spec(plain, "0", most=4, least=4, hosts=2))
    wait_for(lambda: state(job) == "done")
    assert "ended at 12" in "".join(Slurm().logs(job, follow=True))
    wanted = losses(plain)
    assert len(wanted) == 12

    lost = folder_of(tmp_path, "lost")
    job = submit(spec(lost, "0.7", most=4, least=4, hosts=2))
    wait_for(lambda: steps(lost) >= 4)
    where = subprocess.run(
        ["squeue", "-h", "-j", job, "-o", "%N"], capture_output=True, text=True, check=True
    ).stdout
    last = subprocess.run(
        ["scontrol", "show", "hostnames", where.strip()], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    kill_node(nodes, last)
    wait_for(lambda: state(job) == "done", 200)
    assert losses(lost) == wanted

    way = folder_of(tmp_path, "way")
    job = submit(spec(way, "0.5", most=4, least=4, hosts=2))
    wait_for(lambda: steps(way) >= 3)
    quick = submit(
        spec(folder_of(tmp_path, "quick"), "0", most=4, least=4, hosts=2, engine=("partition=high",))
    )
    wait_for(lambda: state(quick) == "done")
    wait_for(lambda: state(job) == "done", 200)
    assert "; saved " in "".join(Slurm().logs(job, follow=False))
    assert losses(way) == wanted


@real
@pytest.mark.all_only
@pytest.mark.usefixtures("nodes")
def test_slurm_refuses_in_one_sentence(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "bad")
    for more, said in (
        ({"engine": ("partition=nowhere",)}, "Slurm refuses the job: .*partition"),
        ({"most": 400, "least": 400, "hosts": 100}, "Slurm refuses the job: .*(node|Node)"),
        ({"memory": 10**15}, "Slurm refuses the job: .*"),
        ({"after": ("999999",)}, "Slurm knows no job '999999' any more"),
    ):
        with pytest.raises(ConfigError, match=said):
            accept(Slurm(), "slurm", spec(folder, **more))
    with pytest.raises(ConfigError, match="Slurm knows no job '999999' any more"):
        Slurm().cancel("999999")


@real
@pytest.mark.all_only
@pytest.mark.usefixtures("nodes")
def test_a_sweep_is_an_array_job_a_round(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "sweep")
    trials = trials_of([parse_axis("seed=0..1")])
    asked = spec(folder, "0", "4")
    sweep = Sweep(asked, trials, folder / "trials", frozenset({"seed"}), at_once=2, steps=4, halving=2)
    outcome = run_sweep(sweep, Slurm(), read_state(sweep.folder, ["sweep"]), print)
    assert [outcome.reached[name].steps for name in outcome.best("min")] == [4, 2]
    assert set(outcome.states.values()) == {"done"}
    state = read_state(sweep.folder, ["sweep"])
    assert sorted(jobs[0].partition("_")[2] for jobs in state.jobs.values()) == ["0", "1"]
