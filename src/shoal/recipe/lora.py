"""Low-rank adapters: `lora(8, targets="*", train="head")` trains two thin matrices beside each linear layer.

What a layer adds is B · A · x × alpha / r; its own weight stays as it is. B begins with zeros, so training begins where
the model was. Only adapters, and what `train=` names, learn: optimizer state and gradients are those of a small model,
under every strategy, because adapters are ordinary layers and their bases ordinary frozen parameters.

Adapters have the names and files of peft: `save_adapter(folder, run.state_dict(), ...)` writes what
`PeftModel.from_pretrained` reads, and `adapter="folder"` begins with what peft has written.
`run.state_dict(weights="export")` has the adapters merged into the weights, under the names of the model without them.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.

When to use: fine-tuning a model whose optimizer state would not fit, or many variants of one model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from shoal.checkpoint.convert.export import export_file
from shoal.checkpoint.convert.foreign_files import open_source
from shoal.checkpoint.layout.tensor_stream import Leaf
from shoal.errors import ConfigError
from shoal.recipe.contract import Preparation, Recipe
from shoal.recipe.names import matching
from shoal.seeds import derive
from shoal.table import did_you_mean
from shoal.torch_private import parameters_of

PREFIX = "base_model.model."
"""How peft's files begin the name of every tensor."""
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


class LoraLinear(nn.Module):
    """A linear layer that does not learn, and the two thin ones beside it that do."""

    def __init__(self, base: nn.Linear, r: int, scaling: float, dropout: float, seed: int) -> None:
        super().__init__()
        kind = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, r, bias=False, **kind)
        self.lora_B = nn.Linear(r, base.out_features, bias=False, **kind)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scaling = scaling
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(base.in_features)  # as peft: kaiming uniform with a = sqrt(5)
        first = (torch.rand(r, base.in_features, generator=generator, dtype=torch.float64) * 2 - 1) * bound
        with torch.no_grad():
            self.lora_A.weight.copy_(first)
            self.lora_B.weight.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer and its adapter."""
        base: torch.Tensor = self.base_layer(x)
        added: torch.Tensor = self.lora_B(self.lora_A(self.dropout(x)))
        return base + added * self.scaling

    @property
    def weight(self) -> torch.Tensor:
        """The weight with the adapter in it, for modules that look at their layers' weights."""
        return self.base_layer.weight + self.lora_B.weight @ self.lora_A.weight * self.scaling

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own."""
        return self.base_layer.bias


@dataclass(frozen=True)
class Lora(Recipe):
    """Thin matrices beside linear layers learn, and the layers do not."""

    summary: ClassVar[str] = "low-rank adapters beside linear layers, in peft's files; the rest is frozen"
    needs_values: ClassVar[bool] = True
    r: int = 8
    alpha: float = 16.0
    targets: str = "*"
    """Which linear layers, by patterns of their names or by the last part of a name, separated by commas."""
    train: str = ""
    """What else learns, by pattern, such as a new head; its linear layers get no adapter."""
    dropout: float = 0.0
    adapter: str = ""
    """A folder that peft or `save_adapter` has written: the adapters begin with its values."""

    def __post_init__(self) -> None:
        if self.r < 1 or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"lora: r={self.r}, dropout={self.dropout:g}; r is 1 or more, dropout from 0 to below 1."
            )

    @property
    def scaling(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / self.r

    def prepare(self, preparation: Preparation) -> None:
        """Freeze the model and put adapters into it."""
        model = preparation.model
        learns = set(matching("lora", self.train, dict(model.named_parameters()))) if self.train else set()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learns)
        layers = self._layers(model, learns)
        for name, layer in layers.items():
            parent, _, last = name.rpartition(".")
            seed = derive(preparation.seed, "lora", name)
            made = LoraLinear(layer, self.r, self.scaling, self.dropout, seed)
            made.train(layer.training)
            setattr(model.get_submodule(parent), last, made)
        if self.adapter:
            read_adapter(model, Path(self.adapter))

    def _layers(self, model: nn.Module, learns: set[str]) -> dict[str, nn.Linear]:
        uses: dict[int, int] = {}
        for module in model.modules():
            for parameter in parameters_of(module).values():
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        # Exactly nn.Linear: attention reads the weight of its own kind of layer and never calls it.
        linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and name}
        free = {name: m for name, m in linear.items() if f"{name}.weight" not in learns}
        found: dict[str, nn.Linear] = {}
        for pattern in [text.strip() for text in self.targets.split(",")]:
            fitting = [n for n in free if fnmatchcase(n, pattern) or n.rpartition(".")[2] == pattern]
            if not fitting:
                raise ConfigError(f"lora: no linear layer fits '{pattern}'{did_you_mean(pattern, free)}")
            found.update({name: free[name] for name in fitting if uses[id(free[name].weight)] == 1})
        if not found:
            raise ConfigError(
                f"lora: every linear layer that fits '{self.targets}' shares its weight with another module, which a "
                "merged adapter would change; name others by targets=."
            )
        return {name: linear[name] for name in linear if name in found}

    def export(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights with the adapters merged into them."""
        return merge(state, self.scaling)


