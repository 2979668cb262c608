"""Hooks of the user's on gradients, and parameters that begin or cease to learn in the middle of a run.

A plain loop calls a parameter's hook with the mean gradient of the whole batch. Here it is called for one micro-batch
of one worker, and the results are added up and divided by the true count. That is the same only if the hook is linear:
it scales, masks, or only looks. A hook is tried before the first step; one that is not linear, or would not be called,
is refused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.errors import ConfigError
from shoal.exchange.frozen import compare_frozen, frozen_sum
from shoal.torch_private import gradient_hooks_of, late_hooks_of, module_backward_hooks_of
from shoal.world.world import World

AT_A_TIME = 4
"""Parameters that are looked at in a step."""
COMPARED_EVERY = 8
"""Steps between two comparisons of what is frozen on workers of a tensor axis."""

Hook = Callable[[Tensor], Tensor | None]


class HookRules:
    """What this plan does with hooks on gradients."""

    def __init__(self, plan: str, parts: int, replaces: str) -> None:
        """`parts`: micro-batches of a step, over all replicas. `replaces`: who puts other tensors in the place of
        parameters, on which their hooks are not called; empty: nobody."""
        self._plan = plan
        self._parts = parts
        self._replaces = replaces

    def check(self, model: nn.Module, speaks: bool) -> None:
        """Refuse hooks that would compute something else, and say what is for the user to know."""
        for name, parameter in model.named_parameters():
            self.check_parameter(name, parameter)
        hooked = [
            name for name, module in model.named_modules() if of_the_user(module_backward_hooks_of(module))
        ]
        if hooked and speaks:
            print(
                f"shoal: layer '{hooked[0]}' has a backward hook, which is called for one micro-batch of one worker at "
                "a time. That equals one process if it changes each sample's gradient by itself and in proportion; "
                "`shoal verify` shows whether it does.",
                file=sys.stderr,
            )

    def check_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Refuse its hooks, if they would compute something else."""
        hooks, late = of_the_user(gradient_hooks_of(parameter)), of_the_user(late_hooks_of(parameter))
        if not (hooks or late):
            return
        what = f"parameter '{name}' has a {'post-accumulate-grad' if late else 'gradient'} hook"
        if self._replaces:
            raise ConfigError(
                f"{what}, and {self._replaces} puts shards in the place of parameters, on which it is not called as it "
                "should be; use zero2 or ddp, or change gradients with clip=."
            )
        come = f"under {self._plan} gradients are sums over the {self._parts} parts of a step, divided by the count"
        if late:
            raise ConfigError(
                f"{what}, and {come} afterwards; use register_hook for what is linear, such as a mask."
            )
        if not all(is_linear(hook, parameter) for hook in hooks):
            raise ConfigError(
                f"{what} that is not linear, and {come} afterwards: what it makes of them is not what it makes of the "
                "mean; use clip=, or a linear hook such as a mask."
            )


