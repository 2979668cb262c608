"""`shoal doctor` names what is wrong: each fault is made for real, around a real command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import environment

from shoal.testing.hosts import make_hosts

SECONDS = 15.0
"""Within this every fault is named."""
DOCTOR = (sys.executable, "-m", "shoal", "doctor", "--json")
NAMESPACES = subprocess.run(
    ["unshare", "--mount", "--net", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
).returncode
needs_root = pytest.mark.skipif(
    NAMESPACES != 0, reason="no mount and network namespaces here: they take root"
)


@pytest.fixture(autouse=True)
def _no_memory_of_faketime() -> Iterator[None]:
    """libfaketime leaves a segment of each process that ends at once."""
    before = set(Path("/dev/shm").glob("*faketime_*"))
    yield
    for file in set(Path("/dev/shm").glob("*faketime_*")) - before:
        file.unlink(missing_ok=True)


def ask(folder: Path, *options: str, shell: str = "", unshare: str = "", **more: str) -> list[dict[str, Any]]:
    """The findings that are not ok. `shell`: what happens before, in the same process; `unshare`: in namespaces."""
    command = [*DOCTOR, "--folder", str(folder / "runs"), *options]
    if shell:
        command = ["sh", "-c", f'{shell} && exec "$@"', "sh", *command]
    if unshare:
        command = ["unshare", *unshare.split(), *command]
    begun = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment(folder) | more, capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - begun < SECONDS, "a fault has to be named within 15 s"
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert done.returncode == (1 if said["faults"] else 0), done.stderr
    assert len(done.stderr.splitlines()) == (1 if said["faults"] else 0), done.stderr
    return [each for each in said["findings"] if each["level"] != "ok"]


def named(found: list[dict[str, Any]], check: str, level: str, words: str) -> dict[str, Any]:
    """The one finding that is meant; it has a remedy."""
    fits = [
        each for each in found if each["check"] == check and each["level"] == level and words in each["what"]
    ]
    assert len(fits) == 1, found
    assert fits[0]["remedy"]
    return fits[0]


def test_an_occupied_port_is_named_with_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
        found = named(ask(tmp_path, "--at", at), "ports", "fault", "listens at")
    assert f"(pid {os.getpid()})" in found["what"]
    assert found["number"] == int(at.split(":")[1])


@needs_root
def test_loopback_that_is_down(tmp_path: Path) -> None:
    found = ask(tmp_path, unshare="--net")
    named(found, "interfaces", "fault", "127.0.0.1")
    assert "ip link set lo up" in named(found, "interfaces", "fault", "127.0.0.1")["remedy"]


@needs_root
def test_a_wrong_etc_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n10.99.99.99 {socket.gethostname()}\n")
    found = ask(tmp_path, shell="mount --bind hosts /etc/hosts", unshare="--mount")
    assert "10.99.99.99" in named(found, "names", "fault", socket.gethostname())["what"]


def test_a_clock_beside_that_of_the_folder(tmp_path: Path) -> None:
    if subprocess.run(["which", "faketime"], capture_output=True).returncode:
        pytest.skip("no `faketime` here; scripts/services installs it")
    found = named(ask(tmp_path, shell="", unshare="", **faked("+120")), "clock", "warning", "ahead of")
    assert found["number"] == pytest.approx(120, abs=5)


def faked(seconds: str) -> dict[str, str]:
    """What `faketime` sets, for the clock alone and not for the times of files."""
    library = next(Path("/usr/lib").rglob("libfaketime.so.1"))
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": seconds,
        "NO_FAKE_STAT": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@needs_root
def test_a_small_dev_shm(tmp_path: Path) -> None:
    found = ask(tmp_path, shell="mount -t tmpfs -o size=64m tmpfs /dev/shm", unshare="--mount")
    assert named(found, "shared-memory", "warning", "MB free of 67 MB")["number"] <= 64 << 20


@needs_root
@pytest.mark.all_only
def test_a_dev_shm_that_cannot_be_written_to(tmp_path: Path) -> None:
    found = ask(tmp_path, shell="mount -t tmpfs -o ro tmpfs /dev/shm", unshare="--mount")
    named(found, "shared-memory", "fault", "Read-only")


def test_few_file_descriptors(tmp_path: Path) -> None:
    found = named(ask(tmp_path, shell="ulimit -n 60"), "descriptors", "fault", "60 files")
    assert found["number"] == 60
    assert "ulimit -n" in found["remedy"]


def test_little_memory(tmp_path: Path) -> None:
    named(ask(tmp_path, shell="ulimit -v 600000"), "memory", "fault", "0.61 GB of addresses")


def test_little_memory_of_a_control_group(tmp_path: Path) -> None:
    with control_group("memory", "memory.limit_in_bytes", 200 << 20) as enter:
        found = ask(tmp_path, shell=enter)
    assert named(found, "memory", "fault", "control group may have 0.21 GB")["number"] < 200 << 20


@contextmanager
def control_group(kind: str, limit: str, value: int) -> Iterator[str]:
    """A group of version 1 inside ours; what a shell says to enter it."""
    root = Path("/sys/fs/cgroup") / kind
    group = root / f"shoal-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(value))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        yield f"echo $$ > {group}/cgroup.procs"
    finally:
        group.rmdir()


DISKS = {
    "mount -t tmpfs -o ro tmpfs runs": ("fault", "Read-only"),
    "mount -t tmpfs -o size=4m tmpfs runs": ("fault", "has 4 MB free"),
    "mount -t tmpfs -o size=300m tmpfs runs": ("warning", "a few checkpoints"),
    "mount -t tmpfs -o size=4k tmpfs tmp": ("fault", "temporary files"),
}


@needs_root
@pytest.mark.parametrize(
    "mount", [pytest.param(m, marks=[] if i < 2 else pytest.mark.all_only) for i, m in enumerate(DISKS)]
)
def test_disks_that_are_full_and_read_only(tmp_path: Path, mount: str) -> None:
    (tmp_path / "runs").mkdir()
    environment(tmp_path)  # makes the folder of temporary files
    named(ask(tmp_path, shell=mount, unshare="--mount"), "disk", *DISKS[mount])


def test_more_threads_than_cores(tmp_path: Path) -> None:
    found = ask(tmp_path, OMP_NUM_THREADS="64")
    assert named(found, "threads", "warning", "OMP_NUM_THREADS=64")["number"] == 128
    cores = len(os.sched_getaffinity(0))
    named(ask(tmp_path, "--workers", str(cores + 1)), "threads", "warning", f"{cores + 1} workers on")


ORPHAN = """
import mmap, os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
file = os.memfd_create("shoal-reduce")
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
print(os.getpid(), flush=True)
os.closerange(0, 3)
time.sleep(60)
"""


def test_leftovers_of_earlier_jobs(tmp_path: Path) -> None:
    temporary = Path(environment(tmp_path)["TMPDIR"])
    (temporary / "shoal-abcd1234").mkdir()
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    segment = Path(f"/dev/shm/torch_{gone.stdout.strip()}_77")
    segment.write_bytes(b"0")
    orphan = int(subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True).stdout)
    try:
        found = ask(tmp_path)
        assert (
            f"{orphan} (no launcher)"
            in named(found, "leftovers", "warning", "processes of an earlier job")["what"]
        )
        assert "shoal-abcd1234" in named(found, "leftovers", "warning", "temporary folders")["remedy"]
        assert str(segment) in named(found, "leftovers", "warning", "shared memory")["remedy"]
    finally:
        os.kill(orphan, 9)
        segment.unlink()


def test_a_slow_link_another_version_and_another_clock(tmp_path: Path) -> None:
    """Two hosts, and the second is bad in three ways. Host 0 names each."""
    try:
        with make_hosts(2) as hosts:
            hosts.limit(40_000_000)
            said = on_two_hosts(tmp_path, hosts.command, f"{hosts.addresses[0]}:29537")
    except Exception as error:
        if "cannot make hosts" in str(error) or "only root" in str(error) or "no `" in str(error):
            pytest.skip(str(error))
        raise
    found = [each for each in said["findings"] if each["level"] != "ok"]
    torch = named(found, "versions", "fault", "torch 1.0.0 here")
    assert torch["host"] == 1
    slow = [each for each in found if each["check"] == "links" and "Mb/s" in each["what"]]
    assert {each["host"] for each in slow} == {0, 1}
    assert all(20e6 < 8 * each["number"] < 60e6 for each in slow), slow
    clock = [each for each in found if each["check"] == "clock" and each["host"] == 1]
    assert any(each["number"] == pytest.approx(90, abs=3) and "host 0" in each["what"] for each in clock), (
        found
    )
    assert len(said["links"]) == 2


def on_two_hosts(folder: Path, command: Callable[..., list[str]], at: str) -> dict[str, Any]:
    package = folder / "other" / "torch-1.0.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    worse = environment(folder)
    worse["PYTHONPATH"] = f"{package.parent}{os.pathsep}{worse['PYTHONPATH']}"
    worse |= faked("+90")
    started = []
    for host, variables in ((0, environment(folder)), (1, worse)):
        words = command(host, *DOCTOR, "--hosts", "2", "--host", str(host), "--at", at)
        started.append(
            subprocess.Popen(
                words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    begun = time.monotonic()
    (out, err), (_, second) = (process.communicate(timeout=60) for process in started)
    assert time.monotonic() - begun < SECONDS
    assert started[1].returncode == 0, second
    assert started[0].returncode == 1, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_host_that_does_not_come_and_one_that_is_not_wanted(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    found = ask_loosely(tmp_path, "--hosts", "2", "--at", at, "--wait", "1")
    named(found, "links", "fault", "host 1 has not come")
    alone = subprocess.run(
        [*DOCTOR, "--hosts", "2", "--host", "1", "--at", at, "--wait", "1"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 2
    assert "host 0 was not reached" in alone.stderr


def ask_loosely(folder: Path, *options: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*DOCTOR, *options], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return found


def test_a_good_machine_has_no_faults_and_the_table_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [word for word in DOCTOR if word != "--json"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "FAULT" not in done.stdout
    for check in ("versions", "links", "clock", "leftovers"):
        assert f"\n{check}" in done.stdout