def merge(state: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """A state dict without adapters, which are merged into the weights beside them.

    >>> a, b = torch.ones(1, 2), torch.ones(2, 1)
    >>> merge({"up.base_layer.weight": torch.eye(2), "up.lora_A.weight": a, "up.lora_B.weight": b}, 0.5)
    {'up.weight': tensor([[1.5000, 0.5000],
            [0.5000, 1.5000]])}
    """
    merged: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if ".lora_" in name:
            continue
        layer, found, rest = name.rpartition(".base_layer.")
        if found and rest == "weight":
            a, b = state[f"{layer}.lora_A.weight"], state[f"{layer}.lora_B.weight"]
            value = value + (b.double() @ a.double() * scaling).to(value.dtype)
        merged[f"{layer}.{rest}" if found else name] = value
    return merged


def save_adapter(folder: str | Path, state: Mapping[str, torch.Tensor], asked: Lora) -> None:
    """Write the adapters of `run.state_dict()` as peft does; on rank 0, where that is not empty.

    What `train=` names is beside them, as peft's `modules_to_save`.
    """
    target = Path(folder)
    adapters = {PREFIX + name: value.contiguous() for name, value in state.items() if ".lora_" in name}
    if not adapters:
        return
    learned = matching("lora", asked.train, state) if asked.train else []
    adapters |= {PREFIX + name: state[name].contiguous() for name in learned}
    layers = [name.rpartition(".lora_A.")[0] for name in state if ".lora_A." in name]
    config = {
        "peft_type": "LORA",
        "r": asked.r,
        "lora_alpha": asked.alpha,
        "lora_dropout": asked.dropout,
        "target_modules": layers,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in learned}) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
        "base_model_name_or_path": None,
    }
    target.mkdir(parents=True, exist_ok=True)
    export_file({name: Leaf.of(value) for name, value in adapters.items()}, target / WEIGHTS)
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter(model: nn.Module, folder: Path) -> None:
    """Fill a model's adapters from a folder that peft or `save_adapter` has written."""
    source = open_source(folder / WEIGHTS)
    named = dict(model.named_parameters())
    read: set[str] = set()
    with torch.no_grad():
        for key, leaf in source.items():
            name = str(key).removeprefix(PREFIX)
            if name not in named or not isinstance(leaf, Leaf) or leaf.shape != tuple(named[name].shape):
                size = list(leaf.shape) if isinstance(leaf, Leaf) else "no size"
                raise ConfigError(
                    f"lora: '{key}' of {size} in {folder} fits no parameter of the model; give the r= and targets= "
                    f"that {CONFIG} says."
                )
            named[name].copy_(leaf.read())
            read.add(name)
    absent = [name for name in named if ".lora_" in name and name not in read]
    if absent:
        raise ConfigError(f"lora: {folder} has no '{absent[0]}'; give the targets= that {CONFIG} says.")
