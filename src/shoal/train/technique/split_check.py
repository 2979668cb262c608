"""Does a loss split? Workers and micro-batches compute it over their own samples, so it must be a sum over samples.

A run looks once, at the first micro-batch it computes: the loss of all its samples against those of its halves. A mean
of all must be the mean of the two, a sum their sum. The output of the model is cut with the samples, so the model does
not run again and what its layers draw or normalise plays no part. Where that cannot be done, nothing is claimed:
`shoal verify` compares whole runs.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from shoal.data.batch import Batch, length
from shoal.errors import ConfigError
from shoal.seeds import generators_kept
from shoal.torch_private import tree_leaves, tree_map
from shoal.train.technique.loss import Loss, as_sum_and_count

_ROUNDING = 2e-4
"""Relative. Losses that are cut are computed in float64, but a loss may go through float32."""

_OUTPUTS = 1e-3
"""Relative to the largest. Outputs of two batch sizes are computed by other kernels, in the model's own format."""

_HALF = (torch.float16, torch.bfloat16)

Sums = tuple[float, float]
"""A loss as a sum and a count."""


@dataclass(frozen=True)
class FirstCall:
    """What a loss was called with, and what it returned."""

    output: object
    batch: Batch
    scalar: bool


class FirstLoss:
    """The loss of a run until its first step is over: it remembers its first call in training.

    >>> loss = FirstLoss(lambda output, batch: output.mean())
    >>> _ = loss(torch.zeros(2, requires_grad=True), torch.zeros(2))
    >>> loss.first.scalar
    True
    """

    def __init__(self, given: Loss, plain: Loss | None = None) -> None:
        """`plain`: the same loss, which does nothing besides."""
        self.given = given
        self.plain = plain or given
        self.first: FirstCall | None = None
        self._more: list[FirstCall] = []
        self.learned: list[nn.Parameter] = []
        """Parameters that its gradient reaches, of whatever module."""

    def __call__(self, output: object, batch: Batch) -> object:
        try:
            returned = self.given(output, batch)
        except (TypeError, AttributeError):
            if isinstance(batch, torch.Tensor) or not _is_of_torch(self.plain):
                raise
            name = getattr(self.plain, "__name__", type(self.plain).__name__)
            raise ConfigError(
                f"loss= is torch's {name}, which takes a target, and here it is called with (output, batch), where the "
                f"batch is a {type(batch).__name__}; give loss=lambda output, batch: {name}(output, batch[1]), or "
                "whichever part of the batch is the target."
            ) from None
        if self.first is None and torch.is_grad_enabled():
            self.first = FirstCall(output, batch, isinstance(returned, torch.Tensor))
            self.learned = list(parameters_behind(returned))
        elif self.first is not None and torch.is_grad_enabled() and _rows(self.first, *self._more) < _ENOUGH:
            self._more.append(FirstCall(_kept(output), batch, self.first.scalar))
        return returned

    def together(self) -> FirstCall | None:
        """The first calls as one of more samples, for micro-batches of one or two show little; else the first."""
        calls = [self.first, *self._more]
        if (
            not self._more
            or self.first is None
            or not all(call is not None and _splits(call) for call in calls)
        ):
            return self.first
        try:
            output, batch = (_joined([getattr(call, what) for call in calls]) for what in ("output", "batch"))
        except CannotSplit:
            return self.first
        return FirstCall(output, batch, self.first.scalar)


_ENOUGH = 16
"""Samples that are looked at together, if the first micro-batch has fewer."""


def _rows(*calls: FirstCall) -> int:
    return sum(length(call.batch) for call in calls)


