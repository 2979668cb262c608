"""Which buffers have one value on all workers, and which value: `buffers=`.

A forward pass that changes a buffer has seen the samples of one micro-batch of one worker. One process that computes
the whole batch at once changes it once a step, with all samples. The words below say how a step's changes become one.
Under each of them every micro-batch begins with the value from before the step; let b be that value, and v_i the value
that micro-batch i, of any worker, leaves behind.

    sum     b + Σ (v_i - b)                what adds up over samples: counts of tokens, hits of a codebook
    mean    the mean of v_i by samples     what averages over samples: a running mean, an EMA of batch means
    first   v_0                            what does not look at samples: a step counter, spectral_norm's vectors
    own     left alone                     micro-batch after micro-batch, each worker by itself
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.torch_private import BatchNormBase, SpectralNorm

WORDS = ("sum", "mean", "first", "own")
BufferWords = str | Mapping[str, str]
"""One word for all buffers, or words by name pattern."""


def words_for(model: nn.Module, words: BufferWords) -> dict[str, str]:
    """The word of every buffer that has one; the others have none, and are watched.

    One word for all leaves batch normalisation alone, which batchnorm= is for. What cannot be averaged takes "first".

    >>> model = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "code": nn.Module()})
    >>> model["code"].register_buffer("book", torch.zeros(3))
    >>> model["code"].register_buffer("steps", torch.tensor(0))
    >>> words_for(model, "mean")
    {'code.book': 'mean', 'code.steps': 'first'}
    >>> words_for(model, {"*.book": "sum"})
    {'code.book': 'sum'}
    """
    check_words(words)
    buffers = dict(model.named_buffers())
    statistics = set(_statistics(model))
    found = dict.fromkeys(power_vectors(model), "first")
    if isinstance(words, str):
        for name, buffer in buffers.items():
            if name not in statistics and name not in found:
                found[name] = words if words == "own" or _refusal(words, buffer) is None else "first"
        return found
    for pattern, word in words.items():
        matched = [name for name in buffers if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"buffers: no buffer is called '{pattern}'; there are {_listed(list(buffers))}."
            )
        for name in matched:
            why = _refusal(word, buffers[name])
            if why is not None:
                raise ConfigError(f"buffers: '{name}' {why}; say 'first' or 'own' for it.")
            found[name] = word
    return found


def check_words(words: BufferWords) -> None:
    """Refuse what is not one of the words."""
    if not isinstance(words, str | Mapping):
        raise ConfigError(
            f'buffers= is a {type(words).__name__}; give a word, or a dict such as {{"*.codebook": "mean"}}.'
        )
    for word in [words] if isinstance(words, str) else words.values():
        if word not in WORDS:
            raise ConfigError(f"buffers: '{word}'; it is one of {', '.join(WORDS)}.")


def watched(model: nn.Module, words: Mapping[str, str]) -> list[str]:
    """Buffers that nobody has said anything about, and that are not statistics of batch normalisation."""
    statistics = set(_statistics(model))
    return [name for name, _ in model.named_buffers() if name not in words and name not in statistics]


def power_vectors(model: nn.Module) -> Iterator[str]:
    """The buffers in which spectral_norm keeps its power iteration: each forward pass takes it one step further."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        names = {name for name, _ in module.named_buffers(recurse=False)}
        if isinstance(module, SpectralNorm):
            yield from (prefix + name for name in ("_u", "_v") if name in names)
        for weight, _ in module.named_parameters(
            recurse=False
        ):  # torch.nn.utils.spectral_norm, the older form
            pair = [weight.removesuffix("_orig") + end for end in ("_u", "_v")]
            if weight.endswith("_orig") and names.issuperset(pair):
                yield from (prefix + name for name in pair)


def _statistics(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, BatchNormBase):
            yield from (f"{path}.{name}" if path else name for name, _ in module.named_buffers(recurse=False))


def _refusal(word: str, buffer: torch.Tensor) -> str | None:
    """Why a buffer cannot have this word; None if it can."""
    if buffer.is_complex() and word in ("sum", "mean", "first"):
        return f"is of {buffer.dtype}, which 'own' alone can do"
    if buffer.dtype == torch.bool and word in ("sum", "mean"):
        return f"is of true and false, which have no {word}"
    if not buffer.is_floating_point() and word == "mean":
        return f"is of {buffer.dtype}, and a mean would not be a whole number"
    return None


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:8])
    return (shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")) or "none"
