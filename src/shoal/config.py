"""Text to values: the strategy grammar, choices such as `cosine(warmup=100)`, and their typed options.

    strategy  =  choice { "*" choice } [ "+" choice ]
    choice    =  name [ "(" item { "," item } ")" ]
    item      =  [ name "=" ] value
    value     =  a number, true, false, a word, text in quotes, or a choice, as in aggregate=trimmed(0.1)
    recipes   =  choice { "&" choice }

The first choice names the exchange; `tpN` and `ppN` fill the tensor and pipeline slots in either order; what
follows `+` is the compressor. Parsing knows no table: whether a name exists is for `plan/check` to say.
"""

from __future__ import annotations

import dataclasses
import re
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_type_hints

from shoal.errors import ConfigError
from shoal.table import did_you_mean
from shoal.types import Choice, Plan, Value, show

_TOKEN = re.compile(r"""\s*(?:(?P<word>[A-Za-z0-9_.\-/:]+)|(?P<text>"[^"]*"|'[^']*')|(?P<sign>[*+(),=&]))""")
_SIGNS = "*+(),=&"
_DEGREE = re.compile(r"(tp|pp)(\d+)$")

D = TypeVar("D")


def parse_strategy(text: str) -> Plan:
    """Parse a strategy; the Plan prints back in the same grammar.

    >>> print(parse_strategy("zero1*tp2 * pp2( 1f1b,microbatches=8 )+topk(0.01)"))
    zero1 * tp2 * pp2(1f1b, microbatches=8) + topk(0.01)
    """
    reader = _Reader(text, "strategy")
    choices = [reader.choice()]
    while reader.take("*"):
        choices.append(reader.choice())
    compressor = reader.choice() if reader.take("+") else None
    reader.end()
    slots: dict[str, Choice] = {}
    for choice in choices[1:]:
        degree = _DEGREE.match(choice.name)
        if degree is None:
            raise ConfigError(
                f"strategy '{text}': '{choice.name}' cannot be multiplied in; after the exchange come tpN and ppN."
            )
        # The order of tpN and ppN says nothing: `a * tp2 * pp2` and `a * pp2 * tp2` are one plan.
        if degree[1] in slots:
            raise ConfigError(f"strategy '{text}': {degree[1]} is given twice; keep one.")
        slots[degree[1]] = choice
    if _DEGREE.match(choices[0].name):
        raise ConfigError(
            f"strategy '{text}' starts with '{choices[0].name}'; the exchange comes first, as in 'ddp * {text}'."
        )
    return Plan(choices[0], slots.get("tp"), slots.get("pp"), compressor)


def degree_of(choice: Choice | None) -> int:
    """The N of a `tpN` or `ppN` choice; 1 where the slot is empty.

    >>> degree_of(Choice("tp2")), degree_of(None)
    (2, 1)
    """
    match = _DEGREE.match(choice.name) if choice is not None else None
    return int(match[2]) if match else 1


def parse_choice(text: str, kind: str) -> Choice:
    """Parse one choice of the given kind, which error messages name.

    >>> parse_choice("cosine(warmup=100)", "schedule")
    Choice(name='cosine', args=(), options=(('warmup', 100),))
    """
    reader = _Reader(text, kind)
    choice = reader.choice()
    reader.end()
    return choice


def parse_choices(text: str, kind: str) -> list[Choice]:
    """Parse choices of one kind, joined by `&`; text in quotes may hold any sign.

    >>> [str(choice) for choice in parse_choices("freeze('encoder.*', until=200) & ema(0.999)", "recipe")]
    ['freeze("encoder.*", until=200)', 'ema(0.999)']
    """
    reader = _Reader(text, kind)
    choices = [reader.choice()]
    while reader.take("&"):
        choices.append(reader.choice())
    reader.end()
    return choices


def parse_value(text: str) -> Value:
    """A number, a truth value, or the text itself.

    >>> parse_value("8"), parse_value("1e-3"), parse_value("true"), parse_value("bf16")
    (8, 0.001, True, 'bf16')
    """
    if text in ("true", "false"):
        return text == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def options_of(kind: Any) -> list[dataclasses.Field[Any]]:
    """The options that a choice may give, in their order: those that have a name only behind all others."""
    return sorted(dataclasses.fields(kind), key=lambda f: f.kw_only is True)


