"""The face of Shoal: `shoal.Run`."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

import torch
from torch import nn

import shoal
from shoal.config import as_type
from shoal.data.batch import Collate, Inputs
from shoal.data.columns import Columns
from shoal.data.source import Source, Stream
from shoal.errors import ConfigError
from shoal.optimizer import MakeOptimizer
from shoal.table import did_you_mean
from shoal.train.apart import meets_at_servers
from shoal.train.build import build
from shoal.train.checkpoints import Checkpoints, Wishes
from shoal.train.evaluate import Metric, evaluate
from shoal.train.loop import Loop
from shoal.train.loss import Loss
from shoal.train.model import MakeModel
from shoal.train.order import Order
from shoal.train.progress import Progress
from shoal.train.question import answer
from shoal.train.schedule import MakeScheduler
from shoal.types import Evaluation, StepReport, Value
from shoal.world.devices import choose_device
from shoal.world.failure import end_in_one_sentence
from shoal.world.launch import from_environment
from shoal.world.world import World


@dataclass(kw_only=True)
class Run:
    """A training run: an ordinary model and loss, and one line that says how the work is shared.

    The script is the same alone (`python train.py`) and in parallel (`shoal run --workers 4 train.py`, or
    torchrun); `--strategy`, `--steps` and `--set name=value` override these fields from outside.

    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    >>> def loss(output, batch):
    ...     return ((output - batch[1]) ** 2).sum(), batch[1].numel()
    >>> run = Run(model=lambda: nn.Linear(4, 1), loss=loss, data=data, global_batch=8, log=None, progress=False,
    ...           optimizer=lambda params: torch.optim.SGD(params, lr=0.1), strategy="solo")
    >>> [step.number for step in run.steps("1ep")]
    [1, 2, 3, 4]
    """

    model: nn.Module | MakeModel
    """An nn.Module, or a callable that makes one. With a callable, initial weights depend on seed and name only."""
    loss: Loss
    """(output, batch) -> (sum, count), or a scalar mean over the batch."""
    optimizer: MakeOptimizer
    """Parameters -> a torch optimizer; groups are kept."""
    data: Source | Stream
    """Anything with len() and [i]; or a stream, whose iter() begins anew each time."""
    global_batch: int
    """Samples per step, over all workers and micro-batches."""
    strategy: str = "ddp"
    """How the work is shared; `shoal list` shows the choices."""
    precision: str = "fp32"
    """fp32, bf16, fp16 or fp64."""
    clip: float | str | None = None
    """A global norm, or "value(0.5)" to clamp each element."""
    schedule: str | MakeScheduler | None = None
    """A learning rate such as "cosine(warmup=100)", or optimizer -> torch scheduler; advances once a step."""
    accumulate: int = 1
    """Micro-batches per worker and step."""
    recompute: str | None = None
    """"blocks" keeps only the inputs of each block and computes its activations again when backward needs them."""
    batchnorm: str = "own"
    """What batch normalisation sees: each worker's "own" samples, or "sync": those of all workers."""
    tensor_rules: Mapping[str, str] = field(default_factory=dict)
    """How tpN cuts modules, by name pattern, where it should not find out itself: {"*.up": "column"}."""
    seed: int = 0
    """Of weights, sample order and dropout."""
    inputs: Inputs | None = None
    """Batch -> what goes into the model; default `batch[0]`, or `batch["inputs"]` of a dict."""
    collate: Collate | None = None
    """List of samples -> batch; default is torch's."""
    shuffle: bool = True
    partition: str = "block"
    """Which samples of a step go to which worker; `shoal list partition` shows the choices."""
    balance: str = "even"
    """How much of a step each worker gets, as "dynamic" or "static(shares=3/1)"; `shoal list balance` shows them."""
    columns: Columns = field(default_factory=dict)
    """Values that a partition divides by, one for each sample: {"length": lengths}."""
    loader_workers: int = 0
    """Processes per worker that prepare batches ahead; 0 prepares them in the training process."""
    on_nan: str = "stop"
    """What a non-finite loss does: "stop", or "skip" that step."""
    deterministic: bool = False
    """Sums in rank order and torch's deterministic kernels: on one host ddp, zero1, zero2 and shared agree bit for
    bit. Between hosts `shared` sums within each host first: it repeats itself bit for bit and rounds in its own way."""
    checkpoint: str | None = None
    """Folder for checkpoints. A run that finds one there goes on from it."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; the last step is saved too. Training goes on while they are written."""
    checkpoint_keep: int | str | None = 3
    """How many automatic checkpoints stay, as 3 or "last=3, every=1000"; None keeps all. Named ones always stay."""
    copies: str = ""
    """Second copies of checkpoints: "peer" (in the memory of hosts), URLs such as "s3://bucket/run", or both."""
    log: str | None = "auto"
    """Folder for events.jsonl; "auto" is the checkpoint folder, or runs/<name of the script>; None writes none."""
    progress: bool = True
    """Show a progress bar, or plain lines where there is no terminal."""
    backend: str = "auto"
    """auto, shoal (shared memory on one host, gloo between hosts), gloo, nccl."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def __post_init__(self) -> None:
        launch = from_environment()
        end_in_one_sentence(launch.rank)
        self._steps_override = self._apply(launch.overrides)
        self.accumulate *= launch.stands_for
        self._rehearsal = bool(launch.record)
        if launch.record:  # a rehearsal: it starts from the beginning and leaves nothing of its own behind
            self.checkpoint, self.checkpoint_every, self.copies = f"{launch.record}/checkpoint", None, ""
            self.log, self.progress = None, False
        wishes = Wishes.of(self.checkpoint, self.checkpoint_every, self.checkpoint_keep, self.copies)
        order = Order(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Order)})
        if launch.question:
            device = choose_device(self.device, launch.local_rank)
            print(answer(order, launch.question, launch.size, device), flush=True)
            os._exit(0)  # threads of the script's own would keep the process, and nothing is left to do
        # Workers that meet at servers only join no group: whoever is lost from one cannot come back to it.
        apart = launch.launcher and meets_at_servers(self.strategy)
        self.world = (
            World.unjoined(launch, self.device) if apart else World.open(launch, self.backend, self.device)
        )
        atexit.register(self.world.close)
        self.plan, self._parts = build(order, self.world, launch.record)
        if self._parts.mesh.model.size > 1 and self.progress and self.world.rank == 0:
            print(f"{self.plan}\n{self._parts.mesh.drawing()}", file=sys.stderr)
        self._checkpoints = Checkpoints(self._parts, str(self.plan), wishes)
        self._loop = Loop(
            self._parts,
            self.schedule,
            self._checkpoints,
            self._log_folder(),
            {
                "strategy": str(self.plan),
                "workers": self.world.size,
                "precision": self.precision,
                "version": shoal.__version__,
                **self._skew(),
            },
            self.progress,
        )
        exchange = self._parts.exchange
        atexit.register(exchange.close)
        self._progress = self._checkpoints.resume() if exchange.begins else Progress()
        exchange.start(self._progress.step, self._parts.memo())
        atexit.register(self._checkpoints.wait)  # a script may end in the middle of its loop

    @property
    def module(self) -> nn.Module:
        """The model as it is being trained."""
        self._parts.exchange.complete()
        return self._parts.model

    def steps(self, how_long: int | str) -> Iterator[StepReport]:
        """Train, yielding after each step; up to so many steps ("2ep": epochs) counted from the run's beginning."""
        asked = how_long if self._steps_override is None else self._steps_override
        return self._loop.steps(asked, self._progress)

    def evaluate(
        self, data: Source, metrics: Mapping[str, Metric] | None = None, batch: int | None = None
    ) -> Evaluation:
        """Loss, and metrics given as (output, batch) -> (sum, count), over a whole data set and all workers."""
        return evaluate(self._parts, data, metrics or {}, batch or self.global_batch)

    def save(self, name: str) -> None:
        """Write a full checkpoint: under the checkpoint folder, or at a path if the name has a slash."""
        if self._parts.exchange.apart and self.world.rank > 0:
            return  # what the servers hold is one state, and one worker writes it
        path = Path(name)
        elsewhere = len(path.parts) > 1 and not self._rehearsal
        self._checkpoints.save(path.name, self._progress, path.parent if elsewhere else None)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model on rank 0, on the CPU; empty on other ranks. Every rank calls it."""
        whole = self._parts.whole.state_dict()
        return whole if self.world.rank == 0 else {}

    def _apply(self, overrides: Mapping[str, Value]) -> int | str | None:
        """What --strategy, --set and --steps say; they win over the script."""
        hints = get_type_hints(type(self))
        settable = {f.name for f in dataclasses.fields(self) if f.name not in _NOT_SETTABLE}
        for key, value in overrides.items():
            if key == "steps":
                continue
            if key not in settable:
                raise ConfigError(
                    f"--set {key}={value}: Run has no such setting{did_you_mean(key, settable)}"
                )
            try:
                setattr(self, key, as_type(value, hints[key]))
            except TypeError as wanted:
                raise ConfigError(f"--set {key}={value}: it should be {wanted}.") from None
        steps = overrides.get("steps")
        return str(steps) if isinstance(steps, float) else steps

    def _skew(self) -> dict[str, str | float]:
        """How uneven the parts of a step are, where keys or shares decide; rank 0 says it once."""
        loader = self._parts.loader
        found = None if loader.feed.partition.even or self.world.rank > 0 else loader.skew()
        if found is None:
            return {}
        skew, steps = found
        if self.progress:
            text = f"the largest part has {skew:.2f} × its share (over {steps} steps)"
            print(f"partition {self.partition}: {text}", file=sys.stderr)
            if self.batchnorm == "own" and self._parts.presence.own and not loader.feed.partition.counted:
                text = "batch normalisation is measured by the first worker, which may see few samples"
                print(f"partition {self.partition}: {text}; consider batchnorm='sync'.", file=sys.stderr)
        return {"partition": self.partition, "skew": round(skew, 4)}

    def _log_folder(self) -> Path | None:
        if self.log is None:
            return None
        if self.log == "auto":
            return Path(self.checkpoint or f"runs/{Path(sys.argv[0]).stem or 'log'}")
        return Path(self.log)


_NOT_SETTABLE = {"model", "loss", "optimizer", "data", "inputs", "collate", "tensor_rules", "columns"}
