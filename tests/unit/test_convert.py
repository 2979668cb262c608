"""Weights of others become checkpoints, and nothing in them is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file
from torch import nn, optim

from shoal import Run
from shoal.checkpoint.convert import pickled, torchfile
from shoal.checkpoint.convert.import_weights import Imported, import_checkpoint
from shoal.checkpoint.folder import latest, look, open_folder
from shoal.checkpoint.layout.tensor_stream import Leaf, write_stream
from shoal.checkpoint.load import Reader
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError


class Net(nn.Module):
    """Batch norm, a scalar, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(6, 4, bias=False)
        self.tied = nn.Linear(6, 4)
        self.tied.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.scale * self.first(x))
        out: torch.Tensor = self.last(hidden) + self.tied(hidden)
        return out


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2)


def trained(make: Callable[[Any], optim.Optimizer] = adamw) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def tensors_of(made: Imported) -> dict[str, torch.Tensor]:
    found = open_folder(made.folder)
    assert not list(verify(found))
    reader = Reader.of(found)
    return {path: reader.read(path) for path in made.manifest.tensors}


def check_model(made: Imported, model: nn.Module) -> None:
    stored = tensors_of(made)
    buffers = dict(model.named_buffers())
    expected = {f"parameter/{n}": p for n, p in model.named_parameters()} | {
        f"buffer/{n}": b for n, b in buffers.items()
    }
    assert {path for path in stored if not path.startswith("optimizer/")} == expected.keys()
    for path, value in expected.items():
        assert torch.equal(stored[path], value.detach()), path
        assert stored[path].dtype == value.dtype


def check_optimizer(made: Imported, model: nn.Module, optimizer: optim.Optimizer) -> None:
    stored = tensors_of(made)
    names = {id(p): n for n, p in model.named_parameters()}
    expected = {
        f"optimizer/{key}/{names[id(p)]}": value
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    assert {path for path in stored if path.startswith("optimizer/")} == expected.keys()
    for path, value in expected.items():
        assert torch.equal(stored[path], value), path


def test_torch_save_of_model_and_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "a.pt"
    )
    made = import_checkpoint(tmp_path / "a.pt", tmp_path / "runs", step=7)
    check_model(made, model)
    check_optimizer(made, model, optimizer)
    assert made.manifest.state["ties"] == {"tied.weight": "last.weight"}
    assert (made.manifest.state["optimizer"], made.manifest.step, made.remarks) == ("AdamW", 7, [])
    assert latest(tmp_path / "runs") == "imported"
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name.startswith(".")] == []


def test_a_run_goes_on_from_an_import(tmp_path: Path) -> None:
    """The next step is the one that torch alone makes."""
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "runs", step=3)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
    run = Run(
        model=Net,
        loss=lambda output, _: (output.square().sum(), 1),
        optimizer=adamw,
        data=torch.utils.data.TensorDataset(x),
        global_batch=8,
        strategy="solo",
        shuffle=False,
        checkpoint=str(tmp_path / "runs"),
        log=None,
        progress=False,
    )
    assert [step.number for step in run.steps(4)] == [4]
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("nest", ["flat", "state_dict", "model_state_dict", "app"])
def test_other_nestings(tmp_path: Path, nest: str) -> None:
    model, _ = trained()
    state = model.state_dict()
    value = {"flat": state, "app": {"app": {"model": state}}}.get(nest, {nest: state, "lr": 0.1})
    torch.save(value, tmp_path / "a.pt")
    made = import_checkpoint(tmp_path / "a.pt", tmp_path / "runs")
    check_model(made, model)
    assert made.manifest.state["optimizer"] is None


