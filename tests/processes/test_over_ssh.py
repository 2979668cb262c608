"""`shoal run --hosts hosts.txt` with a real sshd on loopback: two "hosts" that are this one."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import SCRIPT, SOURCE, losses

from shoal.cluster.over_ssh.hosts import RemoteHost, parse_host, read_hosts
from shoal.errors import ConfigError

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
real = pytest.mark.skipif(
    not (Path(SSHD).exists() and shutil.which("ssh") and os.geteuid() == 0),
    reason="a private sshd needs root, ssh and sshd (scripts/services)",
)

TRAIN = (
    SCRIPT
    + """
import time
run = shoal.Run(**settings, checkpoint="checkpoints")
print("begins", rank, flush=True)
for step in run.steps(8):
    time.sleep(float(sys.argv[1]))
print("ends", rank, flush=True)
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 and rank == 1 else 0)
"""
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which `ssh` reaches a private sshd, whose address two names of ~/.ssh/config lead to."""
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nPidFile {folder}/pid\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\n"
        f"SetEnv PYTHONPATH={SOURCE} GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1\n"
    )
    (folder / "config").write_text(
        f"Host one two\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {folder}/user\n"
        f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking no\n  LogLevel ERROR\n"
    )
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    (bin / "ssh").chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts.txt").write_text("# two names of this machine\none\ntwo\n")
    daemon = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL
    )
    try:
        yield {
            **os.environ,
            "PATH": f"{bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "NO_COLOR": "1",
        }
    finally:
        daemon.terminate()
        daemon.wait()


def start(folder: Path, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    at = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "shoal", "run", "--hosts", "hosts.txt", "--at", at, "--workers", "1"]
    return subprocess.Popen(
        [*command, *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def workers_of(folder: Path) -> list[psutil.Process]:
    """Processes of the other ends: launchers and workers whose folder this is."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and "train.py" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@real
@pytest.mark.all_only
def test_two_hosts_train_together_and_their_lines_carry_their_names(
    hosts: dict[str, str], tmp_path: Path
) -> None:
    done = start(tmp_path, hosts, "--output", "all", "train.py", "0")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert {"one [0] begins 0", "two [1] begins 1", "one [0] ends 0", "two [1] ends 1"} <= set(
        out.splitlines()
    )
    assert len(losses(tmp_path)) == 8


@real
@pytest.mark.all_only
def test_ctrl_c_and_even_a_kill_end_the_other_ends(hosts: dict[str, str], tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        running = start(tmp_path, hosts, "train.py", "0.5")
        assert running.stdout is not None
        while "begins" not in running.stdout.readline():
            assert running.poll() is None
        assert len(workers_of(tmp_path)) >= 2
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
        if number == signal.SIGINT:
            assert running.returncode == 130
            assert "stopped after step" in err + out
        deadline = time.monotonic() + 60
        while workers_of(tmp_path):
            assert time.monotonic() < deadline, "somebody goes on"
            time.sleep(0.1)


@real
@pytest.mark.all_only
def test_a_host_that_fails_or_cannot_be_reached_is_named(hosts: dict[str, str], tmp_path: Path) -> None:
    bad = start(tmp_path, hosts, "--retries", "0", "train.py", "0", "3")
    _, err = bad.communicate(timeout=120)
    assert bad.returncode == 3, err
    assert "shoal: host 1 (two) ended with exit code 3" in err
    (tmp_path / "hosts.txt").write_text("one\nthree.invalid\n")
    nobody = start(tmp_path, hosts, "train.py", "0")
    _, err = nobody.communicate(timeout=120)
    assert nobody.returncode == 4, err
    assert "ssh has lost host 1 (three.invalid), or never reached it" in err


def test_the_file_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("# all of them\nnode-1\nme@10.0.0.2:2222   # the slow one\n\n")
    assert read_hosts(file) == [RemoteHost("node-1"), RemoteHost("10.0.0.2", "me", 2222)]
    for line in ("-oProxyCommand=touch no", "a b", "node;ls", "node:99999", "$(id)"):
        with pytest.raises(ConfigError, match="is no host"):
            parse_host(line)
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hosts(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hosts(tmp_path / "none.txt")
