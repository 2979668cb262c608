"""In which order will gradients become ready? Backward goes through the modules as forward did, the other way.

So we watch the first forward pass. Torch's own DDP watches the first backward pass instead and moves its buckets
after it; here, the order is known before the first gradient arrives, and nothing has to run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn


class ForwardOrder:
    """Watches one forward pass.

    >>> model = nn.ModuleDict({"second": nn.Linear(2, 2), "first": nn.Linear(2, 2)})
    >>> watch = ForwardOrder(model, dict(model.named_parameters()))
    >>> import torch
    >>> _ = model["second"](model["first"](torch.zeros(1, 2)))
    >>> watch.close()
    ['second.bias', 'second.weight', 'first.bias', 'first.weight']
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = list(parameters)
        self._turns: dict[str, int] = {}
        self._hooks = [
            module.register_forward_pre_hook(self._noticing(name)) for name, module in model.named_modules()
        ]

    def close(self) -> list[str]:
        """Stop watching; the parameters by the turn of their module, the last one's first."""
        for hook in self._hooks:
            hook.remove()
        turns = [self._turn(name) for name in self._names]
        ranked = sorted(range(len(turns)), key=lambda i: (turns[i], i), reverse=True)
        return [self._names[i] for i in ranked]

    def _noticing(self, name: str) -> Callable[[nn.Module, object], None]:
        turns = self._turns

        def notice(module: nn.Module, inputs: object) -> None:
            del module, inputs
            turns.setdefault(name, len(turns))

        return notice

    def _turn(self, name: str) -> int:
        """The turn of the module that owns a parameter, or of the innermost one around it that ran.

        Some modules use the parameters of inner ones without running them, as attention does its projection.
        """
        while name:
            name = name.rpartition(".")[0]
            if name in self._turns:
                return self._turns[name]
        return -1
