"""A student learns from a teacher's predictions beside the labels: from a large model a small one that is better than
labels alone make it.

The teacher is frozen and in evaluation mode. Its term of the loss is a sum over the same rows that the user's loss
counts, so it is right for any split of the batch, and under every strategy.

When to use: a large model is there and too slow to serve; labels are few and inputs many.
Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network", 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shoal.call import call_model
from shoal.data.batch import Batch, Inputs, ModelInputs, length
from shoal.errors import ConfigError
from shoal.recipe.contract import Preparation, Recipe, Running, RunView
from shoal.recipe.teacher.inner import Capture, attention_distances, hidden_distances, pairs_in
from shoal.recipe.teacher.logits_cache import LogitsCache, checksum_of, keys_of_rows
from shoal.recipe.teacher.outputs import CountedRows, counted_rows, divergence, logits_of
from shoal.recipe.teacher.placement import nbytes, shard
from shoal.recipe.teacher.weights import load_weights
from shoal.seeds import build_by_name
from shoal.types import Plan
from shoal.world.free_memory import free_memory
from shoal.world.world import World

_PLACES = ("auto", "whole", "sharded")


@dataclass(frozen=True)
class Distil(Recipe):
    """(1 - alpha) × the user's loss + alpha × temperature² × KL(teacher ‖ student)."""

    summary: ClassVar[str] = "learn from a teacher's predictions beside the labels"
    adds_loss: ClassVar[bool] = True
    teacher: str | nn.Module | Callable[[], nn.Module]
    """A module, what makes one, or a Hugging Face folder on disk."""
    alpha: float = 0.5
    temperature: float = 2.0
    weights: str = ""
    """The teacher's weights: a checkpoint, a folder of them, safetensors or a Hugging Face folder."""
    hidden: str = ""
    """Modules whose outputs shall agree: student's:teacher's, several joined by "/"."""
    attention: str = ""
    """Modules that shall look at the same places, likewise."""
    inner: float = 1.0
    """How much hidden= and attention= count beside the predictions."""
    place: str = "auto"
    """Where the teacher is: "whole" on each worker, or "sharded" over those who compute together (zero3, tpN)."""
    cache: str = ""
    """A folder for the teacher's logits: what it has said once it is not asked again."""
    ignore: int = -100
    """Labels that leave a row out, as cross_entropy's."""
    classes: int = 0
    """Compare the first so many classes only, where the student has learned, or learns, others; 0: all."""
    inputs: Inputs | None = None
    """From a batch to what goes into the teacher; default what goes into the student."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1 or self.temperature <= 0 or self.inner < 0 or self.classes < 0:
            raise ConfigError(
                f"distil: alpha={self.alpha:g}, temperature={self.temperature:g}, inner={self.inner:g}, "
                f"classes={self.classes}; alpha is from 0 to 1, a temperature above 0, the others 0 or more."
            )
        if self.place not in _PLACES:
            raise ConfigError(f"distil: place={self.place}; it is {', '.join(_PLACES)}.")
        pairs_in("hidden", self.hidden)
        pairs_in("attention", self.attention)
        if self.cache and (self.hidden or self.attention):
            raise ConfigError(
                "distil: cache= keeps logits only; leave hidden= and attention= out, or cache=."
            )
        if self.cache and self.place == "sharded":
            raise ConfigError(
                "distil: cache= lets workers ask a teacher at different times, and a sharded one runs on all at once; "
                "use place=whole, or leave cache= out."
            )

    def check(self, plan: Plan) -> str:
        """Inner modules are cut, or elsewhere, where layers are divided."""
        if (self.hidden or self.attention) and (plan.tensor is not None or plan.pipeline is not None):
            return "hidden= and attention= need whole layers where the loss is computed; leave them out, or tpN and ppN"
        return ""

    def prepare(self, preparation: Preparation) -> object:
        """How the whole model is called; a stage of it cannot tell."""
        return preparation.inputs

    def run(self, view: RunView) -> Running:
        """Make the teacher, and put it where it belongs. Every worker calls it."""
        assert callable(view.prepared)
        return Distilling(self, self.make_teacher(view), view, view.prepared)

    def make_teacher(self, view: RunView) -> nn.Module:
        """Frozen, in evaluation mode, in the student's number format."""
        if isinstance(self.teacher, nn.Module):
            teacher = self.teacher
        elif isinstance(self.teacher, str):
            teacher = from_hub_folder(self.teacher)
        else:
            teacher = build_by_name(self.teacher, view.seed)
        if self.weights:
            load_weights(teacher, self.weights, "distil")
        like = next((p for p in view.model.parameters() if p.is_floating_point()), None)
        if like is not None:
            teacher = teacher.to(device=view.mesh.world.device, dtype=like.dtype)
        return teacher.eval().requires_grad_(False)


