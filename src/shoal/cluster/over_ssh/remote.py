"""The other end of `shoal run --hosts hosts.txt`: the launcher of this host, for as long as the connection lasts.

sshd tells nobody that its client is gone, but it closes stdin. So this process waits for that, and for its launcher.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from shoal.cluster.worker import die_with


def main(words: Sequence[str]) -> int:
    """The launcher's exit code; it is asked to save and end when stdin closes."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "shoal", "run", *words],
        stdin=subprocess.DEVNULL,
        preexec_fn=partial(die_with, os.getpid()),
    )
    ended = os.pidfd_open(launcher.pid)
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            break
        if not os.read(0, 4096):
            launcher.send_signal(signal.SIGTERM)
            break
    code = launcher.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
