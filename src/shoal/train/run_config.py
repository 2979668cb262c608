"""What the user asks for: the settings of a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn
from torch.utils.data import DataLoader

from shoal.config import as_type
from shoal.data.augment import make_chain
from shoal.data.augment.chain import Augment
from shoal.data.batch import Batch, Collate, Inputs
from shoal.data.columns import Columns
from shoal.data.dataloader import WorkerInit, loader_parts
from shoal.data.sampler import Sampler
from shoal.data.source import Source, Stream
from shoal.errors import ConfigError
from shoal.optimizer import MakeOptimizer
from shoal.recipe.contract import Recipe
from shoal.report.profile import profile_steps
from shoal.report.trackers.send import tracker_names
from shoal.table import did_you_mean
from shoal.train.model.buffer_rules import BufferWords, check_words
from shoal.train.model.make import MODEL, MakeModel
from shoal.train.technique.learning_rate import MakeScheduler
from shoal.train.technique.loss import Loss
from shoal.train.technique.metrics import Metric
from shoal.train.technique.penalty import Penalty
from shoal.types import Value

Step = Callable[[Any, Batch], object]
"""(ctx, batch) -> None, or metrics by name; `ctx` is a `shoal.OwnStep`."""


def not_given(*_: object) -> Any:
    """Stands for a field that has no default and was left out."""
    raise ConfigError(NEEDS)


NEEDS = "a run needs model=, loss= and optimizer=; or models=, optimizers= and step=."


@dataclass(kw_only=True)
class RunConfig:
    """What the user asks for: the keyword arguments of `shoal.Run`, with their defaults."""

    model: nn.Module | MakeModel = not_given
    """An nn.Module, or a callable that makes one. With a callable, initial weights depend on seed and name only."""
    loss: Loss | None = None
    """(output, batch) -> (sum, count), or a scalar mean over the batch. None: a model such as those of Hugging Face
    returns its own, from labels in the batch."""
    optimizer: MakeOptimizer = not_given
    """Parameters -> a torch optimizer; groups are kept."""
    models: Mapping[str, nn.Module | MakeModel] = field(default_factory=dict)
    """With `step`, in place of `model`: models by name. One without an optimizer does not learn."""
    optimizers: Mapping[str, MakeOptimizer] = field(default_factory=dict)
    """With `step`, in place of `optimizer`: what makes each model's optimizer, by the model's name."""
    step: Step | None = None
    """A step of your own, in place of `loss`: (ctx, batch) -> None, or metrics by name; see docs/guides/own-step.md."""
    data: Source | Stream | DataLoader[Any]
    """Anything with len() and [i]; a stream, whose iter() begins anew each time; or a DataLoader, which Shoal takes
    apart: data set, sampler, collate_fn and worker processes stay, and its batch_size is the global batch."""
    global_batch: int = 0
    """Samples per step, over all workers and micro-batches; with a DataLoader its batch_size, if this is left out."""
    strategy: str = "ddp"
    """How the work is shared; `shoal list` shows the choices."""
    penalty: Penalty | None = None
    """(module) -> a scalar tensor, added once per step to the mean loss: a penalty on the whole model's weights."""
    precision: str = "fp32"
    """fp32, bf16, fp16 or fp64."""
    clip: float | str | None = None
    """A global norm, or "value(0.5)" to clamp each element."""
    schedule: str | MakeScheduler | None = None
    """A learning rate such as "cosine(warmup=100)", or optimizer -> torch scheduler; `schedule_every` says when it
    moves. A ReduceLROnPlateau of your own moves only by `run.schedule_step(metric)`."""
    schedule_every: str = "step"
    """When the schedule moves: after each "step", after each "epoch", or by "call" of `run.schedule_step`."""
    recipes: str | Recipe | Sequence[str | Recipe] = ""
    """What to train for beside the loss, as "prune(0.8, begin=100, end=900) & ema(0.999)", or objects in a list; they
    act in this order. `shoal list recipe` shows them."""
    ema: float | str | None = None
    """Weights beside the weights: a decay such as 0.999, "ema(0.999, every=10)", or "swa(start=1000)"."""
    accumulate: int = 1
    """Micro-batches per worker and step."""
    recompute: str | None = None
    """"blocks" keeps only the inputs of each block and computes its activations again when backward needs them."""
    memory: str | None = None
    """"auto" picks accumulate and recompute so that a step fits with 5 % to spare into what is free on this host, each
    worker its share; an amount such as "4GB" is what each worker may take."""
    compile: bool | str = False
    """True compiles each block with torch.compile; a text names a backend, as "aot_eager"."""
    batchnorm: str = "own"
    """What batch normalisation sees: each worker's "own" samples, or "sync": those of all workers."""
    buffers: BufferWords = field(default_factory=dict)
    """How the workers' values of other buffers become one: "sum", "mean", "first" or "own", by name pattern, as in
    {"*.codebook": "mean"}, or one word for all. Without a word they stay each worker's own, and a line says so."""
    tensor_rules: Mapping[str, str] = field(default_factory=dict)
    """How tpN cuts modules, by name pattern, where it should not find out itself: {"*.up": "column"}."""
    seed: int = 0
    """Of weights, sample config and dropout."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What else to measure of each step, by name: (output, batch) -> (sum, count), global as the loss is."""
    early_stop: str | None = None
    """Stop when a value given to `run.log` or `run.best` gets no better: "val_loss, patience=3, mode=min"."""
    inputs: Inputs | None = None
    """Batch -> what goes into the model: one argument, a dict of keywords, or `shoal.Call`; default `batch[0]`, of a
    dict `batch["inputs"]`, or all its entries where forward has parameters of these names."""
    collate: Collate | None = None
    """List of samples -> batch; default is torch's."""
    augment: Augment = ""
    """How samples vary from epoch to epoch: "crop(4) & flip & mixup(0.2, classes=10)", functions (sample, rng) ->
    sample of your own, or a list of both; `shoal list augment` shows the choices. Never in run.evaluate."""
    shuffle: bool | str = True
    """False keeps the order of the data set; "blocks(65536)" mixes blocks of neighbours, for disks and URLs that
    are slow at single samples."""
    sampler: Sampler | None = None
    """An order of your own: iter() gives the numbers of an epoch's samples, or its global batches as lists of them."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is short; else every sample counts once an epoch."""
    partition: str = "block"
    """Which samples of a step go to which worker; `shoal list partition` shows the choices."""
    balance: str = "even"
    """How much of a step each worker gets, as "dynamic" or "static(shares=3/1)"; `shoal list balance` shows them."""
    columns: Columns = field(default_factory=dict)
    """Values that a partition divides by, one for each sample: {"length": lengths}."""
    loader_workers: int = 0
    """Processes per worker that prepare batches ahead; 0 prepares them in the training process."""
    pin_memory: bool = False
    """Loader processes hand batches over in page-locked memory, which copies faster to a card."""
    worker_init_fn: WorkerInit | None = None
    """Called with its number in each loader process when it starts."""
    on_nan: str = "stop"
    """What a non-finite loss does: "stop", or "skip" that step."""
    check_replicas: int | None = None
    """Compare the replicas' parameters and optimizer state, bit by bit, every so many steps: memory that went wrong
    without an error is named, and healed from the majority."""
    deterministic: bool = False
    """Sums in rank config and torch's deterministic kernels: on one host ddp, zero1, zero2 and shared agree bit for
    bit. Between hosts `shared` sums within each host first: it repeats itself bit for bit and rounds in its own way."""
    checkpoint: str | None = None
    """Folder for checkpoints. A run that finds one there goes on from it."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; the last step is saved too. Training goes on while they are written."""
    validation: Source | None = None
    """Data on which each automatic checkpoint is measured, with `metrics`, as val_loss and val_NAME in the log: by
    `shoal run --evaluators 1` beside training, else by the workers when they save it."""
    checkpoint_keep: int | str | None = 3
    """How many automatic checkpoints stay, as 3 or "last=3, every=1000"; None keeps all. Named ones always stay, and so
    does what was saved under another value."""
    checkpoint_failures: int = 3
    """So many saves in a row that fail end the run; those before are reported, and the next one tries again."""
    copies: str = ""
    """Second copies of checkpoints: "peer" (in the memory of hosts), URLs such as "s3://bucket/run", or both."""
    log: str | None = "auto"
    """Folder for events.jsonl; "auto" is the checkpoint folder, or runs/<name of the script>; None writes none."""
    trackers: str = ""
    """Where numbers go besides: "tensorboard, wandb, mlflow, trackio"; from a thread that no step waits for."""
    profile: str = ""
    """Steps that torch's profiler records on every rank, into the log's folder: "steps=10:13"."""
    progress: bool = True
    """Show a progress bar, or plain lines where there is no terminal."""
    backend: str = "auto"
    """auto, shoal (shared memory on one host, gloo between hosts), gloo, nccl."""
    device: str = "auto"
    """auto, cpu or cuda."""