class Distilling(Running):
    """The teacher at work."""

    def __init__(self, asked: Distil, teacher: nn.Module, view: RunView, inputs: Inputs) -> None:
        self._asked = asked
        self.teacher = teacher
        self._inputs: Inputs = ModelInputs(teacher, asked.inputs) if asked.inputs else inputs
        self._hidden = pairs_in("hidden", asked.hidden)
        self._attention = pairs_in("attention", asked.attention)
        pairs = [*self._hidden, *self._attention]
        self._student_parts = Capture(view.model, [mine for mine, _ in pairs], "the student")
        self._teacher_parts = Capture(teacher, [theirs for _, theirs in pairs], "the teacher")
        self._cache: LogitsCache | None = None
        if asked.cache:
            like = next(teacher.parameters()).dtype
            self._cache = LogitsCache(asked.cache, checksum_of(teacher), like, view.mesh.world.rank)
        among = _sharers(asked, teacher, view)
        self.units = shard(teacher, among) if among is not None else []
        """What this worker holds of a teacher in parts."""

    def on_loss(
        self, output: object, batch: Batch, total: torch.Tensor, count: float
    ) -> tuple[torch.Tensor, float]:
        """Beside the user's sum, that of the teacher's, over the same count."""
        asked = self._asked
        student = logits_of(output, "the student")
        rows = counted_rows(student, batch, count, asked.ignore)
        teacher = self._ask(batch)
        if asked.classes:
            student, teacher = student[..., : asked.classes], teacher[..., : asked.classes]
        if teacher.shape != student.shape:
            raise ConfigError(
                f"distil: the student gives logits {list(student.shape)} and the teacher {list(teacher.shape)}; give a "
                "teacher of the same classes, or say how many first ones to compare (classes=)."
            )
        theirs = rows.total(divergence(student, teacher, asked.temperature))
        mixed = total * (1 - asked.alpha) + theirs * asked.alpha
        if self._hidden or self._attention:
            mixed = mixed + self._within(rows, batch) * asked.inner
            self._student_parts.clear()
            self._teacher_parts.clear()
        return mixed, count

    def _ask(self, batch: Batch) -> torch.Tensor:
        cache = self._cache
        keys = keys_of_rows(batch) if cache is not None else []
        known = cache.find(keys) if cache is not None else None
        if known is not None:
            return known.to(next(self.teacher.parameters()).device)
        with torch.no_grad():
            said = logits_of(call_model(self.teacher, self._inputs(batch)), "the teacher")
        if cache is not None:
            cache.keep(keys, said)
        return said

    def _within(self, rows: CountedRows, batch: Batch) -> torch.Tensor:
        """Distances inside of the models: each sample weighs what all its rows count in the user's loss."""
        by_sample = rows.counts.reshape(length(batch), -1).sum(1) * rows.weight
        captures = self._student_parts, self._teacher_parts
        found = [
            *hidden_distances(self._hidden, *captures),
            *attention_distances(self._attention, *captures),
        ]
        return torch.stack([(distance * by_sample).sum() for distance in found]).sum()


def _sharers(asked: Distil, teacher: nn.Module, view: RunView) -> World | None:
    """Over whom the teacher is cut: workers that run it the same number of times, at the same time; None: nobody."""
    mesh = view.mesh
    cuts = view.exchange.cuts_parameters and mesh.data.size > 1
    able = mesh.data if cuts else mesh.tensor if mesh.tensor.size > 1 else None
    if asked.place == "sharded" and able is None and mesh.world.size > 1:
        raise ConfigError(
            "distil: place=sharded needs workers that compute every pass together, as under zero3 and tpN; use one of "
            "them, or place=whole."
        )
    if asked.place == "whole" or asked.cache or able is None:
        return None
    if asked.place == "auto":
        full = mesh.world.gather_numbers([free_memory() / mesh.world.size - 2 * nbytes(teacher)])
        if float(full.min()) > 0:
            return None
    return able.new_group()


def from_hub_folder(path: str) -> nn.Module:
    """The model of a Hugging Face folder, with the head that its config names; safetensors only."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"distil: teacher={path} is a Hugging Face folder, and transformers is not installed; install it, or give "
            "a module and weights=."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        model: nn.Module = kind.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"distil: teacher={path} is no Hugging Face folder with safetensors: {str(error).splitlines()[0]}; give a "
            "folder that has them, or a module and weights=."
        ) from error
    return model
