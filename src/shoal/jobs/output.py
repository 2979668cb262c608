"""The output of a job, from the file that its engine writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

FOLLOW_SECONDS = 0.2


def read_output(file: Path, is_over: Callable[[], bool]) -> Iterator[str]:
    """What is in the file, then what is added to it, until the job is over."""
    place = 0
    while True:
        over = is_over()  # asked first: what was written before its end is read after
        if file.is_file():
            with file.open("rb") as stream:
                stream.seek(place)
                piece = stream.read()
            place += len(piece)
            if piece:
                yield piece.decode(errors="replace")
        if over:
            return
        time.sleep(FOLLOW_SECONDS)
