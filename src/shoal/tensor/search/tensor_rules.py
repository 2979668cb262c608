"""`tensor_rules={"*.q_proj": "column", "head": "whole"}`: the user's word on what is cut, by names of modules."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from shoal.errors import ConfigError
from shoal.tensor.projection import is_projection
from shoal.tensor.search.families import family_of

HOWS = ("column", "row", "heads", "vocabulary", "head", "whole")


def match_rules(model: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """What the rules ask for, module by module; of several that match, the last counts. "whole" includes all below.

    >>> match_rules(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"*": "whole", "1": "column"})
    {'0': 'whole', '1': 'column'}
    """
    matched: dict[str, str] = {}
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern, how in rules.items():
        if how not in HOWS:
            raise ConfigError(
                f"tensor_rules: '{pattern}' asks for '{how}', which is no way to cut; use one of {', '.join(HOWS)}."
            )
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(
                f"tensor_rules: '{pattern}' matches no module; the names are like '{_example(modules)}'."
            )
        for name in names:
            if how == "whole":
                matched.update({below: how for below in modules if f"{below}.".startswith(f"{name}.")})
            else:
                _fits(name, modules[name], how)
                matched[name] = how
    return matched


def _example(modules: Mapping[str, nn.Module]) -> str:
    return next((name for name, module in modules.items() if is_projection(module)), next(iter(modules), ""))


def _fits(name: str, module: nn.Module, how: str) -> None:
    """Refuse a rule for a module that cannot be cut that way."""
    kind = type(module).__name__
    good = {
        "heads": isinstance(module, nn.MultiheadAttention) or family_of(module) is not None,
        "vocabulary": isinstance(module, nn.Embedding),
    }.get(how, is_projection(module))
    if not good:
        raise ConfigError(
            f"tensor_rules: '{name}' is a {kind}, which cannot be cut by '{how}'; ask for 'whole', or name another."
        )
    parameters = list(module.parameters())
    if not parameters or not all(p.is_floating_point() for p in parameters):
        raise ConfigError(
            f"tensor_rules: '{name}' is quantised and cannot be cut; ask for 'whole', or take it out of the rules."
        )
    if not any(p.requires_grad for p in parameters):
        raise ConfigError(
            f"tensor_rules: '{name}' is frozen, and a rule is for what learns; take it out of the rules."
        )
