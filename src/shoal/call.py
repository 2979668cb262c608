"""How a model is called: with one argument, with several, or with keywords."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shoal.errors import ConfigError


class Call:
    """The arguments of one call of the model, for `inputs=` to return.

    >>> both = Call(1, 2, scale=3)
    >>> both.args, both.kwargs
    ((1, 2), {'scale': 3})
    """

    __slots__ = ("args", "kwargs")

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        shown = [type(value).__name__ for value in self.args]
        shown += [f"{name}={type(value).__name__}" for name, value in self.kwargs.items()]
        return f"Call({', '.join(shown)})"


def call_model(model: nn.Module, inputs: object) -> object:
    """The model's output for what `inputs=` returned.

    >>> import torch
    >>> call_model(nn.Bilinear(2, 2, 1), Call(torch.zeros(4, 2), torch.zeros(4, 2))).shape
    torch.Size([4, 1])
    """
    return model(*inputs.args, **inputs.kwargs) if type(inputs) is Call else model(inputs)


def arguments(inputs: object) -> object:
    """What `inputs=` returned, as nested tuples and dicts that may be searched for tensors."""
    return (inputs.args, inputs.kwargs) if type(inputs) is Call else inputs


class Signature:
    """What the forward of a model takes.

    A tuple is several arguments where forward needs several, a dict is keywords where forward has these names;
    anything else, and what fits only so, is one argument. Where both would do, the user has to say.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of = type(model).__name__
        try:
            self._signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):  # some C functions do not tell
            self._signature = None
        self._known: dict[tuple[object, ...], bool] = {}

    def arrange(self, given: object) -> object:
        """What `inputs=` returned, as `call_model` takes it.

        >>> Signature(nn.Bilinear(2, 2, 1)).arrange((1, 2)), Signature(nn.Linear(2, 2)).arrange((1, 2))
        (Call(int, int), (1, 2))
        """
        if isinstance(given, Tensor):
            return given
        if type(given) is tuple:
            key: tuple[object, ...] = ("args", len(given))
            if key not in self._known:
                self._known[key] = self._takes_several(given)
            return Call(*given) if self._known[key] else given
        if isinstance(given, Mapping):
            key = ("names", *given)
            if key not in self._known:
                self._known[key] = self._takes_names(given)
            return Call(**given) if self._known[key] else given
        return given

    def named(self, names: Any) -> bool:
        """Whether forward has a parameter of each of these names."""
        return self._signature is not None and not set(names) - self._names()

    def unnamed(self, names: Any) -> list[str]:
        """Which of these names forward has no parameter of."""
        return [str(name) for name in names if name not in self._names()]

    def _binds(self, *args: object, **kwargs: object) -> bool:
        """Whether forward can be called so."""
        if self._signature is None:
            return not kwargs and len(args) == 1
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    def _names(self) -> set[str]:
        hidden = (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.POSITIONAL_ONLY,
        )
        found = self._signature.parameters.values() if self._signature is not None else ()
        return {parameter.name for parameter in found if parameter.kind not in hidden}

    def _takes_several(self, given: tuple[object, ...]) -> bool:
        if not self._binds(*given):
            return False
        if self._binds(given):
            raise ConfigError(
                f"inputs= returned a tuple of {len(given)}, which may be {len(given)} arguments of {self._of}.forward "
                "or one; say which with shoal.Call(*parts) or shoal.Call(parts)."
            )
        return True

    def _takes_names(self, given: Mapping[str, object]) -> bool:
        if not all(isinstance(name, str) for name in given) or not self._binds(**given):
            return False
        if not self.named(given) and self._binds(given):
            raise ConfigError(
                f"inputs= returned a dict with {', '.join(self.unnamed(given))}, which {self._of}.forward does not "
                "name; choose the entries that it takes, or say what is meant with shoal.Call(**entries) or "
                "shoal.Call(entries)."
            )
        return True
