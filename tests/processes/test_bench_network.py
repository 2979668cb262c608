"""`scripts/bench network` for real: two namespaces, two processes, and nothing left of either."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from commands import finish, start
from warm import Command

from benchmarks.report.origin import ROOT
from benchmarks.workload.text import size_for
from shoal.errors import ConfigError
from shoal.testing.hosts import make_hosts

NETWORK = (str(ROOT / "benchmarks"), "network", "--out", "out")
TINY = ("--rates", "50mbit", "--parameters", "1e5", "--small", "4e4", "--rounds", "2")
ENDLESS = (*TINY, "--strategies", "ddp", "--steps", "1000000")
"""It is not over before somebody ends it."""


@pytest.fixture(autouse=True)
def _hosts_can_be_made() -> None:
    try:
        with make_hosts(2) as hosts:
            hosts.limit(10**7)
    except ConfigError as refused:
        pytest.skip(f"no two hosts on this machine: {refused}")


def namespaces(pid: int) -> list[str]:
    """Those that a process has made. The folder is read and not `ip netns list`, which says nothing if it cannot."""
    return [name for name in os.listdir("/run/netns") if name.startswith(f"shoal-host-{pid}-")]


def test_the_contest(tmp_path: Path) -> None:
    names = "ddp, torch ddp fp16, torch ddp powersgd"
    process = start(tmp_path, *NETWORK, *TINY, "--steps", "5", "--strategies", names)
    out, err = process.communicate(timeout=170)
    assert process.returncode == 0, err
    assert namespaces(process.pid) == []
    sections = json.loads((tmp_path / "out" / "network.json").read_text())["sections"]
    found = sections[0]["raw"]
    assert found["failed"] == {}
    (at,) = found["rates"]
    assert 0.5 * 50e6 < at["probed"] < 1.2 * 50e6
    whole = 4 * size_for(1e5).parameters
    sent = {row[0]: row[3] * 1e6 for row in sections[0]["rows"]}
    for name, share in (("torch ddp", 1.0), ("ddp", 1.0), ("torch ddp fp16", 0.5)):
        assert sent[name] == pytest.approx(share * whole, rel=0.2), name
    assert sent["torch ddp powersgd"] < 0.5 * whole
    ours, theirs = found["learned"]["ddp"], found["learned"]["torch ddp"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)  # same weights, same samples
    assert ours["final"] == pytest.approx(theirs["final"], rel=1e-5)
    assert len(ours["losses"]) == 5
    assert "50 Mb/s: step time" in out
    assert "round 2 of 2: ddp" in err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.all_only)])
def test_who_is_interrupted_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, *NETWORK, *ENDLESS)
    children = hosts_of(process)
    process.send_signal(number)
    assert finish(process).code != 0
    assert namespaces(process.pid) == []
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_what_a_killed_one_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    process = start(tmp_path, *NETWORK, *ENDLESS)
    children = hosts_of(process)
    assert len(namespaces(process.pid)) == 3, "two hosts and their switch"
    process.kill()
    finish(process)
    assert not psutil.wait_procs(children, timeout=10)[1], "the hosts outlive the one who started them"
    # From here on any test beside this one that makes hosts may tidy up before the next line does.
    with make_hosts(1):
        assert namespaces(process.pid) == []


def hosts_of(process: Command) -> list[psutil.Process]:
    """The processes on the two hosts, once they have met: that is when the first line is said. Both have then asked to
    end with their parent, and train for longer than any test lasts, so that nothing here depends on time."""
    said = process.first_error()
    assert "losses, 1000000 steps: torch ddp" in said, said
    children = psutil.Process(process.pid).children()
    hosts = [child for child in children if "benchmarks.network.start" in child.cmdline()]
    assert len(hosts) == 2, [child.cmdline() for child in children]
    return hosts
