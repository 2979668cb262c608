"""The plain program: a training loop in torch alone, the whole global batch in one piece. What every run is held to.

Nothing of a run is in here but the order of samples and the first weights: no exchange, no step, no (sum, count).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.data.batch import convert
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.testing.parity import ParityTrace
from shoal.train.model.make import make_model
from shoal.train.run_config import RunConfig

MeanLoss = Callable[[nn.Module, Any], torch.Tensor]
"""The model and the whole batch -> what one process calls backward on."""


def plain_loop(config: RunConfig, mean_loss: MeanLoss, steps: int) -> ParityTrace:
    """Train in float64, as a tutorial of torch would have it."""
    model, _ = make_model(config.model, config.seed, torch.float64, deferred=False)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = config.optimizer(list(named.values()))
    loader = Loader(Feed(config.data, config.global_batch, rank=0, size=1, seed=config.seed))
    losses = []
    for step in range(steps):
        batch = convert(loader.take(step).batches[0], torch.device("cpu"), torch.float64)
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if config.clip is not None:
            nn.utils.clip_grad_norm_(named.values(), float(config.clip))
        optimizer.step()
        losses.append(float(loss.detach()))
    return ParityTrace(losses, {name: p.detach().clone() for name, p in model.named_parameters()})
