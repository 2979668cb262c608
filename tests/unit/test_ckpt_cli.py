"""`shoal ckpt`, as it is typed: what it prints, what it does to folders, how it ends."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from shoal.checkpoint.diff import difference
from shoal.checkpoint.folder import look, point_to
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.write_plan import Holding
from shoal.checkpoint.reports import Facts
from shoal.checkpoint.save import Saver
from shoal.cli import main as cli
from shoal.world.world import World


@dataclass
class Done:
    code: int
    out: str
    err: str


Ckpt = Callable[..., Done]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ckpt:
    """`shoal ckpt ...` in this process."""

    def call(*args: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["shoal", "ckpt", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Done(int(code) if code is not None else 0, out, err)

    return call


def tensors(number: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "parameter/up.weight": torch.randn(40, 7, generator=generator),
        "parameter/up.bias": torch.full((40,), float(number)),
        "buffer/norm.num_batches_tracked": torch.tensor(3),
        "optimizer/exp_avg/up.weight": torch.randn(40, 7, generator=generator),
        "optimizer/step/up.weight": torch.tensor(float(number)),
    }


def save(root: Path, name: str, step: int, given: Mapping[str, torch.Tensor], state: Any = None) -> Path:
    """A checkpoint of one worker."""
    held = [(Holding(path, Region.whole(t.shape), t.dtype), t) for path, t in given.items()]
    saver = Saver(World.alone(), root)
    saver.save(held, Facts(name, step, "zero1 * tp2", state or {"ties": {"head.weight": "up.weight"}}))
    saver.wait()
    return root / name


def run_folder(root: Path, *steps: int) -> Path:
    for step in steps:
        save(root, f"step-{step}", step, tensors(step))
    return root


def damage(folder: Path, path: str) -> None:
    """Flip one bit in the middle of a tensor."""
    file = folder / "rank-0000.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + length])[path]["data_offsets"]
    data[8 + length + (start + stop) // 2] ^= 16
    file.write_bytes(data)


def lines(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_ls(tmp_path: Path, ckpt: Ckpt) -> None:
    root = run_folder(tmp_path / "runs", 5, 10)
    save(root, "best", 7, tensors(7))
    point_to(root, "step-5")
    (root / "step-10" / "manifest.json").write_text("{}")
    done = ckpt("ls", root)
    assert done.code == 0, done.err
    rows = lines(done.out)
    assert rows[0] == ["name", "step", "written", "plan", "workers", "size"]
    assert [row[0] for row in rows[1:]] == ["step-5", "best", "step-10"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", rows[1][2])
    size = (root / "best" / "rank-0000.safetensors").stat().st_size
    assert rows[1][3:] == ["zero1 * tp2", "1", f"{size / 1000:.1f} KB", "latest"]
    assert rows[2][-1] == f"{size / 1000:.1f} KB"
    assert (
        rows[3][1]
        == f"damaged: {root}/step-10/manifest.json cannot be used: it does not match its own checksum"
    )


def test_show(tmp_path: Path, ckpt: Ckpt) -> None:
    root = run_folder(tmp_path, 5, 10)
    done = ckpt("show", root)
    assert done.code == 0, done.err
    facts, _, table = done.out.partition("\n\n")
    assert ["checkpoint", str(root / "step-10")] in lines(facts)
    assert ["plan", "zero1 * tp2, 1 worker"] in lines(facts)
    assert ["state ties", '{"head.weight": "up.weight"}'] in lines(facts)
    assert ["tensors", "5, 2.4 KB"] in lines(facts)
    assert lines(table)[1] == ["optimizer/exp_avg/up.weight", "[40, 7]", "float32", "1.1 KB", "1"]
    assert len(lines(table)) == 6
    done = ckpt("show", root / "step-5", "--limit", "2")
    assert done.out.splitlines()[-1] == "and 3 more: --all shows them"
    assert str(root / "step-5") in done.out
    assert "more" not in ckpt("show", root / "step-5", "--limit", "2", "--all").out


def test_verify_names_each_damaged_tensor(tmp_path: Path, ckpt: Ckpt) -> None:
    root = run_folder(tmp_path, 5, 10, 15)
    done = ckpt("verify", root)
    assert done.code == 0
    assert len(re.findall(r"^step-\d+: whole: 6\.5 KB in 1 file, [\d.]+ GB/s$", done.out, re.MULTILINE)) == 3
    damage(root / "step-10", "parameter/up.bias")
    damage(root / "step-10", "optimizer/exp_avg/up.weight")
    done = ckpt("verify", root)
    assert done.code == 1
    assert "step-15: whole" in done.out
    assert "step-5: whole" in done.out
    found = done.out.partition("step-10: DAMAGED\n")[2].splitlines()
    assert sorted(line.partition(": ")[2] for line in found[:2]) == [
        "'optimizer/exp_avg/up.weight' does not match its checksum",
        "'parameter/up.bias' does not match its checksum",
    ]
    assert done.out.splitlines()[-1] == "1 of 3 checkpoints damaged"
    assert ckpt("verify", root / "step-5").code == 0
    assert ckpt("verify", root / "step-10").code == 1


def test_export_of_one_file(tmp_path: Path, ckpt: Ckpt) -> None:
    root = run_folder(tmp_path / "runs", 5)
    target = tmp_path / "out" / "model.safetensors"
    done = ckpt("export", root, target)
    assert done.code == 0, done.err
    assert "4 tensors" in done.out
    found, given = load_file(target), tensors(5)
    assert found.keys() == {"up.weight", "up.bias", "norm.num_batches_tracked", "head.weight"}
    assert torch.equal(found["up.weight"], given["parameter/up.weight"])
    assert torch.equal(found["head.weight"], given["parameter/up.weight"])
    assert torch.equal(found["norm.num_batches_tracked"], torch.tensor(3))
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in target.parent.iterdir()] == ["model.safetensors"]
    again = ckpt("export", root, target)
    assert (again.code, "exists already" in again.err) == (2, True)


def test_export_of_a_hugging_face_folder(tmp_path: Path, ckpt: Ckpt) -> None:
    root = run_folder(tmp_path / "runs", 5)
    (tmp_path / "c.json").write_text('{"model_type": "toy"}')
    done = ckpt("export", root, tmp_path / "one", "--config", tmp_path / "c.json", "--dtype", "bf16")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    found, given = load_file(tmp_path / "one" / "model.safetensors"), tensors(5)
    assert torch.equal(found["up.weight"], given["parameter/up.weight"].bfloat16())
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    assert json.loads((tmp_path / "one" / "config.json").read_text()) == {"model_type": "toy"}

    done = ckpt("export", root, tmp_path / "many", "--shard-size", "1.2KB")
    assert done.code == 0, done.err
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    joined: dict[str, torch.Tensor] = {}
    for file in files:
        part = load_file(tmp_path / "many" / file)
        assert all(index["weight_map"][name] == file for name in part)
        joined |= part
    assert joined.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in joined.values())
    assert torch.equal(joined["head.weight"], given["parameter/up.weight"])


def test_what_is_exported_loads_into_the_model(tmp_path: Path, ckpt: Ckpt) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
            self.head = nn.Linear(5, 5, bias=False)
            self.head.weight = self.up.weight

    model = Tied()
    given = {f"parameter/{n}": p.detach() for n, p in model.named_parameters()}
    given |= {f"buffer/{n}": b for n, b in model.named_buffers()}
    save(tmp_path, "final", 1, given)
    assert ckpt("export", tmp_path / "final", tmp_path / "a.safetensors").code == 0
    other = Tied()
    other.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
    assert torch.equal(other.up.weight, model.up.weight)


def test_export_refuses_what_is_damaged(tmp_path: Path, ckpt: Ckpt) -> None:
    root = run_folder(tmp_path / "runs", 5)
    damage(root / "step-5", "parameter/up.weight")
    done = ckpt("export", root, tmp_path / "a.safetensors")
    assert done.code == 2
    assert "step-5 is damaged" in done.err
    assert "'parameter/up.weight' does not match its checksum" in done.err
    assert not (tmp_path / "a.safetensors").exists()


def test_diff(tmp_path: Path, ckpt: Ckpt) -> None:
    a = save(tmp_path, "a", 5, tensors(5))
    b = save(tmp_path, "b", 6, tensors(5))
    done = ckpt("diff", a, b)
    assert done.code == 0, done.out + done.err
    assert "EQUAL: 5 tensors, not one bit differs" in done.out

    given = tensors(5)
    given["optimizer/exp_avg/up.weight"][3, 2] += 1.0
    given["parameter/up.bias"][:2] = torch.tensor([5.5, 10.0])
    given["buffer/norm.num_batches_tracked"] = torch.tensor(3, dtype=torch.int32)
    given["parameter/more"] = given.pop("optimizer/step/up.weight")
    c = save(tmp_path, "c", 5, given, {"ties": {}})
    done = ckpt("diff", a, c)
    assert done.code == 1
    assert "the states differ in: ties" in done.out
    assert "DIFFERS: 5 of 6 tensors" in done.out
    rows = {row[0]: row[1:] for row in lines(done.out)}
    assert rows["parameter/more"] == ["only in B"]
    assert rows["optimizer/step/up.weight"] == ["only in A"]
    assert rows["buffer/norm.num_batches_tracked"] == ["I64 [] in A, I32 [] in B"]
    assert rows["parameter/up.bias"] == ["2", "40", "5.00e+00", "5.00e-01"]
    assert rows["optimizer/exp_avg/up.weight"][:3] == ["1", "280", "1.00e+00"]
    done = ckpt("diff", a, c, "--limit", "1")
    assert "and 4 more" in done.out


def test_differences_bit_by_bit() -> None:
    nan, inf = math.nan, math.inf

    def of(a: list[float], b: list[float], dtype: torch.dtype = torch.float32) -> tuple[int, float, float]:
        return difference(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))

    assert of([1.0, nan, inf], [1.0, nan, inf]) == (0, 0.0, 0.0)
    assert of([0.0], [-0.0]) == (1, 0.0, 0.0)
    assert of([1.0, -4.0], [1.0, 4.0]) == (1, 8.0, 2.0)
    count, absolute, _ = of([1.0, nan], [2.0, 1.0])
    assert (count, math.isnan(absolute)) == (2, True)
    assert of([1, 5], [1, 4], torch.int64) == (1, 1.0, 0.2)
    assert of([True, False], [True, True], torch.bool) == (1, 1.0, 1.0)
    assert of([1.0, 2.0], [1.0, 4.0], torch.bfloat16) == (1, 2.0, 0.5)


def test_large_tensors_are_compared_in_pieces(
    tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.checkpoint.diff._AT_ONCE", 64)
    one, other = tensors(5), tensors(5)
    other["parameter/up.weight"].view(-1)[[3, 100, 279]] += torch.tensor([4.0, 1.0, 2.0])
    other["optimizer/exp_avg/up.weight"].view(-1)[[3, 100]] = torch.tensor([math.nan, 1.0])
    a, b = save(tmp_path, "a", 5, one), save(tmp_path, "b", 5, other)
    rows = {row[0]: row[1:] for row in lines(ckpt("diff", a, b).out)}
    assert rows["parameter/up.weight"][:3] == ["3", "280", "4.00e+00"]
    assert rows["optimizer/exp_avg/up.weight"] == ["2", "280", "nan", "nan"]
    assert list(rows).index("optimizer/exp_avg/up.weight") < list(rows).index("parameter/up.weight")


def names(root: Path) -> set[str]:
    return {found.name for found in look(root)}


def test_prune(tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run_folder(tmp_path, 10, 20, 30, 40, 50)
    save(root, "best", 15, tensors(15))
    point_to(root, "step-20")
    everything = names(root)
    monkeypatch.setattr("typer.confirm", lambda _: False)
    done = ckpt("prune", root, "--keep", "2", "--every", "30")
    assert "step-10" in done.out
    assert "nothing is removed" in done.out
    assert names(root) == everything
    done = ckpt("prune", root, "--keep", "2", "--every", "30", "--yes")
    assert done.code == 0, done.err
    assert names(root) == {"best", "step-20", "step-30", "step-40", "step-50"}
    assert "removed 1 checkpoint" in done.out
    assert sorted(path.name for path in root.iterdir() if path.name.startswith(".")) == []
    done = ckpt("prune", root, "--keep", "2", "--every", "30", "--yes")
    assert "nothing to remove: 5 checkpoints" in done.out


def test_prune_keeps_the_newest_whole_one(tmp_path: Path, ckpt: Ckpt) -> None:
    root = run_folder(tmp_path, 10, 20, 30, 40)
    for step in (20, 30, 40):
        damage(root / f"step-{step}", "parameter/up.bias")
    done = ckpt("prune", root, "--keep", "2", "--yes")
    assert done.code == 0, done.err
    assert names(root) == {"step-10", "step-30", "step-40"}
    damage(root / "step-10", "parameter/up.bias")
    done = ckpt("prune", root, "--keep", "1", "--yes")
    assert (done.code, "none of the 3 checkpoints" in done.err) == (2, True)
    assert names(root) == {"step-10", "step-30", "step-40"}


def test_copy_there_and_back(tmp_path: Path, ckpt: Ckpt) -> None:
    root = run_folder(tmp_path / "runs", 5, 10)
    url = f"file://{tmp_path}/copies"
    done = ckpt("copy", root, url)
    assert done.code == 0, done.err
    rows = lines(ckpt("ls", url).out)
    assert [(row[0], row[1], row[-1]) for row in rows[1:]] == [
        ("step-10", "10", "latest"),
        ("step-5", "5", rows[2][-1]),
    ]
    done = ckpt("copy", f"{url}/step-5", tmp_path / "back")
    assert done.code == 0, done.err
    assert ckpt("diff", root / "step-5", tmp_path / "back").code == 0
    damage(root / "step-10", "parameter/up.bias")
    done = ckpt("copy", root / "step-10", url)
    assert (done.code, "is damaged" in done.err) == (2, True)


def test_import(tmp_path: Path, ckpt: Ckpt) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    done = ckpt("import", tmp_path / "a.pt", tmp_path / "runs", "--name", "start", "--step", "40")
    assert done.code == 0, done.err
    assert "runs/start: 4 parameters, 3 buffers, 4 tensors of optimizer state" in done.out
    assert lines(ckpt("ls", tmp_path / "runs").out)[1][:2] == ["start", "40"]
    assert ckpt("export", tmp_path / "runs", tmp_path / "b.safetensors").code == 0
    back = load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())
    done = ckpt("import", tmp_path / "a.pt", tmp_path / "runs", "--optimizer", "AdamW", "--name", "other")
    assert ["state optimizer", "AdamW"] in lines(ckpt("show", tmp_path / "runs").out)


REFUSED = {
    "ls gone": "there is no folder gone; give a checkpoint",
    "ls empty": "there is no checkpoint in empty",
    "ls memory://nothing-there": "there is no checkpoint at memory://nothing-there",
    "show gone": "there is no folder gone",
    "show runs/broken": "runs/broken/manifest.json cannot be used",
    "verify empty": "there is no checkpoint in empty",
    "export gone a.safetensors": "there is no folder gone",
    "export runs/step-5 out --dtype int3": "--dtype int3: it is one of fp64, fp32, bf16, fp16.",
    "export runs/step-5 out --shard-size 5": "--shard-size 5: write it like 5GB or 500MB.",
    "export runs/step-5 out --config gone.json": "--config gone.json: there is no such file.",
    "export runs/step-5 a.safetensors --config c": "--config is for a folder; a.safetensors is one file.",
    "export runs/step-5 /proc/none/a.safetensors": "/proc/none/a.safetensors cannot be written (No such file",
    "diff runs/step-5 gone": "there is no folder gone",
    "prune runs/step-5": "runs/step-5 is a checkpoint itself; name the folder it is in.",
    "prune runs --keep 0": "would leave nothing to go on from",
    "copy runs elsewhere": "one of the two is a URL",
    "copy s3://a s3://b": "one of the two is a URL",
    "import gone.pt runs": "there is no gone.pt; give a file or folder to import.",
}


def test_refusals_are_one_sentence(tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path / "runs", 5)
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for command, words in REFUSED.items():
        done = ckpt(*command.split())
        assert done.code == 2, f"{command}: {done}"
        assert words in done.err, command
        assert done.err.startswith("shoal: ")
        assert done.err.count("\n") == 1, command
        assert done.out == "", command
    assert not (tmp_path / "out").exists()
