"""The first lines of a process on a host: it ends with whoever started it, from before torch is loaded.

Run as `python -m benchmarks.network.start PID INTERFACE`; `benchmarks.network.pair` does.
"""

from __future__ import annotations

import sys

from shoal.cluster.worker import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from benchmarks.network.host import main  # torch comes with it, and takes seconds

    main(sys.argv[2])
