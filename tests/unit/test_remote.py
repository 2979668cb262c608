"""Copies at a URL: what is shown there is whole, what is damaged is refused, and a run never waits for them.

S3 is a real server in a process of its own (moto), spoken to over a socket.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.copies import background as copies
from shoal.checkpoint.copies.background import Copier
from shoal.checkpoint.copies.find_newest import LocalFolder, find_whole
from shoal.checkpoint.copies.keep import Keep
from shoal.checkpoint.copies.remote import Remote, RemotePlace
from shoal.checkpoint.folder import latest, look, open_folder, point_to
from shoal.checkpoint.layout.manifest import FILE, FileFacts, Logical, Manifest, Slice
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.shard_file import checksum, head, place, write_file
from shoal.checkpoint.load import Reader
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.world.world import World

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


def checkpoint(root: Path, step: int, value: float = 0.0, files: int = 3, numel: int = 500) -> Path:
    """A checkpoint as `files` ranks write it, full of one number."""
    folder = root / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    facts, tensors = {}, {}
    for rank in range(files):
        key, name = f"parameter/w{rank}", f"rank-{rank:04}.safetensors"
        data = memoryview(torch.full((numel,), value + rank).numpy().data).cast("B")
        header = head(place([(key, torch.float32, (numel,))]))
        write_file(folder / name, [header, data])
        facts[name] = FileFacts(len(header) + len(data), checksum(header))
        piece = Slice(name, key, Region.whole((numel,)), checksum(data))
        tensors[key] = Logical(torch.float32, (numel,), (piece,))
    manifest = Manifest(folder.name, step, f"{value:010}", "ddp", files, tensors, facts)
    write_file(folder / FILE, [manifest.dumps()])
    return folder


def flip(path: Path) -> None:
    """One bit of the last number."""
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of an S3 server."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed; it is one of the dev extras")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the S3 server did not start"
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of the server, on which there is an empty bucket called `copies`."""
    import boto3

    given = {**KEYS, "AWS_ENDPOINT_URL": server, "AWS_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1"}
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST")).close()
    client = boto3.client("s3")
    client.create_bucket(Bucket="copies")
    yield client
    client.close()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Somewhere to copy to."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    return {
        "memory": f"memory://{tmp_path}",
        "file": f"file://{tmp_path}/copies/of/this",
        "s3": "s3://copies/runs/first",
    }[request.param]


def shown(remote: Remote) -> list[tuple[str, int, bool]]:
    return [(c.name, c.step, c.latest) for c in remote.candidates()]


def test_there_and_back(url: str, tmp_path: Path) -> None:
    remote = Remote(url)
    remote.check()
    assert remote.candidates() == []
    for step in (10, 9):
        remote.upload(checkpoint(tmp_path / "here", step, float(step)))
    assert shown(remote) == [("step-9", 9, True), ("step-10", 10, False)], "the last upload is the latest"
    folder = remote.download("step-10", tmp_path / "there")
    assert folder == tmp_path / "there" / "step-10"
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == {
        f.name: f.read_bytes() for f in (tmp_path / "here" / "step-10").iterdir()
    }
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["latest", "step-10"]
    remote.remove("step-9")
    assert shown(remote) == [("step-10", 10, True)], "a pointer to nothing points to the newest"
    remote.remove("step-9")  # twice is no mistake


def test_the_same_name_again_takes_all_of_the_old_away(url: str, tmp_path: Path) -> None:
    remote = Remote(url)
    remote.upload(checkpoint(tmp_path / "old", 5, 1.0, files=4))
    remote.upload(checkpoint(tmp_path / "new", 5, 2.0, files=2))
    assert len(list(remote.download("step-5", tmp_path / "back").iterdir())) == 3
    assert not any("rank-0003" in path for path in remote._files.find(remote._path))


