"""Compressors: the contract, over every choice of the table, and what each of them says about a vector."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compress import TABLE, make_compressor
from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.cast import CHUNK
from shoal.compress.feedback import Feedback
from shoal.compress.powersgd import Factors
from shoal.compress.topk import SMALL
from shoal.config import parse_choice
from shoal.errors import ConfigError
from shoal.types import Promise

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]
SIZES = [0, 1, 7, 255, 257, 1030, SMALL + 3]
MATRICES = ((0, 40, 50), (2010, 30, 20), (2613, 2, 2))
TEXTS = [*TABLE, "topk(0.3)", "topk(1.0)", "randomk(0.5, feedback=false)", "randomk(1.0)", "powersgd(1)"]


def make(text: str) -> Compressor:
    return make_compressor(parse_choice(text, "compressor"))


def layout_of(vector: torch.Tensor, matrices: tuple[tuple[int, int, int], ...] = ()) -> Layout:
    return Layout(vector.numel(), vector.dtype, CPU, matrices)


def draw(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def encoded(code: Code, vector: torch.Tensor, turn: int = 0) -> torch.Tensor:
    """The last payload of one worker alone."""
    payload = code.payload()
    code.encode(vector, payload, turn)
    return code.second(vector, payload) if code.rounds == 2 else payload


def said(code: Code, vector: torch.Tensor, turn: int = 0) -> torch.Tensor:
    out = torch.full_like(vector, torch.nan)
    code.decode(encoded(code, vector, turn), out, add=False)
    return out


def said_and_kept(code: Code, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    payload, out, kept = encoded(code, vector), torch.full_like(vector, torch.nan), vector.clone()
    code.decode(payload, out, add=False)
    code.lose(kept, payload, 1)
    return out, kept


def summed(codes: list[Code], vectors: list[torch.Tensor], turn: int = 0) -> torch.Tensor:
    """What every worker has after a turn: the way of a real exchange, without a wire."""
    payloads = [code.payload() for code in codes]
    for code, vector, payload in zip(codes, vectors, payloads, strict=True):
        code.encode(vector, payload, turn)
    out = torch.full_like(vectors[0], torch.nan)
    if not codes[0].summable:
        for number, payload in enumerate(payloads):
            codes[0].decode(payload, out, add=number > 0)
        return out
    if codes[0].rounds == 2:
        first = sum(payloads[1:], payloads[0])
        payloads = [code.second(vector, first) for code, vector in zip(codes, vectors, strict=True)]
    total = sum(payloads[1:], payloads[0])
    for code in codes:
        code.decode(total, out, add=False)
    return out


# The contract, over every choice.


@pytest.mark.parametrize("name", TABLE)
def test_every_choice_declares_its_facts(name: str) -> None:
    chosen = TABLE[name]
    assert isinstance(chosen.promise, Promise)
    assert 0 <= chosen.bound < 1
    assert (chosen.bound == 0) == (chosen.promise is Promise.EXACT)
    assert isinstance(make(name).feedback, bool)
    doc = importlib.import_module(chosen.__module__).__doc__ or ""
    assert "When to use" in doc
    assert chosen.__module__ == f"shoal.compress.{name}"


def test_every_compressor_is_in_the_table() -> None:
    found = set()
    for name in TABLE:
        module = importlib.import_module(TABLE[name].__module__)
        found |= {
            thing
            for thing in vars(module).values()
            if inspect.isclass(thing) and issubclass(thing, Compressor) and not inspect.isabstract(thing)
        }
    assert found == set(TABLE.values())


def test_feedback_is_on_where_theory_needs_it() -> None:
    wanted = {"sign", "topk", "randomk", "powersgd"}
    assert {name for name in TABLE if make(name).feedback} == wanted
    assert not make("topk(0.1, feedback=false)").feedback
    assert make("int8(feedback=true)").feedback


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text", TEXTS)
def test_contract(text: str, size: int, dtype: torch.dtype) -> None:
    vector = draw(size, dtype)
    before, layout = vector.clone(), layout_of(vector)
    code, other = make(text).code(layout), make(text).code(layout)
    payload = code.payload()
    assert payload.is_contiguous()
    assert payload.numel() == other.payload().numel()
    sent = payload.nbytes
    code.encode(vector, payload, 3)
    again = torch.full_like(payload, 77)
    other.encode(vector, again, 3)
    assert torch.equal(payload, again), "all bytes are written, and the same ones each time"
    if code.rounds == 2:
        payload, again = code.second(vector, payload), other.second(vector, again)
        sent += payload.nbytes
    assert torch.equal(vector, before), "the vector is only read"
    assert sent == code.nbytes()
    out = torch.full_like(vector, torch.nan)
    code.decode(payload, out, add=False)
    assert out.isfinite().all()
    added = draw(size, dtype, seed=1)
    code.decode(payload, added, add=True)
    torch.testing.assert_close(added, draw(size, dtype, seed=1) + out)
    kept = vector.clone()
    code.lose(kept, payload, 1)
    torch.testing.assert_close(kept + out, vector)


@pytest.mark.parametrize("text", [*TABLE, "powersgd(2)"])
def test_matrices_and_what_lies_between_them(text: str) -> None:
    vector = draw(2700)
    code = make(text).code(layout_of(vector, MATRICES))
    out, kept = said_and_kept(code, vector)
    torch.testing.assert_close(kept + out, vector)


@pytest.mark.parametrize("text", TEXTS)
def test_long_vectors_are_their_chunks_together(text: str) -> None:
    """Whatever is done chunk by chunk, the seams do not show."""
    vector = draw(CHUNK + 1003)
    code = make(text).code(layout_of(vector))
    out, kept = said_and_kept(code, vector)
    assert out.isfinite().all()
    torch.testing.assert_close(kept + out, vector)
    if text in ("none", "fp16", "bf16", "int8"):
        torch.testing.assert_close(out, vector, atol=0.03, rtol=0.004)


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_decoded_is_the_sum_of_what_was_said(text: str) -> None:
    vectors = [draw(2700, torch.float64, seed) for seed in range(3)]
    layout = layout_of(vectors[0], MATRICES)
    codes = [make(text).code(layout) for _ in vectors]
    total = summed(codes, vectors)
    lost = [vector.clone() for vector in vectors]
    for code, kept, vector in zip(codes, lost, vectors, strict=True):
        own = encoded(code, vector) if code.rounds == 1 else torch.empty(0)
        code.lose(kept, own, 3)
    spoken = sum(vector - kept for vector, kept in zip(vectors, lost, strict=True))
    rounding = {"fp16": 2e-2, "bf16": 2e-1}.get(text, 1e-12)  # sums are made in these types too
    torch.testing.assert_close(total, spoken, atol=rounding, rtol=0.0)


@pytest.mark.parametrize(
    "text", [t for t in TEXTS if make(t).code(Layout(9000, torch.float32, CPU)).elementwise]
)
def test_a_slice_of_an_elementwise_payload_is_the_payload_of_a_slice(text: str) -> None:
    vector = draw(1000)
    code, part = make(text).code(layout_of(vector)), make(text).code(layout_of(vector[100:300]))
    assert torch.equal(encoded(code, vector)[100:300], encoded(part, vector[100:300]))


@pytest.mark.parametrize("text", TEXTS)
def test_payloads_may_lie_anywhere(text: str) -> None:
    vector = draw(1030)
    code = make(text).code(layout_of(vector))
    payload = encoded(code, vector)
    if payload.dtype != torch.uint8:
        return
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), payload])[3:]
    out = torch.empty_like(vector)
    code.decode(moved, out, add=False)
    assert torch.equal(out, said(code, vector))


@pytest.mark.parametrize("size", [300, SMALL + 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_finite_is_not_hidden(text: str, value: float, size: int) -> None:
    vector = draw(size)
    code = make(text).code(layout_of(vector))
    for turn in range(3):
        spoilt = vector.clone()
        spoilt[turn * size // 3] = value
        assert not said(code, spoilt, turn).isfinite().all()
    assert said(code, vector, 4).isfinite().all(), "the next turn is as good as any"


@pytest.mark.parametrize("text", TEXTS)
def test_turns_can_be_decoded_by_somebody_else(text: str) -> None:
    vector = draw(1030)
    code, other = make(text).code(layout_of(vector)), make(text).code(layout_of(vector))
    if code.rounds == 2:
        return
    out = torch.empty_like(vector)
    other.turn_to(5)
    other.decode(encoded(code, vector, 5), out, add=False)
    assert torch.equal(out, said(code, vector, 5))


def test_reductions_are_what_is_said() -> None:
    layout = Layout(1 << 20, torch.float32, CPU, ((0, 1024, 1024),))
    found = {text: make(text).reduction(layout) for text in ("none", "fp16", "bf16", "int8", "int4", "sign")}
    assert found == pytest.approx(
        {"none": 1, "fp16": 2, "bf16": 2, "int8": 3.94, "int4": 7.76, "sign": 31.03}, rel=0.01
    )
    assert make("topk(0.01)").reduction(layout) == pytest.approx(50, rel=0.01)
    assert make("randomk(0.1)").reduction(layout) == pytest.approx(10, rel=0.01)
    assert make("powersgd(4)").reduction(layout) == pytest.approx(128)


@pytest.mark.parametrize("text", ["topk(0)", "topk(1.5)", "randomk(-0.1)", "randomk(0)", "powersgd(0)"])
def test_bad_options_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give "):
        make(text)


def test_none_has_no_options() -> None:
    with pytest.raises(ConfigError, match="has no option 'feedback'"):
        make("none(feedback=true)")


# Error feedback.


@pytest.mark.parametrize("text", [t for t in TEXTS if "feedback=false" not in t])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), turns=st.integers(1, 6))
def test_with_feedback_nothing_is_lost(text: str, seed: int, turns: int) -> None:
    """What was decoded so far and what is still kept is what went in."""
    workers = 1 if text in ("fp16", "bf16") else 3  # the rounding of sums in these types is nobody's residual
    layout = Layout(2700, torch.float64, CPU, MATRICES)
    codes = [make(text).code(layout) for _ in range(workers)]
    keepers = [Feedback(code, layout) for code in codes]
    given_in = torch.zeros(2700, dtype=torch.float64)
    decoded = torch.zeros_like(given_in)
    for turn in range(turns):
        vectors = [draw(2700, torch.float64, seed + 31 * turn + 7 * worker) for worker in range(workers)]
        given_in += sum(vectors)
        for keeper, vector in zip(keepers, vectors, strict=True):
            keeper.before(vector)
        decoded += summed(codes, vectors, turn)
        for code, keeper, vector in zip(codes, keepers, vectors, strict=True):
            own = torch.empty(0) if code.rounds == 2 else encoded(code, vector, turn)
            keeper.after(own, workers)
    torch.testing.assert_close(
        decoded + sum(keeper.residual for keeper in keepers), given_in, atol=1e-9, rtol=0.0
    )


@pytest.mark.parametrize("text", ["sign", "topk(0.1)", "randomk(0.2)", "powersgd(2)"])
def test_with_feedback_the_same_vector_comes_through_in_time(text: str) -> None:
    """The mean over many turns approaches the vector; without feedback, topk and sign never get there."""
    vector = draw(900)
    layout = layout_of(vector)
    code = make(text).code(layout)
    keeper, total, turns = Feedback(code, layout), torch.zeros(900), 120
    for turn in range(turns):
        sent = vector.clone()
        keeper.before(sent)
        payload = encoded(code, sent, turn)
        code.decode(payload, total, add=True)
        keeper.after(payload, 1)
    assert (total / turns - vector).norm() < 0.15 * vector.norm()


def test_residuals_stay_finite_and_can_be_scaled() -> None:
    vector = torch.tensor([1.0, torch.inf, 3.0, torch.nan])
    layout = layout_of(vector)
    code = make("topk(0.25)").code(layout)
    keeper = Feedback(code, layout)
    keeper.before(vector)
    keeper.after(encoded(code, vector), 1)
    assert keeper.residual.tolist() == [1.0, 0.0, 3.0, 0.0]
    keeper.scale(0.5)
    assert keeper.residual.tolist() == [0.5, 0.0, 1.5, 0.0]
    keeper.reset()
    assert keeper.residual.tolist() == [0.0] * 4


# Each of them for itself.

numbers = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=600)


def largest_of_block(vector: torch.Tensor, block: int) -> torch.Tensor:
    filled = torch.nn.functional.pad(vector.abs(), (0, -len(vector) % block)).view(-1, block)
    return filled.amax(1).repeat_interleave(block)[: len(vector)]


LIMITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda v: torch.zeros_like(v),
    "fp16": lambda v: (v.abs() / 2048).clamp(min=2.0**-25),
    "bf16": lambda v: (v.abs() / 256).clamp(min=2.0**-134),
    "int8": lambda v: largest_of_block(v, 256) / 254 * (1 + 1e-4) + 1e-30,
    "int4": lambda v: largest_of_block(v, 256) / 7 * (1 + 1e-4) + 1e-30,
}


@pytest.mark.parametrize("text", LIMITS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(values=numbers)
def test_errors_stay_within_limits(text: str, dtype: torch.dtype, values: list[float]) -> None:
    vector = torch.tensor(values, dtype=dtype)
    out = said(make(text).code(layout_of(vector)), vector)
    assert ((out - vector).abs() <= LIMITS[text](vector)).all()


def test_int4_is_right_in_the_mean() -> None:
    """Values far smaller than a step of their block are not lost: rounding by lot has no favourite."""
    vector = torch.linspace(-0.05, 0.05, 1000).index_fill_(0, torch.tensor([0, 300, 600, 999]), 1.0)
    code = make("int4").code(layout_of(vector))
    mean = torch.stack([said(code, vector, turn) for turn in range(2000)]).mean(0)
    assert (mean - vector).abs().max() < 0.02
    assert (said(code, vector) - vector).abs().max() > 0.05


@given(values=numbers)
def test_sign_says_signs_and_the_mean_size(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    out = said(make("sign").code(layout_of(vector)), vector)
    torch.testing.assert_close(out.abs(), vector.abs().mean().expand_as(out), rtol=1e-4, atol=1e-30)
    assert (out * vector >= 0).all()


@given(values=numbers, ratio=st.floats(0.01, 1.0))
def test_topk_of_short_vectors_is_exact(values: list[float], ratio: float) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    out = said(make(f"topk({ratio})").code(layout_of(vector)), vector)
    sent, count = out != 0, max(1, round(ratio * len(values)))
    assert torch.equal(out[sent], vector[sent])
    best = vector.abs().topk(count).values
    assert torch.equal(out.abs().topk(count).values.sort().values, best.sort().values)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sorted"])
def test_topk_of_long_vectors_has_most_of_the_mass(kind: str, ratio: float) -> None:
    vector = draw(300_000)
    if kind == "heavy":
        vector = vector.sign() * vector.abs().pow(6)
    elif kind == "sorted":
        vector = vector.sort().values
    code = make(f"topk({ratio})").code(layout_of(vector))
    best = vector.abs().topk(round(ratio * 300_000)).values.double().sum()
    for turn in range(5):
        out = said(code, vector, turn)
        sent = out != 0
        assert torch.equal(out[sent], vector[sent])
        assert out.abs().double().sum() >= 0.9 * best


@pytest.mark.parametrize("value", [0.0, 2.5])
@pytest.mark.parametrize("odd", [0, 1, 100, 5000])
def test_topk_of_vectors_that_are_nearly_constant(value: float, odd: int) -> None:
    """A threshold tells nothing there. Long vectors with few elements other than 0 are those of embeddings."""
    size = 2 * SMALL
    vector = torch.full((size,), value)
    vector[torch.randperm(size, generator=torch.Generator().manual_seed(0))[:odd]] = 7.0
    count = round(0.05 * size)
    out, kept = said_and_kept(make("topk(0.05)").code(layout_of(vector)), vector)
    assert (out == 7).sum() == min(odd, count)
    assert (out != 0).sum() == (min(odd, count) if value == 0 else count)
    assert torch.equal(kept + out, vector)


@given(size=st.integers(1, 300), ratio=st.floats(0.01, 1.0), turn=st.integers(0, 1 << 40))
def test_randomk_draws_so_many_different_elements(size: int, ratio: float, turn: int) -> None:
    out = said(make(f"randomk({ratio})").code(Layout(size, torch.float32, CPU)), torch.ones(size), turn)
    assert out.sum() == max(1, round(ratio * size))
    assert set(out.tolist()) <= {0.0, 1.0}


def test_randomk_gives_each_element_the_same_chance() -> None:
    code = make("randomk(0.7)").code(Layout(11, torch.float64, CPU))
    often = sum(said(code, torch.ones(11, dtype=torch.float64), turn) for turn in range(1500)) / 1500
    torch.testing.assert_close(often, torch.full_like(often, 8 / 11), atol=0.05, rtol=0.0)


def test_randomk_without_feedback_has_the_right_mean() -> None:
    vector = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0])
    code = make("randomk(0.4, feedback=false)").code(layout_of(vector))
    mean = sum(said(code, vector, turn) for turn in range(2000)) / 2000
    torch.testing.assert_close(mean, vector, atol=0.5, rtol=0.0)


def test_fp16_cuts_what_is_too_large_and_leaves_what_is_infinite() -> None:
    vector = torch.tensor([1e6, -1e30, 65504.0, torch.inf, -torch.inf, 1.0])
    out = said(make("fp16").code(layout_of(vector)), vector)
    assert out.tolist() == [65504.0, -65504.0, 65504.0, torch.inf, -torch.inf, 1.0]


@pytest.mark.parametrize("rank", [1, 3])
def test_powersgd_finds_a_matrix_of_its_rank(rank: int) -> None:
    vectors = []
    for worker in range(2):
        left, right = draw(40 * rank, torch.float64, 9), draw(50 * rank, torch.float64, worker)
        vectors.append((left.view(40, rank) @ right.view(rank, 50)).view(-1))
    layout = Layout(2000, torch.float64, CPU, ((0, 40, 50),))
    codes = [make(f"powersgd({rank})").code(layout) for _ in vectors]
    torch.testing.assert_close(summed(codes, vectors), vectors[0] + vectors[1])


def test_powersgd_gets_better_from_turn_to_turn() -> None:
    """Q is where the last turn has left it: that is the power iteration."""
    layout = Layout(2000, torch.float64, CPU, ((0, 40, 50),))
    vector = draw(2000, torch.float64)
    code = make("powersgd(4)").code(layout)
    errors = [float((said(code, vector, turn) - vector).norm()) for turn in range(40)]
    best = float(torch.linalg.svdvals(vector.view(40, 50))[4:].norm())
    assert errors[39] < errors[5] < errors[0]
    assert best <= errors[39] < 1.02 * best


def test_powersgd_continues_from_its_state() -> None:
    vector = draw(2700)
    code, other = (make("powersgd(2)").code(layout_of(vector, MATRICES)) for _ in range(2))
    for turn in range(3):
        said(code, vector, turn)
    assert not torch.equal(said(other, vector, 3), said(code, vector, 3))
    other.load_state(code.state())
    assert torch.equal(said(other, vector, 4), said(code, vector, 4))
    with pytest.raises(ValueError, match="needs a q of"):
        other.load_state({"q": torch.zeros(3)})
    with pytest.raises(ValueError, match="keeps no state"):
        make("int8").code(layout_of(vector)).load_state(code.state())


def test_powersgd_recovers_from_vectors_that_teach_nothing() -> None:
    layout = Layout(2000, torch.float32, CPU, ((0, 40, 50),))
    code, vector = make("powersgd(4)").code(layout), draw(2000)
    fresh = said(make("powersgd(4)").code(layout), vector)
    for bad in (torch.zeros(2000), torch.full((2000,), torch.nan)):
        said(code, bad)
    assert torch.equal(said(code, vector), fresh)


def test_powersgd_sends_small_things_as_they_are() -> None:
    vector = draw(2700)
    code = make("powersgd(2)").code(layout_of(vector, MATRICES))
    assert isinstance(code, Factors)
    out = said(code, vector)
    for start, stop in ((2000, 2010), (2610, 2700)):  # the last matrix is smaller than its factors
        assert torch.equal(out[start:stop], vector[start:stop])
    assert make("powersgd(4)").code(Layout(50, torch.float32, CPU)).rounds == 1