def _kept(output: object) -> object:
    """An output without what its gradient would need."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)


def _splits(call: FirstCall) -> bool:
    n = length(call.batch)
    try:
        part(call.output, n, 0, 1)
        part(call.batch, n, 0, 1)
    except CannotSplit:
        return False
    return True


def _joined(trees: Sequence[object]) -> object:
    """The rows of several trees of one kind, one after the other."""
    leaves = [tree_leaves(tree) for tree in trees]
    if len({len(some) for some in leaves}) > 1:
        raise CannotSplit
    rows = []
    for same in zip(*leaves, strict=True):
        tensors = [leaf for leaf in same if isinstance(leaf, torch.Tensor)]
        if not tensors and any(leaf != same[0] for leaf in same):
            raise CannotSplit
        if tensors and (len(tensors) < len(same) or len({t.shape[1:] for t in tensors}) > 1):
            raise CannotSplit
        rows.append(torch.cat(tensors) if tensors else same[0])
    following = iter(rows)
    return tree_map(lambda _: next(following), trees[0])


def _is_of_torch(loss: Loss) -> bool:
    return (getattr(loss, "__module__", "") if callable(loss) else "").startswith("torch.")


def parameters_behind(returned: object) -> Iterator[nn.Parameter]:
    """The parameters that the gradient of what a loss returned reaches."""
    waiting = [leaf.grad_fn for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    seen: set[object] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            yield variable
        waiting += [following for following, _ in node.next_functions]


def couples(
    model: Callable[[Batch], object], call: FirstCall, whole: object, put_back: Callable[[], None]
) -> bool:
    """Whether the output for some samples depends on which others are in the batch.

    `whole`: what the model made of all samples. It runs without gradients; `put_back` brings it to its state again.
    """
    n = length(call.batch)
    if n < 2:
        return False
    try:
        some = part(call.batch, n, 0, n // 2)

        def differ(whole: object) -> bool:
            state = standing()[1:]  # torch's are set as modules begin
            made = model(some)
            if state != standing()[1:]:
                raise CannotSplit
            return not _alike(part(whole, n, 0, n // 2), made)

        if not differ(whole):
            return False
        # It may remember something from pass to pass: so once more, both from one state.
        put_back()
        again = model(call.batch)
        put_back()
        return differ(again)
    except Exception:  # a model that fails on half a batch has said nothing
        return False


def meets(model: Callable[[Batch], object], batch: Batch, put_back: Callable[[], None]) -> bool:
    """Whether the output for half of the samples depends on the others. The model runs twice, in evaluation mode.

    One that draws all the same would draw otherwise for fewer samples: then it runs on as many, half of them others,
    from the same state of the generators.
    """
    n = length(batch)
    before = _generators()
    whole = model(batch)
    put_back()
    if all(torch.equal(a, b) for a, b in zip(before, _generators(), strict=True)):
        return not same_rows(whole, model(part(batch, n, 0, n // 2)), n)
    for place, state in zip((torch, torch.cuda), before, strict=False):
        place.set_rng_state(state)
    some = part(batch, n, 0, n // 2)
    mixed = model(_joined([some, some, part(batch, n, 0, n % 2)] if n % 2 else [some, some]))
    return not same_rows(whole, part(mixed, n, 0, n // 2), n)


def _generators() -> list[torch.Tensor]:
    cards = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cards]


def samples_meet_in(n: int) -> str:
    """What to say of a model in which they do."""
    return (
        f"shoal: the model gives other outputs for {n // 2} samples than for the same among {n}: samples of a batch "
        "act on each other, as in x - x.mean(0), and each worker and micro-batch sees its own only. Normalise within "
        "each sample, or see all with run.gather; for batch normalisation there is batchnorm='sync'."
    )


def can_split(batch: Batch) -> bool:
    """Whether a batch can be cut in two."""
    n = length(batch)
    try:
        part(batch, n, 0, n // 2)
    except CannotSplit:
        return False
    return n > 1


def same_rows(whole: object, half: object, n: int) -> bool:
    """Whether the first half of an output of `n` samples is the other output; also where that cannot be told."""
    try:
        return _alike(part(whole, n, 0, n // 2), half)
    except CannotSplit:
        return True


def _alike(one: object, other: object) -> bool:
    mine, theirs = (
        [leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        for tree in (one, other)
    )
    if [t.shape for t in mine] != [t.shape for t in theirs] or any(t.dtype in _HALF for t in mine):
        raise CannotSplit
    return all(
        bool(((a - b).abs() <= _OUTPUTS * a.abs().max()).all())
        if a.is_floating_point()
        else bool((a == b).all())
        for a, b in zip(mine, theirs, strict=True)
        if a.numel()
    )


@contextmanager
def unseen() -> Iterator[None]:
    """While it lasts nothing is printed, and afterwards all global generators stand where they stood."""
    numbers, words = random.getstate(), np.random.get_state()
    try:
        with generators_kept(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(numbers)
        np.random.set_state(words)


def standing() -> tuple[object, ...]:
    """Where the global generators stand."""
    legacy: object = np.random.get_state()
    words = (legacy[1].tobytes(), *legacy[2:]) if isinstance(legacy, tuple) else repr(legacy)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), words


class CannotSplit(Exception):
    """Samples, or outputs, that cannot be cut in two."""


def does_not_split(loss: Loss, call: FirstCall, model: Callable[[Batch], object] | None) -> str:
    """How a loss over all samples differs from that over their halves, in a sentence; empty where nothing is known.

    `model`: batch -> output, for outputs that cannot be cut, such as a loss that the model computes itself. It and the
    loss run without gradients; that they leave no trace is for the caller to see to.

    >>> batch = torch.arange(4.0)
    >>> call = FirstCall(batch, batch, scalar=True)
    >>> does_not_split(lambda output, batch: output.mean(), call, None)
    ''
    >>> does_not_split(lambda output, batch: output.sum(), call, None)[:62]
    'loss= returned a sum without its count: over 4 samples it is 6'
    """
    n = length(call.batch)
    try:
        part(call.output, n, 0, 1)
        model = None
    except CannotSplit:
        if model is None:
            return ""
    for wide in (True, False) if model is None else (False,):
        try:
            return _compare(_evaluator(loss, call, model, wide), n, call.scalar)
        except Exception:  # a loss that fails on half a batch, or in float64, has said nothing
            continue
    return ""


def _evaluator(
    loss: Loss, call: FirstCall, model: Callable[[Batch], object] | None, wide: bool
) -> Callable[[int, int], Sums]:
    """The loss over the samples from one to another; `wide`: in float64."""
    n = length(call.batch)
    output, batch = (_widened(call.output), _widened(call.batch)) if wide else (call.output, call.batch)
    if not wide and any(
        isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF for leaf in tree_leaves(output)
    ):
        raise CannotSplit  # rounding would be all there is to see

    def evaluate(start: int, stop: int) -> Sums:
        mine = part(batch, n, start, stop)
        state = standing()
        returned = loss(part(output, n, start, stop) if model is None else model(mine), mine)
        if state != standing():
            raise CannotSplit  # what it draws is another thing each time
        total, count = as_sum_and_count(returned, mine)
        return float(total), count

    return evaluate


def part(tree: object, n: int, start: int, stop: int) -> object:
    """The samples from one to another out of `n`, of everything that has one row for each.

    >>> part({"x": torch.arange(4)}, 4, 1, 3)
    {'x': tensor([1, 2])}
    """
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] != n):
            raise CannotSplit
        if not isinstance(leaf, torch.Tensor | int | float | None):
            raise CannotSplit  # lists of words, graphs, objects of the user's own
    return tree_map(lambda leaf: leaf[start:stop].clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _widened(tree: object) -> object:
    """In float64, so that rounding is not mistaken for a difference."""

    def widen(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().double() if leaf.is_floating_point() else leaf.detach()

    return tree_map(widen, tree)


def _compare(evaluate: Callable[[int, int], Sums], n: int, scalar: bool) -> str:
    if n < 2:
        return ""
    half = n // 2
    whole, first, second = evaluate(0, n), evaluate(0, half), evaluate(half, n)
    return _mean(n, whole, first, second) if scalar else _sum(n, whole, first, second, evaluate)


def _mean(n: int, whole: Sums, first: Sums, second: Sums) -> str:
    """Of a scalar, which has been multiplied by the samples."""
    all_, a, b = (total / count for total, count in (whole, first, second))
    both = (first[0] + second[0]) / whole[1]
    size = max(abs(all_), abs(a), abs(b))
    if abs(all_ - both) <= _ROUNDING * size or not math.isfinite(all_):
        return ""
    said = f"over {n} samples it is {all_:.6g}, and {a:.6g} and {b:.6g} over their halves"
    if abs(all_ - (a + b)) <= _ROUNDING * size:
        return (
            f"loss= returned a sum without its count: {said}. Each worker and micro-batch is taken as a mean, so the "
            "gradient is divided by how many there are; return (sum, count)."
        )
    if min(a, b) <= all_ <= max(a, b):
        why = "it is a mean over something else than samples, such as tokens that are not padding; return (sum, count)"
    else:
        why = "it compares samples with each other; let it see those of all workers with run.gather"
    return f"loss= depends on how the batch is cut: {said}, whose mean is {both:.6g}. Most likely {why}."


def _sum(n: int, whole: Sums, first: Sums, second: Sums, evaluate: Callable[[int, int], Sums]) -> str:
    if abs(whole[1] - first[1] - second[1]) > _ROUNDING * whole[1]:
        return (
            f"loss= returned counts that do not add up: {whole[1]:g} over {n} samples, and {first[1]:g} and "
            f"{second[1]:g} over their halves. Return as count what the sum is over."
        )
    more = first[0] + second[0] - whole[0]
    size = max(abs(whole[0]), abs(first[0]), abs(second[0]))
    if not abs(more) > _ROUNDING * size:
        return ""
    said = f"its sum over {n} samples is {whole[0]:.6g}, and {first[0]:.6g} and {second[0]:.6g} over their halves"
    why = "it compares samples with each other; let it see those of all workers with run.gather"
    if n > 2:
        again = evaluate(0, 1)[0] + evaluate(1, n)[0] - whole[0]
        if abs(again - more) <= _ROUNDING * size:  # as much, wherever it is cut
            why = "a term in it does not depend on the samples, such as a penalty on the weights; give it as penalty="
    return f"loss= depends on how the batch is cut: {said}. Most likely {why}."