def test_what_others_do_there_is_seen(url: str, tmp_path: Path) -> None:
    mine, theirs = Remote(url), Remote(url)
    theirs.upload(checkpoint(tmp_path, 1))
    assert shown(mine) == [("step-1", 1, True)]
    theirs.upload(checkpoint(tmp_path, 2))
    assert shown(mine) == [("step-2", 2, True), ("step-1", 1, False)]


def test_what_was_the_latest_here_stays_the_latest(url: str, tmp_path: Path) -> None:
    Remote(url).upload(checkpoint(tmp_path / "a", 3))
    here = tmp_path / "b"
    for step in (4, 5):
        checkpoint(here, step)
    point_to(here, "step-4")
    Remote(url).download("step-3", here)
    assert latest(here) == "step-4"
    assert [found.name for found in look(here)] == ["step-4", "step-5", "step-3"]


def test_a_manifest_that_cannot_be_read_is_shown_as_such(url: str, tmp_path: Path) -> None:
    remote = Remote(url)
    remote.upload(checkpoint(tmp_path, 3))
    text = remote._files.cat_file(remote._at("step-3", FILE))
    remote._files.pipe_file(remote._at("step-3", FILE), text.replace(b'"step":3', b'"step":4'))
    assert shown(remote) == [("step-3", -1, True)]
    with pytest.raises(ConfigError, match=r"step-3/manifest.json cannot be used: it does not match its own"):
        remote.download("step-3", tmp_path / "back")


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_a_damaged_object_is_refused_and_named(s3: Any, tmp_path: Path, damage: str) -> None:
    remote = Remote("s3://copies/run")
    remote.upload(checkpoint(tmp_path / "here", 3))
    where = {"Bucket": "copies", "Key": "run/step-3/rank-0001.safetensors"}
    text = bytearray(s3.get_object(**where)["Body"].read())
    text[-1] ^= 1
    if damage == "lose":
        s3.delete_object(**where)
    else:
        s3.put_object(Body=bytes(text if damage == "flip" else text[:-4]), **where)
    because = {
        "flip": ": 'parameter/w1' does not match its checksum",
        "cut": " has 2076 bytes",
        "lose": ": No such",
    }
    named = f"a copy is damaged (s3://copies/run/step-3/rank-0001.safetensors{because[damage]}"
    with pytest.raises(ConfigError) as raised:
        remote.download("step-3", tmp_path / "there")
    assert str(raised.value).startswith(named)
    assert list((tmp_path / "there").iterdir()) == [], "nothing is left of it"


