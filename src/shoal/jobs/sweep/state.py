"""Which trials have been handed over, as which jobs: a file in the sweep's folder, so that a sweep can go on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.errors import ConfigError
from shoal.sealed import write_file

FILE = "sweep.json"


@dataclass
class SweepState:
    """What is known of a sweep."""

    command: list[str]
    """What was asked for; a folder belongs to one sweep."""
    jobs: dict[str, list[str]] = field(default_factory=dict)
    """The job of each trial in each round."""
    ended: dict[str, str] = field(default_factory=dict)
    """How jobs have ended: their engine may forget them."""

    def save(self, folder: Path) -> None:
        """Written whole, or not at all."""
        temporary = folder / f"{FILE}.{os.getpid()}"
        write_file(temporary, [json.dumps(asdict(self), indent=1).encode() + b"\n"])
        temporary.rename(folder / FILE)


def read_state(folder: Path, command: list[str]) -> SweepState:
    """That of this folder, which is made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    if not file.is_file():
        return SweepState(command)
    try:
        found = SweepState(**json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give another --folder.") from None
    if found.command != command:
        raise ConfigError(
            f"{folder} belongs to another sweep ({' '.join(found.command)}); give its options, or another --folder."
        )
    return found
