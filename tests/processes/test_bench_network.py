"""`shoal bench network` for real: two namespaces, two processes, and nothing left of either."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from commands import finish, start
from warm import Command

from shoal.bench.text import size_for
from shoal.errors import ConfigError
from shoal.testing.hosts import make_hosts

TINY = ("bench", "network", "--rates", "50mbit", "--parameters", "1e5", "--small", "4e4", "--rounds", "2")


@pytest.fixture(autouse=True)
def _hosts_can_be_made() -> None:
    try:
        with make_hosts(2) as hosts:
            hosts.limit(10**7)
    except ConfigError as refused:
        pytest.skip(f"no two hosts on this machine: {refused}")


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"shoal-host-{pid}-")]


def test_the_contest(tmp_path: Path) -> None:
    names = "ddp, torch ddp fp16, torch ddp powersgd"
    process = start(tmp_path, "-m", "shoal", *TINY, "--steps", "5", "--strategies", names, "--out", "out")
    out, err = process.communicate(timeout=170)
    assert process.returncode == 0, err
    assert namespaces(process.pid) == []
    found = json.loads((tmp_path / "out" / "network.json").read_text())
    assert found["failed"] == {}
    (at,) = found["rates"]
    assert 0.5 * 50e6 < at["probed"] < 1.2 * 50e6
    whole = 4 * size_for(1e5).parameters
    for name, share in (("torch ddp", 1.0), ("ddp", 1.0), ("torch ddp fp16", 0.5)):
        assert at["timed"][name]["step_bytes"] == pytest.approx(share * whole, rel=0.2), name
    assert at["timed"]["torch ddp powersgd"]["step_bytes"] < 0.5 * whole
    ours, theirs = found["learned"]["ddp"], found["learned"]["torch ddp"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)  # same weights, same samples
    assert ours["final"] == pytest.approx(theirs["final"], rel=1e-5)
    assert len(ours["losses"]) == 5
    assert "50 Mb/s: step time" in out
    assert "round 2 of 2: ddp" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "-m", "shoal", *TINY, "--strategies", "ddp")
    children = _hosts_of(process)
    process.send_signal(number)
    assert finish(process).code != 0
    assert namespaces(process.pid) == []
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_what_a_killed_one_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    process = start(tmp_path, "-m", "shoal", *TINY, "--strategies", "ddp")
    children = _hosts_of(process)
    process.kill()
    finish(process)
    assert not psutil.wait_procs(children, timeout=10)[1], "the hosts outlive the one who started them"
    assert len(namespaces(process.pid)) == 3, "two hosts and their switch"
    with make_hosts(1):
        assert namespaces(process.pid) == []


def _hosts_of(process: Command) -> list[psutil.Process]:
    """The processes on the two hosts, once there are two that run Python."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        words = {child: _words(child) for child in psutil.Process(process.pid).children()}
        hosts = [
            child for child, line in words.items() if "shoal.bench.start" in line and "netns" not in line
        ]
        if len(hosts) == 2:
            time.sleep(0.5)  # until they have asked to be ended with their parent
            return hosts
        time.sleep(0.05)
    raise AssertionError("no hosts were started")


def _words(process: psutil.Process) -> list[str]:
    """Its command; nothing of one that has just ended, as those do that make the namespaces."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
