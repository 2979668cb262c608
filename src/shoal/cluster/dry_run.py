"""Before the workers start: one process builds the script's model, to see whether the strategy can divide it.

Heads that tpN cannot divide, or a model with too few places for ppN, show only once the script has built its model. So
where the strategy divides the model, a dry run executes the script as the first worker would, up to its `Run`. The same
is done where the script names a global_batch of fewer samples than workers. The dry run builds the model, makes the
checks of a real run and ends (see `shoal.train.answer_dry_run`). It joins nobody, writes nothing of its own, and its
output is not shown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shoal.cluster.local import Job, threads_of, worker_environment
from shoal.cluster.recovery.supervise import run_job
from shoal.config import degree_of, parse_strategy
from shoal.errors import WorkerFailed

SECONDS = 60.0
"""How long a dry run may take: a script that waits for its peers before `Run` would wait for ever."""

_DEGREE = re.compile(r"(^|\*)\s*(tp|pp)(\d|$)")
"""A degree in a strategy, or the beginning of one that an f-string completes."""


def try_model(job: Job) -> None:
    """Raise the refusal of a run that cannot work, as far as one process can see, before any worker starts.

    Any other error of the dry run is left to the workers, which show it as they always do.
    """
    if job.size == 1 or not (may_divide(job) or may_be_too_many(job)):
        return
    # The environment of the first worker, without the meeting place: nobody else comes.
    environment = {
        **worker_environment(job, 0, "", threads_of(job)),
        **dict.fromkeys(("SHOAL_RENDEZVOUS", "MASTER_ADDR", "MASTER_PORT"), ""),
        "SHOAL_DRY_RUN": "check",
    }
    try:
        run_job(Job(job.script, job.args, output="none", environment=environment, seconds=SECONDS))
    except WorkerFailed as failed:
        if failed.refusal:
            raise


def may_divide(job: Job) -> bool:
    """Whether the strategy divides the model: that of the command line, else any in the script and its arguments.

    A script that only mentions such a strategy costs the time of a dry run; one that reads it from elsewhere is refused
    by its workers, if it must be.
    """
    chosen = job.overrides.get("strategy")
    if chosen is not None:
        plan = parse_strategy(str(chosen))
        return degree_of(plan.tensor) * degree_of(plan.pipeline) > 1
    return any(_DEGREE.search(text) for text in (*job.args, *_texts(Path(job.script))))


def may_be_too_many(job: Job) -> bool:
    """Whether a global_batch that the job or its script names has fewer samples than there are workers."""
    chosen = job.overrides.get("global_batch")
    named = [chosen] if chosen is not None else _named(Path(job.script), "global_batch")
    return any(isinstance(value, int) and value < job.size for value in named)


def _named(script: Path, name: str) -> Iterator[object]:
    """The constants that a script gives to a name: `name=8` in a call or a line, or `"name": 8`."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        pairs: list[tuple[object, ast.expr | None]] = []
        if isinstance(node, ast.keyword):
            pairs = [(node.arg, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            pairs = list(zip(keys, node.values, strict=True))
        for found, value in pairs:
            if isinstance(found, str) and found.lower() == name and isinstance(value, ast.Constant):
                yield value.value


def _texts(script: Path) -> Iterator[str]:
    """The texts that a script works with: its string constants, parts of f-strings too, but no docstrings."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return  # the workers will show it
    idle = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in idle:
            yield node.value