def is_linear(hook: Hook, like: Tensor) -> bool:
    """Whether a hook makes of a sum what it makes of the summands, added up. Calls it three times.

    >>> is_linear(lambda g: g * 2, torch.zeros(3)), is_linear(lambda g: g / g.norm(), torch.zeros(3))
    (True, False)
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu") for _ in range(2))
    kind = like.dtype if like.is_floating_point() else torch.float32
    made = []
    with torch.no_grad():
        for gradient in (a, b, a - 3 * b):
            given = gradient.to(like.device, kind)
            result = hook(given)
            made.append((given if result is None else result).double())
    scale = max(float(m.abs().max()) for m in made) if like.numel() else 0.0
    near = 1e-9 if kind is torch.float64 else 1e-2 if kind.itemsize == 2 else 1e-4
    return all(m.shape == a.shape for m in made) and bool(
        (made[0] - 3 * made[1] - made[2]).abs().le(near * scale).all()
    )


def of_the_user(hooks: Sequence[object]) -> list[Any]:
    """Without those of Shoal and of torch itself."""
    return [h for h in hooks if not (getattr(h, "__module__", "") or "").startswith(("shoal.", "torch."))]


class TrainedSet:
    """Which parameters learn: those that learned when the exchange was made, or fewer of them."""

    def __init__(self, model: nn.Module, plan: str, rules: HookRules, fixed: bool, cut: World) -> None:
        """`fixed`: the exchange cannot do with fewer either (zero3), and its parameters have to be asked each step.
        `cut`: the workers over which layers are cut, who hold parts of the same parameters and sum no gradients."""
        self._plan = plan
        self._rules = rules
        self._parameters = [(n, p, p.requires_grad) for n, p in model.named_parameters()]
        self._places = list(_places(model, with_parameters=not fixed))
        self._fixed = fixed
        self._cut = cut
        self._step = 0
        self.computing = False
        """Whether a forward and backward pass of a step is under way."""
        self._hooks = [] if fixed else list(self._guard(model))

    def begin(self) -> None:
        """A step's passes begin."""
        # Hooks may come after the run was made. To ask every parameter takes too long for a short step: a few do.
        everybody, count = self._parameters, len(self._parameters)
        start = self._step * AT_A_TIME % max(count, 1)
        checked = everybody if self._fixed or self._step == 0 else everybody[start : start + AT_A_TIME]
        if self._cut.size > 1 and self._step % COMPARED_EVERY == 0:
            learn = {name: parameter for name, parameter, learned in everybody if learned}
            sums = self._cut.gather_numbers([frozen_sum(learn)])[:, 0].tolist()
            compare_frozen(self._cut, sums, learn)
        self._look_at_places()
        self._step += 1
        for name, parameter, learned in checked:
            if gradient_hooks_of(parameter):
                self._rules.check_parameter(name, parameter)
            if self._fixed and parameter.requires_grad != learned:
                word = "frozen" if learned else "unfrozen"
                raise ConfigError(
                    f"parameter '{name}' was {word} after Run was made, and {self._plan} cannot change what learns; "
                    "use zero2, or save and go on in a new Run."
                )
        self.computing = True

    def _look_at_places(self) -> None:
        """Refuse layers and parameters that the script has put in the place of others: nothing would train them."""
        start = self._step * AT_A_TIME % max(len(self._places), 1)
        for owner, key, held, name in self._places[start : start + AT_A_TIME]:
            if getattr(owner, key, None) is not held:
                raise ConfigError(
                    f"'{name}' is not what it was when Run was made: the script has replaced or removed it, and the "
                    "run would go on training what was there. Make a new Run with the changed model, or change "
                    "values in place, under torch.no_grad()."
                )

    def close(self) -> None:
        """The run is over: the model is the user's alone."""
        for hook in self._hooks:
            hook.remove()

    def _guard(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """A hook on what is frozen costs nothing, and is called if it gets a gradient after all."""
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex()):
                parameter.requires_grad_(True)  # torch wants it so for as long as a hook is registered
                yield parameter.register_hook(self._refusing(name))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(False)

    def _refusing(self, name: str) -> Callable[[Tensor], None]:
        me = weakref.ref(self)

        def refuse(gradient: Tensor) -> None:
            del gradient
            here = me()
            if here is not None and here.computing:
                raise ConfigError(
                    f"parameter '{name}' was unfrozen after Run was made, and {here._plan} has gradients and optimizer "
                    "state for those only that learned then; leave it learning when Run is made and freeze it with "
                    "requires_grad_(False) until its time, or save and go on in a new Run."
                )

        return refuse


def _places(model: nn.Module, with_parameters: bool) -> Iterator[tuple[nn.Module, str, object, str]]:
    """Every layer, and parameter, by the one that holds it and its name there.

    `with_parameters`: not where an exchange puts others in their place itself, while passes run (zero3).
    """
    for prefix, owner in model.named_modules():
        above = f"{prefix}." if prefix else ""
        for key, layer in owner.named_children():
            yield owner, key, layer, above + key
        for key, parameter in owner.named_parameters(recurse=False) if with_parameters else ():
            yield owner, key, parameter, above + key