def fill_options(choice: Choice, into: type[D]) -> D:
    """Fill the options dataclass of a table's entry from a choice; wrong names and types get a sentence.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     rate: float
    ...     warmup: int = 0
    >>> fill_options(Choice("decay", args=(1,), options=(("warmup", 5),)), Options)
    Options(rate=1.0, warmup=5)
    """
    fields = [f for f in options_of(into) if f.init]
    names = [f.name for f in fields]
    kind: object = into
    hints = _hints(kind)
    if len(choice.args) > len(fields):
        takes = f"takes at most {len(fields)} ({', '.join(names)})" if fields else "takes no options"
        raise ConfigError(f"{choice.name} {takes}, but '{choice}' gives {len(choice.args)}.")
    given = dict(zip(names, choice.args, strict=False))
    for key, value in choice.options:
        if key not in names:
            raise ConfigError(f"{choice.name} has no option '{key}'{did_you_mean(key, names)}")
        if key in given:
            raise ConfigError(f"'{choice}' gives {key} twice; keep one.")
        given[key] = value
    missing = [f.name for f in fields if f.name not in given and _required(f)]
    if missing:
        raise ConfigError(f"{choice.name} needs {missing[0]}, as in '{choice.name}({missing[0]}=...)'.")
    return into(**{key: _convert(choice, key, value, hints[key]) for key, value in given.items()})


@lru_cache(maxsize=256)
def _hints(into: object) -> dict[str, object]:
    """The types of its fields: to find them out compiles each, which would be most of the time of a search of plans."""
    return get_type_hints(into)


def _required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(choice: Choice, key: str, value: Value, hint: object) -> Value | None:
    try:
        return as_type(value, hint)
    except TypeError as error:
        raise ConfigError(f"{choice.name}: {key}={value} should be {error}.") from None


def as_type(value: Value, hint: object) -> Value | None:
    """A parsed value as a field of the given type has it; TypeError says what it should be.

    >>> as_type(1, float | None), as_type("none", float | None), as_type(7, str)
    (1.0, None, '7')
    """
    wanted = get_args(hint) or (hint,)
    if type(value) in wanted and value != "none":
        return value
    if value == "none" and type(None) in wanted:
        return None
    # Written as 1, meant as 1.0. The other way round, and true for 1, are mistakes.
    if float in wanted and type(value) is int:
        return float(value)
    if str in wanted:
        return show(value)
    known = [t.__name__ for t in wanted if t in (int, float, bool)]
    raise TypeError(" or ".join(known))


class _Reader:
    """Tokens of one text, read left to right."""

    def __init__(self, text: str, kind: str) -> None:
        self.text = text
        self.kind = kind
        self.tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ConfigError(f"{kind} '{text}': cannot read '{text[at:].strip()}'.")
            self.tokens.append(match["word"] or match["text"] or match["sign"])
            at = match.end()
        # A stack, so that taking the next token is a pop.
        self.tokens.reverse()

    def take(self, sign: str) -> bool:
        if self.tokens and self.tokens[-1] == sign:
            self.tokens.pop()
            return True
        return False

    def word(self) -> str:
        if not self.tokens or self.tokens[-1] in _SIGNS:
            found = f"'{self.tokens[-1]}'" if self.tokens else "the end"
            raise ConfigError(f"{self.kind} '{self.text}': expected a name or a value, found {found}.")
        return self.tokens.pop()

    def value(self, word: str) -> Value:
        """A plain value; or a choice within the choice, which stays text until somebody asks what it means."""
        if word[0] in "\"'":
            return word[1:-1]
        return str(self.choice(word)) if self.tokens[-1:] == ["("] else parse_value(word)

    def choice(self, word: str = "") -> Choice:
        name = word or self.word()
        args: list[Value] = []
        options: list[tuple[str, Value]] = []
        if self.take("(") and not self.take(")"):
            while True:
                word = self.word()
                if self.take("="):
                    options.append((word, self.value(self.word())))
                else:
                    args.append(self.value(word))
                if self.take(")"):
                    break
                if not self.take(","):
                    raise ConfigError(f"{self.kind} '{self.text}': a ')' is missing after {name}(...")
        return Choice(name, tuple(args), tuple(options))

    def end(self) -> None:
        if self.tokens:
            raise ConfigError(f"{self.kind} '{self.text}': cannot read from '{self.tokens[-1]}' on.")
