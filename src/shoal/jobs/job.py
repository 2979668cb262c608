"""A job: what is asked for, parsed and checked before any engine hears of it."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shoal.cluster.recovery.elastic import parse_workers
from shoal.errors import ConfigError
from shoal.plan.paper.cluster import parse_amount
from shoal.table import Table

PRIORITIES = Table("priority", {"low": 0, "normal": 100, "high": 200})
"""Names of priorities; any whole number is one too."""
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(min|[smhd])")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)$")
_NAME = re.compile(r"[\w.+=-][\w.+=,-]{0,63}$", re.ASCII)


@dataclass(frozen=True)
class JobSpec:
    """What is asked for; the same for every engine.

    >>> JobSpec(("train.py", "--data", "corpus"), least=2, most=4).words(4)[-6:]
    ('run', '--workers', '2:4', 'train.py', '--data', 'corpus')
    """

    command: tuple[str, ...]
    """What `shoal run` is given besides `--workers`: its options, the script, the script's arguments."""
    least: int = 1
    """With fewer workers it does not start."""
    most: int = 1
    cores: int = 1
    """Of each worker."""
    devices: int = 0
    """Cards of each worker."""
    memory: int = 0
    """Bytes of the whole job; 0: none are set aside."""
    seconds: float | None = None
    """After so long it is stopped; None: it may take as long as it needs."""
    priority: int = PRIORITIES["normal"]
    after: tuple[str, ...] = ()
    """Jobs of the same engine that have to end well first."""
    retries: int = 0
    """Starts after it has failed. A job whose host was lost starts again by itself."""
    preemptible: bool = True
    """Whether a job of higher priority may have it save, stop and wait for its turn again."""
    reservation: str = ""
    """The name of a reservation whose resources it takes."""
    account: str = ""
    """In whose share it counts; the user's own name if left out."""
    name: str = ""
    folder: str = ""
    """In which it runs."""
    hosts: int = 1
    """Among which the workers are divided evenly."""
    engine: tuple[str, ...] = ()
    """What one engine alone understands, as `partition=debug`."""

    def words(self, workers: int) -> tuple[str, ...]:
        """The command line that runs it with `workers` workers on this host."""
        number = str(workers) if self.least >= workers else f"{self.least}:{workers}"
        return (sys.executable, "-m", "shoal", "run", "--workers", number, *self.command)

    def to_json(self) -> str:
        """As a line of text; `from_json` reads it."""
        return json.dumps(asdict(self), separators=(",", ":"))


def from_json(text: str) -> JobSpec:
    """Read back what `JobSpec.to_json` wrote.

    >>> from_json(JobSpec(("train.py",)).to_json()) == JobSpec(("train.py",))
    True
    """
    found: dict[str, Any] = json.loads(text)
    known = {field.name for field in fields(JobSpec)}
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k in known
    }
    return JobSpec(**values)


def parse_time(text: str, option: str = "--time") -> float:
    """Seconds, from a time as people write it.

    >>> parse_time("2h"), parse_time("1h30m"), parse_time("1-02:00:00")
    (7200.0, 5400.0, 93600.0)
    """
    clock = _CLOCK.match(text)
    seconds = 0.0
    if clock is not None:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        seconds = days * 86400.0 + hours * 3600 + minutes * 60 + rest
    elif re.fullmatch(f"(?:{_PART.pattern})+", text):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if not (0 < seconds < math.inf):
        raise ConfigError(f"{option} {text} is no time; write it like 2h, 90min, 1h30m or 1:30:00.")
    return seconds


def parse_priority(text: str) -> int:
    """The number behind `--priority`.

    >>> parse_priority("high"), parse_priority("150")
    (200, 150)
    """
    return int(text) if re.fullmatch(r"-?\d{1,6}", text) else PRIORITIES.look_up(text)


def parse_memory(text: str) -> int:
    """Bytes.

    >>> parse_memory("16GB")
    16000000000
    """
    return int(parse_amount(text, "--memory"))


def parse_width(text: str) -> tuple[int, int]:
    """The least and the most workers."""
    return parse_workers(text)


def check(spec: JobSpec) -> None:
    """Refuse what no engine could run, in one sentence."""
    script = script_of(spec)
    if not script:
        raise ConfigError("there is no script among what is submitted; name a Python file, as train.py.")
    if not Path(spec.folder or os.curdir, script).is_file():
        raise ConfigError(
            f"there is no script {script!r} in {spec.folder or os.getcwd()}; give the path of a Python file."
        )
    if spec.hosts > 1 and (spec.most % spec.hosts or spec.least % spec.hosts):
        raise ConfigError(
            f"{spec.most} workers cannot be on {spec.hosts} hosts in equal numbers; use a multiple of them."
        )
    for option, value, low in (
        ("--hosts", spec.hosts, 1),
        ("--cores", spec.cores, 1),
        ("--devices", spec.devices, 0),
        ("--retries", spec.retries, 0),
    ):
        if value < low:
            raise ConfigError(f"{option} {value} is too few; it must be at least {low}.")
    if spec.name and not _NAME.match(spec.name):
        raise ConfigError(
            f"--name {spec.name!r}: use letters, digits and . _ + = , - (64 at most), as first-try."
        )


def script_of(spec: JobSpec) -> str:
    """The Python file among the words of the command."""
    return next((word for word in spec.command if word.endswith(".py") and not word.startswith("-")), "")


def time_text(seconds: float) -> str:
    """A time as `parse_time` reads it.

    >>> time_text(7200), time_text(5400), time_text(0.4), time_text(90061)
    ('2h', '1h30m', '0s', '1d1h1m1s')
    """
    left = round(seconds)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size}{unit}")
            left %= size
    return "".join(parts) or "0s"
