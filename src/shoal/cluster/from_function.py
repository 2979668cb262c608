"""`shoal.launch`: run one function in several workers, from a notebook's cell, a prompt or a script.

The workers are fresh interpreters: a program that has run torch has threads, and cannot be forked. They get the
function by value, and are started, watched and ended like those of `shoal run`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.cluster.by_value import from_bytes, to_bytes
from shoal.cluster.local import Job
from shoal.cluster.recovery.supervise import run_job
from shoal.errors import ConfigError, WorkerFailed
from shoal.world.failure import end_in_one_sentence
from shoal.world.launch import from_environment
from shoal.world.private_folder import private_folder

Result = TypeVar("Result")

# The call is here, so that a traceback has no more frames of ours than under `shoal run`.
_SCRIPT = """from shoal.cluster.from_function import give, take
function, args = take(__file__)
give(__file__, function(*args))
"""
_SETTINGS = "settings"
_FUNCTION = "function"
_RESULT = "result"


def launch(function: Callable[..., Result], *args: object, workers: int = 2) -> Result:
    """`function(*args)` on every one of `workers` new processes of this host; what it returned on rank 0.

    In it, `shoal.Run` finds the workers as under `shoal run`. The function may be defined anywhere, also in a cell;
    each worker gets its own copy of it and of what it uses. Rank 0's output is shown. If a worker fails, all are ended,
    and the error has that worker's traceback; Ctrl-C ends them too.

    >>> launch(lambda number: number + 1, 2, workers=1)             # doctest: +SKIP
    3
    """
    here = from_environment()
    end_in_one_sentence(here.rank)
    if here.size > 1 or here.launcher:
        raise ConfigError(
            f"shoal.launch was called in worker {here.rank} of {here.size}, which another launcher has started; "
            "start this script with `python`, or call the function itself."
        )
    if workers < 1:
        raise ConfigError(f"shoal.launch(workers={workers}): at least 1 worker is needed.")
    name = getattr(function, "__qualname__", repr(function))
    with private_folder("shoal-launch-") as private:
        folder = private.path
        script = Path(folder, "launch.py")
        script.write_text(_SCRIPT)
        settings = to_bytes((sys.path, sys.argv), "shoal.launch: sys.path")
        Path(folder, _SETTINGS).write_bytes(settings)
        Path(folder, _FUNCTION).write_bytes(to_bytes((function, args), f"shoal.launch: {name}"))
        sys.stdout.flush()
        try:
            run_job(Job(str(script), workers=workers, fresh=True))
        except WorkerFailed as failed:
            if failed.refusal:
                raise ConfigError(str(failed)) from None
            raise failed from None
        result: Result = pickle.loads(Path(folder, _RESULT).read_bytes())
    return result


def take(script: str) -> tuple[Callable[..., object], tuple[object, ...]]:
    """In a worker: the function to call and its arguments. Sets sys.path and sys.argv to those of the program."""
    folder = os.path.dirname(script)
    sys.path[:], sys.argv[:] = from_bytes(Path(folder, _SETTINGS).read_bytes())
    found: tuple[Callable[..., object], tuple[object, ...]] = from_bytes(Path(folder, _FUNCTION).read_bytes())
    return found


def give(script: str, result: object) -> None:
    """In a worker: write rank 0's result for the program. Pickled by name: the program has its own definitions."""
    if from_environment().rank > 0:
        return
    try:
        data = pickle.dumps(result)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"shoal.launch: what the function returned on rank 0 cannot be given back ({error}); return tensors, "
            "numbers, or a state_dict."
        ) from None
    Path(os.path.dirname(script), _RESULT).write_bytes(data)
