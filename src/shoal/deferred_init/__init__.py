"""Building a model without ever holding it: shapes now, each value when it is asked for.

The factory runs on tensors without memory while a log is kept of what it does to them; the value of one tensor is
the part of that log that concerns it. Bit for bit what `shoal.seeds.build_by_name` gives. The idea is the
deferred initialisation of torchdistX.
"""

from shoal.deferred_init.meta_model import DeferredModel, build_deferred
from shoal.deferred_init.outline import CannotDefer

__all__ = ["CannotDefer", "DeferredModel", "build_deferred"]
