"""The grammar: what is printed reads back the same, and what cannot be read gets a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import as_type, degree_of, fill_options, parse_choice, parse_strategy, parse_value
from shoal.errors import ConfigError
from shoal.types import Choice, Plan

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_./:\-]{0,8}", fullmatch=True)
VALUES = (
    st.integers()
    | st.floats(allow_nan=False)
    | st.booleans()
    | WORDS.filter(lambda word: isinstance(parse_value(word), str))
)
CHOICES = st.builds(
    Choice,
    name=WORDS.filter(lambda word: degree_of(Choice(word)) == 1 and not word.startswith(("tp", "pp"))),
    args=st.lists(VALUES, max_size=3).map(tuple),
    options=st.lists(st.tuples(WORDS, VALUES), max_size=3).map(tuple),
)


def degrees(letters: str) -> st.SearchStrategy[Choice | None]:
    sized = st.builds(
        lambda n, choice: Choice(f"{letters}{n}", choice.args, choice.options), st.integers(1, 64), CHOICES
    )
    return st.none() | sized


@given(CHOICES, degrees("tp"), degrees("pp"), st.none() | CHOICES)
def test_a_plan_reads_back_as_it_was_printed(
    exchange: Choice, tensor: Choice | None, pipeline: Choice | None, compressor: Choice | None
) -> None:
    plan = Plan(exchange, tensor, pipeline, compressor)
    again = parse_strategy(str(plan))
    assert again == plan
    assert str(again) == str(plan)
    assert parse_strategy(str(plan).replace(" ", "")) == plan, "spaces mean nothing"


@given(CHOICES)
def test_a_choice_reads_back_as_it_was_printed(choice: Choice) -> None:
    assert parse_choice(str(choice), "schedule") == choice


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    plan, refusal = None, ""
    try:
        plan = parse_strategy(text)
    except ConfigError as error:
        refusal = str(error)
    assert refusal.endswith(".") if plan is None else parse_strategy(str(plan)) == plan


def test_slots_come_in_either_order() -> None:
    assert parse_strategy("ddp * pp2 * tp4") == parse_strategy("ddp*tp4*pp2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a name or a value, found the end"),
        ("ddp *", "found the end"),
        ("ddp + ", "found the end"),
        ("ddp(", "found the end"),
        ("ddp(bucket_mb=)", "found ')'"),
        ("ddp(bucket_mb=2", "a ')' is missing after ddp("),
        ("ddp(2 3)", "a ')' is missing after ddp("),
        ("ddp zero1", "cannot read from 'zero1' on"),
        ("ddp + none + none", "cannot read from '+' on"),
        ("ddp ! 3", "cannot read '! 3'"),
        ("ddp * zero1", "'zero1' cannot be multiplied in"),
        ("ddp * tp2 * tp4", "tp is given twice"),
        ("tp2 * pp2", "the exchange comes first, as in 'ddp * tp2 * pp2'"),
    ],
)
def test_what_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="strategy") as caught:
        parse_strategy(text)
    assert words in str(caught.value)
    assert f"'{text}'" in str(caught.value)


@dataclass(frozen=True)
class Options:
    rate: float
    warmup: int = 0
    label: str = ""
    limit: float | None = None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decay(1)", Options(1.0)),
        ("decay(0.5, 3, hello)", Options(0.5, 3, "hello")),
        ("decay(warmup=3, rate=1e-3)", Options(0.001, 3)),
        ("decay(1, label=8)", Options(1.0, label="8")),
        ("decay(1, limit=2)", Options(1.0, limit=2.0)),
        ("decay(1, limit=none)", Options(1.0)),
        ("decay(1, label=none)", Options(1.0, label="none")),
    ],
)
def test_options_are_filled(text: str, expected: Options) -> None:
    assert fill_options(parse_choice(text, "schedule"), Options) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("decay", "decay needs rate, as in 'decay(rate=...)'."),
        ("decay(1, 2, a, 4, 5)", "decay takes at most 4 (rate, warmup, label, limit), but"),
        ("decay(1, warmpu=2)", "decay has no option 'warmpu'; did you mean 'warmup'?"),
        ("decay(1, rate=2)", "'decay(1, rate=2)' gives rate twice; keep one."),
        ("decay(rate=1, warmup=2, warmup=3)", "gives warmup twice"),
        ("decay(fast)", "decay: rate=fast should be float."),
        ("decay(true)", "decay: rate=True should be float."),
        ("decay(1, 2.5)", "decay: warmup=2.5 should be int."),
        ("decay(1, limit=much)", "decay: limit=much should be float."),
    ],
)
def test_wrong_options_get_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fill_options(parse_choice(text, "schedule"), Options)
    assert str(caught.value).startswith(sentence) or sentence in str(caught.value)


def test_options_by_name_only_come_behind_those_of_a_subclass() -> None:
    @dataclass(frozen=True)
    class Common:
        rate: float
        label: str = field(default="", kw_only=True)

    @dataclass(frozen=True)
    class More(Common):
        warmup: int = 0

    assert fill_options(Choice("decay", (1, 3, "hello")), More) == More(1.0, warmup=3, label="hello")


def test_no_options() -> None:
    @dataclass(frozen=True)
    class Nothing:
        pass

    assert fill_options(Choice("plain"), Nothing) == Nothing()
    with pytest.raises(ConfigError, match=r"plain takes no options, but 'plain\(1\)' gives 1\."):
        fill_options(Choice("plain", (1,)), Nothing)


def test_values_take_the_type_of_their_field() -> None:
    assert as_type(True, bool) is True
    assert as_type(2, int) == 2
    assert as_type(1e20, str) == "1e20"
    for value, hint in ((1, bool), (True, int), ("x", int | None), ("none", int)):
        with pytest.raises(TypeError):
            as_type(value, hint)
