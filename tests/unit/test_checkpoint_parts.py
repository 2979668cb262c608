"""The pure parts of a checkpoint: regions, who writes what, manifests; and every flipped bit."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from shoal.checkpoint.copies.find_newest import LocalFolder, find_whole
from shoal.checkpoint.folder import LATEST, look, open_folder
from shoal.checkpoint.layout.manifest import FILE, Manifest
from shoal.checkpoint.layout.region import Region, covers
from shoal.checkpoint.layout.write_plan import Holding, assign
from shoal.checkpoint.load import Reader
from shoal.checkpoint.reports import Facts
from shoal.checkpoint.save import Saver, State
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError
from shoal.world.world import World

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def cut_tensors(draw: st.DrawFn) -> list[Region]:
    """One tensor, cut along a dimension among some, and flat among others: a region for each of them."""
    shape = draw(shapes)
    degree, owners = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if not shape:
        return [Region.whole(shape)]
    dim = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=degree - 1, max_size=degree - 1)))
    spans = list(zip([0, *edges], [*edges, shape[dim]], strict=True))
    found = []
    for low, high in spans:
        part = Region(shape, dim, ((low, high - low),), 0, 0)
        size = math.prod(part.part_shape)
        borders = sorted(draw(st.lists(st.integers(0, size), min_size=owners - 1, max_size=owners - 1)))
        for start, stop in zip([0, *borders], [*borders, size], strict=True):
            found.append(Region(shape, dim, part.spans, start, stop))
    return found


@given(cut_tensors())
def test_regions_that_are_cut_from_a_tensor_cover_it(regions: list[Region]) -> None:
    assert covers(regions)
    for number, region in enumerate(regions):
        if region.numel:
            assert not covers([r for i, r in enumerate(regions) if i != number])
    assert [Region.from_json(r.shape, json.loads(json.dumps(r.to_json()))) for r in regions] == regions


def saved(root: Path, ranks: list[State]) -> None:
    """What several ranks would write, each alone: their savers differ in rank only."""
    listed = [[holding for holding, _ in state] for state in ranks]
    writes = assign(listed)
    merged = []
    for state, mine in zip(ranks, writes, strict=True):
        for write in mine:
            holding, tensor = state[write.holding]
            part = tensor.reshape(-1)[write.start : write.start + write.region.numel]
            merged.append((Holding(holding.path, write.region, holding.dtype), part))
    saver = Saver(World.alone(), root)
    saver.save(merged, Facts("all", 1, "test", {}))
    saver.wait()


@settings(max_examples=60, deadline=None)
@given(cut_tensors(), st.data())
def test_any_cut_is_read_as_any_other(regions: list[Region], data: st.DataObject) -> None:
    shape = regions[0].shape
    whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        saved(
            Path(folder),
            [[(Holding("parameter/w", r, whole.dtype), r.of(whole))] for r in regions if r.numel],
        )
        reader = Reader.of(open_folder(Path(folder) / "all"))
        assert torch.equal(reader.read("parameter/w"), whole)
        dim = data.draw(st.integers(0, max(len(shape) - 1, 0)))
        if shape:
            low = data.draw(st.integers(0, shape[dim]))
            high = data.draw(st.integers(low, shape[dim]))
            part = Region(shape, dim, ((low, high - low),), 0, 0)
            size = math.prod(part.part_shape)
            start = data.draw(st.integers(0, size))
            wanted = Region(shape, dim, part.spans, start, data.draw(st.integers(start, size)))
            assert torch.equal(reader.read("parameter/w", wanted), wanted.of(whole))
        reader.close()


@given(
    st.lists(
        st.tuples(st.integers(1, 600_000), st.sets(st.integers(0, 4), min_size=1)), min_size=1, max_size=8
    )
)
def test_everything_is_written_once_and_evenly(tensors: list[tuple[int, set[int]]]) -> None:
    ranks: list[list[Holding]] = [[] for _ in range(5)]
    for number, (size, holders) in enumerate(tensors):
        for rank in holders:
            ranks[rank].append(Holding(f"parameter/{number}", Region.whole((size,)), torch.float32))
    writes = assign(ranks)
    for number, (size, _) in enumerate(tensors):
        regions = sorted(
            (w.region.start, w.region.stop)
            for rank, mine in enumerate(writes)
            for w in mine
            if ranks[rank][w.holding].path == f"parameter/{number}"
        )
        edges = [0, *(stop for _, stop in regions)]
        assert [start for start, _ in regions] == edges[:-1], "without a gap, and nothing twice"
        assert edges[-1] == size


def test_what_all_hold_is_shared_out_evenly() -> None:
    everything = [
        Holding(f"parameter/{n}", Region.whole((n * 1000 + 7,)), torch.float32) for n in range(1, 600)
    ]
    loads = [sum(w.region.numel for w in mine) for mine in assign([everything] * 4)]
    assert max(loads) < 1.02 * sum(loads) / 4
    private = [Holding("buffer/b", Region.whole((10,)), torch.float32, shared=False)]
    assert [len(mine) for mine in assign([private, private])] == [1, 0], "the first one's numbers are taken"


def small(root: Path, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(0)
    saver = Saver(World.alone(), root)
    for step in range(1, steps + 1):
        tensors = {
            "parameter/a": torch.randn(13, 7, generator=generator),
            "parameter/b": torch.randn(5, generator=generator).to(torch.bfloat16),
            "optimizer/exp_avg/a": torch.randn(13, 7, generator=generator, dtype=torch.float64),
            "optimizer/step/a": torch.tensor(float(step)),
            "buffer/mask": torch.tensor([True, False, True]),
            "buffer/empty": torch.empty(0, 3),
        }
        state = [(Holding(path, Region.whole(t.shape), t.dtype), t) for path, t in tensors.items()]
        saver.save(state, Facts(f"step-{step}", step, "solo", {"cursor": {"epoch": 0}, "schedule": None}))
    saver.wait()


def test_any_safetensors_reader_opens_a_shard(tmp_path: Path) -> None:
    small(tmp_path, 1)
    reader = Reader.of(open_folder(tmp_path / "step-1"))
    with safe_open(tmp_path / "step-1" / "rank-0000.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(reader.manifest.tensors)
        for path in file.keys():  # noqa: SIM118 it is no dict
            assert torch.equal(file.get_tensor(path), reader.read(path))


def test_ten_thousand_flipped_bits_are_all_seen(tmp_path: Path) -> None:
    small(tmp_path)
    draws = random.Random(0)
    folder = tmp_path / "step-2"
    files = [folder / FILE, folder / "rank-0000.safetensors", tmp_path / LATEST]
    assert list(verify(open_folder(folder))) == []
    for number in range(10_000):
        file = files[number % 2] if number % 10 else files[2]
        good = file.read_bytes()
        bad = bytearray(good)
        place = draws.randrange(len(bad) * 8)
        bad[place // 8] ^= 1 << place % 8
        file.write_bytes(bad)
        if file.name == LATEST:
            assert look(tmp_path)[0].name == "step-2", f"bit {place} of latest leads astray"
        else:
            assert list(verify(open_folder(folder))), f"bit {place} of {file.name} went unseen"
        file.write_bytes(good)
    assert list(verify(open_folder(folder))) == []


@pytest.mark.parametrize("how", ["cut short", "lengthened", "removed", "empty", "another's"])
def test_files_that_are_not_what_was_written(tmp_path: Path, how: str) -> None:
    small(tmp_path)
    file = tmp_path / "step-2" / "rank-0000.safetensors"
    data = file.read_bytes()
    if how == "removed":
        file.unlink()
    elif how == "another's":
        file.write_bytes((tmp_path / "step-1" / file.name).read_bytes())
    else:
        file.write_bytes({"cut short": data[:-5], "lengthened": data + b"\0", "empty": b""}[how])
    problems = list(verify(open_folder(tmp_path / "step-2")))
    assert problems
    assert "rank-0000.safetensors" in problems[0]
    found = find_whole(World.alone(), [LocalFolder(World.alone(), tmp_path)])
    assert found is not None
    assert found.name == "step-1"


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "step-2" / "rank-0000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4  # the narrowest numbers are the last
    file.write_bytes(data)
    assert [p.split(": ")[1] for p in verify(open_folder(tmp_path / "step-2"))] == [
        "'buffer/mask' does not match its checksum"
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(format=9), "it has format 9"),
        (lambda body: body.pop("files"), "missing or of the wrong kind"),
        (lambda body: body["files"].update({"../x": {"bytes": 1, "head": ""}}), "not a plain file name"),
        (lambda body: body["tensors"]["parameter/a"].update(slices=[]), "a part of 'parameter/a' is in none"),
        (lambda body: body["tensors"]["parameter/a"]["slices"][0].update(file="y"), "which it does not list"),
        (lambda body: body["tensors"]["parameter/a"].update(shape=[99, 99]), "a part of 'parameter/a'"),
        (lambda body: body["tensors"]["parameter/a"].update(shape=[1, 1]), "is not a region"),
        (lambda body: body["tensors"]["parameter/a"].update(dtype="X9"), "missing or of the wrong kind"),
    ],
)
def test_a_manifest_is_checked_before_it_is_believed(tmp_path: Path, change: object, words: str) -> None:
    from shoal.checkpoint.layout.manifest import seal, unseal

    small(tmp_path, 1)
    body = unseal((tmp_path / "step-1" / FILE).read_bytes())
    change(body)  # type: ignore[operator]
    with pytest.raises(ValueError, match=words):
        Manifest.loads(seal(body))


def test_nothing_whole_is_an_error_and_nothing_at_all_is_a_beginning(tmp_path: Path) -> None:
    world = World.alone()
    assert find_whole(world, [LocalFolder(world, tmp_path / "nowhere")]) is None
    small(tmp_path)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / FILE).write_text("{}")
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints .* is whole .*its own checksum"):
        find_whole(world, [LocalFolder(world, tmp_path)])
