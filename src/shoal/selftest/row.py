"""One line of a self-test: what was looked at, what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "failed", "left out"]


@dataclass(frozen=True)
class Answer:
    """What a check has found on one worker, or on all of them."""

    good: bool
    said: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measurements behind the sentence, for the file."""


@dataclass(frozen=True)
class Row:
    """A check with its verdict.

    >>> Row("strategies", "zero1", "ok", "equals one process to 2e-16", 0.4).key
    'strategies: zero1'
    """

    kind: str
    subject: str
    verdict: Verdict
    said: str
    seconds: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return key_of(self.kind, self.subject)


def key_of(kind: str, subject: str) -> str:
    """How a check is named in the progress, and in the files between the launcher and its workers."""
    return f"{kind}: {subject}"


def joined(answers: list[Answer]) -> Answer:
    """One answer for all workers: the first that is not good, else rank 0's, with the largest of each number.

    >>> joined([Answer(True, "fine", {"gap": 1.0}), Answer(True, "fine", {"gap": 3.0})])
    Answer(good=True, said='fine', numbers={'gap': 3.0})
    """
    shown = next((answer for answer in answers if not answer.good), answers[0])
    names = dict.fromkeys(name for answer in answers for name in answer.numbers)
    worst = {name: max(a.numbers[name] for a in answers if name in a.numbers) for name in names}
    return Answer(shown.good, shown.said, worst)
