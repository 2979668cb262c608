"""Every exchange beside torch DDP and FSDP2, alternating in one run: step time as medians and ratios.

    scripts/bench exchange            2 and 4 workers, 20 M and 60 M parameters (about half an hour on two cores)
    scripts/bench exchange --quick    2 workers, 20 M parameters

All contestants train the same transformer with fused AdamW on the same batches. `compute` is the same loop with
no communication at all: the physical limit of a worker that shares the machine with the others.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.order import Order
from shoal.train.parts import Parts
from shoal.train.step import run_step
from shoal.world.world import World

VOCABULARY, CONTEXT = 4096, 64


class Transformer(nn.Module):
    """A plain decoder-only language model."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.mask = nn.Buffer(nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.mask)
        out: torch.Tensor = self.head(self.norm(x))
        return out


SIZES = {"20M": (512, 5), "60M": (768, 8)}


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Case:
    size: str
    batch: int
    """Sequences per worker and step."""
    rounds: int
    steps: int
    only: tuple[str, ...]


Stepper = Callable[[int], None]


def torch_loop(world: World, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Stepper:
    """The loop a person writes by hand."""
    data = dataset(world, case)

    def step(_: int) -> None:
        rows = torch.arange(case.batch) + world.rank * case.batch
        batch = tuple(t[rows] for t in data.tensors)
        optimizer.zero_grad(set_to_none=True)
        total, count = loss(model(batch[0]), batch)
        (total / count).backward()
        optimizer.step()

    return step


def make_parts(world: World, case: Case, strategy: str) -> Parts:
    order = Order(
        model=Transformer(*SIZES[case.size]),
        loss=loss,
        optimizer=adamw,
        data=dataset(world, case),
        global_batch=case.batch * world.size,
        strategy=strategy,
    )
    return build(order, world, record="")[1]


def shoal_loop(world: World, case: Case, strategy: str) -> Stepper:
    parts = make_parts(world, case, strategy)
    return lambda number: void(run_step(parts, number))


def void(_: object) -> None:
    return None


def dataset(world: World, case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (4 * case.batch * world.size, CONTEXT + 1), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def contestants(world: World, case: Case) -> dict[str, Callable[[], Stepper]]:
    group = dist.new_group(backend="gloo")
    name = os.environ.get("SHOAL_HOST", "")
    os.environ["SHOAL_HOST"] = f"apart{world.rank}"  # so counted, no two workers share memory: messages only
    apart = dist.new_group(backend="shoal")
    os.environ["SHOAL_HOST"] = name
    over_gloo = World(world.rank, world.size, world.device, world.hosts, world.store, apart)
    stock_gloo = World(world.rank, world.size, world.device, world.hosts, world.store, group)

    def fresh() -> nn.Module:
        return Transformer(*SIZES[case.size])

    def compute() -> Stepper:
        model = fresh()
        return torch_loop(world, case, model, adamw(list(model.parameters())))

    def ddp(through: dist.ProcessGroup) -> Stepper:
        model = DistributedDataParallel(fresh(), process_group=through, gradient_as_bucket_view=True)
        return torch_loop(world, case, model, adamw(list(model.parameters())))

    def fsdp() -> Stepper:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        model = fresh()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return torch_loop(world, case, model, adamw(list(model.parameters())))

    assert world.group is not None
    everyone: dict[str, Callable[[], Stepper]] = {
        "compute": compute,
        "torch ddp, gloo": lambda: ddp(group),
        "torch fsdp2, gloo": fsdp,
        "ddp, gloo": lambda: shoal_loop(stock_gloo, case, "ddp"),
        "zero1, gloo": lambda: shoal_loop(over_gloo, case, "zero1"),
        "zero2, gloo": lambda: shoal_loop(over_gloo, case, "zero2"),
        "torch ddp, shm": lambda: ddp(world.group),
        "ddp, shm": lambda: shoal_loop(world, case, "ddp"),
        "zero1, shm": lambda: shoal_loop(world, case, "zero1"),
        "zero2, shm": lambda: shoal_loop(world, case, "zero2"),
        "shared": lambda: shoal_loop(world, case, "shared"),
    }
    return {n: make for n, make in everyone.items() if not case.only or n in case.only}


def contest(world: World, case: Case) -> dict[str, list[float]]:
    """Seconds of every timed step of every contestant."""
    torch.set_num_threads(1)
    return alternate(world, contestants(world, case), case.rounds, case.steps)


def alternate(
    world: World, makers: dict[str, Callable[[], Stepper]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of every timed step; contestants alternate, round by round."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(rounds):
        order = list(makers) if turn % 2 == 0 else list(reversed(makers))
        for name in order:
            step = makers[name]()
            for number in range(2 + steps):
                world.barrier()
                start = time.perf_counter()
                step(number)
                world.barrier()  # a step is over when the slowest worker is
                if number >= 2:
                    times[name].append(time.perf_counter() - start)
            del step
            gc.collect()
    return times


GOALS = [
    ("shared", "compute", 1.06),
    ("shared", "torch ddp, gloo", 0.92),
    ("ddp, gloo", "torch ddp, gloo", 1.02),
    ("ddp, shm", "torch ddp, shm", 1.02),
    ("zero1, shm", "ddp, shm", 1.05),
    ("zero2, shm", "ddp, shm", 1.05),
    ("zero1, gloo", "ddp, gloo", 1.05),
    ("zero2, gloo", "ddp, gloo", 1.05),
    ("zero1, shm", "torch fsdp2, gloo", 1.0),
    ("zero2, shm", "torch fsdp2, gloo", 1.0),
    ("zero1, gloo", "torch fsdp2, gloo", 1.0),
    ("zero2, gloo", "torch fsdp2, gloo", 1.0),
]


def report(case: Case, workers: int, times: dict[str, list[float]]) -> int:
    medians = {name: statistics.median(t) for name, t in times.items()}
    count = sum(p.numel() for p in Transformer(*SIZES[case.size]).parameters())
    print(
        f"\n{case.size} ({count / 1e6:.1f} M parameters), {workers} workers, batch {case.batch}×{CONTEXT} a worker"
    )
    print(f"{'contestant':<20} {'median ms':>10} {'quartiles':>15} {'/compute':>9} {'/torch ddp gloo':>16}")
    for name, t in times.items():
        low, _, high = statistics.quantiles(t, n=4)
        ratios = [
            f"{medians[name] / medians[k]:.3f}" if k in medians else "-"
            for k in ("compute", "torch ddp, gloo")
        ]
        span = f"{low * 1e3:.0f}..{high * 1e3:.0f}"
        print(f"{name:<20} {medians[name] * 1e3:>10.1f} {span:>15} {ratios[0]:>9} {ratios[1]:>16}")
    return judge(medians, GOALS)


def judge(medians: dict[str, float], goals: list[tuple[str, str, float]]) -> int:
    """Print each ratio beside its goal; how many are missed."""
    here = [goal for goal in goals if goal[0] in medians and goal[1] in medians]
    return count_missed(
        [(f"{one} / {other}", medians[one] / medians[other], most) for one, other, most in here]
    )


def count_missed(lines: list[tuple[str, float, float]]) -> int:
    """Print each figure beside its goal; how many are missed."""
    for name, found, most in lines:
        print(f"  {'ok  ' if found <= most else 'MISS'} {name} = {found:.3f} (goal {most})")
    sys.stdout.flush()
    return sum(found > most for _, found, most in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    sizes, counts = (["20M"], [2]) if args.quick else (args.sizes, args.workers)
    missed = 0
    for size in sizes:
        for workers in counts:
            case = Case(size, args.batch, args.rounds, args.steps, tuple(args.only))
            times = spawn(contest, workers, case, timeout=3600)[0]
            missed += report(case, workers, times)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
