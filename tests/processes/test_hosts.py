"""Two hosts on one machine: network namespaces joined by a cable that the test makes itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """Two namespaces, with addresses 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command here (Debian package iproute2): cannot make two hosts")
    tag = uuid.uuid4().hex[:6]
    names = (f"shoal-{tag}-0", f"shoal-{tag}-1")
    ends = (f"sh{tag}0", f"sh{tag}1")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            ends[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            names[1],
        )
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"the kernel refuses network namespaces: {error.stderr.strip()}")
    yield names
    for name in names:
        _ip("netns", "del", name)


def _start(name: str, host: int, strategy: str, log: Path, script: Path) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "shoal", "run", "--workers", "2"]
    command += ["--hosts", "2", "--host", str(host), "--at", "10.77.0.1:29517", "--strategy", strategy]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, str(script), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _losses(log: Path) -> list[float]:
    lines = (log / "events.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if "loss" in event]


@pytest.mark.parametrize("strategy", ["shared", "zero2"])
def test_two_hosts_of_two_workers_train_as_one_process(
    cable: tuple[str, str], tmp_path: Path, strategy: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    hosts = [_start(name, i, strategy, tmp_path / "two", script) for i, name in enumerate(cable)]
    outputs = [host.communicate(timeout=90) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "hosts 2" in outputs[0][0]
    alone = subprocess.run(
        [sys.executable, script, tmp_path / "one"], capture_output=True, text=True, timeout=90
    )
    assert alone.returncode == 0, alone.stderr
    assert _losses(tmp_path / "two") == pytest.approx(_losses(tmp_path / "one"), rel=1e-12)
