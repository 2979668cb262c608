"""The real command in real processes: `python -m shoal run` with small scripts that need no Shoal inside.

Where it matters what is imported when, and where nothing is imported, the interpreter is a fresh one (see `warm`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm import Command

SOURCE = Path(__file__).parents[2] / "src"
DEADLINE = 150.0
HOST = f"host {socket.gethostname()}"

# Each worker of these scripts says that it lives by writing its process id, and then waits to be ended.
WAIT = """
import os, pathlib, time
rank = os.environ["RANK"]
pathlib.Path(f"pid-{rank}.part").write_text(str(os.getpid()))
os.rename(f"pid-{rank}.part", f"pid-{rank}")
while len(list(pathlib.Path(".").glob("pid-?"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""


class Shell:
    """Runs `shoal` in a folder of its own, with a temporary folder of its own, as a user's shell would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.started: list[subprocess.Popen[str] | Command] = []

    def script(self, text: str) -> str:
        (self.folder / "train.py").write_text(text)
        return "train.py"

    def start(self, *args: str, fresh: bool = False, **environment: str) -> subprocess.Popen[str] | Command:
        paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
        # The tester's own choice of threads must not hide what the launcher chooses.
        inherited = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        env = {
            **inherited,
            "PYTHONPATH": paths,
            "TMPDIR": str(self.temporary),
            "NO_COLOR": "1",
            **environment,
        }
        command = ["-m", "shoal", *args]
        process = (
            subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            if fresh
            else Command(self.folder, env, command)
        )
        self.started.append(process)
        return process

    def run(self, *args: str, fresh: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*args, fresh=fresh, **environment))

    def pids(self, workers: int) -> list[int]:
        """Process ids of a WAIT script's workers, once all of them live."""
        files = [self.folder / f"pid-{rank}" for rank in range(workers)]
        until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def leftovers(self) -> list[str]:
        return [path.name for path in self.temporary.glob("shoal-*")]


def finish(process: subprocess.Popen[str] | Command) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """True if the process has ended; a zombie that nobody has collected yet counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for process in shell.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for file in tmp_path.glob("pid-?"):
        assert gone(int(file.read_text())), f"worker {file.name} outlived its test"


SHOW = """
import sys
torch_was_there = "torch" in sys.modules
import json, os
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "SHOAL_RENDEZVOUS"]
seen = {name: os.environ[name] for name in names}
seen |= {"torch": torch_was_there, "args": sys.argv[1:], "path": sys.path[0], "name": __name__}
seen |= {"overrides": json.loads(os.environ["SHOAL_OVERRIDES"]), "gloo": os.environ.get("GLOO_SOCKET_IFNAME")}
seen |= {"master": os.environ.get("MASTER_PORT"), "host": os.environ.get("SHOAL_HOST")}
with open(f"seen-{os.environ['RANK']}", "w") as file:
    json.dump(seen, file)
print("out", os.environ["RANK"])
print("err", os.environ["RANK"], file=sys.stderr)
print("no newline at the end", end="")
"""


def seen(shell: Shell, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((shell.folder / f"seen-{rank}").read_text())
    return found


def test_workers_know_their_place_and_share_one_import(shell: Shell) -> None:
    options = ["--workers", "3", "--threads", "1", "--strategy", "ddp", "--steps", "2ep"]
    settings = ["--set", "clip=0.5", "--set", "resume=false", "--set", "name=a=b"]
    done = shell.run("run", *options, *settings, shell.script(SHOW), "--lr", "1", "--", "-x", fresh=True)
    assert (done.returncode, done.stderr) == (0, "err 0\n")
    assert done.stdout == "out 0\nno newline at the end", "only the first worker prints"
    expected = {"strategy": "ddp", "steps": "2ep", "clip": 0.5, "resume": False, "name": "a=b"}
    for rank in range(3):
        found = seen(shell, rank)
        assert [found[name] for name in ("RANK", "LOCAL_RANK")] == [str(rank)] * 2
        assert [found[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["3"] * 2
        assert found["OMP_NUM_THREADS"] == "1"
        assert found["torch"] is True, "torch was imported before the fork"
        assert found["args"] == ["--lr", "1", "--", "-x"]
        assert found["path"] == str(shell.folder)
        assert found["name"] == "__main__"
        assert found["overrides"] == expected
        rendezvous = Path(str(found["SHOAL_RENDEZVOUS"]).removeprefix("file://"))
        assert rendezvous.parent.parent == shell.temporary
    assert shell.leftovers() == [], "the private folder is removed"


def test_second_of_two_hosts_with_all_output(shell: Shell) -> None:
    place = ["--hosts", "2", "--host", "1", "--at", "127.0.0.1:29511"]
    alone = ["--output", "all", "--retries", "0"]  # nobody else comes
    done = shell.run("run", "--workers", "2", *alone, *place, shell.script(SHOW))
    assert done.returncode == 0
    lines = [f"[{rank}] {text}" for rank in (2, 3) for text in ("no newline at the end", f"out {rank}")]
    assert sorted(done.stdout.splitlines()) == lines
    assert sorted(done.stderr.splitlines()) == ["[2] err 2", "[3] err 3"]
    found = seen(shell, 3)
    assert [found[name] for name in ("RANK", "WORLD_SIZE")] == ["3", "4"]
    assert [found[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["1", "2"]
    assert found["SHOAL_RENDEZVOUS"] == "tcp://127.0.0.1:29511"
    assert (found["master"], found["host"]) == ("29511", "host-1")


def test_first_error_ends_the_job_and_is_shown(shell: Shell, everything: bool) -> None:
    fail = """
def fail():
    raise ValueError("the cause")

if rank == "1":
    print("a last word")
    fail()
time.sleep(0.05)
if rank == "2":
    raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
time.sleep(60)
"""
    done = shell.run("run", "--workers", "4", shell.script(WAIT + fail), fresh=everything)
    assert done.returncode == 1
    first, *_, last = done.stderr.splitlines()
    assert first == f"shoal: worker 1 of 4 ({HOST}, pid {shell.pids(4)[1]}) failed:"
    assert last == "ValueError: the cause"
    assert "  | a last word" in done.stderr, "what nobody has seen yet is quoted"
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert len(frames) == 2, "the script's own frames only"
    assert all("train.py" in frame for frame in frames)
    assert all(gone(pid) for pid in shell.pids(4))
    assert shell.leftovers() == []


REFUSE = """
from shoal.errors import ConfigError
raise ConfigError("7 is odd; use 8.")
"""


def test_config_error_is_one_sentence(shell: Shell) -> None:
    done = shell.run("run", "--workers", "2", shell.script(REFUSE))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "shoal: 7 is odd; use 8.\n")


def test_fresh_interpreters_where_forking_is_unsafe(shell: Shell) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("OpenBLAS starts no thread on one core, so forking is safe here")
    done = shell.run(
        "run", "--workers", "2", shell.script(SHOW + REFUSE), "--x", fresh=True, OPENBLAS_NUM_THREADS="2"
    )
    assert (done.returncode, done.stdout) == (2, "out 0\nno newline at the end")
    assert done.stderr == "err 0\nshoal: 7 is odd; use 8.\n"
    found = seen(shell, 0)
    assert found["torch"] is False
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "args")] == ["0", "2", ["--x"]]
    assert found["path"] == str(shell.folder)
    assert shell.leftovers() == []


def test_killed_worker_is_named(shell: Shell) -> None:
    lost = """
if rank == "2":
    os.kill(os.getpid(), 9)
time.sleep(0.05)
if rank == "1":
    raise RuntimeError("an error that follows from the kill and does not say so")
time.sleep(60)
"""
    done = shell.run("run", "--workers", "3", shell.script(WAIT + lost))
    pids = shell.pids(3)
    said = f"shoal: worker 2 of 3 ({HOST}, pid {pids[2]}) was killed by SIGKILL (out of memory? see dmesg).\n"
    assert (done.returncode, done.stderr) == (128 + signal.SIGKILL, said)
    assert all(gone(pid) for pid in pids)


def test_exit_codes_and_exit_handlers(shell: Shell) -> None:
    leave = """
import atexit, sys
atexit.register(print, "goodbye", flush=True)
if rank == "1":
    sys.exit(7)
time.sleep(0.2)
sys.exit()
"""
    done = shell.run("run", "--workers", "2", shell.script(WAIT + leave))
    assert done.returncode == 7
    who = f"worker 1 of 2 ({HOST}, pid {shell.pids(2)[1]})"
    assert done.stderr == f"shoal: {who} failed: the script called sys.exit(7).\n"
    assert done.stdout == "goodbye\n", "a worker that ends well calls its exit handlers"


def test_launcher_killed_outright_leaves_no_worker(shell: Shell) -> None:
    memory = "pathlib.Path('memory').write_text(os.environ['SHOAL_MEMORY'])\n"
    script = shell.script(WAIT.replace("rank =", memory + "rank =") + "time.sleep(60)")
    launcher = shell.start("run", "--workers", "2", script)
    pids = shell.pids(2)
    kept = Path((shell.folder / "memory").read_text())
    assert kept.is_dir()
    launcher.kill()
    until(lambda: all(gone(pid) for pid in pids))
    until(lambda: shell.leftovers() == [])
    until(lambda: not kept.exists())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_everything_quietly(
    shell: Shell, number: signal.Signals, code: int, everything: bool
) -> None:
    # A shell without job control starts background jobs with SIGINT ignored, which children would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    fresh = everything and number == signal.SIGINT
    launcher = shell.start("run", "--workers", "2", shell.script(WAIT + "time.sleep(60)"), fresh=fresh)
    signal.signal(signal.SIGINT, before)
    pids = shell.pids(2)
    launcher.send_signal(number)
    done = finish(launcher)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert all(gone(pid) for pid in pids)
    assert shell.leftovers() == []


def test_stubborn_workers_are_killed(shell: Shell) -> None:
    deaf = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f"deaf-{rank}").touch()
while len(list(pathlib.Path(".").glob("deaf-?"))) < 2:
    time.sleep(0.01)
if rank == "0":
    raise KeyError("x")
time.sleep(60)
"""
    done = shell.run("run", "--workers", "2", shell.script(WAIT + deaf))
    assert done.returncode == 1
    who = f"worker 0 of 2 ({HOST}, pid {shell.pids(2)[0]})"
    assert done.stderr.startswith(f"shoal: {who} failed:\nTraceback")
    assert all(gone(pid) for pid in shell.pids(2))


def test_busy_port_is_one_sentence(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
        done = shell.run("run", "--workers", "2", "--at", at, shell.script("raise SystemExit(9)"))
    assert done.returncode == 2
    assert done.stderr == (
        f"shoal: cannot listen at {at} (Address already in use); "
        "choose another port, or end the program that listens there.\n"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "missing.py"], "there is no script 'missing.py'"),
        (["run", "--workers", "0", "train.py"], "--workers 0"),
        (["run", "--hosts", "2", "train.py"], "--at ADDRESS:PORT"),
        (["run", "--at", "nowhere", "train.py"], "--at nowhere is not ADDRESS:PORT"),
        (["run", "--set", "clip", "train.py"], "--set clip is not KEY=VALUE"),
        (["server", "--listen", "0.0.0.0:7077", "--keys", "none"], "--listen 0.0.0.0:7077 is every address"),
        (["server", "--listen", "[::]:7077", "--keys", "none"], "name the one by which workers reach it"),
    ],
)
def test_wrong_requests_are_one_sentence(shell: Shell, args: list[str], words: str) -> None:
    shell.script("raise SystemExit(9)")
    done = shell.run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shoal: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_itself_needs_no_torch(shell: Shell) -> None:
    code = "import sys, shoal.cli.main; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    alone = shell.run(fresh=True)
    assert "Usage: shoal" in alone.stdout + alone.stderr
    assert shell.run("--version", fresh=True).stdout.startswith("shoal ")
    unknown = shell.run("rnu", fresh=True)
    assert unknown.returncode == 2
    assert "No such command" in unknown.stderr
