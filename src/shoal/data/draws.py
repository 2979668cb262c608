"""What data sets draw: from torch's, numpy's and Python's global generators, keyed by sample.

A sample's augmentation is a function of (seed, epoch, sample number), whoever prepares it and together with which
others. Seeding three generators before every sample would cost more than most samples do. So a data set is watched: a
generator that it has not drawn from is left alone, and once it draws, what it has just given is thrown away and made
again with that generator keyed. From then on it is keyed before every sample. Afterwards numpy and `random` stand
where the script had left them.

A generator that a data set holds itself is out of reach: its state depends on what was drawn before.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch

from shoal import seeds

Given = TypeVar("Given")


class Generator(Protocol):
    """A global generator: of torch, of numpy or of Python."""

    def seed(self, key: int) -> None: ...
    def state(self) -> object: ...
    def restore(self, state: Any) -> None: ...
    def glance(self) -> object: ...


class TorchGenerator:
    """torch's, on the CPU and on a card in use; data sets are watched on the CPU."""

    def seed(self, key: int) -> None:
        """Let it continue from a key."""
        seeds.continue_from(key)

    def state(self) -> bytes:
        """Where it stands."""
        state: bytes = torch.default_generator.get_state().numpy().tobytes()
        return state

    def restore(self, state: bytes) -> None:
        """Put it back; the step has set it for this batch, and sets it again for what comes next."""
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def glance(self) -> bytes:
        """As `state`, which is quick here."""
        return self.state()


_HEAD = object.__basicsize__
_BODY = random.Random.__base__.__basicsize__ - _HEAD  # type: ignore[union-attr]
"""Offset and size of the generator's words in the C object behind `random`."""


class PythonGenerator:
    """The one behind `random`."""

    def __init__(self) -> None:
        self._owner: Any = getattr(random.random, "__self__", self)
        self._seen = self._words_are_there()

    def seed(self, key: int) -> None:
        """Let it continue from a key."""
        random.seed(key)

    def state(self) -> object:
        """Where it stands."""
        return random.getstate()

    def restore(self, state: Any) -> None:
        """Put it back."""
        random.setstate(state)

    def glance(self) -> Any:
        """What any draw changes: its words in memory, and a normal number kept for later.

        Python takes ten microseconds to say where it stands, so it is asked only where its memory looks unfamiliar.
        """
        return (self._look(), self._owner.gauss_next) if self._seen else self.state()

    def _look(self) -> bytes:
        return ctypes.string_at(id(self._owner) + _HEAD, _BODY)

    def _words_are_there(self) -> bool:
        _, words, _ = random.getstate()
        twister = isinstance(self._owner, random.Random)
        return twister and np.array(words[:-1], dtype=np.uint32).tobytes() in self._look()


class NumpyGenerator:
    """The legacy one behind `np.random.rand` and its like."""

    def __init__(self) -> None:
        self._kept = False

    def seed(self, key: int) -> None:
        """Let it continue from a key; a generator that the script has put in place of numpy's own is left alone."""
        if _twister() is not None:
            np.random.seed(key & 0xFFFFFFFF)

    def state(self) -> object:
        """Where it stands."""
        name, words, *rest = cast(tuple[Any, ...], np.random.get_state())
        self._kept = rest[1:2] == [1]
        return name, words.tobytes(), *rest

    def restore(self, state: Any) -> None:
        """Put it back."""
        name, words, *rest = state
        np.random.set_state((name, np.frombuffer(words, dtype=np.uint32), *rest))

    def glance(self) -> Any:
        """What any draw changes. numpy takes thirty microseconds to say where it stands, and memory none.

        Only a normal number that was kept for later can be drawn without a change there; then it is asked.
        """
        address = _twister()
        return self.state() if address is None or self._kept else ctypes.string_at(address, _TWISTER_BYTES)


_TWISTER_BYTES = 624 * 4 + 4
"""The words of a Mersenne twister, and how many of them are used."""


