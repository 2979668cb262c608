"""Before which module's call does a parameter have to be there? Found out by watching one forward pass.

Most parameters are used by the module that has them. Some are not: attention uses the weights of its projection and
never calls it, and a model may use a weight of a layer before the layer runs. So every operation of the pass is looked
at, and a parameter's guard is the innermost module around it that had been called when it was first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.torch_private import tree_leaves

_FACTS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad", "layout", "is_cuda")
}
"""What may be known of a parameter whose values are not here yet."""


class FirstUse(TorchFunctionMode):
    """Watches from the call of the model to its end; use `watch` to have it do so once.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
    >>> watch = FirstUse(model, {p: name for name, p in model.named_parameters()})
    >>> x = model[0](torch.ones(1, 2)) if watch.__enter__() else None
    >>> _ = model[1](x, x, x), watch.stop()
    >>> [(guard, sorted(names)) for guard, names in watch.guards().items() if names]  # doctest: +NORMALIZE_WHITESPACE
    [('0', ['0.bias', '0.weight']),
     ('1', ['1.in_proj_bias', '1.in_proj_weight', '1.out_proj.bias', '1.out_proj.weight'])]
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._around = _around(model, self._names)
        self._called: dict[str, int] = {"": 0}
        self._guards: dict[str, str] = {}
        self._running = False
        self._hooks = [
            module.register_forward_pre_hook(self._noticing(name), prepend=True)
            for name, module in model.named_modules()
            if name
        ]

    def __enter__(self) -> FirstUse:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._running = True
        return self

    def stop(self) -> None:
        """Watch no longer."""
        if self._running:
            self._running = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def guards(self) -> dict[str, list[str]]:
        """Modules in the order of their calls, each with the parameters that must be there when it is called.

        What the pass did not use belongs to the whole model, which is called ''.
        """
        found: dict[str, list[str]] = {
            name: [] for name in sorted(self._called, key=lambda n: self._called[n])
        }
        for name in self._names.values():
            found[self._guards.get(name, "")].append(name)
        return found

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # Shapes and types may be read long before the values are; modules would wait too early.
        if func not in _FACTS:
            for leaf in tree_leaves((args, kwargs)):
                # Every operation on a parameter passes here, also those outside of the module that owns it (tied
                # weights).
                if isinstance(leaf, nn.Parameter):
                    self._use(leaf)
        return func(*args, **(kwargs or {}))

    def _use(self, parameter: nn.Parameter) -> None:
        name = self._names.get(id(parameter))
        if name is not None and name not in self._guards:
            called = [around for around in self._around[name] if around in self._called]
            # Of those around it, the last that was called: a tied weight has several.
            self._guards[name] = max(called, key=lambda around: (around.count("."), self._called[around]))

    def _noticing(self, name: str) -> Callable[[nn.Module, object], None]:
        called = self._called

        def notice(module: nn.Module, inputs: object) -> None:
            del module, inputs
            called.setdefault(name, len(called))

        return notice


def _around(model: nn.Module, names: Mapping[int, str]) -> dict[str, set[str]]:
    """By parameter: the modules that own it, and all modules around those."""
    found: dict[str, set[str]] = {name: {""} for name in names.values()}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            if id(parameter) in names:
                found[names[id(parameter)]].update(_parents(path))
    return found


def _parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
