"""The batch script of a job: a text that people can read, change and submit themselves."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence

from shoal.jobs.job import JobSpec

SAVE_SECONDS = 60
"""So long before its time is over a job gets SIGTERM, and saves."""
_HEAD = "#SBATCH --"


def batch_script(specs: Sequence[JobSpec], at_once: int = 0) -> str:
    """The script of one job, or of an array of jobs that differ in their commands only.

    >>> spec = JobSpec(("train.py",), least=2, most=4, hosts=2, seconds=5400, folder="/data", name="first")
    >>> print(batch_script([spec]).partition("# The")[0], end="")
    #!/bin/bash
    #SBATCH --job-name=first
    #SBATCH --chdir=/data
    #SBATCH --output=/data/shoal-%j.out
    #SBATCH --open-mode=append
    #SBATCH --requeue
    #SBATCH --nodes=1-2
    #SBATCH --ntasks-per-node=1
    #SBATCH --cpus-per-task=2
    #SBATCH --nice=1000
    #SBATCH --comment=shoal:4
    #SBATCH --time=90
    #SBATCH --signal=TERM@60
    <BLANKLINE>
    export OMP_NUM_THREADS=1
    set -- train.py
    """
    lines = ["#!/bin/bash", *(_HEAD + option for option in _options(specs[0], len(specs), at_once)), ""]
    return "\n".join([*lines, *_body(specs)]) + "\n"


def _options(spec: JobSpec, jobs: int, at_once: int) -> list[str]:
    each = spec.most // spec.hosts
    fewest = math.ceil(spec.least / each)
    place = "%A_%a" if jobs > 1 else "%j"
    options = [
        f"job-name={spec.name or 'shoal'}",
        f"chdir={_quoted(spec.folder)}",
        f"output={_quoted(f'{spec.folder}/shoal-{place}.out')}",
        "open-mode=append",
        "requeue",
        f"nodes={spec.hosts}" if fewest >= spec.hosts else f"nodes={fewest}-{spec.hosts}",
        "ntasks-per-node=1",
        f"cpus-per-task={each * spec.cores}",
        f"nice={max(0, 200 - spec.priority) * 10}",
        f"comment=shoal:{spec.most}",
    ]
    if jobs > 1:
        options.append(f"array=0-{jobs - 1}" + (f"%{at_once}" if at_once else ""))
    if spec.seconds is not None:
        minutes = math.ceil(spec.seconds / 60)
        options.append(f"time={minutes}")
        if minutes * 60 > 2 * SAVE_SECONDS:
            options.append(f"signal=TERM@{SAVE_SECONDS}")
    if spec.memory:
        options.append(f"mem={math.ceil(spec.memory / spec.hosts / 2**20)}M")
    if spec.devices:
        options.append(f"gpus-per-node={each * spec.devices}")
    if spec.after:
        options += [f"dependency=afterok:{':'.join(spec.after)}", "kill-on-invalid-dep=yes"]
    if spec.account:
        options.append(f"account={spec.account}")
    if spec.reservation:
        options.append(f"reservation={spec.reservation}")
    return [*options, *spec.engine]


def _quoted(path: str) -> str:
    return f'"{path}"' if " " in path else path


def _body(specs: Sequence[JobSpec]) -> list[str]:
    spec = specs[0]
    each = spec.most // spec.hosts
    workers = f"{spec.least}:{spec.most}" if spec.hosts == 1 and spec.least < spec.most else str(each)
    run = f"{shlex.quote(sys.executable)} -m shoal run --workers {workers}"
    lines = [f"export OMP_NUM_THREADS={spec.cores}"]
    if len(specs) == 1:
        lines.append(f"set -- {shlex.join(spec.command)}")
    else:
        lines.append('case "$SLURM_ARRAY_TASK_ID" in')
        lines += [f"{number}) set -- {shlex.join(one.command)} ;;" for number, one in enumerate(specs)]
        lines.append("esac")
    if spec.hosts == 1:
        lines.append(f'srun --kill-on-bad-exit=1 {run} "$@"')
    else:
        lines += _across_nodes(run)
    lines += [
        "code=$?",
        "# It has saved to make way for another job: it waits for its turn again.",
        """if [ "$code" -eq 143 ] && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then""",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
    ]
    if spec.retries:
        lines += [
            "# What cannot work (2) would end in the same way, and 143 is the end of whoever was asked to end.",
            f'if [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$code" -ne 143 ] && '
            f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {spec.retries} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return [*lines, 'exit "$code"']


def _across_nodes(run: str) -> list[str]:
    """One launcher a node. After the loss of a node Slurm starts the job again, perhaps on fewer nodes."""
    return [
        "# The workers meet at the first node of the allocation.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'address=$(scontrol show node "$first" | sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p")',
        "export SHOAL_RUN_AT=$address:$((20000 + SLURM_JOB_ID % 20000))",
        "srun --kill-on-bad-exit=1 bash -c '",
        '    if [ "$SLURM_NNODES" -eq 1 ]; then',
        f'        exec {run} "$@"',
        "    fi",
        f'    exec {run} --retries 0 --hosts "$SLURM_NNODES" --host "$SLURM_NODEID" --at "$SHOAL_RUN_AT" "$@"',
        '\' shoal "$@"',
    ]