def _twister() -> int | None:
    """Where numpy's global Mersenne twister lies; None if the script has put another generator there."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return bits.ctypes.state_address if isinstance(bits, np.random.MT19937) else None


class Watch:
    """Finds out which global generators a function draws from, and tells it which to key.

    >>> watch = Watch(NumpyGenerator(), PythonGenerator())
    >>> def read(keyed):
    ...     for generator in keyed:
    ...         generator.seed(5)
    ...     return random.random()
    >>> watch(read) == watch(read), [type(generator).__name__ for generator in watch.keyed]
    (True, ['PythonGenerator'])
    """

    def __init__(self, *generators: Generator) -> None:
        self.keyed: tuple[Generator, ...] = ()
        """The function draws from these."""
        self._watched: tuple[Generator, ...] = generators
        """Others draw from these as well, or it is not known yet: compared before and after."""
        self._glanced: dict[Generator, Any] = {}
        """Generators that have not been drawn from so far: compared with how they stood last time."""
        self._first = True

    def __call__(self, read: Callable[[Sequence[Generator]], Given]) -> Given:
        """What `read` gives; it must not matter that it is called again."""
        before = {generator: generator.state() for generator in (*self.keyed, *self._watched)}
        given = read(self.keyed)
        moved = [generator for generator, seen in self._glanced.items() if generator.glance() != seen]
        if moved:  # in here, or by the script in between
            self._glanced = {g: seen for g, seen in self._glanced.items() if g not in moved}
            self._watched = (*self._watched, *moved)
            return self._again(self.keyed, before, read)
        drawn = [generator for generator in self._watched if generator.state() != before[generator]]
        if drawn:
            self._watched = tuple(generator for generator in self._watched if generator not in drawn)
            keyed = self.keyed
            self.keyed = (*self.keyed, *drawn)
            # What it drew came from no key: read the sample again, now with these generators keyed.
            return self._again((*keyed, *drawn), before, read)
        # The script's own generators stand as before: reading ahead must not change what it draws.
        for generator in self.keyed:
            generator.restore(before[generator])
        if self._first:
            self._first = False
            quiet = [g for g in self._watched if not isinstance(g, TorchGenerator)]  # every step sets torch's
            self._glanced = {generator: generator.glance() for generator in quiet}
            self._watched = tuple(generator for generator in self._watched if generator not in quiet)
        return given

    def _again(
        self,
        touched: Sequence[Generator],
        before: dict[Generator, Any],
        read: Callable[[Sequence[Generator]], Given],
    ) -> Given:
        for generator in touched:
            generator.restore(before[generator])
        return self(read)


def own_generators(data: object) -> list[str]:
    """Attributes of a data set, and of what it is made of, that are generators of its own: no key reaches them.

    >>> class Noisy:
    ...     def __init__(self):
    ...         self.rng = np.random.default_rng(0)
    >>> own_generators(Noisy())
    ['Noisy.rng']
    """
    return list(_generators_in(data, type(data).__name__, depth=3, seen=set()))


_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_INSIDE = 64
"""Attributes, or entries of a list, that are looked at."""


def _generators_in(value: object, name: str, depth: int, seen: set[int]) -> Iterator[str]:
    if isinstance(value, _KINDS):
        yield name
    elif depth and id(value) not in seen:
        seen.add(id(value))
        parts: list[tuple[str, object]] = []
        if isinstance(value, list | tuple):
            parts = [(f"[{i}]", part) for i, part in enumerate(value[:_INSIDE])]
        elif not isinstance(value, type | torch.Tensor | np.ndarray):
            parts = [
                (f".{key}", part) for key, part in list(getattr(value, "__dict__", {}).items())[:_INSIDE]
            ]
        for suffix, part in parts:
            if not isinstance(part, int | float | str | bytes | torch.Tensor):
                yield from _generators_in(part, f"{name}{suffix}", depth - 1, seen)
