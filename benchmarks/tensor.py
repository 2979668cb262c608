"""`tp2` beside DTensor used by hand on gloo: the same Llama, cut at the same places, in the same processes.

    scripts/bench tensor [--rounds 4] [--steps 5]

By hand means torch's own `parallelize_module` with a plan written for Llama and an AdamW over DTensors. Goal: a step
of ours takes at most 0.9 of that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from exchange import alternate, judge
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.order import Order
from shoal.train.step import run_step
from shoal.world.world import World

VOCABULARY, CONTEXT = 4096, 64
GOAL = 0.9


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=5,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=CONTEXT,
            use_cache=False,
        )
    )


def loss(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def by_hand(world: World, group: dist.ProcessGroup, data: TensorDataset, batch: int) -> Callable[[int], None]:
    model = llama()
    mesh = DeviceMesh.from_group(group, "cpu")
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(5):
        at = f"model.layers.{i}"
        plan |= {f"{at}.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        plan |= {f"{at}.mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
        plan |= {f"{at}.self_attn.o_proj": RowwiseParallel(), f"{at}.mlp.down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    del world

    def step(_: int) -> None:
        rows = tuple(t[:batch] for t in data.tensors)
        optimizer.zero_grad(set_to_none=True)
        total, count = loss(model(rows[0]), rows)
        (total / count).backward()
        optimizer.step()

    return step


def ours(world: World, data: TensorDataset, batch: int) -> Callable[[int], None]:
    order = Order(
        model=llama,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        data=data,
        global_batch=batch,
        strategy=f"ddp * tp{world.size}",
    )
    _, parts = build(order, world, record="")

    def step(number: int) -> None:
        run_step(parts, number)

    return step


def contest(world: World, rounds: int, steps: int, batch: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    group = dist.new_group(backend="gloo")
    tokens = torch.randint(
        0, VOCABULARY, (4 * batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    assert world.group is not None
    through = world.group
    makers: dict[str, Callable[[], Callable[[int], None]]] = {
        "DTensor by hand, gloo": lambda: by_hand(world, group, data, batch),
        "DTensor by hand, shm": lambda: by_hand(world, through, data, batch),
        f"ddp * tp{world.size}": lambda: ours(world, data, batch),
    }
    return alternate(world, makers, rounds, steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    times = spawn(contest, 2, args.rounds, args.steps, args.batch, timeout=1800)[0]
    medians = {name: statistics.median(t) for name, t in times.items()}
    slowest = medians["DTensor by hand, gloo"]
    print(f"Llama of {sum(p.numel() for p in llama().parameters()) / 1e6:.1f} M parameters, 2 workers")
    for name, median in medians.items():
        print(f"{name:<24} {median * 1e3:>8.1f} ms   / by hand on gloo {median / slowest:.3f}")
    sys.exit(1 if judge(medians, [("ddp * tp2", "DTensor by hand, gloo", GOAL)]) else 0)


if __name__ == "__main__":
    main()
