"""A run that is put down and taken up again ends where an uninterrupted one ends."""

from __future__ import annotations

import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import losses, python, shoal, write
from safetensors.torch import save_file
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal.checkpoint.save as save_module
from shoal.checkpoint.convert.import_weights import import_checkpoint
from shoal.checkpoint.copies.keep import Keep
from shoal.checkpoint.folder import latest, look, open_folder
from shoal.checkpoint.load import Reader
from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.loop import Loop
from shoal.train.run_config import RunConfig
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
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
    order = RunConfig(
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
    checkpoints = Checkpoints(parts, str(plan), CheckpointConfig(folder, every=3))
    return Loop(parts, case["schedule"], checkpoints, None, {"strategy": str(plan)}, False)


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
    """By exchange and case: what an uninterrupted run and one with three interruptions saw, and where they ended."""
    found = {}
    for strategy in strategies:
        for name, case in CASES.items():
            text = strategy if strategy in ("solo", "zero3") else f"{strategy}(bucket_mb=0.001)"
            whole, cut = (Path(root) / f"{strategy}-{name}-{kind}" for kind in ("whole", "cut"))
            loop = make_loop(world, whole, text, case)
            wanted = seen(list(loop.steps(12, loop.checkpoints.resume())))
            again: Seen = []
            for begin, stop in (
                (0, 4),
                (3, 5),
                (3, 8),
                (6, 12),
            ):  # in the middle of an epoch, and of two saves
                loop_again = make_loop(world, cut, text, case)
                progress = loop_again.checkpoints.resume()
                assert progress.step == begin
                for report in loop_again.steps(12, progress):
                    again += seen([report])
                    if report.number == stop:
                        break
            ends = [{**x.context.whole.tensors(), **state_of(x)} for x in (loop, loop_again)]
            found[f"{strategy} {name}"] = [wanted, again, ends, loop_again.context.scale.value]
    return found


def state_of(loop: Loop) -> dict[str, torch.Tensor]:
    state = loop.context.whole.optimizer_state()
    return {f"{name} {key}": value for name, entries in state.items() for key, value in entries.items()}


def check_stop_and_go(found: dict[str, list[Any]]) -> None:
    for name, (wanted, again, (whole, resumed), scale) in found.items():
        expected = wanted[:4] + wanted[3:5] + wanted[3:8] + wanted[6:]
        assert again == expected, f"{name}: each step as if nothing had happened"
        assert whole.keys() == resumed.keys()
        for key, value in whole.items():
            assert torch.equal(value, resumed[key]), f"{name}: {key}"
        if name.endswith("fp16"):
            assert scale == 2.0 ** (16 - sum(skipped for *_, skipped in wanted)) < 2.0**16, name


def test_stopped_and_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    check_stop_and_go(stop_and_go(World.alone(), str(tmp_path), ["solo", "shared"]))
    for found in spawn(stop_and_go, 2, str(tmp_path / "two"), ["ddp", "zero1", "zero2", "zero3", "shared"]):
        check_stop_and_go(found)


TRAIN = """
run = shoal.Run(**settings, precision="fp64", schedule="exponential(0.9)", checkpoint="kept",
                checkpoint_every=3, checkpoint_keep=None, accumulate=6 // int(os.environ.get("WORLD_SIZE", "1")))
for step in run.steps(12):
    if step.number == 7 and rank == 1 and os.path.exists("armed"):
        os.kill(os.getpid(), 9)
"""


def test_a_worker_without_samples_in_its_first_step_keeps_its_random_streams(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN)
    assert python(tmp_path, script).code == 0
    wanted = losses(tmp_path)
    for step in (6, 9, 12):
        shutil.rmtree(tmp_path / "kept" / f"step-{step}", ignore_errors=True)
    done = shoal(tmp_path, "run", "--workers", "2", script)  # step 4 has two samples, and both are worker 0's
    assert done.code == 0, done.err
    assert losses(tmp_path)[:12] == pytest.approx(wanted, rel=1e-10)


def test_another_strategy_and_another_number_of_workers(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN.replace("kept", "whole"), "whole.py")
    assert python(tmp_path, script, "--set", "x").code == 0
    wanted = losses(tmp_path)
    (tmp_path / "log" / "events.jsonl").unlink()

    script = write(tmp_path, TRAIN)
    (tmp_path / "armed").touch()
    done = shoal(tmp_path, "run", "--workers", "3", "--retries", "0", "--strategy", "zero1", script)
    assert (done.code, "worker 1 of 3" in done.err) == (128 + signal.SIGKILL, True), done.err
    (tmp_path / "armed").unlink()
    assert latest(tmp_path / "kept") in ("step-3", "step-6"), "the second may have been on its way"
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", "shared", "--steps", "9", script)
    assert done.code == 0, done.err
    assert latest(tmp_path / "kept") == "step-9"
    assert python(tmp_path, script).code == 0
    assert losses(tmp_path) == pytest.approx(wanted, rel=1e-10)
    whole, kept = (Reader.of(open_folder(tmp_path / root / "step-12")) for root in ("whole", "kept"))
    assert whole.manifest.tensors.keys() == kept.manifest.tensors.keys()
    for path in whole.manifest.tensors:
        torch.testing.assert_close(kept.read(path), whole.read(path), rtol=1e-9, atol=1e-11)


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
    order = RunConfig(
        model=model,
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=optimizer,
        data=data(),  # type: ignore[arg-type]
        global_batch=8,
        strategy="solo",
    )
    _, parts = build(order, World.alone(), record="")
    checkpoints = Checkpoints(parts, "solo", CheckpointConfig(folder, every=1, keep=Keep(2)))
    return Loop(parts, None, checkpoints, None, {"strategy": "solo"}, False)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    loop = one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    list(loop.steps(1, Progress()))
    for model, optimizer, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            one_linear(tmp_path, model, optimizer).checkpoints.resume()


class Poison:
    """Unpickling this leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    list(loop.steps(1, Progress()))
    mark = tmp_path / "mark"
    poison = pickle.dumps(Poison(mark))

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody unpickles")

    for name in ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"):
        monkeypatch.setattr(pickle, name, touched)
    monkeypatch.setattr(torch, "load", touched)
    assert one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw).checkpoints.resume().step == 1
    for name in ("manifest.json", "rank-0000.safetensors"):
        file = tmp_path / "step-1" / name
        good = file.read_bytes()
        file.write_bytes(poison)
        with pytest.raises(ConfigError, match=f"none of the 1 checkpoints in .* is whole .*{name}"):
            one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw).checkpoints.resume()
        file.write_bytes(good)
    assert not mark.exists()


def test_what_is_damaged_is_named_and_the_one_before_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    list(loop.steps(3, Progress()))
    assert [found.name for found in look(tmp_path)] == ["step-3", "step-2"], "two are kept, the latest first"
    file = tmp_path / "step-3" / "rank-0000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    assert again.checkpoints.resume().step == 2
    told = capsys.readouterr().err
    assert "a checkpoint is damaged" in told
    assert "does not match its checksum" in told
    assert "going on from" in told
    assert "step-2" in told
    (tmp_path / "latest").unlink()
    assert again.checkpoints.resume().step == 2


def test_dying_while_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    loop = one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    for number in (1, 2):
        loop.checkpoints.save("final", Progress(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "latest"]
    (tmp_path / "final").rename(tmp_path / ".final.old")  # the moment between the two renames
    (tmp_path / ".step-3.token.shoal").mkdir()
    again = one_linear(tmp_path, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    assert again.checkpoints.resume().step == 2
    again.checkpoints.save("final", Progress(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "latest"], "nothing lies around"


class Tied(nn.Module):
    """One weight under two names, and a buffer that looks like a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 3)
        self.register_buffer("pace", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.second(torch.tanh(self.first(x * self.pace))))
        return out


