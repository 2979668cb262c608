"""`tp2` beside DTensor used by hand on gloo: the same Llama, cut at the same places, in the same processes.

    scripts/bench tensor [--rounds 4] [--steps 5]       needs transformers

By hand means torch's own `parallelize_module` with a plan written for Llama and an AdamW over DTensors. Goal: a step
of ours takes at most 0.9 of that.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.report.result import Section
from benchmarks.workload.steps import make_stepper
from benchmarks.workload.transformer import Step, count_parameters
from benchmarks.workload.turns import Times, alternate, goals_of_medians, section_of_times
from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.world.world import World

VOCABULARY, CONTEXT = 4096, 64
LAYERS = 5
GOAL = 0.9
BY_HAND = "DTensor by hand, gloo"


def llama() -> nn.Module:
    """A small one, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=CONTEXT,
            use_cache=False,
        )
    )


def loss(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """The summed surprise at each true next token, and how many they were."""
    return F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def by_hand(group: dist.ProcessGroup, data: TensorDataset, batch: int) -> Step:
    """What a user of torch writes."""
    model = llama()
    mesh = DeviceMesh.from_group(group, "cpu")
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        plan |= {f"{at}.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        plan |= {f"{at}.mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
        plan |= {f"{at}.self_attn.o_proj": RowwiseParallel(), f"{at}.mlp.down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        rows = tuple(t[:batch] for t in data.tensors)
        optimizer.zero_grad(set_to_none=True)
        total, count = loss(model(rows[0]), rows)
        (total / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def ours(world: World, data: TensorDataset, batch: int) -> Step:
    """What a user of Shoal writes."""
    config = RunConfig(
        model=llama,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        data=data,
        global_batch=batch,
        strategy=f"ddp * tp{world.size}",
    )
    return make_stepper(build(config, world, record="")[1])


def contest(world: World, rounds: int, steps: int, batch: int) -> Times:
    """Seconds of every timed step of every contestant."""
    torch.set_num_threads(1)
    group = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (4 * batch, CONTEXT + 1), generator=generator)
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    assert world.group is not None
    through = world.group
    makers: dict[str, Callable[[], Step]] = {
        BY_HAND: lambda: by_hand(group, data, batch),
        "DTensor by hand, shm": lambda: by_hand(through, data, batch),
        f"ddp * tp{world.size}": lambda: ours(world, data, batch),
    }
    return alternate(world, makers, rounds, steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much is compared."""
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One table."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "tensor trains a Llama of transformers, which is not installed; `pip install transformers`."
        )
    times = spawn(contest, 2, options.rounds, options.steps, options.batch, timeout=1800)[0]
    title = f"Llama of {count_parameters(llama()) / 1e6:.1f} M parameters, 2 workers"
    section = section_of_times(title, times, [BY_HAND])
    yield replace(section, goals=goals_of_medians(times, [("ddp * tp2", BY_HAND, GOAL)]))
