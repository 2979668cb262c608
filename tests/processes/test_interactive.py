"""A prompt and a notebook: errors leave the session alive, and functions typed there run on several workers."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
from commands import SCRIPT, environment, finish, fresh, start, write

SECONDS = 90.0
ONE = """
import shoal
class Plain(Net):
    def __init__(self):
        super().__init__()
    def forward(self, x):  # without dropout, whose draws belong to a micro-batch
        return self.last(torch.tanh(self.scale * self.first(x)))

def train(steps, rate):
    run = shoal.Run(**settings | {"model": Plain, "optimizer": lambda p: torch.optim.AdamW(p, lr=rate)})
    return run.world.size, [step.loss for step in run.steps(steps)], run.state_dict()
"""
BAD = """
def bad_loss(output, batch):
    raise ZeroDivisionError("of my own")

def bad():
    for step in shoal.Run(**settings | {"loss": bad_loss}).steps(3):
        pass
"""


class Session:
    """`python -i` at a terminal."""

    def __init__(self, folder: Path) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 1000, 0, 0))  # no line is wrapped
        self.process = subprocess.Popen(
            [sys.executable, "-i", "-q"],
            cwd=folder,
            env=environment(folder) | {"TERM": "dumb", "PYTHON_BASIC_REPL": "1"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C comes from the terminal
        )
        os.close(slave)
        self.seen = ""
        self.until(">>> ")

    def until(self, end: str) -> str:
        """What comes until `end` does."""
        deadline = time.monotonic() + SECONDS
        while end not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {end!r} came:\n{self.seen}"
            self.seen += os.read(self.master, 65536).decode(errors="replace").replace("\r\n", "\n")
        found, _, self.seen = self.seen.partition(end)
        return found

    def type(self, line: str) -> str:
        """What a line prints."""
        os.write(self.master, f"{line}\n".encode())
        return self.until("\n>>> ").partition("\n")[2]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def session(tmp_path: Path):
    """A prompt at which the script's start has been typed."""
    found = Session(tmp_path)
    try:
        (tmp_path / "start.txt").write_text(SCRIPT + ONE + BAD)
        found.type("exec(open('start.txt').read())")  # as if typed: nobody can look up the source
        yield found
    finally:
        os.killpg(found.process.pid, signal.SIGKILL)
        found.process.wait()
        os.close(found.master)


def test_a_prompt(session: Session, tmp_path: Path) -> None:
    refused = session.type("shoal.Run(**settings | {'strategy': 'zero9'})")
    assert re.match(r"shoal: .*zero9", refused)
    assert "Traceback" not in refused
    failed = session.type("bad()")
    assert "ZeroDivisionError: of my own" in failed
    assert "src/shoal" not in failed  # no frames of ours
    alone = session.type("size, losses, state = train(3, 1e-2); print(size, losses)")
    losses = eval(alone.strip().partition(" ")[2])
    assert len(losses) == 3

    both = session.type("found = shoal.launch(train, 3, 1e-2, workers=2); print(found[0], found[1])")
    assert both.startswith("2 [")
    assert eval(both.strip().partition(" ")[2]) == pytest.approx(losses, rel=1e-5)
    close = "print(all(torch.allclose(state[n], found[2][n], atol=1e-6) for n in state), len(state))"
    assert session.type(close).strip() == "True 5"

    failed = session.type("shoal.launch(bad, workers=2)")
    assert re.search(r"worker \d of 2 \(host .*\) failed", failed)
    assert "ZeroDivisionError: of my own" in failed
    assert "src/shoal" not in failed
    refused = session.type("shoal.launch(train, 3, open('/dev/null'), workers=2)")
    assert "shoal: shoal.launch: train cannot be given to another process" in refused
    assert not session.children()

    sleep = "lambda: [print('begun', flush=True), __import__('time').sleep(600)]"
    os.write(session.master, f"shoal.launch({sleep}, workers=2)\n".encode())
    session.until("\nbegun\n")
    os.write(session.master, b"\x03")
    assert "KeyboardInterrupt" in session.until("\n>>> ")
    assert not session.children()
    assert not list((tmp_path / "tmp").glob("shoal-*"))
    assert session.type("print(train(3, 1e-2)[1])").strip() == str(losses)


NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
def cell(text):
    return shell.run_cell(text)

assert cell(open("start.txt").read()).success
failed = cell("shoal.Run(**settings | {'strategy': 'zero9'})")
assert isinstance(failed.error_in_exec, shell.user_ns["shoal"].ConfigError)
assert isinstance(cell("bad()").error_in_exec, ZeroDivisionError)
assert cell("size, losses, state = train(3, 1e-2)").success
assert cell("found = shoal.launch(train, 3, 1e-2, workers=2)").success
size, losses, state = shell.user_ns["found"]
print("both", size, shell.user_ns["losses"], losses)
print("before")
failed = cell("def fail():\\n    x = 1\\n    return x / 0\\nshoal.launch(fail, workers=2)")
assert type(failed.error_in_exec).__name__ == "WorkerFailed", failed
assert cell("alive = 1").success and shell.user_ns["alive"] == 1
"""


def test_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    (tmp_path / "start.txt").write_text(SCRIPT + ONE + BAD)
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    done = finish(fresh(tmp_path, "notebook.py"))
    assert done.code == 0, done.out + done.err
    assert "shoal: unknown strategy" in done.out + done.err or "zero9" in done.out
    both = re.search(r"both 2 (\[.*?\]) (\[.*?\])", done.out)
    assert both is not None, done.out
    assert eval(both[2]) == pytest.approx(eval(both[1]), rel=1e-5)
    said = done.out.partition("before\n")[2]
    assert re.search(r"shoal: worker \d of 2 \(host .*\) failed", said)
    assert "    return x / 0\n" in said  # the line of a cell
    assert not list((tmp_path / "tmp").glob("shoal-*"))


def test_a_script(tmp_path: Path) -> None:
    """Without a guard: the workers do not run the script, only the function."""
    text = "print(len(shoal.launch(train, 2, 1e-2)[1]))\nshoal.launch(lambda: 1 / 0, workers=1)\n"
    done = finish(start(tmp_path, write(tmp_path, ONE + text)))
    assert done.out.splitlines() == ["2"]
    assert done.code == 1
    assert re.match(r"shoal: worker 0 of 1 \(host .*\) failed:\n", done.err)
    assert "ZeroDivisionError: division by zero" in done.err


@pytest.mark.parametrize(
    ("call", "rank", "sentence"),
    [
        ("len, [], workers=0", "", "shoal.launch(workers=0): at least 1 worker is needed."),
        ("len, []", "1", "shoal.launch was called in worker 1 of 2, which another launcher has started; start this "
         "script with `python`, or call the function itself."),
        ("lambda: open, open('/dev/null'), workers=1", "", "shoal.launch: <lambda> cannot be given to another process "
         "(cannot pickle '_io.TextIOWrapper' object); make what it needs inside the function."),
        ("lambda: (x for x in []), workers=1", "", "shoal.launch: what the function returned on rank 0 cannot be given "
         "back (cannot pickle 'generator' object); return tensors, numbers, or a state_dict."),
    ],
)  # fmt: skip
def test_refusals(
    call: str, rank: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "short.py").write_text(f"import shoal\nshoal.launch({call})\n")
    done = finish(start(tmp_path, "short.py"))
    said = f"shoal: {f'rank {rank}: ' if rank else ''}{sentence}\n"
    assert (done.code, done.out, done.err) == (2, "", said)