def test_a_run_begins_with_imported_weights(tmp_path: Path) -> None:
    """Such a file does not say which weights are tied, nor what is a buffer."""
    torch.manual_seed(3)
    model = Tied()
    model.pace += torch.rand(5)
    save_file(
        {name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", step=0)
    loop = one_linear(tmp_path / "run", Tied, adamw)
    assert loop.checkpoints.resume().step == 0
    state = loop.context.whole.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert len(list(loop.steps(2, Progress()))) == 2


class Warming(nn.Module):
    """Dropout that begins with the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.first(x)))
        return out


def test_a_model_that_draws_later_draws_the_same_after_a_restart(tmp_path: Path) -> None:
    losses = []
    for stops in ([6], [4, 6]):
        seen_losses: dict[int, float] = {}
        for stop in stops:
            loop = one_linear(tmp_path / f"{len(stops)}", Warming, adamw)
            progress = loop.checkpoints.resume()
            if progress.step > 2:
                loop.context.model.drop.p = 0.5  # type: ignore[union-attr, assignment]
            for report in loop.steps(6, progress):
                seen_losses[report.number] = report.loss
                if report.number == 2:
                    loop.context.model.drop.p = 0.5  # type: ignore[union-attr, assignment]
                if report.number == stop:
                    break
        losses.append(seen_losses)
    assert losses[0] == losses[1]


def plain(folder: Path, steps: int = 0) -> Loop:
    loop = one_linear(folder, lambda: nn.Sequential(nn.Linear(5, 3)), adamw)
    if steps:
        list(loop.steps(steps, loop.checkpoints.resume()))
    return loop


def test_nothing_of_the_users_own_is_touched(tmp_path: Path) -> None:
    for name in (".git", ".cache", "plots"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    (tmp_path / "notes").touch()
    loop = plain(tmp_path, 2)
    for name in ("plots", "notes"):
        with pytest.raises(ConfigError, match=f"{name} is there already and is no checkpoint"):
            loop.checkpoints.save(name, Progress(2))
    assert plain(tmp_path).checkpoints.resume().step == 2
    assert all((tmp_path / name / "mine").exists() for name in (".git", ".cache", "plots"))
    assert (tmp_path / "notes").is_file()


def test_a_lost_manifest_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain(tmp_path, 3)
    (tmp_path / "step-3" / "manifest.json").unlink()
    assert plain(tmp_path).checkpoints.resume().step == 2
    told = capsys.readouterr().err
    assert "step-3/manifest.json cannot be used" in told
    assert "step-3 is of another future and is called step-3.abandoned now" in told
    plain(tmp_path, 4)
    assert [found.name for found in look(tmp_path)] == ["step-4", "step-3"], "of the new future"
    for step in (3, 4):
        (tmp_path / f"step-{step}" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="none of the 2 checkpoints"):
        plain(tmp_path).checkpoints.resume()


def test_another_precision_goes_on(tmp_path: Path) -> None:
    list(make_loop(World.alone(), tmp_path, "solo", CASES["nadam"]).steps(3, Progress()))
    loop = make_loop(World.alone(), tmp_path, "solo", {**CASES["nadam"], "precision": "fp64"})
    reports = list(loop.steps(6, loop.checkpoints.resume()))
    assert [report.number for report in reports] == [4, 5, 6]
    state = loop.context.exchange.optimizer_state()
    assert state["first.weight"]["exp_avg"].dtype == torch.float64


def fail_on_one_rank(world: World, root: str) -> tuple[str, str, int]:
    """The second worker's disk is full once: what the others are told, and whether the next save is right."""
    loop = make_loop(world, Path(root), "ddp", CASES["nadam"])
    real = save_module.write_block

    def full(path: Path, _: memoryview) -> None:
        raise OSError(28, "No space left on device", str(path))

    if world.rank == 1:
        save_module.write_block = full
    told = []
    for action in (
        lambda: loop.checkpoints.save("now", Progress(1)),
        lambda: (loop.checkpoints.begin("later", Progress(1)), loop.checkpoints.wait()),
    ):
        try:
            action()
            told.append("nothing")
        except ConfigError as error:
            told.append(str(error))
    save_module.write_block = real
    world.barrier()
    loop.checkpoints.save("again", Progress(2))
    assert [p.name for p in Path(root).iterdir() if p.name.startswith(".")] == []
    return told[0], told[1], make_loop(world, Path(root), "ddp", CASES["nadam"]).checkpoints.resume().step


def test_a_full_disk_of_one_worker_fails_the_save_everywhere(tmp_path: Path) -> None:
    for now, later, step in spawn(fail_on_one_rank, 2, str(tmp_path)):
        assert "No space left on device" in now
        assert "No space left on device" in later
        assert step == 2


def test_a_script_that_ends_in_the_middle_of_its_loop_keeps_its_checkpoint(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import time\nimport shoal.checkpoint.save as save\nreal = save.write_block\n"
        "def slow(*given):\n    time.sleep(1)\n    real(*given)\n"
        "save.write_block = slow\n"
        "run = shoal.Run(**settings, checkpoint='kept', checkpoint_every=2)\nsteps = run.steps(12)\n"
        "for _ in range(2):\n    next(steps)\n",
    )
    assert python(tmp_path, script).code == 0
    assert latest(tmp_path / "kept") == "step-2"
