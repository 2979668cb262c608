"""What in a state dict of others is the model, and what the optimizer's state of which parameter.

torch numbers the parameters of an optimizer and does not say which is which, nor which optimizer it was. Where that
follows from the numbers, it is taken over; where it does not, the state is left out and a remark says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from shoal.checkpoint.convert.dcp import Later
from shoal.checkpoint.layout.tensor_stream import Leaf
from shoal.errors import ConfigError

_MODELS = ("model", "state_dict", "model_state_dict")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_ADAM = frozenset(("step", "exp_avg", "exp_avg_sq"))
_CLASSES = {
    frozenset(("momentum_buffer",)): "SGD",
    frozenset(("step", "sum")): "Adagrad",
    frozenset(("step", "square_avg")): "RMSprop",
    frozenset(("step", "square_avg", "acc_delta")): "Adadelta",
    frozenset(("step", "exp_avg", "exp_inf")): "Adamax",
    frozenset((*_ADAM, "mu_product")): "NAdam",
}
"""Which optimizer of torch keeps what."""


Nested = Mapping[object, object]
"""A dict as somebody else saved it: further dicts, lists, numbers, and a Leaf for each tensor."""


@dataclass
class Content:
    """What a source has for a run."""

    model: dict[str, Leaf] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Other names of a tensor -> its first."""
    optimizer: dict[str, dict[str, Leaf]] = field(default_factory=dict)
    """Parameter -> kind -> numbers."""
    optimizer_name: str | None = None
    remarks: list[str] = field(default_factory=list)

    def paths(self) -> dict[str, Leaf]:
        """Everything by the path that a checkpoint has for it."""
        found = {f"{_kind(name, leaf)}/{name}": leaf for name, leaf in self.model.items()}
        for name, entries in self.optimizer.items():
            found.update({f"optimizer/{kind}/{name}": leaf for kind, leaf in entries.items()})
        return found


def understand(tree: Nested, optimizer: str = "") -> Content:
    """Find the model and the optimizer's state; `optimizer` is its class, where the caller knows.

    >>> weight = torch.zeros(2, 3)
    >>> found = understand({"epoch": 3, "model": {"module.a": Leaf.of(weight), "module.b": Leaf.of(weight)}})
    >>> list(found.paths()), found.ties, found.remarks
    (['parameter/a'], {'b': 'a'}, ["'module.' at the beginning of every name is taken away"])
    """
    content = Content()
    holder, entries = _model(tree)
    named = {str(name): leaf for name, leaf in entries.items() if isinstance(leaf, Leaf)}
    for name in entries:
        if str(name) not in named:
            content.remarks.append(f"'{name}' is left out: it is no tensor")
    if all(name.startswith("module.") for name in named):  # as DistributedDataParallel names them
        named = {name.removeprefix("module."): leaf for name, leaf in named.items()}
        content.remarks.append("'module.' at the beginning of every name is taken away")
    seen: dict[object, str] = {}
    for name, leaf in named.items():
        first = seen.setdefault(leaf.same, name) if leaf.same is not None else name
        if first == name:
            content.model[name] = leaf
        else:
            content.ties[name] = first
    state = next((entry for key in _OPTIMIZERS if isinstance(entry := holder.get(key), dict)), None)
    if state is not None:
        _take_optimizer(content, state, optimizer)
    return content


def _model(tree: Nested) -> tuple[Nested, Nested]:
    """The dict of tensors, and the dict that it is an entry of."""
    inside = [entry for key in _MODELS if isinstance(entry := tree.get(key), dict)]
    if len(inside) == 1 and any(isinstance(value, Leaf) for value in inside[0].values()):
        return tree, inside[0]
    if any(isinstance(value, Leaf) for value in tree.values()):
        return {}, tree
    nested = inside or [value for value in tree.values() if isinstance(value, dict)]
    if len(nested) == 1:
        return _model(nested[0])
    raise ConfigError(
        f"there is no state dict in it, only {', '.join(repr(str(key)) for key in tree) or 'nothing'}; "
        f"it should hold tensors by name, or such a dict as {' or '.join(repr(key) for key in _MODELS)}."
    )


