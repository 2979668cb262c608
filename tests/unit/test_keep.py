"""Which checkpoints stay, and that what goes is never seen half gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.copies.keep import Keep, prune, prune_remote
from shoal.checkpoint.copies.remote import Remote
from shoal.checkpoint.folder import clean, look, point_to
from shoal.checkpoint.layout.manifest import FILE, Manifest
from shoal.errors import ConfigError

Found = list[tuple[str, int, bool]]
OTHERS = ("best", "step-x", "my-step-3", "step-3-tuned")


@st.composite
def folders(draw: st.DrawFn) -> Found:
    """Automatic and other names, some with a manifest that cannot be read, at most one the latest."""
    steps = draw(st.lists(st.integers(0, 60), unique=True))
    damaged = draw(st.sets(st.sampled_from(steps))) if steps else set()
    found = [(f"step-{n}", -1 if n in damaged else n, False) for n in steps]
    found += [(name, draw(st.integers(-1, 60)), False) for name in OTHERS]
    found = draw(st.permutations(found))
    latest = draw(st.sampled_from([None, *(name for name, _, _ in found)]))
    return [(name, step, name == latest) for name, step, _ in found]


def automatic(found: Found) -> Found:
    return [entry for entry in found if entry[0] not in OTHERS]


@given(folders(), st.integers(1, 6), st.integers(0, 7))
def test_what_must_stay_stays(found: Found, last: int, every: int) -> None:
    victims = Keep(last, every).victims(found)
    left = [entry for entry in found if entry[0] not in victims]
    assert len(set(victims)) == len(victims)
    assert [entry for entry in left if entry[2]] == [entry for entry in found if entry[2]], "the latest"
    assert {n for n, _, _ in found} - {n for n, _, _ in automatic(found)} <= {n for n, _, _ in left}
    whole = sorted((step for _, step, _ in automatic(found) if step >= 0), reverse=True)
    kept = {step for _, step, _ in automatic(left) if step >= 0}
    assert set(whole[:last]) <= kept, "the last"
    if every:
        assert {step for step in whole if step % every == 0} <= kept, "every so many"
    assert Keep(last, every).victims(left) == [], "a second time changes nothing"


@given(folders(), st.integers(1, 6), st.integers(0, 7))
def test_nothing_else_stays(found: Found, last: int, every: int) -> None:
    victims = Keep(last, every).victims(found)
    whole = sorted((step for _, step, _ in automatic(found) if step >= 0), reverse=True)
    for name, step, latest in automatic(found):
        wanted = latest or step in whole[:last] or (every > 0 and step % every == 0)
        if step >= 0:
            assert (name in victims) == (not wanted)


@given(folders())
def test_without_a_number_all_stay(found: Found) -> None:
    assert Keep.of(None).victims(found) == []


def test_a_damaged_one_does_not_push_out_a_whole_one() -> None:
    found = [("step-4", -1, True), ("step-3", 3, False), ("step-2", 2, False), ("step-1", -1, False)]
    assert Keep(last=2).victims(found) == []
    assert Keep(last=1).victims(found) == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (3, Keep(3)),
        ("3", Keep(3)),
        ("last=3, every=1000", Keep(3, 1000)),
        ("5, 100", Keep(5, 100)),
        ("every=100", Keep(3, 100)),
        ("none", Keep(None)),
        (None, Keep(None)),
    ],
)
def test_what_people_write(text: int | str | None, expected: Keep) -> None:
    assert Keep.of(text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (0, "last=0 would leave nothing to go on from"),
        ("-1", "last=-1 would leave nothing to go on from"),
        ("every=-5", "every=-5 is not a number of steps"),
        ("lsat=3", "keep has no option 'lsat'"),
        ("last=x", "last=x should be int"),
        ("3 4", "a '\\)' is missing"),
        ("3)", "cannot read"),
        ("3, last=3", "gives last twice"),
    ],
)
def test_what_cannot_be_kept(text: int | str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Keep.of(text)


def empty_checkpoint(root: Path, name: str, step: int) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(
        Manifest(name, step, f"2026-01-01T00:00:{step:02}", "solo", 1, {}, {}).dumps()
    )
    return folder


def names(root: Path) -> set[str]:
    return {found.name for found in look(root)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4, 5):
        empty_checkpoint(tmp_path, f"step-{step}", step)
    empty_checkpoint(tmp_path, "best", 1)
    point_to(tmp_path, "step-5")
    return tmp_path


def test_prune_removes_and_spares(root: Path) -> None:
    assert prune(root, Keep(last=1), spare={"step-2"}) == ["step-1", "step-3", "step-4"]
    assert names(root) == {"best", "step-2", "step-5"}
    assert {path.name for path in root.iterdir()} == {"best", "step-2", "step-5", "latest"}


def test_latest_stays_though_somebody_moved_it_back(root: Path) -> None:
    point_to(root, "step-2")
    prune(root, Keep(last=1))
    assert names(root) == {"best", "step-2", "step-5"}


def test_the_one_left_between_two_renames_can_go(root: Path) -> None:
    (root / "step-1").rename(root / ".step-1.old")
    prune(root, Keep(last=3))
    assert names(root) == {"best", "step-3", "step-4", "step-5"}
    assert not (root / ".step-1.old").exists()


def test_half_a_removal_is_no_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dies as soon as it begins to remove files."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        prune(root, Keep(last=3))
    assert names(root) == {"best", "step-3", "step-4", "step-5"}
    assert len(list(root.glob(".*"))) == 2, "what is left over is still there"
    clean(root)
    assert not list(root.glob(".*"))


def test_copies_are_pruned_by_the_same_rule(root: Path) -> None:
    remote = Remote("memory://test-keep")
    for step in (1, 2, 3, 4):
        remote.upload(root / f"step-{step}")
    remote.upload(root / "best")
    remote.upload(root / "step-2")  # and so the latest
    assert prune_remote(remote, Keep(last=1), spare={"step-3"}) == ["step-1"]
    assert [c.name for c in remote.candidates()] == ["step-2", "step-4", "step-3", "best"]
