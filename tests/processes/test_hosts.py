"""Several hosts on one machine: what joins them, what holds them back, and a run that trains on two of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import python
from warm import Command

from shoal.report.events import last_pass, read_events
from shoal.testing.hosts import INTERFACE, Hosts, make_hosts
from shoal.testing.spawn import warm
from shoal.train.state import pace

PORT = 29518
MB = 10**6

SCRIPT = """
import sys, torch, shoal
from torch import nn
from torch.utils.data import TensorDataset
data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), torch.arange(64.0).view(64, 1))
run = shoal.Run(
    model=lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)),
    loss=lambda out, batch: (((out - batch[1]) ** 2).sum(), batch[1].numel()),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
    data=data, global_batch=16, precision="fp64", clip=1.0, log=sys.argv[1], progress=False)
for step in run.steps(12):
    pass
if run.world.rank == 0:
    print("hosts", len(set(run.world.hosts)))
"""


PROBE = """set -e
ip link add name b type bridge
ip link add v type veth peer name w
tc qdisc add dev v root tbf rate 1mbit burst 10kb latency 50ms
"""
"""What hosts are made of, in a namespace without a name. It does not use what is tested, whose faults must not skip."""


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_made() -> None:
    tried = subprocess.run(["unshare", "--net", "sh", "-c", PROBE], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no hosts on this machine: {tried.stderr.strip()}")


def _enter(act: Callable[..., Any], hosts: Hosts, host: int, answers: Any) -> None:
    hosts.enter(host)
    answers.put((host, act(hosts, host)))


def on_every_host(act: Callable[..., Any], hosts: Hosts) -> list[Any]:
    """`act(hosts, number)` in a process on each host; what they return."""
    context = warm()
    answers = context.Queue()
    numbers = range(len(hosts.names))
    started = [context.Process(target=_enter, args=(act, hosts, n, answers), daemon=True) for n in numbers]
    for process in started:
        process.start()
    try:
        found = dict(answers.get(timeout=60) for _ in numbers)
    finally:
        for process in started:
            process.kill()
            process.join()
    return [found[number] for number in numbers]


def reach(address: str) -> socket.socket:
    """A connection to a host that may not listen yet."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=30)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def meet(hosts: Hosts, host: int) -> tuple[list[str], list[str]]:
    """Call every other host, and be called by each: who was heard, and from which address."""
    others = [number for number in range(len(hosts.names)) if number != host]
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((hosts.addresses[host], PORT)))
        listener.settimeout(30)
        for other in others:
            stack.enter_context(reach(hosts.addresses[other])).sendall(bytes([host]))
        heard = []
        for _ in others:
            caller, (address, _port) = listener.accept()
            stack.enter_context(caller)
            caller.settimeout(30)
            heard.append((hosts.addresses[caller.recv(1)[0]], address))
        heard.sort()
    return [said for said, _ in heard], [seen for _, seen in heard]


def test_each_of_three_hosts_reaches_each_other() -> None:
    with make_hosts(3) as hosts:
        first, second, third = hosts.addresses
        found = on_every_host(meet, hosts)
    assert (first, second, third) == ("10.77.0.1", "10.77.0.2", "10.77.0.3")
    assert found == [([second, third],) * 2, ([first, third],) * 2, ([first, second],) * 2]


def exchange(connection: socket.socket, ends: list[float]) -> None:
    """A megabyte each way; notes when the last byte has come."""

    def send() -> None:
        connection.sendall(bytes(MB))
        connection.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    count = 0
    while got := connection.recv(1 << 16):
        count += len(got)
    assert count == MB
    ends.append(time.monotonic())
    sender.join()