def adopt_loader(config: RunConfig) -> list[str]:
    """Take a DataLoader in `data` apart; sentences say what that means. What the config says itself wins."""
    if not isinstance(config.data, DataLoader):
        return []
    parts = loader_parts(config.data, config.seed)
    if config.sampler is not None:
        raise ConfigError(
            "sampler= beside a DataLoader, which has one of its own; leave sampler= out, or give data=loader.dataset."
        )
    if config.global_batch and parts.own_batches:
        raise ConfigError(
            f"global_batch={config.global_batch} beside a DataLoader whose batch_sampler= makes batches of its own "
            "sizes; leave one of them out."
        )
    said = [f"data=DataLoader: its batches of {parts.batch} are global batches, divided among all workers."]
    if config.global_batch:
        said = [f"data=DataLoader: global_batch={config.global_batch} replaces its batch_size={parts.batch}."]
    if parts.lost:
        said.append(f"data=DataLoader: not kept: {', '.join(parts.lost)}.")
    config.data = parts.data
    config.global_batch = config.global_batch or parts.batch
    config.shuffle = config.shuffle and parts.shuffle
    config.sampler = parts.sampler
    config.drop_last = config.drop_last or parts.drop_last
    config.collate = config.collate or parts.collate
    config.loader_workers = config.loader_workers or parts.workers
    config.pin_memory = config.pin_memory or parts.pin_memory
    config.worker_init_fn = config.worker_init_fn or parts.worker_init
    return said


