"""The documentation site: every page is in its navigation, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("mkdocs", "material", "mkdocstrings_handlers")


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) == len(set(named)), "a page stands twice in mkdocs.yml"
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert set(named) == pages


def test_the_site_builds(tmp_path: Path) -> None:
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"{', '.join(missing)} not installed; scripts/docs installs it"
        print(reason)
        pytest.skip(reason)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text()
    assert 'id="shoal.train.run.Run.steps"' in reference
    assert 'id="shoal.errors.ConfigError"' in reference
    for page in (tmp_path / "site").rglob("*.html"):
        outside = re.findall(r'(?:src|rel="stylesheet" href)="(https?://[^"]+)"', page.read_text())
        assert not outside, f"{page.name} loads {outside}: pages must open without a network"
