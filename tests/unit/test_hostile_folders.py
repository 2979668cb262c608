"""What else may lie in a folder of checkpoints: each is told in one sentence, nothing hangs, nothing whole is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint.copies.find_newest import LocalFolder, find_whole
from shoal.checkpoint.folder import Unreadable, abandon, glance, look, open_folder
from shoal.checkpoint.layout.head import FILE, read_head
from shoal.checkpoint.layout.manifest import Manifest
from shoal.checkpoint.layout.shard_file import ShardFile
from shoal.errors import ConfigError
from shoal.sealed import seal, unseal
from shoal.world.world import World

NOBODY = 65534
SHARD = "rank-0000.safetensors"


def run(folder: Path, **changes: Any) -> shoal.Run:
    data = TensorDataset(torch.arange(32.0).view(32, 1), torch.ones(32, 1))
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "loss": lambda output, batch: ((output - batch[1]) ** 2).mean(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "data": data,
        "global_batch": 8,
        "strategy": "solo",
        "checkpoint": str(folder),
        "checkpoint_every": 1,
        "log": None,
        "progress": False,
    }
    return shoal.Run(**{**settings, **changes})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints of a run."""
    folder = tmp_path / "kept"
    list(run(folder).steps(3))
    return folder


def rewrite(root: Path, step: int, change: Callable[[Any], Any]) -> None:
    """A manifest with a right checksum and other contents."""
    file = root / f"step-{step}" / FILE
    body = unseal(file.read_bytes())
    file.write_bytes(seal(change(body)))


