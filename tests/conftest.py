"""What every test shares: `--all`, the examples that hypothesis draws, and the order of the files."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start what runs in the background that way, and so would every process of a test that is to be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "grid",
    "server_kills",
    "simulation",
    "exchanges",
    "any_to_any",
    "hybrids",
    "bits",
    "zero3",
    "examples",
)
"""They go first: so that, at the end of a run of several files at a time, nobody waits for one of them."""

MORE_SECONDS = 60.0
"""For fixtures, and for pytest-timeout to have its try first."""
ERRORS = pytest.StashKey[int]()
"""The standard error that tests have not redirected."""

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("all", derandomize=False, database=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="every cell of the large products and every repetition; hypothesis draws anew in each run",
    )


def pytest_configure(config: pytest.Config) -> None:
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[ERRORS] = os.dup(2)
    if not config.getoption("--hypothesis-profile", None):
        settings.load_profile("all" if config.getoption("--all") else "repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))  # the rest stays in its order
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("all_only")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("all_only")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that is over its time is ended by pytest-timeout, in Python. One that never comes back to Python, as in a
    lock of a library, would hold up the run for ever: its process ends, with the stacks of all threads, and xdist names
    the test and goes on with another process."""
    limit = item.get_closest_marker("timeout")
    seconds = float(limit.args[0] if limit else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + MORE_SECONDS, exit=True, file=item.config.stash[ERRORS])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether this is a run with `--all`."""
    return bool(request.config.getoption("--all"))
