"""Several models under their names, as one module: one checkpoint, one state dict, one set of random streams."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shoal.data.batch import Batch
from shoal.errors import ConfigError
from shoal.train.model.make import MODEL, MakeModel, make_model


class Models(nn.ModuleDict):
    """Models by name. Parameters are called after their model: `gen.0.weight`.

    >>> [name for name, _ in Models({"gen": nn.Linear(1, 1), "disc": nn.Linear(1, 1)}).named_parameters()]
    ['gen.weight', 'gen.bias', 'disc.weight', 'disc.bias']
    """

    def forward(self, batch: Batch) -> Models:
        """What an evaluation hands to its metrics: the models themselves."""
        del batch
        return self


def make_models(given: Mapping[str, nn.Module | MakeModel], seed: int, dtype: object) -> Models:
    """All models. Initial values of those that a factory makes follow from the seed, the model's name and theirs.

    Training modes stay as they were given: a teacher in evaluation mode is one here too.
    """
    modes: list[bool] = []

    def make() -> Models:
        made = Models()
        for name, one in given.items():
            module = one if isinstance(one, nn.Module) else one()
            if not isinstance(module, nn.Module):
                raise ConfigError(f"models['{name}'] made a {type(module).__name__}; {MODEL}")
            made[name] = module
        modes[:] = [module.training for module in made.modules()]
        return made

    built = all(isinstance(one, nn.Module) for one in given.values())
    models, _ = make_model(make() if built else make, seed, dtype, deferred=False)  # type: ignore[arg-type]
    assert isinstance(models, Models)
    for module, mode in zip(models.modules(), modes, strict=True):
        module.training = mode
    _check_apart(models)
    return models


def _check_apart(models: Models) -> None:
    """Refuse models that share a parameter: two exchanges would each send and update it."""
    seen: dict[int, str] = {}
    for name, model in models.items():
        for parameter in model.parameters():
            other = seen.setdefault(id(parameter), name)
            if other != name:
                raise ConfigError(
                    f"models '{other}' and '{name}' share a parameter, which two optimizers would update; make them "
                    "one model with two heads, and call ctx.backward for it once for each loss."
                )