def without(key: str) -> Callable[[Any], Any]:
    return lambda body: {name: value for name, value in body.items() if name != key}


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def resumed(root: Path) -> int:
    return run(root)._progress.step


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: [1, 2], "it holds a list, and a manifest is an object"),
        (without("state"), "an entry is missing or of the wrong kind ('state')"),
        (lambda body: {**body, "state": []}, "an entry is missing or of the wrong kind ('state')"),
        (lambda body: {**body, "step": -3}, "its step is -3, and steps are counted from 0"),
        (lambda body: {**body, "step": True}, "its step is True"),
        (lambda body: {**body, "tensors": [1]}, "an entry is missing or of the wrong kind ('tensors')"),
        (lambda body: {**body, "files": {SHARD: 3}}, "an entry is missing or of the wrong kind"),
        (lambda body: {**body, "tensors": {"parameter/w": [1]}}, "an entry is missing or of the wrong kind"),
    ],
)
def test_a_manifest_that_is_none_is_one_sentence(
    root: Path, change: Callable[[Any], Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(root, 3, change)
    found = open_folder(root / "step-3")
    assert found.manifest is None
    assert words in found.problem
    assert not found.unreadable
    assert resumed(root) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(told) == 1
    assert words in told[0]


def test_a_state_that_no_run_has_written_is_one_sentence(root: Path) -> None:
    for state, words in (({}, "lacks 'optimizer'"), ({"optimizer": 3}, "has 3 as 'optimizer'")):
        rewrite(root, 3, lambda body, state=state: {**body, "state": state})  # type: ignore[misc]
        with pytest.raises(ConfigError, match=f"step-3 {words} of its state, so no run can go on from it"):
            run(root)


@pytest.mark.parametrize(
    ("key", "value"),
    [("replicas", None), ("numbers", [True]), ("streams", []), ("early_stop", "x"), ("best", 3)],
)
def test_what_else_a_state_may_have_is_looked_at_too(root: Path, key: str, value: object) -> None:
    rewrite(root, 3, lambda body: {**body, "state": {**body["state"], key: value}})
    with pytest.raises(ConfigError, match=f"'{key}' of its state, so no run can go on from it"):
        resumed(root)


@pytest.mark.parametrize("name", [f"step-3/{FILE}", f"step-3/{SHARD}"])
def test_a_fifo_holds_nobody_up(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(root / name)
    assert resumed(root) == 2
    assert "it is a FIFO, and no file" in capsys.readouterr().err


def test_a_pointer_or_a_lock_that_is_a_fifo(root: Path) -> None:
    pipe(root / "latest")
    assert resumed(root) == 3
    (root / FILE).symlink_to("/dev/zero")
    assert open_folder(root).problem.endswith("it is a device, and no file")
    os.mkfifo(root / ".lock")
    with pytest.raises(
        ConfigError, match=r"\.lock is no lock of a run \(it is a FIFO, and no file\); remove it"
    ):
        run(root)


@contextmanager
def as_nobody(folder: Path) -> Iterator[Path]:
    """As a user who may not do everything; the folder seen from where that user may be."""
    before = Path.cwd()
    os.chdir(folder.parent)
    folder.parent.chmod(0o755)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield Path(folder.name)
    finally:
        if is_root:
            os.seteuid(0)
        os.chdir(before)


@pytest.mark.parametrize("closed", ["step-3", f"step-3/{FILE}", f"step-3/{SHARD}"])
def test_what_may_not_be_read_is_not_damaged(root: Path, closed: str) -> None:
    """Never an older checkpoint in its place, and nothing is called otherwise."""
    before = sorted(path.name for path in root.iterdir())
    (root / closed).chmod(0)
    with as_nobody(root) as here, pytest.raises(Unreadable) as raised:
        find_whole(World.alone(), [LocalFolder(World.alone(), here)])
    assert "cannot be used: Permission denied. It may be whole, so this run neither goes on" in str(
        raised.value
    )
    assert "kept/step-3" in str(raised.value)
    assert sorted(path.name for path in root.iterdir()) == before
    (root / closed).chmod(0o755)
    assert resumed(root) == 3


def test_a_newer_format_is_not_damaged(root: Path) -> None:
    rewrite(root, 3, lambda body: {**body, "format": 2})
    with pytest.raises(
        ConfigError, match=r"it has format 2, and this version of shoal reads 1\. It may be whole"
    ):
        run(root)
    assert (root / "step-3").is_dir()


def test_a_device_that_fails_is_not_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.checkpoint.folder as folders

    real = folders.read_file

    def slow(path: Path) -> bytes:
        if path == root / "step-3" / FILE:
            raise TimeoutError(110, "Connection timed out", str(path))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(folders, "read_file", slow)
        with pytest.raises(
            ConfigError, match=r"step-3.* cannot be used: Connection timed out\. It may be whole"
        ):
            run(root)
    assert resumed(root) == 3


def test_what_is_closed_and_older_is_in_nobodys_way(root: Path) -> None:
    rewrite(root, 1, lambda body: {**body, "format": 2})
    (root / "lost+found").mkdir()
    (root / "lost+found").chmod(0)
    with as_nobody(root) as here:
        found = find_whole(World.alone(), [LocalFolder(World.alone(), here)])
    assert found is not None
    assert found.name == "step-3"
    assert [entry.name for entry in look(root)] == ["step-3", "step-2", "step-1"]


def test_a_folder_that_nobody_may_look_into_is_one_sentence(root: Path) -> None:
    root.chmod(0)
    with (
        as_nobody(root) as here,
        pytest.raises(ConfigError, match=r"kept cannot be looked into \(Permission denied\)"),
    ):
        find_whole(World.alone(), [LocalFolder(World.alone(), here)])
    root.chmod(0o755)


def test_what_is_set_aside_is_never_removed(root: Path) -> None:
    for turn in (1, 2, 3):
        names = abandon(root, 2)
        assert names == {"step-3": "step-3.abandoned" if turn == 1 else f"step-3.abandoned-{turn}"}
        shutil.copytree(root / "step-2", root / "step-3")
        rewrite(root, 3, lambda body: {**body, "step": 3})
    assert set(glance(root)) == {"step-1", "step-2", "step-3"}
    shutil.rmtree(root / "step-3")
    list(run(root).steps(8))
    assert {path.name for path in root.iterdir()} == {
        *("step-6", "step-7", "step-8", "latest"),
        *("step-3.abandoned", "step-3.abandoned-2", "step-3.abandoned-3"),
    }


def test_five_thousand_checkpoints_are_not_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a folder, and a run that goes on, read the tensors of one manifest."""
    body = unseal((root / "step-3" / FILE).read_bytes())
    for step in range(4, 5001):
        folder = root / f"step-{step}"
        folder.mkdir()
        (folder / FILE).write_bytes(seal({**body, "name": folder.name, "step": step}))
        os.link(root / "step-3" / SHARD, folder / SHARD)
    read: list[str] = []
    real_loads, real_open = Manifest.loads, ShardFile.__init__

    def loads(text: bytes) -> Manifest:
        read.append(read_head(text).name)
        return real_loads(text)

    def opened(self: ShardFile, path: Path) -> None:
        read.append(path.parent.name)
        real_open(self, path)

    monkeypatch.setattr(Manifest, "loads", staticmethod(loads))
    monkeypatch.setattr(ShardFile, "__init__", opened)
    assert len(glance(root)) == 5000
    assert read == []
    (root / "latest").write_bytes(seal("step-4999"))
    assert resumed(root) == 4999
    assert set(read) == {"step-4999"}
    assert (root / "step-5000.abandoned").is_dir()
