"""What clip= may be."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError
from shoal.train.technique.clip import ByNorm, ByValue, make_clip


def test_what_clip_may_be() -> None:
    assert make_clip(None) is None
    assert make_clip(2) == make_clip("norm(2)") == make_clip("norm(limit=2.0)") == ByNorm(2.0)
    assert make_clip("value(0.5)") == ByValue(0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (0, "clip=0: the limit must be above 0."),
        (-1.0, "clip=-1.0: the limit must be above 0."),
        (float("nan"), "clip=nan: the limit must be above 0."),
        ("value(0)", "the limit must be above 0."),
        ("norm", "norm needs limit, as in 'norm(limit=...)'."),
        ("vale(1)", "unknown clip 'vale'; did you mean 'value'?"),
        ("value(1, 2)", "value takes at most 1 (limit)"),
        ("value(small)", "value: limit=small should be float."),
    ],
)
def test_what_it_may_not_be(text: float | str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_clip(text)
    assert words in str(caught.value)
