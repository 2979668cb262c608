"""What a step of the user's own calls: `ctx` in `step=my_step`, called as `my_step(ctx, batch)`.

The gradient of an update is that of the sum of its terms: `backward(name, total, count)` adds total / count, where
both are sums over all workers. One process that calls (total / count).backward() for each computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shoal import seeds
from shoal.errors import ConfigError, NonFiniteLoss
from shoal.exchange.contract import Exchange, StepView, Tally, trainable
from shoal.partition.block import BlockPartition
from shoal.partition.cuts import split
from shoal.table import did_you_mean
from shoal.torch_private import version_of
from shoal.train.own_step.exchange_by_model import ExchangeByModel
from shoal.train.own_step.same_calls import SameCalls
from shoal.train.step_context import StepContext
from shoal.train.technique.clip import ByNorm, ByValue
from shoal.train.technique.loss import as_sum_and_count, check_gradient


class OwnStep:
    """One step of a run with `step=`: the models, and what to call. Every rank makes the same calls in one order.

    >>> def my_step(ctx, batch):
    ...     fake = ctx["gen"](ctx.randn(len(batch), 4))
    ...     ctx.backward("gen", -ctx["disc"](fake).sum(), len(batch))
    ...     ctx.update("gen")
    """

    def __init__(
        self, context: StepContext, exchange: ExchangeByModel, calls: SameCalls, view: StepView, samples: int
    ) -> None:
        self.number = view.step
        """Of this step, counted from 0."""
        self.samples = samples
        """In the global batch of this step."""
        self._context = context
        self._exchange = exchange
        self._calls = calls
        self._view = view
        self._feed = context.loader.feed
        self._here = split(samples, self._feed.size, self._feed.rank)
        self._draws = 0
        self._terms: dict[str, float] = {}
        self._sums: dict[str, list[float]] = {}
        self._losses: dict[str, list[float]] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._by_hand = self._versions() if self._watches else {}
        self.skipped = False
        """Whether an update of this step was dropped, because a loss was not finite and on_nan="skip"."""
        self.grad_norm: float | None = None
        """Of the last update, before clipping, where the run clips by norm."""

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """The models by name."""
        return dict(self._exchange.models.items())

    def __getitem__(self, name: str) -> nn.Module:
        """A model by its name."""
        if name not in self._exchange.models:
            raise ConfigError(
                f"ctx['{name}']: there is no such model{did_you_mean(name, list(self._exchange.models))}"
            )
        return self._exchange.models[name]

    @property
    def has_samples(self) -> bool:
        """False where an epoch's last batch has none for this worker: it gets one all the same, and counts nothing."""
        return self._context.presence.counts

    def backward(
        self,
        name: str,
        total: torch.Tensor,
        count: float | torch.Tensor | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of total / count, both summed over all workers, to what the next update of a model takes.

        Only this model's parameters get gradients, whatever else the loss went through. Without a count, `total` is
        the mean over this worker's samples; workers then need not meet to add up the count.
        """
        exchange = self._learning(name, "backward")
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            what = f"shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
            raise ConfigError(
                f"ctx.backward('{name}') got {what}; give a scalar tensor: a sum and its count, or a mean."
            )
        mine = self._here[1] - self._here[0]
        total, n = as_sum_and_count((total * mine, mine) if count is None else (total, count), None)
        check_gradient(total)
        counts = self.has_samples
        if count is not None or exchange.sends_terms:
            everywhere = self._calls.agree(f"ctx.backward('{name}')", n if counts else 0.0)
        else:  # a count of samples is known without asking
            self._calls.note(f"ctx.backward('{name}')")
            everywhere = float(self.samples)
        if not everywhere > 0:
            raise ConfigError(
                f"ctx.backward('{name}'): the count is {everywhere:g} over all workers; count samples or elements, or "
                "leave the call out, on all ranks alike."
            )
        # Another worker's batch normalisation may wait for this one's backward pass; it then adds nothing.
        with self._in_full():
            exchange.add_term(total, 1.0 / everywhere if counts else 0.0, retain_graph)
        term = float(total.detach()) / everywhere if counts else 0.0
        self._terms[name] = self._terms.get(name, 0.0) + term

    def update(self, name: str) -> float:
        """One step of a model's optimizer with what `backward` has added up; the sum of those terms comes back.

        The number is the same on every rank, so that a step may decide by it.
        """
        exchange, meter = self._learning(name, "update"), self._context.meter
        meter.mark("compute")
        self._calls.agree(f"ctx.update('{name}')", 0.0)
        if name not in self._terms:
            raise ConfigError(f"ctx.update('{name}') comes before any ctx.backward('{name}', ...) for it.")
        self._check_untouched(name)
        exchange.close_terms()
        loss = exchange.finish(Tally(self._terms.pop(name), 1.0)).total
        meter.mark("exposed")
        self._losses.setdefault(name, []).append(loss)
        # Torch then refuses to go back through a graph from before the update, as it does after its own optimizers.
        torch.autograd.graph.increment_version(list(trainable(self[name]).values()))
        with self._in_full():
            if self._is_good(name, loss):
                self._apply(name, exchange)
            else:
                exchange.discard()
                self.skipped = True
        exchange.begin(self._view)
        if self._watches:
            self._by_hand = self._versions()
        meter.mark("update")
        return loss

    @contextmanager
    def change(self, name: str) -> Iterator[nn.Module]:
        """While it lasts, change a model's parameters by hand, without gradients: clip them, or copy others' values.

        Every rank makes the same changes. Under `shared`, whose ranks hold one copy, this is the only way to do so.
        """
        model = self[name]
        self._calls.agree(f"ctx.change('{name}')", 0.0)
        exchange = self._exchange.by_model.get(name)
        with torch.no_grad():
            if exchange is None:
                yield model
            else:
                with exchange.by_hand():
                    yield model
        if self._watches:
            self._by_hand = self._versions()

    def ema(self, name: str, of: str, decay: float) -> None:
        """Let a model without an optimizer follow another: each parameter becomes decay × itself + the rest of theirs.

        Buffers, such as batch norm's statistics, are left alone. With decay 0 it becomes a copy.
        """
        theirs = dict(self[of].named_parameters())
        mine = dict(self[name].named_parameters())
        if {n: p.shape for n, p in mine.items()} != {n: p.shape for n, p in theirs.items()}:
            raise ConfigError(f"ctx.ema('{name}', of='{of}'): their parameters differ in names or shapes.")
        if name in self._exchange.by_model:
            raise ConfigError(
                f"ctx.ema('{name}', of='{of}'): '{name}' has an optimizer, which would go on from other values than "
                "it left; leave its optimizer out, or use ctx.change."
            )
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"ctx.ema('{name}', of='{of}', {decay}): the decay is from 0 to 1.")
        with self.change(name):
            for one, parameter in mine.items():
                parameter.mul_(decay).add_(theirs[one], alpha=1.0 - decay)

    def mean(self, name: str, total: Any, count: float | None = None) -> None:
        """Report total / count, both summed over all workers and all calls of this step, as `step.metrics[name]`.

        Without a count, `total` is a mean over this worker's samples.
        """
        if isinstance(total, torch.Tensor):
            total = float(total.detach())
        n = float(self._here[1] - self._here[0]) if count is None else float(count)
        sums = self._sums.setdefault(name, [0.0, 0.0])
        if self.has_samples:
            sums[0] += total * n if count is None else total
            sums[1] += n

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal draws, a row for each sample of this worker: the same for a sample at any number of workers."""
        return self._rows(torch.randn, shape)

    def rand(self, *shape: int) -> torch.Tensor:
        """Uniform draws from [0, 1), a row for each sample of this worker, as `randn`."""
        return self._rows(torch.rand, shape)

    def generator(self) -> torch.Generator:
        """A new generator that stands at the same place on every rank, for what the whole batch has in common."""
        self._draws += 1
        key = seeds.derive(self._feed.seed, "own step", self.number, self._draws)
        return torch.Generator().manual_seed(key)

    def _rows(self, draw: Any, shape: tuple[int, ...]) -> torch.Tensor:
        partition = self._feed.partition
        if not isinstance(partition, BlockPartition) or not partition.even:
            raise ConfigError(
                "ctx.randn and ctx.rand draw by a sample's place in the step, which only partition='block' with equal "
                "shares tells; use it, or draw from ctx.generator()."
            )
        start, stop = self._here if self.has_samples else (0, 1)
        if not shape or shape[0] != stop - start:
            raise ConfigError(
                f"ctx.randn{shape}: the first number is how many samples this worker has, {stop - start} here; draw "
                "several times, or a wider row, for several draws a sample."
            )
        dtype = self._context.precision.model
        whole: torch.Tensor = draw(self.samples, *shape[1:], generator=self.generator(), dtype=dtype)
        return whole[start:stop].to(self._context.world.device)

    def close(self, returned: object) -> tuple[float, dict[str, float]]:
        """The step is over, and this is what the user's function returned; its loss and metrics. For the loop."""
        for name, value in self._returned(returned).items():
            total, count = value if isinstance(value, tuple) else (value, None)
            self.mean(name, total, count)
        names = sorted(self._sums)
        self._calls.agree(f"the end of the step, with the metrics {names}", 0.0)
        if self._terms:
            name = next(iter(self._terms))
            raise ConfigError(
                f"step {self.number + 1} ended with a ctx.backward('{name}', ...) and no ctx.update('{name}') after "
                "it; update in the same step, or leave the backward out."
            )
        self._check_by_hand()
        means = {f"loss/{name}": sum(found) / len(found) for name, found in self._losses.items()}
        loss = sum(means.values()) if means else math.nan
        if names:
            numbers = torch.tensor([self._sums[name] for name in names], dtype=torch.float64, device="cpu")
            self._context.mesh.data.all_reduce(numbers).wait()
            rows = zip(names, numbers.tolist(), strict=True)
            means |= {name: total / count if count else math.nan for name, (total, count) in rows}
        recorder = self._context.recorder
        if recorder is not None:
            recorder.gradients(self.number, loss, self._gradients, 1.0)
            recorder.parameters(self.number, self._context.whole.parameters())
        return loss, means

    def _in_full(self) -> AbstractContextManager[object]:
        """Backward passes and updates are not for autocast, which the step itself runs in."""
        if self._context.precision.compute is None:
            return nullcontext()
        return torch.autocast(self._context.world.device.type, enabled=False)

    def _returned(self, returned: object) -> Mapping[str, Any]:
        if returned is None or isinstance(returned, Mapping):
            return returned or {}
        raise ConfigError(
            f"step= returned a {type(returned).__name__}; return nothing, or metrics by name, each (sum, count) or a "
            "mean."
        )

    def _learning(self, name: str, call: str) -> Exchange:
        exchange = self._exchange.by_model.get(name)
        if exchange is not None:
            return exchange
        learning = list(self._exchange.by_model)
        raise ConfigError(
            f"ctx.{call}('{name}'): no model of that name has an optimizer{did_you_mean(name, learning)}"
        )

    def _is_good(self, name: str, loss: float) -> bool:
        """Whether an update may be applied; every rank decides alike, from numbers that are alike."""
        context = self._context
        norm = loss
        if math.isfinite(loss) and (context.skip_nan or isinstance(context.clip, ByNorm)):
            norm = self.grad_norm = self._exchange.by_model[name].grad_norm()
        if math.isfinite(norm):
            return True
        if not context.skip_nan:
            raise NonFiniteLoss(
                f"the loss or gradient of '{name}' is not finite in step {self.number + 1} ({norm}); lower its "
                "learning rate, or set on_nan='skip' to drop such updates."
            )
        return False

    def _apply(self, name: str, exchange: Exchange) -> None:
        clip, factor = self._context.clip, 1.0
        if self._context.recorder is not None:
            turn = len(self._losses[name])
            for one, gradient in exchange.gradients().items():
                self._gradients[f"{name}.{one}" if turn == 1 else f"{name}.{one} (update {turn})"] = gradient
        if isinstance(clip, ByNorm) and self.grad_norm is not None:
            factor = min(1.0, clip.limit / (self.grad_norm + 1e-6))
        with self._context.drawing(exchange.optimizer, self.number):
            exchange.apply(factor, clip.limit if isinstance(clip, ByValue) else None)
        exchange.publish()

    def _check_untouched(self, name: str) -> None:
        """Refuse gradients that came past `backward`: they would not be summed over the workers."""
        if self._context.world.size > 1:
            for one, parameter in trainable(self[name]).items():
                if parameter.grad is not None:
                    raise ConfigError(
                        f"'{name}.{one}' has a gradient that did not come by ctx.backward, and would not reach other "
                        f"workers; call ctx.backward('{name}', sum, count) in place of loss.backward()."
                    )
        self._check_by_hand()

    # Under `shared` a change by hand would be made by every rank in turn, to the one copy that they have.

    @property
    def _watches(self) -> bool:
        return self._context.world.size > 1 and any(e.one_copy for e in self._exchange.by_model.values())

    def _versions(self) -> dict[str, int]:
        return {
            name: sum(version_of(p) for p in trainable(self._exchange.models[name]).values())
            for name in self._exchange.by_model
        }

    def _check_by_hand(self) -> None:
        if self._watches and (now := self._versions()) != self._by_hand:
            name = next(one for one in now if now[one] != self._by_hand[one])
            raise ConfigError(
                f"the parameters of '{name}' were changed by hand, which under shared every rank would do to the one "
                f"copy that they have; write `with ctx.change('{name}') as model:` around it, or use zero1."
            )