def check_kinds(config: RunConfig) -> None:
    """Refuse fields of another kind than a run can use."""
    if not_given in (config.model, config.optimizer) or config.models or config.optimizers:
        raise ConfigError(NEEDS)
    if not isinstance(config.model, nn.Module) and not callable(config.model):
        raise ConfigError(f"model= is a {type(config.model).__name__}; {MODEL}")
    if not callable(config.optimizer):
        raise ConfigError(
            f"optimizer= is a {type(config.optimizer).__name__}; give a function of the parameters that returns "
            "a torch optimizer, such as lambda params: torch.optim.AdamW(params, lr=3e-4)."
        )
    if config.loss is not None and not callable(config.loss):
        raise ConfigError(
            f"loss= is a {type(config.loss).__name__}; give a function (output, batch) -> (sum, count)."
        )
    check_words(config.buffers)
    make_chain(config.augment)
    if (tracker_names(config.trackers) or profile_steps(config.profile)) and config.log is None:
        raise ConfigError(
            "trackers= and profile= write into the log's folder, and log=None: give log= a folder."
        )
    if not isinstance(config.tensor_rules, Mapping):
        raise ConfigError(
            f'tensor_rules= is a {type(config.tensor_rules).__name__}; give a dict such as {{"*.up": "column"}}.'
        )
    if not isinstance(config.columns, Mapping):
        raise ConfigError(
            f'columns= is a {type(config.columns).__name__}; give a dict such as {{"length": lengths}}.'
        )
    if config.global_batch == 0:
        raise ConfigError(
            "global_batch= is missing: how many samples a step has, over all workers; give global_batch=256, or a "
            "DataLoader as data=."
        )
    if config.sampler is not None and not hasattr(config.sampler, "__iter__"):
        raise ConfigError(
            f"sampler= is a {type(config.sampler).__name__}; give an object whose iter() gives numbers of samples."
        )
    functions = {
        "inputs": config.inputs,
        "collate": config.collate,
        "penalty": config.penalty,
        "worker_init_fn": config.worker_init_fn,
    }
    for name, given in functions.items():
        if given is not None and not callable(given):
            raise ConfigError(f"{name}= is a {type(given).__name__}; give a function.")


def settable() -> set[str]:
    """The settings that the command line may override."""
    return {f.name for f in dataclasses.fields(RunConfig) if f.name not in _NOT_SETTABLE}


def apply_overrides(config: RunConfig, overrides: Mapping[str, Value]) -> int | str | None:
    """Set the fields that they name; how long to train, if that is among them."""
    hints = get_type_hints(type(config))
    known = settable()
    for key, value in overrides.items():
        if key == "steps":
            continue
        if key not in known:
            raise ConfigError(f"--set {key}={value}: Run has no such setting{did_you_mean(key, known)}")
        try:
            setattr(config, key, as_type(value, hints[key]))
        except TypeError as wanted:
            raise ConfigError(f"--set {key}={value}: it should be {wanted}.") from None
    steps = overrides.get("steps")
    return str(steps) if isinstance(steps, float) else steps


def plain_settings(config: RunConfig) -> dict[str, object]:
    """What the user asks for, as far as it is numbers and text: two runs are compared by it."""
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)}
    return {name: value for name, value in found.items() if isinstance(value, int | float | bool | str)}


def log_folder(config: RunConfig) -> Path | None:
    """Where the event logs go; None: nowhere."""
    if config.log is None:
        return None
    if config.log == "auto":
        return Path(config.checkpoint or f"runs/{Path(sys.argv[0]).stem or 'log'}")
    return Path(config.log)


_NOT_SETTABLE = {
    *("model", "loss", "optimizer", "models", "optimizers", "step", "penalty", "metrics"),
    *("data", "validation", "inputs", "collate", "tensor_rules", "columns", "sampler", "worker_init_fn"),
}
