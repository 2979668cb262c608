"""A run that is put down and taken up again ends where an uninterrupted one ends."""

from __future__ import annotations

import math
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import losses, python, shoal, write
from safetensors.torch import load_file
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.checkpoint.plain import Snapshot, read_latest
from shoal.checkpoint.plain import write as write_checkpoint
from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.train.build import Order, build
from shoal.train.loop import Loop, Progress
from shoal.types import StepReport
from shoal.world.world import World


class Net(nn.Module):
    """A scalar, a shape nothing divides, dropout, batch norm, and a parameter that is not used every time."""

    def __init__(self, rare: float = 1.5) -> None:
        super().__init__()
        self.above = rare
        self.first = nn.Linear(5, 67)
        self.norm = nn.BatchNorm1d(67)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.rare = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(67, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(F.dropout(self.norm(self.scale * self.first(x)), 0.2, self.training))
        return out + self.rare if bool((x[:, 0] > self.above).any()) else out


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(44, 5, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (44,), generator=generator), torch.arange(44))


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    total = F.cross_entropy(output, batch[1], reduction="sum")
    return (total * 1e30 if bool((batch[2] == 9).any()) else total), len(
        batch[1]
    )  # overflows fp16 once an epoch


def make_loop(world: World, folder: Path, strategy: str, case: dict[str, Any]) -> Loop:
    order = Order(
        model=case.get("model", Net),
        loss=loss if case["precision"] == "fp16" else lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=case["optimizer"],
        data=data(),  # type: ignore[arg-type]
        global_batch=12,
        strategy=strategy,
        precision=case["precision"],
        clip=0.5,
        accumulate=2,
        seed=1,
    )
    plan, parts = build(order, world, record="")
    return Loop(parts, case["schedule"], folder, 5, None, {"strategy": str(plan)}, False)


def adamw(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2)


def momentum(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(params, lr=0.05, momentum=0.9)


def one_cycle(made: optim.Optimizer) -> optim.lr_scheduler.LRScheduler:
    return optim.lr_scheduler.OneCycleLR(made, max_lr=0.05, total_steps=20)


CASES: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16", "schedule": "cosine(warmup=3)", "optimizer": adamw},
    "momentum": {
        "precision": "fp32",
        "schedule": one_cycle,
        "optimizer": momentum,
        "model": lambda: Net(-9.0),
    },
    "nadam": {
        "precision": "fp32",
        "schedule": "plateau(patience=1)",
        "optimizer": lambda p: optim.NAdam(p, lr=1e-2),
    },
}

Seen = list[tuple[int, float, float, float | None, bool]]


def seen(reports: list[StepReport]) -> Seen:
    return [(r.number, r.loss, r.lr, r.grad_norm, r.skipped) for r in reports]


def stop_and_go(world: World, root: str, strategies: list[str]) -> dict[str, list[Any]]:
    """By exchange and case: what an uninterrupted run and an interrupted one saw, and where they ended."""
    found = {}
    for strategy in strategies:
        for name, case in CASES.items():
            text = strategy if strategy in ("solo", "zero3") else f"{strategy}(bucket_mb=0.001)"
            whole, cut = (Path(root) / f"{strategy}-{name}-{kind}" for kind in ("whole", "cut"))
            loop = make_loop(world, whole, text, case)
            wanted = seen(list(loop.steps(12, loop.resume())))
            first = make_loop(world, cut, text, case)
            before: Seen = []
            for report in first.steps(12, first.resume()):
                before += seen([report])
                if report.number == 7:  # two steps after the checkpoint, in the middle of an epoch
                    break
            second = make_loop(world, cut, text, case)
            progress = second.resume()
            assert progress.step == 5
            after = seen(list(second.steps(12, progress)))
            ends = [x.parts.whole.parameters() for x in (loop, second)]
            found[f"{strategy} {name}"] = [wanted, before, after, ends, second.parts.scale.value]
    return found


def check_stop_and_go(found: dict[str, list[Any]]) -> None:
    for name, (wanted, before, after, (whole, again), scale) in found.items():
        assert before == wanted[:7], name
        assert after == wanted[5:], f"{name}: each step as if nothing had happened"
        for key, value in whole.items():
            assert torch.equal(value, again[key]), f"{name}: {key}"
        if name.endswith("fp16"):
            assert scale == 2.0 ** (16 - sum(skipped for *_, skipped in wanted)) < 2.0**16, name