def exchange_with_two(hosts: Hosts, host: int) -> tuple[float, list[float]]:
    """The first host exchanges a megabyte with each of two others at once: when it began, when bytes had come."""
    ends: list[float] = []
    with ExitStack() as stack:
        if host:
            connection = stack.enter_context(reach(hosts.addresses[0]))
            connection.recv(1)  # until both are there
            exchange(connection, ends)
            return 0.0, ends
        listener = stack.enter_context(socket.create_server((hosts.addresses[0], PORT)))
        listener.settimeout(30)
        both = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
        threads = [threading.Thread(target=exchange, args=(connection, ends)) for connection in both]
        begun = time.monotonic()
        for connection in both:
            connection.settimeout(30)
            connection.sendall(b"!")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return begun, ends


def test_a_limit_is_kept_both_ways() -> None:
    """2 MB leave one host and 2 MB come, of two others: the other ends alone would let them pass in one second."""
    with make_hosts(3) as hosts:
        hosts.limit(8 * MB)
        (begun, mine), (_, second), (_, third) = on_every_host(exchange_with_two, hosts)
    assert [len(ends) for ends in (mine, second, third)] == [2, 1, 1]
    assert max(mine) - begun > 1.5, "what the first received was not held back"
    assert max(second + third) - begun > 1.5, "what it sent was not held back"


def buckets(hosts: Hosts) -> int:
    """Token buckets in all namespaces."""
    shown = [
        subprocess.run(["tc", "-n", name, "qdisc"], capture_output=True, text=True, check=True).stdout
        for name in (*hosts.names, hosts.switch)
    ]
    return "".join(shown).count("qdisc tbf")


def test_a_limit_is_lifted() -> None:
    with make_hosts(2) as hosts:
        assert buckets(hosts) == 0
        hosts.limit(10**8)
        hosts.limit(10**9)
        assert buckets(hosts) == 4
        hosts.limit(None)
        assert buckets(hosts) == 0


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def interfaces() -> list[str]:
    """Of the machine itself."""
    return [name for name in os.listdir("/sys/class/net") if name.startswith(INTERFACE)]


def test_nothing_is_left() -> None:
    with make_hosts(3) as hosts:
        made = {*hosts.names, hosts.switch}
        assert made <= namespaces()
        assert interfaces() == []
    with pytest.raises(ZeroDivisionError), make_hosts(1) as others:  # noqa: PT012
        made |= {*others.names, others.switch}
        raise ZeroDivisionError
    assert len(made) == 6
    assert not made & namespaces()
    assert interfaces() == []