def test_the_endpoint_may_stand_in_a_config_file(
    s3: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {server}\n")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    Remote("s3://copies/run", waits=()).check()


def test_a_bucket_that_is_not_there_is_not_made(s3: Any) -> None:
    with pytest.raises(ConfigError, match=r"^s3://copiez/run cannot be written to \(.*bucket does not exist"):
        Remote("s3://copiez/run").check()
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["copies"]


class Dies(BaseException):
    """The end of a process, as far as one can have that in the same process."""


def dying(remote: Remote, moments: int) -> Remote:
    """Every operation that changes something is one moment. A copy of a file dies in its middle."""
    left = [moments]

    def watched(action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if action.__name__ in ("pipe_file", "put_file") and "memory" not in remote.title:
                    text = given[1] if action.__name__ == "pipe_file" else Path(given[0]).read_bytes()
                    target = Path(given[0] if action.__name__ == "pipe_file" else given[1])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(text[: len(text) // 2])
                raise Dies
            return action(*given, **named)

        return act

    for name in ("put_file", "pipe_file", "mv", "rm", "rm_file"):
        setattr(remote._files, name, watched(getattr(remote._files, name)))
    return remote


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_whatever_moment_it_dies_at_all_that_is_shown_is_whole(kind: str, tmp_path: Path) -> None:
    first, old, new = (
        checkpoint(tmp_path / "here", 1, 1.0),
        checkpoint(tmp_path / "old", 2, 2.0),
        checkpoint(tmp_path / "new", 2, 3.0),
    )
    for moment in range(1, 100):
        url = f"memory://die-{moment}" if kind == "memory" else f"file://{tmp_path}/{moment}"
        for folder in (first, old):
            Remote(url).upload(folder)
        try:
            dying(Remote(url, waits=()), moment).upload(new)
        except Dies:
            values = whole_copies(Remote(url), tmp_path / f"back-{moment}")
            assert values["step-1"] == 1.0
            assert values.get("step-2") in (None, 2.0, 3.0)
            Remote(url).upload(new)  # and it can be done again
            assert whole_copies(Remote(url), tmp_path / f"again-{moment}") == {"step-1": 1.0, "step-2": 3.0}
        else:
            break
    assert moment > 2 + 3 + 3, "it died at each of its moments"


def whole_copies(remote: Remote, into: Path) -> dict[str, float]:
    """The number in each of the copies that are shown; each of them must be whole, and of one mould."""
    found = {}
    for candidate in remote.candidates():
        assert candidate.step >= 0
        reader = Reader.of(open_folder(remote.download(candidate.name, into)))
        numbers = {float(reader.read(f"parameter/w{rank}")[0]) - rank for rank in range(3)}
        reader.close()
        assert len(numbers) == 1
        found[candidate.name] = numbers.pop()
    return found


UPLOADER = """
import os, sys
from pathlib import Path
import s3fs
from shoal.checkpoint.copies.remote import Remote
for line in sys.stdin:
    if os.fork() == 0:  # nothing has been connected or started yet
        remote = Remote("s3://copies/run")
        remote.candidates()
        print(os.getpid(), flush=True)
        remote.upload(Path(line.strip()))
        os._exit(0)
    print(os.wait()[1], flush=True)
"""


def test_an_upload_that_is_killed_shows_nothing_that_is_not_whole(s3: Any, tmp_path: Path) -> None:
    """Real kills, one in each fifth of the time that an upload takes."""
    del s3
    folder = checkpoint(tmp_path / "new", 2, 3.0, files=3, numel=2_600_000)  # 31 MB
    remote = Remote("s3://copies/run")
    remote.upload(checkpoint(tmp_path / "here", 1, 1.0))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    takes, seen = 0.0, []
    with subprocess.Popen([sys.executable, "-c", UPLOADER], **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for seed in (None, 0, 1, 2, 3, 4):
            remote.remove("step-2")
            process.stdin.write(f"{folder}\n")
            uploader, begin = int(process.stdout.readline()), time.monotonic()
            if seed is not None:
                time.sleep(takes * (seed + random.Random(seed).random()) / 5)
                with suppress(ProcessLookupError):  # it was faster than the first
                    os.kill(uploader, signal.SIGKILL)
            process.stdout.readline()
            takes = takes or time.monotonic() - begin
            values = whole_copies(remote, tmp_path / f"back-{seed}")
            assert values.pop("step-1") == 1.0
            assert values in ({}, {"step-2": 3.0})
            seen.append(values)
        process.stdin.close()
    assert seen[0], "left alone it is copied"
    assert {} in seen, "none was killed in time"


def test_clean_removes_halves_and_nothing_else(url: str, tmp_path: Path) -> None:
    remote = Remote(url)
    remote.upload(checkpoint(tmp_path, 1))
    remote._files.pipe_file(remote._at("step-2", "rank-0000.safetensors"), b"half")
    remote._files.pipe_file(remote._at("photos", "holiday.jpg"), b"not ours")
    remote._files.pipe_file(remote._at("photos", "rank-0001.safetensors"), b"not ours")
    remote.clean()
    left = sorted(path.rpartition("/")[2] for path in remote._files.find(remote._path))
    expected = ["holiday.jpg", "latest", FILE, *(f"rank-000{n}.safetensors" for n in (0, 1, 1, 2))]
    assert left == sorted(expected)


def test_what_may_pass_is_tried_again_and_what_may_not_is_not(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "here", 1)
    for error, failures, tries in (
        (OSError("busy"), 2, 3),
        (OSError("busy"), 9, 3),
        (PermissionError("no"), 9, 1),
    ):
        remote = Remote(f"file://{tmp_path}/{failures}-{tries}", waits=(0, 0))
        real, calls = remote._files.mv, []

        def fails(
            *given: Any, real: Any = real, calls: Any = calls, e: Any = error, n: int = failures
        ) -> None:
            calls.append(given)
            if len(calls) <= n:
                raise e
            real(*given)

        remote._files.mv = fails
        if failures > len(remote._waits):
            with pytest.raises(ConfigError, match=rf"cannot be written to \({error}\); check the address"):
                remote.upload(folder)
            assert remote.candidates() == []
        else:
            remote.upload(folder)
            assert shown(remote) == [("step-1", 1, True)]
        assert len(calls) == tries


def test_a_folder_that_changes_meanwhile_is_not_shown(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/copies")
    folder = checkpoint(tmp_path / "here", 1, 1.0)
    with pytest.raises(ConfigError, match="changed while it was copied"):
        remote.upload(folder, lambda *_: checkpoint(tmp_path / "here", 1, 2.0) and None)
    assert remote.candidates() == []


@pytest.mark.parametrize("name", ["", "latest", "../other", ".hidden", "step-*", "step-[12]"])
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/copies")
    remote.upload(checkpoint(tmp_path, 1))
    for action in (remote.remove, lambda name: remote.download(name, tmp_path)):
        with pytest.raises(ConfigError, match=r"cannot be called|has one of the signs"):
            action(name)
    assert shown(remote) == [("step-1", 1, True)]


def test_a_pattern_is_no_place() -> None:
    with pytest.raises(ConfigError, match=r"'/runs/\*' has one of the signs"):
        Remote("memory://runs/*")


def test_what_is_not_there_and_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    registry: Any = importlib.import_module("fsspec.registry")
    with pytest.raises(ConfigError, match=r"foo://x cannot be opened \(Protocol not known: foo\)"):
        Remote("foo://x")
    with pytest.raises(ConfigError, match="only a whole checkpoint can be copied"):
        Remote("memory://x").upload(tmp_path / "nothing")
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        ConfigError, match=r"s3://copies needs a package .*s3fs.*pip install 'shoal\[remote\]'"
    ):
        Remote("s3://copies")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"fsspec.*pip install 'shoal\[remote\]'"):
        Remote("memory://x")


def test_passwords_are_not_shown() -> None:
    remote = Remote("webhdfs://me:secret@127.0.0.1:1/run", waits=())
    assert remote.title == "webhdfs://127.0.0.1:1/run"
    with pytest.raises(ConfigError, match="cannot be listed") as raised:
        remote.candidates()
    assert "secret" not in str(raised.value)
    assert "?op=" not in str(raised.value)


# Going on from a copy.


def test_a_damaged_folder_is_replaced_by_its_copy(
    s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del s3
    world, remote = World.alone(), Remote("s3://copies/run")
    checkpoint(tmp_path, 1)
    remote.upload(checkpoint(tmp_path, 2, 7.0))
    flip(tmp_path / "step-2" / "rank-0002.safetensors")
    found = find_whole(world, [LocalFolder(world, tmp_path), RemotePlace(world, remote, tmp_path)])
    assert found is not None
    assert found.folder == tmp_path / "step-2"
    assert list(verify(found)) == []
    reader = Reader.of(found)
    assert reader.read("parameter/w2")[0] == 9.0
    reader.close()
    assert "rank-0002.safetensors: 'parameter/w2' does not match its checksum" in capsys.readouterr().err


def meet(world: World, folder: str) -> list[str]:
    """What a rank sees of a damaged copy, and of copies that cannot be reached."""
    root, url = Path(folder) / "run", f"file://{folder}/copies"
    place = RemotePlace(world, Remote(url, waits=()), root)
    found = find_whole(world, [LocalFolder(world, root), place])
    assert found is not None
    said = [str(found.folder), str(place.bring("step-9"))]
    for where in (root, Path(folder) / "empty"):
        lost = RemotePlace(world, Remote("webhdfs://127.0.0.1:1/run", waits=()), where)
        try:
            said.append(f"{len(lost.candidates())} candidates")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_all_ranks_see_the_same_whatever_rank_0_meets(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", 1)
    Remote(f"file://{tmp_path}/copies").upload(checkpoint(tmp_path / "newer", 2))
    flip(tmp_path / "copies" / "step-2" / "rank-0001.safetensors")
    said = spawn(meet, 2, str(tmp_path))
    assert said[0] == said[1]
    going_on, nothing, unreachable, refused = said[0]
    assert going_on == f"{tmp_path}/run/step-1"
    assert nothing == f"file:{tmp_path}/copies/step-9"
    assert not Path(nothing).exists()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-1"]
    assert unreachable == "0 candidates", "there is something to go on from here"
    assert refused.startswith(
        f"there is no checkpoint in {tmp_path}/empty, and webhdfs://127.0.0.1:1/run cannot"
    )


# Copies while training goes on.


class Slow(Remote):
    """Uploads wait at a gate."""

    def __init__(self, url: str) -> None:
        super().__init__(url, waits=())
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def upload(self, folder: Path, tell: Callable[[int, int], None] | None = None) -> None:
        self.begun.release()
        assert self.gate.acquire(timeout=60)
        super().upload(folder, tell)


def test_a_slow_line_holds_nobody_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_QUIET", 0.05)
    remote = Slow(f"file://{tmp_path}/copies")
    copier = Copier(remote, Keep(last=3))
    folders = [checkpoint(tmp_path / "here", step) for step in (1, 2, 3, 4)]
    assert copier.busy() == set()
    copier.add(folders[0])
    assert remote.begun.acquire(timeout=60)
    begin = time.monotonic()
    for folder in folders[1:3]:
        copier.add(folder)
    assert time.monotonic() - begin < 1.0
    assert copier.busy() == {"step-1", "step-3"}, "the newest has taken the place of the one that waited"
    assert remote.candidates() == []
    remote.gate.release()
    threading.Timer(0.3, remote.gate.release).start()
    copier.close()
    assert [c.name for c in remote.candidates()] == ["step-3", "step-1"]
    assert f"shoal: waiting for the copy of step-3 to file://{tmp_path}/copies (" in capsys.readouterr().err
    assert copier.busy() == set()
    remote.gate.release()
    copier.add(folders[3])  # a run may go on after it has waited
    copier.close()
    assert [c.name for c in remote.candidates()] == ["step-4", "step-3", "step-1"]


def full(*_: Any) -> None:
    raise OSError("the disk is full")


def test_a_failure_is_said_and_the_next_one_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = Remote(f"file://{tmp_path}/copies", waits=())
    copier = Copier(remote, Keep(last=1))
    real = remote._files.put_file

    for step, broken in ((100, False), (300, True), (400, False)):
        remote._files.put_file = full if broken else real
        copier.add(checkpoint(tmp_path / "here", step))
        copier.close()
    assert [c.name for c in remote.candidates()] == ["step-400"], "old copies go too"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"shoal: the copy of step-300 to file://{tmp_path}/copies failed (file://")
    assert "the disk is full" in said[0]
    assert said[0].endswith("training goes on, and the next checkpoint will be copied again.")


def test_what_has_no_copy_in_the_end_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote = Remote(f"file://{tmp_path}/copies", waits=())
    copier = Copier(remote, Keep())
    real = remote._files.put_file
    for step, broken in ((1, True), (2, False), (3, True), (4, True)):
        remote._files.put_file = full if broken else real
        copier.add(checkpoint(tmp_path / "here", step))
        copier.close()
    capsys.readouterr()
    copier.say_what_is_missing()
    where = f"{tmp_path / 'here'} file://{tmp_path}/copies"
    assert capsys.readouterr().err == (
        f"shoal: step-3, step-4 have no copy at file://{tmp_path}/copies; in {tmp_path / 'here'} they are whole. Once "
        f"that place answers, `shoal ckpt copy {where}` makes up for it.\n"
    )
    copier.say_what_is_missing()
    assert capsys.readouterr().err == "", "once is enough"


AWAY = """
import shoal, torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.ones(32, 1), torch.ones(32, 1))
run = shoal.Run(model=lambda: nn.Linear(1, 1), loss=lambda output, batch: ((output - batch[1]) ** 2).mean(),
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1), data=data, global_batch=8, log=None,
                progress=False, checkpoint="kept", checkpoint_every=2, copies="s3://copies/run")
for remote in run._checkpoints._remotes:
    remote._waits = ()
for step in run.steps(4):
    if step.number == 3:
        run._checkpoints._saver.idle()
        run._checkpoints._copiers[0].close()
        run._checkpoints._remotes[0]._files.client_kwargs["endpoint_url"] = "http://127.0.0.1:9"
        run._checkpoints._remotes[0]._files.connect(refresh=True)
print("after the loop")
"""


def test_s3_that_is_away_at_the_end(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has all it needs: what comes after its loop runs, and the exit code is 0."""
    del s3
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    script = [sys.executable, "-c", AWAY]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "after the loop\n"), done.stderr
    assert "the copy of step-4 to s3://copies/run failed (" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"shoal: step-4 has no copy at s3://copies/run; in {tmp_path}/kept they are whole."
    ), last
    assert shown(Remote("s3://copies/run")) == [("step-2", 2, True)]


def test_a_copy_that_does_not_answer_is_not_damaged(tmp_path: Path) -> None:
    """It was listed, and is newer than what is here: no older one in its place."""
    checkpoint(tmp_path / "here", 1)
    remote = Remote(f"file://{tmp_path}/copies", waits=())
    remote.upload(checkpoint(tmp_path / "there", 2))
    remote._files.get_file = full
    world = World.alone()
    places = [LocalFolder(world, tmp_path / "here"), RemotePlace(world, remote, tmp_path / "here")]
    with pytest.raises(
        ConfigError, match=r"the disk is full.*copy of step-2 there is the newest checkpoint, and this"
    ):
        find_whole(world, places)


def test_old_copies_that_cannot_go_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote(f"file://{tmp_path}/copies", waits=())
    copier = Copier(remote, Keep(last=1))
    real = remote.remove
    for step in (1, 2):
        copier.add(checkpoint(tmp_path / "here", step))
        copier.close()
        monkeypatch.setattr(remote, "remove", lambda name: full() if name == "step-1" else real(name))
    assert [c.name for c in remote.candidates()] == ["step-2", "step-1"]
    expected = (
        f"shoal: old copies at file://{tmp_path}/copies could not be removed (the disk is full); they stay.\n"
    )
    assert capsys.readouterr().err == expected


def test_the_copier_steps_back_and_clears_what_earlier_runs_left(tmp_path: Path) -> None:
    remote = Slow(f"file://{tmp_path}/copies")
    remote._files.pipe_file(remote._at("step-7", "rank-0000.safetensors"), b"half")
    copier = Copier(remote, Keep())
    copier.add(checkpoint(tmp_path / "here", 8))
    assert remote.begun.acquire(timeout=60)
    thread = copier._thread
    assert thread is not None
    assert thread.daemon, "a run that fails must be able to end"
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) >= 10
    remote.gate.release()
    copier.close()
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["latest", "step-8"]
