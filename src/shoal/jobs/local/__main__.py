"""The two processes of the queue: `schedule FOLDER LOCK`, and `supervise FOLDER JOB ATTEMPT LOCK`."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.jobs.local import scheduler, supervisor

if __name__ == "__main__":
    if sys.argv[1] == "schedule":
        scheduler.main(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        supervisor.main(Path(sys.argv[2]), *map(int, sys.argv[3:6]))