def test_names_of_distributed_data_parallel(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    made = import_checkpoint(tmp_path / "a.pt", tmp_path / "runs")
    check_model(made, model)
    check_optimizer(made, model, optimizer)
    assert "'module.'" in made.remarks[0]


LEFT: dict[str, tuple[Callable[[Any], optim.Optimizer], str]] = {
    "two groups": (
        lambda p: adamw([{"params": (q := [*p])[:2]}, {"params": q[2:]}]),
        "it has 2 groups of parameters",
    ),
    "fewer": (lambda p: adamw([*p][:3]), "it is of 3 parameters, and the model has 7"),
    "another order": (lambda p: adamw([*p][::-1]), "and the parameter"),
    "radam": (lambda p: optim.RAdam(p), "say which with --optimizer"),
    "factored": (lambda p: optim.Adafactor(p), "'row_var' of 'first.weight' is"),
}


@pytest.mark.parametrize("case", LEFT)
def test_optimizer_state_that_cannot_be_told_is_left_out(tmp_path: Path, case: str) -> None:
    make, words = LEFT[case]
    model, optimizer = trained(make)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    made = import_checkpoint(tmp_path / "a.pt", tmp_path / "runs")
    check_model(made, model)
    assert made.manifest.state["optimizer"] is None
    assert len(made.remarks) == 1
    assert words in made.remarks[0]
    if case == "radam":
        named = import_checkpoint(tmp_path / "a.pt", tmp_path / "runs", "named", optimizer="RAdam")
        check_optimizer(named, model, optimizer)
        assert named.manifest.state["optimizer"] == "RAdam"


MAKERS: list[Callable[[Any], optim.Optimizer]] = [
    lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    optim.Adam,
    lambda p: optim.AdamW(p, amsgrad=True),
    optim.Adagrad,
    optim.RMSprop,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
]


def test_which_optimizer_it_was(tmp_path: Path) -> None:
    for number, make in enumerate(MAKERS):
        model, optimizer = trained(make)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
        made = import_checkpoint(tmp_path / "a.pt", tmp_path / "runs", f"n{number}")
        assert made.manifest.state["optimizer"] == type(optimizer).__name__
        check_optimizer(made, model, optimizer)


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {
        "turned": base.T,
        "part": base[1:3, 2:],
        "spread": torch.ones(3, 1).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(base + 1),
        **{
            str(dtype): base.to(dtype)
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8)
        },
        "bool": base > 3,
        "complex": torch.complex(base, base),
        "float8": base.to(torch.float8_e4m3fn),
    }
    torch.save(state, tmp_path / "a.pt")
    stored = tensors_of(import_checkpoint(tmp_path / "a.pt", tmp_path / "runs"))
    by_name = {path.partition("/")[2]: value for path, value in stored.items()}
    assert by_name.keys() == state.keys()
    for name, value in state.items():
        assert by_name[name].dtype == value.dtype
        assert by_name[name].shape == value.shape
        plain = torch.float64 if not value.dtype.is_complex else torch.complex128
        assert torch.equal(by_name[name].to(plain), value.detach().to(plain)), name
    torch.save({"odd": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "b.pt")
    with pytest.raises(ConfigError, match="'parameter/odd' is of complex128"):
        import_checkpoint(tmp_path / "b.pt", tmp_path / "runs", "b")


def test_safetensors_and_hugging_face_folders(tmp_path: Path) -> None:
    model, _ = trained()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plain = {name: value.detach() for name, value in named.items()}
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file(plain, hub / "model.safetensors")
    check_model(import_checkpoint(hub / "model.safetensors", tmp_path / "runs", "file"), model)
    check_model(import_checkpoint(hub, tmp_path / "runs", "folder"), model)
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(plain)}
    for file in sorted({*places.values()}):
        save_file({name: plain[name] for name, at in places.items() if at == file}, hub / file)
    (hub / "model.safetensors").unlink()
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    check_model(import_checkpoint(hub, tmp_path / "runs", "several"), model)
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ConfigError, match="is not a file of its folder"):
        import_checkpoint(hub, tmp_path / "runs", "outside")


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_torch_dcp(tmp_path: Path) -> None:
    model, optimizer = trained()
    del model.tied  # each name is a tensor of its own there
    optimizer = adamw(model.parameters())
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.1 * number)
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}
    torch_dcp.save(state, checkpoint_id=tmp_path / "dcp")
    made = import_checkpoint(tmp_path / "dcp", tmp_path / "runs")
    check_model(made, model)
    check_optimizer(made, model, optimizer)
    assert (made.manifest.state["optimizer"], made.remarks) == ("AdamW", [])

    data = next((tmp_path / "dcp").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-2000])
    with pytest.raises(
        ConfigError, match=r"distcp has \d+ bytes, and \d+ are needed; nothing has been written"
    ):
        import_checkpoint(tmp_path / "dcp", tmp_path / "runs", "cut")
    assert [found.name for found in look(tmp_path / "runs")] == ["imported"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["imported", "latest"]


class Hostile:
    """Unpickling this leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, (f"touch {self.mark}",)


def hostile_files(tmp_path: Path, mark: Path) -> dict[str, Path]:
    poison = Hostile(mark)
    torch.save({"model": {"w": torch.zeros(3)}, "args": poison}, tmp_path / "zip.pt")
    torch.save({"w": torch.zeros(3), "x": poison}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(poison))
    torch_dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(poison))
    return {"zip": tmp_path / "zip.pt", "old": tmp_path / "old.pt", "bare": tmp_path / "bare.pt",
            "dcp": tmp_path / "dcp"}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_hostile_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name, source in hostile_files(tmp_path, mark).items():
        words = (
            "no file of torch.save since version 1.6"
            if name in ("old", "bare")
            else "it asks for posix.system"
        )
        with pytest.raises(ConfigError, match=words):
            import_checkpoint(source, tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()
    assert not mark.exists()
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists(), "the file would have done something"


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol_and_every_value(protocol: int) -> None:
    shared = [1, 2]
    value = {
        "numbers": [0, 255, 256, 70000, -1, 2**40, -(2**90), 1.5, True, False, None],
        "texts": ["", "a", "ä" * 300, b"", b"x" * 300],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "nested": {"a": {"b": [shared, shared]}},
        7: {n: n for n in range(1200)},
    }
    if protocol == 2:
        del value["texts"]  # bytes are made by a call there
    assert pickled.read(pickle.dumps(value, protocol), ()) == value


BROKEN = {
    "call": b"cos\nsystem\n(S'true'\ntR.",
    "instance": b"(S'true'\nios\nsystem\n.",
    "persistent name": b"Pname\n.",
    "extension": b"\x82\x01.",
    "not a pickle": b"hello",
    "no end": pickle.dumps([1, 2])[:-1],
    "memo": b"h\x05.",
    "empty stack": b"s.",
    "no mark": b"t.",
    "odd dict": b"(K\x01d.",
    "key": b"}]K\x01s.",
    "append to a number": b"K\x01K\x02a.",
    "reduce of a number": b"K\x01)R.",
    "nothing": b"",
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_pickles_are_value_errors(case: str) -> None:
    with pytest.raises(ValueError, match=r"^(it|opcode|at position|pickle|not enough|no newline|expected)"):
        pickled.read(BROKEN[case], ("collections.OrderedDict",))


def archive(changes: dict[str, bytes | None]) -> torch.Tensor:
    """A file of torch.save with some of its members replaced, or left out."""
    file, out = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.arange(6.0)}, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = changes.get(info.filename.partition("/")[2], old.read(info))
            if data is not None:
                new.writestr(info.filename, data)
    return torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)


def test_archives_that_claim_too_much() -> None:
    assert torch.equal(torchfile.load(archive({}))["w"], torch.arange(6.0))
    for changes, words in (
        ({"data/0": None}, "data/0 are missing"),
        ({"data/0": b"\0" * 20}, r"shape \[6\] in it is larger than its numbers"),
        ({"data/0": b"\0" * 21}, "data/0 in it are cut off"),
        ({"data.pkl": None}, "no data.pkl"),
        ({"byteorder": b"big"}, "big-endian"),
    ):
        with pytest.raises(ValueError, match=words):
            torchfile.load(archive(changes))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_files_with_bytes_changed_at_random_are_taken_or_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    torch_dcp.save(state, checkpoint_id=tmp_path / "dcp")
    chance, refused = random.Random(0), 0
    for file in (tmp_path / "a.pt", tmp_path / "dcp" / ".metadata"):
        good = file.read_bytes()
        for number in range(30):
            data = bytearray(good)
            for _ in range(chance.choice((1, 1, 5))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            file.write_bytes(data)
            source = file if file.suffix == ".pt" else file.parent
            try:
                import_checkpoint(source, tmp_path / "runs", f"{source.name}-{number}")
            except ConfigError:
                refused += 1
    assert 10 < refused < 58


def test_refusals(tmp_path: Path) -> None:
    torch.save([torch.zeros(3)], tmp_path / "list.pt")
    torch.save({"epoch": 3, "args": {"lr": 0.1}, "more": {}}, tmp_path / "none.pt")
    torch.save({"w": torch.zeros(3)}, tmp_path / "good.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.pt").touch()
    import_checkpoint(tmp_path / "good.pt", tmp_path / "runs", "there")
    for source, name, words in (
        ("list.pt", "a", "it holds a list, not a dict of tensors"),
        ("none.pt", "a", "there is no state dict in it, only 'epoch', 'args', 'more'"),
        ("empty", "a", "holds neither model.safetensors"),
        ("empty.pt", "a", "cannot be imported into"),
        ("gone.pt", "a", "there is no .*gone.pt; give a file"),
        ("good.pt", "there", "there exists already; give the import another --name"),
        ("good.pt", "latest", "a checkpoint cannot be called 'latest'"),
    ):
        with pytest.raises(ConfigError, match=words):
            import_checkpoint(tmp_path / source, tmp_path / "runs", name)
    with pytest.raises(ConfigError, match="--step -1"):
        import_checkpoint(tmp_path / "good.pt", tmp_path / "runs", "b", -1)
    assert [found.name for found in look(tmp_path / "runs")] == ["there"]


class Block(bytearray):
    """Memory that can be asked whether it is still there."""


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    made: list[weakref.ref[Block]] = []
    most = []

    def read() -> torch.Tensor:
        block = Block(4000)
        made.append(weakref.ref(block))
        most.append(sum(ref() is not None for ref in made))
        return torch.frombuffer(block, dtype=torch.float32)

    write_stream(tmp_path / "a", {f"w{n}": Leaf(torch.float32, (1000,), read) for n in range(9)})
    assert len(most) == 9
    assert max(most) <= 2, "the one being read, and the one before it that is being let go"
