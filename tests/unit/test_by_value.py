"""What a prompt has defined, as bytes and back: functions, closures, classes, and the sentence for what cannot go."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from shoal.cluster.by_value import from_bytes, to_bytes
from shoal.errors import ConfigError

TYPED = """
import dataclasses, enum, functools, torch

FACTOR = 3

class Mode(enum.Enum):
    SLOW = 1
    FAST = 2

@dataclasses.dataclass
class Settings:
    rate: float = 0.5
    sizes: list = dataclasses.field(default_factory=lambda: [2, 3])
    mode: Mode = Mode.FAST

    @functools.cached_property
    def total(self):
        return sum(self.sizes)

    @property
    def half(self):
        return self.rate / 2

    @staticmethod
    def name():
        return "settings"

    @classmethod
    def slow(cls):
        return cls(mode=Mode.SLOW)

class Net(torch.nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.layer = torch.nn.Linear(settings.total, FACTOR)

    def forward(self, x):
        return self.layer(x)

class Slotted:
    __slots__ = ("value",)
    def __init__(self, value):
        self.value = value

def even(number):
    return number == 0 or odd(number - 1)

def odd(number):
    return number != 0 and even(number - 1)

def counter():
    count = 0
    def up():
        nonlocal count
        count += 1
        return count
    def look():
        return count
    return up, look

def work(settings, *, times=2):
    class Inner(Settings):
        rate: float = 2.0
    assert Inner.slow().mode is Mode.SLOW and settings.mode is Mode.FAST
    net = Net(settings)
    return net.layer.weight.shape, [Slotted(i).value for i in range(times)], settings.half, Inner.name()
"""


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What somebody has typed; whatever arrives finds a `__main__` that knows nothing of it."""
    prompt, worker = ModuleType("__main__"), ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", prompt)
    exec(compile(TYPED, "<typed>", "exec"), vars(prompt))
    monkeypatch.setitem(sys.modules, "__main__", worker)
    return vars(prompt)


def there(value: object) -> object:
    return from_bytes(to_bytes(value, "it"))


def test_a_function_comes_with_what_it_names(typed) -> None:
    work, settings = there((typed["work"], typed["Settings"]()))
    assert work is not typed["work"]
    assert work(settings) == (torch.Size([3, 5]), [0, 1], 0.25, "settings")
    assert work(settings, times=1)[1] == [0]
    main = sys.modules["__main__"]
    assert type(settings) is main.Settings
    assert type(settings) is not typed["Settings"]
    assert "even" not in vars(main)  # nothing has named it


def test_functions_that_call_each_other(typed) -> None:
    even = there(typed["even"])
    assert even(10)
    assert not even(7)


def test_functions_share_their_closure(typed) -> None:
    up, look = typed["counter"]()
    up()
    up_there, look_there = there((up, look))
    assert up_there() == 2
    assert look_there() == 2
    assert look() == 1


def test_tensors_and_what_can_be_imported_go_as_usual() -> None:
    value, function = there((torch.arange(3), torch.add))
    assert function is torch.add
    assert torch.equal(value, torch.arange(3))


def test_what_cannot_go_is_named() -> None:
    with (
        open(__file__) as file,
        pytest.raises(
            ConfigError, match=r"train cannot be given .*TextIOWrapper.*; make what it needs inside"
        ),
    ):
        to_bytes(lambda: file, "train")
