"""Shoal: one training loop, every way to share it.

run = shoal.Run(model=Net, loss=loss, optimizer=make_optimizer, data=dataset, global_batch=256)
for step in run.steps("2ep"):
    print(step.number, step.loss)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.call import Call as Call
    from shoal.cluster.from_function import launch as launch
    from shoal.embedding import SparseEmbedding as SparseEmbedding
    from shoal.errors import ConfigError as ConfigError
    from shoal.errors import NonFiniteLoss as NonFiniteLoss
    from shoal.errors import PeerLost as PeerLost
    from shoal.errors import ShoalError as ShoalError
    from shoal.train.own_step.own_step import OwnStep as OwnStep
    from shoal.train.run import Run as Run
    from shoal.types import Evaluation as Evaluation
    from shoal.types import Plan as Plan
    from shoal.types import Promise as Promise
    from shoal.types import StepReport as StepReport

__version__ = "0.1.0"

# Loaded on first use, so that the command line answers without paying for torch.
_HOME = {
    "Call": "shoal.call",
    "ConfigError": "shoal.errors",
    "Evaluation": "shoal.types",
    "NonFiniteLoss": "shoal.errors",
    "OwnStep": "shoal.train.own_step.own_step",
    "PeerLost": "shoal.errors",
    "Plan": "shoal.types",
    "Promise": "shoal.types",
    "Run": "shoal.train.run",
    "ShoalError": "shoal.errors",
    "SparseEmbedding": "shoal.embedding",
    "StepReport": "shoal.types",
    "launch": "shoal.cluster.from_function",
}
__all__ = [
    "Call",
    "ConfigError",
    "Evaluation",
    "NonFiniteLoss",
    "OwnStep",
    "PeerLost",
    "Plan",
    "Promise",
    "Run",
    "ShoalError",
    "SparseEmbedding",
    "StepReport",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