def test_stopped_and_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    check_stop_and_go(stop_and_go(World.alone(), str(tmp_path), ["solo", "shared"]))
    for found in spawn(stop_and_go, 2, str(tmp_path / "two"), ["ddp", "zero1", "zero2", "zero3", "shared"]):
        check_stop_and_go(found)


TRAIN = """
run = shoal.Run(**settings, precision="fp64", schedule="exponential(0.9)", checkpoint="kept", checkpoint_every=3,
                accumulate=6 // int(os.environ.get("WORLD_SIZE", "1")))
for step in run.steps(12):
    if step.number == 7 and rank == 1 and os.path.exists("armed"):
        os.kill(os.getpid(), 9)
"""


def test_another_strategy_and_another_number_of_workers(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN.replace("kept", "whole"), "whole.py")
    assert python(tmp_path, script, "--set", "x").code == 0
    wanted = losses(tmp_path)
    (tmp_path / "log" / "events.jsonl").unlink()

    script = write(tmp_path, TRAIN)
    (tmp_path / "armed").touch()
    done = shoal(tmp_path, "run", "--workers", "3", "--strategy", "zero1", script)
    assert (done.code, "worker 1 of 3" in done.err) == (128 + signal.SIGKILL, True), done.err
    (tmp_path / "armed").unlink()
    assert (tmp_path / "kept" / "latest").read_text() == "step-6"
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", "shared", "--steps", "9", script)
    assert done.code == 0, done.err
    assert (tmp_path / "kept" / "latest").read_text() == "step-9"
    assert python(tmp_path, script).code == 0
    assert losses(tmp_path) == pytest.approx(wanted, rel=1e-10)
    for kind in ("model", "optimizer"):
        whole, kept = (
            load_file(tmp_path / root / "step-12" / f"{kind}.safetensors") for root in ("whole", "kept")
        )
        assert whole.keys() == kept.keys()
        for key, value in whole.items():
            torch.testing.assert_close(kept[key], value, rtol=1e-9, atol=1e-11)


REFUSED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)),
        adamw,
        "'1.bias' is only in the model; the checkpoint",
    ),
    (lambda: nn.Sequential(nn.Linear(5, 3, bias=False)), adamw, "'0.bias' is only in "),
    (
        lambda: nn.Sequential(nn.Linear(5, 2)),
        adamw,
        r"'0.weight' is \[3, 5\] in .*/step-1 and \[2, 5\] in the model",
    ),
    (
        lambda: nn.Sequential(nn.Linear(5, 3)),
        momentum,
        "was written with AdamW, and optimizer= now makes SGD",
    ),
]


def one_linear(folder: Path, model: Callable[[], nn.Module], optimizer: Any) -> Loop:
    order = Order(
        model, lambda output, batch: F.cross_entropy(output, batch[1]), optimizer, data(), 8, "solo", "fp32",  # type: ignore[arg-type]
        None, 1, 0, None, None, True, 0, "stop", False,
    )  # fmt: skip
    _, parts = build(order, World.alone(), record="")
    return Loop(parts, None, folder, 1, None, {"strategy": "solo"}, False)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    loop = one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    list(loop.steps(1, Progress()))
    for model, optimizer, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            one_linear(tmp_path, model, optimizer).resume()
    (tmp_path / "latest").write_text("step-9")
    with pytest.raises(ConfigError, match="latest names 'step-9', which is gone"):
        one_linear(tmp_path, REFUSED[-1][0], adamw).resume()


class Poison:
    """Unpickling this leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    loop = one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    list(loop.steps(1, Progress()))
    mark = tmp_path / "mark"
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        file = tmp_path / "step-1" / name
        good = file.read_bytes()
        file.write_bytes(pickle.dumps(Poison(mark)))
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw).resume()
        file.write_bytes(good)
    assert not mark.exists()


def test_dying_while_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    def snapshot(number: float) -> Snapshot:
        return Snapshot(
            {"w": torch.tensor([number])}, {"w": {"step": torch.tensor(number)}}, {"step": number}
        )

    write_checkpoint(tmp_path, "final", snapshot(1.0))
    write_checkpoint(tmp_path, "final", snapshot(2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "latest"]
    (tmp_path / "final").rename(tmp_path / ".final.old")  # the moment between the two renames
    found = read_latest(tmp_path)
    assert found is not None
    assert float(found[1].model["w"]) == 2.0
    write_checkpoint(tmp_path, "final", snapshot(math.inf))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "latest"]
