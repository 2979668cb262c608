"""Nothing outlives a job, however it ends: no process that loads data, no temporary folder."""

from __future__ import annotations

import time
from pathlib import Path

from commands import DEADLINE, environment, finish, fresh, start, write

TRAIN = """
import signal, time
what = sys.argv[1]

class Data:
    def __len__(self):
        return 26
    def __getitem__(self, i):
        open(f"pid-{os.getpid()}", "w").close()
        if what == "stuck" and os.path.exists("there"):
            time.sleep(1000)
        return x[i], y[i]

run = shoal.Run(**{**settings, "data": Data(), "log": None, "loader_workers": 1})
for step in run.steps(1000 if what == "stuck" else 6):
    if step.number == 3:
        open("there", "w").close()
    if what == "kill" and step.number == 3 and rank == run.world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left(tmp_path: Path, everything: bool) -> None:
    many, alone = ("-m", "shoal", "run", "--workers", "2", "train.py"), ("train.py",)
    cases = [(many, "ends"), (many, "stuck"), (alone, "stuck")]
    if everything:
        cases += [(many, "kill"), (alone, "kill")]
    begun = {}
    for words, what in cases:
        folder = tmp_path / f"{len(words)}-{what}"
        folder.mkdir()
        write(folder, TRAIN)
        begun[folder] = (fresh if everything else start)(folder, *words, what)
    for folder, command in begun.items():
        if folder.name.endswith("stuck"):
            until(lambda folder=folder: (folder / "there").exists())  # type: ignore[misc]
            time.sleep(0.5)  # loaders are in a sample by now
            command.kill()
        done = finish(command)
        assert (done.code == 0) is folder.name.endswith("ends"), done.err
    for folder in begun:
        loaders = [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]
        assert loaders
        until(lambda loaders=loaders: all(gone(pid) for pid in loaders))  # type: ignore[misc]
        left = Path(environment(folder)["TMPDIR"])
        until(lambda left=left: not [*left.glob("shoal-*"), *left.glob("pymp-*")])  # type: ignore[misc]


def until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody has collected counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