def _kind(name: str, leaf: Leaf) -> str:
    """A state dict does not say what is a buffer: whole numbers are, and the statistics of batch normalisation."""
    number = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return "buffer" if name.rpartition(".")[2] in _BUFFERS or not number else "parameter"


def _take_optimizer(content: Content, given: Nested, optimizer: str) -> None:
    states = given.get("state")
    listed = _value(given.get("param_groups", []))
    groups = [*listed.values()] if isinstance(listed, dict) else listed
    if not isinstance(states, dict) or not states or not isinstance(groups, list):
        return
    try:
        for key, name in _owners(content, states, groups):
            entries = {
                kind: leaf for kind, value in states[key].items() if (leaf := _leaf(value)) is not None
            }
            shape = content.model[name].shape
            for kind, leaf in entries.items():
                if leaf.shape not in (shape, (), (1,)):
                    raise _Left(
                        f"'{kind}' of '{name}' is {list(leaf.shape)}, and the parameter {list(shape)}"
                    )
            if entries:
                content.optimizer[name] = entries
        if content.optimizer:
            content.optimizer_name = optimizer or _class(content, groups)
    except _Left as reason:
        content.optimizer = {}
        content.remarks.append(f"the optimizer's state is left out: {reason}")


class _Left(Exception):
    """Why the optimizer's state cannot be taken over."""


def _owners(content: Content, states: Nested, groups: list[object]) -> Iterator[tuple[object, str]]:
    """Whose state each entry is."""
    if not all(str(key).isdigit() for key in states):
        for key in states:
            name = str(key) if str(key) in content.model else str(key).removeprefix("module.")
            if content.ties.get(name, name) not in content.model:
                raise _Left(f"'{key}' is no parameter of the model")
            yield key, content.ties.get(name, name)
        return
    names = [name for name, leaf in content.model.items() if _kind(name, leaf) == "parameter"]
    if len(groups) != 1:
        raise _Left(
            f"it has {len(groups)} groups of parameters, and does not say which parameter is in which"
        )
    numbers = _value(_options(groups).get("params"))
    numbers = numbers if isinstance(numbers, list | tuple) else []
    if len(numbers) != len(names):
        raise _Left(f"it is of {len(numbers)} parameters, and the model has {len(names)}")
    order = {str(number): name for number, name in zip(numbers, names, strict=True)}
    yield from ((key, order[str(key)]) for key in states if str(key) in order)


def _class(content: Content, groups: list[object]) -> str:
    kinds = frozenset(kind for entries in content.optimizer.values() for kind in entries)
    group = _options(groups)
    if kinds - {"max_exp_avg_sq"} == _ADAM and {"amsgrad", "decoupled_weight_decay"} <= group.keys():
        return "AdamW" if _value(group["decoupled_weight_decay"]) else "Adam"
    if kinds not in _CLASSES:
        listed = ", ".join(sorted(kinds))
        raise _Left(f"with {listed} it can be of several optimizers; say which with --optimizer, as AdamW")
    return _CLASSES[kinds]


def _options(groups: list[object]) -> Nested:
    """The options of an optimizer's first group of parameters."""
    first = groups[0] if groups else None
    return first if isinstance(first, dict) else {}


def _value(value: object) -> object:
    return value.read() if isinstance(value, Later) else value


def _leaf(value: object) -> Leaf | None:
    """A tensor, or a number as one: torch kept steps as plain numbers once."""
    value = _value(value)
    if isinstance(value, int | float):
        value = torch.tensor(float(value))
    if isinstance(value, torch.Tensor):
        return Leaf.of(value)
    return value if isinstance(value, Leaf) else None
