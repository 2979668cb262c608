"""Which checkpoints stay, and that what goes is never seen half gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.copies.keep import Keep, Retention, prune, prune_remote
from shoal.checkpoint.copies.remote import Remote
from shoal.checkpoint.folder import clean, look, point_to
from shoal.checkpoint.layout.manifest import FILE, FileFacts, Manifest
from shoal.errors import ConfigError
from shoal.sealed import seal, unseal

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


def empty_checkpoint(root: Path, name: str, step: int, keep: str = "", size: int = 0) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    files = {"rank-0000.safetensors": FileFacts(size, "")} if size else {}
    manifest = Manifest(name, step, f"2026-01-01T00:00:{step:02}", "solo", 1, {}, files, keep=keep)
    (folder / FILE).write_bytes(manifest.dumps())
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


def test_a_run_removes_only_what_goes_by_its_own_retention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, keep in ((1, "none"), (2, "2"), (3, ""), (4, "2"), (5, "last=2, every=4")):
        empty_checkpoint(tmp_path, f"step-{step}", step, keep)
    empty_checkpoint(tmp_path, "best", 1, "2")
    retention = Retention(Keep(2))
    for step in (6, 7, 8):
        retention.after(
            empty_checkpoint(tmp_path, f"step-{step}", step, "2"), {"step-4"} if step == 7 else ()
        )
        point_to(tmp_path, f"step-{step}")
    assert names(tmp_path) == {"best", "step-1", "step-3", "step-5", "step-7", "step-8"}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert (
        "has 3 checkpoints that were saved under another retention than checkpoint_keep=2: they stay"
        in told[0]
    )
    assert told[1].startswith(
        f"shoal: checkpoint_keep=2 removes step-2 from {tmp_path} now, and from here on one for"
    )


def test_nothing_goes_where_the_new_one_is_not_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retention = Retention(Keep(1))
    for step in (1, 2):
        empty_checkpoint(tmp_path, f"step-{step}", step, "1")
    new = empty_checkpoint(tmp_path, "step-3", 3, "1", size=7)
    for data in (None, b"123456"):
        if data is not None:
            (new / "rank-0000.safetensors").write_bytes(data)
        retention.after(new, ())
        assert names(tmp_path) == {"step-1", "step-2", "step-3"}
        assert "although it has just been written; no older checkpoint is removed" in capsys.readouterr().err
    (new / "rank-0000.safetensors").write_bytes(b"1234567")
    retention.after(new, ())
    assert names(tmp_path) == {"step-3"}


def test_what_nobody_can_read_is_not_removed(root: Path) -> None:
    body = unseal((root / "step-1" / FILE).read_bytes())
    (root / "step-1" / FILE).write_bytes(seal({**body, "format": 2}))
    assert prune(root, Keep(last=1)) == ["step-2", "step-3", "step-4"]
    assert names(root) == {"best", "step-1", "step-5"}


def test_copies_are_pruned_by_the_same_rule(root: Path) -> None:
    remote = Remote("memory://test-keep")
    for step in (1, 2, 3, 4):
        remote.upload(root / f"step-{step}")
    remote.upload(root / "best")
    remote.upload(root / "step-2")  # and so the latest
    assert prune_remote(remote, Keep(last=1), spare={"step-3"}) == ["step-1"]
    assert [c.name for c in remote.candidates()] == ["step-2", "step-4", "step-3", "best"]
    assert prune_remote(remote, Keep(last=1), own="1") == [], "none of them was saved under this one"