def _start(
    hosts: Hosts, host: int, strategy: str, log: Path, script: Path, fresh: bool = False
) -> subprocess.Popen[str] | Command:
    words = ["-m", "shoal", "run", "--workers", "2", "--hosts", "2", "--host", str(host)]
    words += ["--at", f"{hosts.addresses[0]}:29517", "--strategy", strategy, str(script), str(log)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not fresh:
        return Command(script.parent, environment, words, partial(_on_host, hosts, host))
    return subprocess.Popen(
        hosts.command(host, sys.executable, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _on_host(hosts: Hosts, host: int) -> None:
    """In the forked command: it is there, and keeps snapshots every few of these tiny steps."""
    pace.SHARE = 3.0
    hosts.enter(host)


def _losses(log: Path) -> list[float]:
    lines = (log / "events.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if "loss" in event]


@pytest.mark.parametrize("strategy", ["shared", "zero2"])
def test_two_hosts_of_two_workers_train_as_one_process(
    tmp_path: Path, strategy: str, everything: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with make_hosts(2) as hosts:
        fresh = everything and strategy == "zero2"  # one of the two in an interpreter that begins on its host
        started = [_start(hosts, host, strategy, tmp_path / "two", script, fresh) for host in range(2)]
        try:
            outputs = [process.communicate(timeout=90) for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "hosts 2" in outputs[0][0]
    alone = python(tmp_path, str(script), str(tmp_path / "one"))
    assert alone.code == 0, alone.err
    assert _losses(tmp_path / "two") == pytest.approx(_losses(tmp_path / "one"), rel=1e-12)


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.all_only)])
def test_a_lost_worker_and_a_lost_host_are_waited_for(tmp_path: Path, host: int) -> None:
    """Both launchers start their workers again, from memory alone; a host that is gone, with the store if it is the
    first, is waited for, and joins by its command."""
    script, log = tmp_path / "train.py", tmp_path / "two"
    body = """    import os, pathlib, time
    time.sleep(0.02)
    if step.number == 7 and run.world.rank == 3 and not pathlib.Path("lost").exists():
        pathlib.Path("lost").touch()
        os.kill(os.getpid(), 9)
    if step.number == 10 and not pathlib.Path("go").exists():
        pathlib.Path(f"there-{run.world.rank}").touch()
        time.sleep(120)
"""
    script.write_text(SCRIPT.replace("    pass\n", body))
    with make_hosts(2) as hosts, ExitStack() as stack:
        started = [_start(hosts, host, "zero1", log, script) for host in range(2)]
        for process in started:
            stack.callback(process.kill)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("there-*"))) < 4:
            assert time.monotonic() < deadline, [process.poll() for process in started]
            time.sleep(0.05)
        (tmp_path / "go").touch()
        started[host].kill()
        started[host].communicate(timeout=60)
        started[host] = _start(hosts, host, "zero1", log, script)
        stack.callback(started[host].kill)
        outputs = [process.communicate(timeout=90) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    seen = [event["after"] for event in read_events(log / "events.jsonl") if event.get("event") == "recovery"]
    assert len(seen) == 2, outputs
    assert min(seen) > 0, "from the snapshots of both hosts, or of the one that is left"
    text = script.read_text().replace(body, "    pass\n")
    (tmp_path / "plain.py").write_text(text)
    alone = python(tmp_path, "plain.py", str(tmp_path / "one"))
    assert alone.code == 0, alone.err
    events = read_events(log / "events.jsonl")
    found = [event["loss"] for event in last_pass(events)]
    assert found == pytest.approx(_losses(tmp_path / "one"), rel=1e-12)


LOSES = """    import os, pathlib, time
    time.sleep(0.1)
    if step.number == 3 and run.world.rank == 3:
        os.kill(os.getpid(), 9)
"""


def _serve(hosts: Hosts, host: int, keys: Path) -> Command:
    words = ["-m", "shoal", "server", "--listen", f"{hosts.addresses[host]}:7077"]
    words += ["--keys", str(keys), "--servers", "1"]
    words += ["--join", f"{hosts.addresses[0]}:7077"] * (host > 0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Command(keys.parent, environment, words, partial(hosts.enter, host))


def test_servers_on_two_hosts_and_one_of_them_is_lost(tmp_path: Path) -> None:
    """Workers on both hosts meet at servers of both. The second host's are killed in the middle, and one of its
    workers, in whose place comes another: no loss changes."""
    script, log, keys = tmp_path / "train.py", tmp_path / "two", tmp_path / "keys"
    script.write_text(SCRIPT.replace("    pass\n", LOSES))
    with make_hosts(2) as hosts, ExitStack() as stack:
        servers = []
        for host in range(2):
            servers.append(_serve(hosts, host, keys))
            stack.callback(servers[-1].kill)
            assert "1 server of the coordinator" in servers[-1].first_error()
        strategy = f"ps(at={hosts.addresses[0]}:7077, keys={keys})"
        started = [_start(hosts, host, strategy, log, script) for host in range(2)]
        for process in started:
            stack.callback(process.kill)
        deadline = time.monotonic() + 60
        while not (log / "events.jsonl").exists() or len(_losses(log)) < 4:
            assert time.monotonic() < deadline, [process.poll() for process in started]
            time.sleep(0.05)
        servers[1].kill()
        outputs = [process.communicate(timeout=90) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "worker 3 was killed; another takes its place" in outputs[1][1]
    alone = python(tmp_path, str(script), str(tmp_path / "one"))
    assert alone.code == 0, alone.err
    assert len(_losses(log)) == 12
    assert _losses(log) == pytest.approx(_losses(tmp_path / "one"), rel=1e-12)
