"""What people and CI call: present, executable, pinned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.catalogue import BENCHMARKS

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").iterdir())
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_scripts_are_those_of_the_readme() -> None:
    assert [script.name for script in SCRIPTS] == [
        "bench",
        "demo",
        "docs",
        "lint",
        "release",
        "services",
        "setup",
        "test",
    ]


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    assert os.access(script, os.X_OK), f"{script.name} is not executable"
    text = script.read_text()
    first, second = text.splitlines()[:2]
    assert first == "#!/usr/bin/env bash"
    assert second.startswith("# "), f"{script.name}: the second line says what it does"
    strict = "set -euo pipefail" in text or 'source "$(dirname "$0")/setup"' in text
    assert strict, f"{script.name} goes on after a failure"
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_ci_calls_services_lint_and_test() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line.split()[0] for line in lines if line.startswith("scripts/")]
    assert commands == ["scripts/services", "scripts/lint", "scripts/test"]
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def extras_of(script: str) -> list[str]:
    """What a script asks scripts/setup to install."""
    found = re.search(
        r'^source "\$\(dirname "\$0"\)/setup"(.*)$', (ROOT / "scripts" / script).read_text(), re.M
    )
    assert found is not None
    return found[1].split()


@pytest.mark.parametrize("script", ["bench", "demo", "docs", "lint", "release", "test"])
def test_each_script_says_what_it_needs(script: str) -> None:
    """Without a word of its own, setup would read the arguments of the script as extras."""
    extras = extras_of(script)
    assert extras
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    said = re.findall(r"^    \[(\w+)\]=", (ROOT / "scripts" / "setup").read_text(), re.MULTILINE)
    assert {"core", *extras} <= set(said), "setup says how large each extra is"


def test_the_demo_does_without_test_tools() -> None:
    assert extras_of("demo") == ["plots"]
    assert "docs" in extras_of("test"), "tests/docs/test_site.py builds the site"


def copy_of(script: str, folder: Path) -> Path:
    """A script alone in a folder that looks like the repository."""
    (folder / "scripts").mkdir(exist_ok=True)
    for name in (script, "setup"):
        (folder / "scripts" / name).write_text((ROOT / "scripts" / name).read_text())
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).write_text((ROOT / name).read_text())
    return folder / "scripts" / script


def pretend(folder: Path, name: str, text: str) -> None:
    """A program of this name that only does what the text says."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_setup_installs_each_extra_once(tmp_path: Path) -> None:
    script = copy_of("lint", tmp_path).with_name("setup")
    python = tmp_path / ".venv" / "bin"
    pretend(python, "python", 'echo "pip warns"; echo "$*" >>calls')

    def said(*extras: str) -> str:
        return subprocess.run(["bash", script, *extras], capture_output=True, text=True, check=True).stdout

    first = said("plots")
    assert "matplotlib" in first
    assert "transformers" not in first
    assert "pip warns" not in first
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1].endswith("-e .[plots]")
    assert said("plots") == ""
    second = said("plots", "dev")
    assert "matplotlib" not in second
    assert "transformers" in second
    assert (tmp_path / "calls").read_text().splitlines()[-1].endswith("-e .[dev]")
    with (tmp_path / "constraints.txt").open("a") as pins:
        pins.write("# changed\n")
    assert "matplotlib" in said("plots")


def test_setup_shows_what_pip_says_when_it_fails(tmp_path: Path) -> None:
    script = copy_of("lint", tmp_path).with_name("setup")
    pretend(tmp_path / ".venv" / "bin", "python", 'echo "no such version"; exit 1')
    done = subprocess.run(["bash", script, "plots"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no such version" in done.stderr
    assert not (tmp_path / ".venv" / "stamp-plots").exists()


def services(folder: Path, *present: str, user: int = 0) -> subprocess.CompletedProcess[str]:
    """scripts/services where only these commands are there, for this user, and apt-get has no network."""
    for name in ("bash", "sort", "tr", "mktemp", "rm", "tail"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    pretend(folder, "id", f"echo {user}")
    pretend(folder, "apt-get", 'echo "E: no network: $*"; exit 100')
    for name in present:
        pretend(folder, name, "exit 0")
    command = [folder / "bash", ROOT / "scripts" / "services"]
    return subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, check=False)


def test_services_need_no_network_where_everything_is_there(tmp_path: Path) -> None:
    done = services(tmp_path, "ip", "tc", "unshare", "faketime", "chromium", user=1000)
    assert (done.returncode, done.stdout) == (0, "services: everything is here\n")


def test_services_say_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "user").mkdir()
    done = services(tmp_path / "user", "unshare", user=1000)
    assert done.returncode == 1
    assert "no 'tc'" in done.stdout
    assert "sudo scripts/services" in done.stderr
    done = services(tmp_path / "root", "unshare", "chromium")
    assert done.returncode == 1
    assert "no network: install -y --no-install-recommends faketime iproute2" in done.stderr
    assert "could not install faketime iproute2" in done.stderr


def test_a_release_is_a_commit(tmp_path: Path) -> None:
    script = copy_of("release", tmp_path)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    pretend(tmp_path / ".venv" / "bin", "python", "exit 0")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not committed" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_what_is_left_out_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "-rs" in project["tool"]["pytest"]["ini_options"]["addopts"].split()


def test_hooks_call_the_tools_of_lint() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    lint = (ROOT / "scripts" / "lint").read_text()
    for tool in ("ruff check", "ruff format", "mypy"):
        assert f"entry: .venv/bin/{tool}" in hooks
        assert tool in lint


def test_torch_is_pinned_once_and_alike() -> None:
    assert PINS["torch"] == "2.13.0"
    assert "torch==2.13.0" in (ROOT / "scripts" / "setup").read_text()
    assert "torch>=2.13,<2.14" in PROJECT["dependencies"]
    assert "torch==2.13.0" in (ROOT / "scripts" / "release").read_text()


def test_everything_asked_for_is_pinned() -> None:
    asked = [
        *PROJECT["dependencies"],
        *(x for extra in PROJECT["optional-dependencies"].values() for x in extra),
    ]
    names = {re.split(r"[<>=!\[ ]", text)[0] for text in asked}
    assert names <= set(PINS), f"not in constraints.txt: {sorted(names - set(PINS))}"


def test_an_unknown_benchmark_is_a_failure_and_each_named_one_exists() -> None:
    named = re.search(r"scripts/bench ([\w| ]+)\.", (ROOT / "scripts" / "bench").read_text())
    assert named is not None
    wanted = {word.strip() for word in named[1].split("|")}
    assert wanted == set(BENCHMARKS), "scripts/bench names its benchmarks in its second line"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks", "no"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no benchmark 'no'" in done.stderr


def test_results_of_runs_are_not_committed() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {".venv", "/runs/", "/demo/"} <= set(ignored)
