"""One trial pass, watched: which operations and which layers each tensor goes into.

The rules for what can be cut look at this record and not at names or source code. Layers that we know how to cut
are seen as one step each; everything else is seen operation by operation, below autograd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.seeds import Args, Kwargs, Operation
from shoal.tensor.projection import is_projection
from shoal.torch_private import TorchDispatchMode, storage_address, tree_leaves

SAME_PLACE = frozenset({"clone", "detach", "alias", "_to_copy", "empty_like", "zeros_like", "ones_like"})
"""Operations that are not arithmetic, and still give each value its place in the result."""


@dataclass(frozen=True)
class Event:
    """A step of the pass: an operation (`module` is None), or one call of a layer seen as a whole."""

    name: str
    module: str | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    elementwise: bool = False
    random: bool = False


@dataclass(frozen=True)
class CallSpan:
    """One call of a module: the events during it are number `begin` to `end` - 1."""

    begin: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class Trace:
    """What a trial pass did. Tensors are numbers: keys of `tensors`, which keeps them alive and so distinct."""

    events: list[Event] = field(default_factory=list)
    spans: dict[str, list[CallSpan]] = field(default_factory=lambda: defaultdict(list))
    tensors: dict[int, Tensor] = field(default_factory=dict)
    uses: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    source: dict[int, int] = field(default_factory=dict)
    learned: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    bare: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)

    def calls(self, module: str) -> list[Event]:
        """Every call of a layer, in order."""
        return [event for event in self.events if event.module == module]

    def ran(self, module: str) -> bool:
        return bool(self.spans.get(module))

    def add(self, event: Event) -> None:
        number = len(self.events)
        self.events.append(event)
        for tensor in event.inputs:
            self.uses[tensor].append(number)
        for tensor in event.outputs:
            self.source.setdefault(tensor, number)
        if event.module is not None or any(tensor in self.learned for tensor in event.inputs):
            self.learned.update(event.outputs)

    def know(self, value: object) -> tuple[int, ...]:
        """The numbers of all tensors in `value`."""
        found = []
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                # Kept alive: Python gives the id of a tensor that is gone to the next one.
                self.tensors[id(leaf)] = leaf
                found.append(id(leaf))
        return tuple(found)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.depth = 0  # inside how many layers that count as one step
        self.running = (
            False  # what happens outside of the model (making a batch, taking a loss) is not its doing
        )

    def __torch_dispatch__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        before = torch.get_rng_state() if seeded else None
        result = func(*args, **(kwargs or {}))
        if not self.running:
            return result
        trace = self.trace
        inputs, outputs = trace.know((args, kwargs or {})), trace.know(result)
        trace.made |= _storages(trace, outputs) - _storages(trace, inputs)
        # Inside of a layer nothing is noted: what it does to its weights is known.
        if not self.depth:
            trace.bare.update(inputs)
            name = func.overloadpacket.__name__
            same = torch.Tag.pointwise in func.tags or name in SAME_PLACE
            # An attention may draw numbers, and without dropout it does not: the generator tells.
            random = before is not None and not torch.equal(before, torch.get_rng_state())
            trace.add(Event(name, None, inputs, outputs, same or name == "bernoulli_", random))
        return result


def _storages(trace: Trace, tensors: tuple[int, ...]) -> set[int]:
    return {storage_of(trace.tensors[tensor]) for tensor in tensors}


def storage_of(tensor: Tensor) -> int:
    """A number for the memory behind `tensor`; views share it."""
    return storage_address(tensor)


def is_layer(module: nn.Module) -> bool:
    """Is a call of this one step?"""
    return is_projection(module) or isinstance(module, nn.Embedding | nn.MultiheadAttention)


def watch(model: nn.Module, run: Callable[[], object]) -> Trace:
    """Call `run`, which must pass something through `model`, and record it. Leaves random state and buffers alone.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> [event.name for event in watch(model, lambda: model(torch.ones(1, 2))).events]
    ['Linear', 'relu']
    """
    trace = Trace()
    trace.learned.update(trace.know([p for p in model.parameters() if p.requires_grad]))
    watcher = _Watcher(trace)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for name, module in model.named_modules():
            before, after = _hooks(watcher, name, module)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        stack.enter_context(watcher)
        run()
    return trace


def _hooks(
    watcher: _Watcher, name: str, module: nn.Module
) -> tuple[Callable[..., None], Callable[..., None]]:
    trace = watcher.trace
    layer = is_layer(module)
    begins: list[int] = []

    def before(*_: object) -> None:
        watcher.running = True
        begins.append(len(trace.events))
        watcher.depth += layer

    def after(_: nn.Module, args: object, kwargs: object, result: object) -> None:
        watcher.depth -= layer
        inputs, outputs = trace.know((args, kwargs)), trace.know(_plain(result))
        if layer and not watcher.depth:
            trace.add(Event(type(module).__name__, name, inputs, outputs))
        trace.spans[name].append(CallSpan(begins.pop(), len(trace.events), inputs, outputs))
        if not name:
            watcher.running = False
            trace.returned.update(outputs)

    return before, after


def _plain(result: object) -> object:
    # Outputs of Hugging Face models are dictionaries that also have attributes.
    return dict(result) if isinstance(result, Mapping) else result


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """A pass without gradients that leaves no mark: buffers and random state are as before, layers are not fused."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # The fused encoder layer calls no inner module, so the trace would not see the projections.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
            for buffer, value in buffers:
                buffer.copy_(value)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
