"""Find out what of a model can be cut, without processes: from one trial pass, and from the user's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shoal.errors import ConfigError
from shoal.tensor.attention import attention_pieces
from shoal.tensor.cut import Cut, Cuts
from shoal.tensor.layout import TensorCut
from shoal.tensor.projection import inputs, is_projection, out_dim, outputs
from shoal.tensor.search.families import family_of, heads_of
from shoal.tensor.search.pairs import find_pairs
from shoal.tensor.search.prove import check_between, prove
from shoal.tensor.search.sequence import find_blocks
from shoal.tensor.search.tensor_rules import match_rules
from shoal.tensor.search.trial_pass import Trace, is_layer, watch
from shoal.tensor.search.vocabulary import find_vocabulary, unfit


class _Finder:
    """State of the search for cuts: the model, its trace, and the cuts found so far."""

    def __init__(self, model: nn.Module, trace: Trace, degree: int, rules: Mapping[str, str]) -> None:
        self.model = model
        self.trace = trace
        self.degree = degree
        self.rules = rules
        self.modules = dict(model.named_modules())
        self.cuts: dict[str, Cut] = {}
        self.reasons: dict[str, str] = {}
        self.holders: dict[int, list[str]] = {}
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
        inside = [name for name, module in self.modules.items() if isinstance(module, nn.MultiheadAttention)]
        for name, module in self.modules.items():
            if is_layer(module) and not any(name.startswith(_join(one, "")) for one in inside):
                for parameter in module.parameters():
                    self.holders.setdefault(id(parameter), []).append(name)

    def add(self, cut: Cut) -> None:
        """Keep a cut. A parameter that has several names is cut under each of them."""
        pieces = {
            name: piece
            for first, piece in cut.parameters
            for name in self.names[id(self.model.get_parameter(first))]
        }
        self.cuts[cut.module] = replace(cut, parameters=tuple(pieces.items()))

    def drop(self, name: str) -> None:
        """Forget a cut, and those that are nothing without it."""
        gone = self.cuts.pop(name, None)
        if gone is not None and gone.group:
            for other in [cut.module for cut in self.cuts.values() if cut.group == gone.group]:
                self.reasons[self.cuts.pop(other).module] = "tensor_rules cuts its partner in another way"

    def refuse(self, name: str) -> str | None:
        """Why the layer `name` may not be cut at all, or None."""
        module = self.modules[name]
        if self.rules.get(name) == "whole":
            return "tensor_rules says so"
        if not self.trace.ran(name):
            return "it did not run in the trial pass"
        parameters = list(module.parameters())
        if is_parametrized(module) or any(not p.is_floating_point() for p in parameters):
            return "its weight is computed from other values, or quantised"
        # Code outside of the layer would read a part where it expects the whole.
        if any(id(p) in self.trace.bare for p in parameters):
            return "its weight is also used outside of it"
        return None

    def refuse_shared(self, name: str) -> str | None:
        """As `refuse`, for layers that cannot share their weights, and those that are cut already."""
        if name in self.cuts or self.rules.get(name) not in (None, "column", "row", "whole"):
            return "it is cut in another way"
        others = self.sharers(name) - {name}
        return f"it shares a weight with '{min(others)}'" if others else self.refuse(name)

    def refuse_words(self, name: str) -> str | None:
        """As `refuse`, for vocabularies: whoever shares the weight must be cut as well."""
        if self.rules.get(name) in ("column", "row"):
            return "tensor_rules cuts it in another way"
        for other in sorted(self.sharers(name)):
            if not isinstance(self.modules[other], nn.Embedding) and not is_projection(self.modules[other]):
                return f"it shares its weight with '{other}'"
            reason = self.refuse(other)
            if reason is not None:
                return (
                    reason
                    if other == name
                    else f"'{other}', which has the same weight, stays whole: {reason}"
                )
        return None

    def sharers(self, name: str) -> set[str]:
        return {other for p in self.modules[name].parameters() for other in self.holders[id(p)]}

    def column(self, name: str, why: str, groups: int = 1, how: str = "column") -> Cut:
        module = self.modules[name]
        sizes = (outputs(module) // groups,) * groups
        pieces = [(_join(name, "weight"), TensorCut(out_dim(module), sizes))]
        if module.bias is not None:
            pieces.append((_join(name, "bias"), TensorCut(0, sizes)))
        return Cut(name, how, why, tuple(pieces))

    def row(self, name: str, why: str) -> Cut:
        module = self.modules[name]
        # Only the weight: a row's bias is added once, after the sum, and stays whole.
        piece = TensorCut(1 - out_dim(module), (inputs(module),))
        return Cut(name, "row", why, ((_join(name, "weight"), piece),))

    def words(self, name: str, why: str) -> Cut:
        module = self.modules[name]
        if not isinstance(module, nn.Embedding):
            return self.column(name, why, how="head")
        piece = TensorCut(0, (module.num_embeddings,))
        return Cut(name, "vocabulary", why, ((_join(name, "weight"), piece),))

    def divide(self, name: str, heads: Mapping[str, int]) -> None:
        """Refuse heads that the degree does not divide."""
        for kind, number in heads.items():
            if number % self.degree:
                fits = [
                    n for n in range(2, max(heads.values()) + 1) if all(h % n == 0 for h in heads.values())
                ]
                remedy = f"use {' or '.join(f'tp{n}' for n in fits)}" if fits else "leave tp out"
                raise ConfigError(
                    f"'{name}' has {number} {kind}heads, which tp{self.degree} cannot divide; {remedy}, "
                    f"or keep it whole with tensor_rules={{'{name}': 'whole'}}."
                )


def find_cuts(model: nn.Module, run: Callable[[], object], degree: int, rules: Mapping[str, str]) -> Cuts:
    """What of `model` can be cut `degree` ways. `run` passes a real batch through the model, which is watched.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [(cut.module, cut.how) for cut in find_cuts(model, lambda: model(torch.ones(1, 4)), 2, {}).cuts]
    [('0', 'column'), ('2', 'row')]
    """
    matched = match_rules(model, rules)
    trace = watch(model, run)
    finder = _Finder(model, trace, degree, matched)
    _attentions(finder)
    # The order decides who takes a layer that several rules would cut: attention before generic pairs, which know
    # nothing of heads.
    _families(finder)
    _vocabulary(finder)
    _pairs(finder)
    ruled = _ruled(finder)
    order = {name: place for place, name in enumerate(finder.modules)}
    cuts = tuple(sorted(finder.cuts.values(), key=lambda cut: order[cut.module]))
    whole = _whole(finder, cuts)
    if not cuts:
        why = sorted(whole, key=lambda item: not is_layer(finder.modules.get(item[0], model)))
        reasons = "; ".join(f"'{name}': {reason}" for name, reason in why[:3]) or "it has no parameters"
        raise ConfigError(
            f"tp{degree} finds nothing to cut in this model ({reasons}); "
            "name layers with tensor_rules, or leave tp out."
        )
    blocks, length, obstacle = find_blocks(model, trace, cuts)
    if ruled:
        lines = [finder.cuts[name] for name in ruled]
        # The user's word for a cut is no proof: the found ones follow from the trace, these are tried.
        check_between(model, trace, lines)
        prove(model, run, lines, degree)
    return Cuts(cuts, whole, degree, _head(trace, cuts), blocks, length, obstacle)


def _attentions(finder: _Finder) -> None:
    for name, module in finder.modules.items():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        reason = finder.refuse_shared(name) if finder.rules.get(name) != "heads" else finder.refuse(name)
        if type(module).forward is not nn.MultiheadAttention.forward:
            reason = "its forward is its own"
        if module.bias_k is not None:
            reason = "it has a bias for keys and values"
        if reason is None:
            finder.divide(name, {"": module.num_heads})
            finder.add(Cut(name, "heads", f"{module.num_heads} heads", attention_pieces(name, module)))
        else:
            finder.reasons[name] = reason


def _families(finder: _Finder) -> None:
    trace = finder.trace
    for name, module in finder.modules.items():
        family = family_of(module)
        if family is None:
            continue
        columns = [_join(name, column) for column in family.columns]
        row = _join(name, family.row)
        reason = next((why for one in (*columns, row) if (why := finder.refuse_shared(one))), None)
        heads = heads_of(module, family)
        # They would come out cut by heads, and nothing puts them together.
        if any(tensor in trace.returned for span in trace.spans[name] for tensor in span.outputs[1:]):
            reason = "the model returns its attention weights"
        if reason is not None:
            finder.reasons.update(dict.fromkeys((*columns, row), reason))
            continue
        query = heads[family.columns[0]]
        finder.divide(name, {"": query, "key and value ": min(heads.values())})
        why = f"{query} heads of {type(module).__name__} '{name}'"
        random = any(
            event.random for span in trace.spans[name] for event in trace.events[span.begin : span.end]
        )
        for one in columns:
            cut = finder.column(one, why, family.packed)
            finder.add(_grouped(cut, name, 1, name if random else None, family.divide))
        finder.add(_grouped(finder.row(row, why), name, 1, name if random else None, family.divide))


def _grouped(cut: Cut, group: str, axis: int, dropped: str | None, divide: tuple[str, ...] = ()) -> Cut:
    return replace(cut, group=group, axis=axis, dropped=dropped, divide=divide)


def _vocabulary(finder: _Finder) -> None:
    found, whole = find_vocabulary(finder.model, finder.trace, finder.degree, finder.refuse_words)
    finder.reasons.update(whole)
    for name, why in found.items():
        finder.add(finder.words(name, why))


def _pairs(finder: _Finder) -> None:
    pairs, reasons = find_pairs(finder.model, finder.trace, finder.degree, finder.refuse_shared)
    finder.reasons = {name: why for name, why in reasons.items() if name not in finder.cuts} | finder.reasons
    for pair in pairs:
        roles = dict.fromkeys(pair.columns, "column") | {pair.row: "row"}
        if any(finder.rules.get(name, role) != role for name, role in roles.items()):
            finder.reasons.update(dict.fromkeys(roles, "tensor_rules breaks its pair"))
            continue
        dropped = _above(list(roles)) if pair.dropped else None
        for name in pair.columns:
            finder.add(_grouped(finder.column(name, f"a pair with '{pair.row}'"), pair.row, -1, dropped))
        finder.add(_grouped(finder.row(pair.row, f"a pair with '{pair.columns[0]}'"), pair.row, -1, dropped))


def _ruled(finder: _Finder) -> list[str]:
    """Add the cuts that rules ask for and that were not found; their names."""
    why = "tensor_rules"
    added = []
    for name, how in finder.rules.items():
        if how == "whole" or (name in finder.cuts and finder.cuts[name].how == how):
            continue
        if how == "heads" and any(cut.group == name for cut in finder.cuts.values()):
            continue
        finder.drop(name)
        module = finder.modules[name]
        reason = finder.refuse(name) if how != "heads" else finder.reasons.get(name, "its parts stay whole")
        others = finder.sharers(name) - {name} if is_layer(module) else set()
        if reason is None and others:
            reason = f"it shares a weight with '{min(others)}'"
        if reason is None and isinstance(module, nn.Embedding):
            reason = unfit(module, finder.degree)
        if reason is not None:
            raise ConfigError(
                f"tensor_rules: '{name}' cannot be cut by '{how}': {reason}; take it out of the rules."
            )
        if how == "column":
            finder.add(replace(finder.column(name, why), group=why))
        elif how == "row":
            finder.add(replace(finder.row(name, why), group=why))
        else:
            finder.add(finder.words(name, why))
        added.append(name)
    return added


def _whole(finder: _Finder, cuts: tuple[Cut, ...]) -> tuple[tuple[str, str], ...]:
    pieces = {name for cut in cuts for name, _ in cut.parameters}
    covered = {cut.module for cut in cuts}
    found = []
    for name, module in finder.modules.items():
        if name in covered or any(name.startswith(f"{one}.") for one in covered):
            continue
        own = [own for own, _ in module.named_parameters(recurse=False)]
        if all(_join(name, each) in pieces for each in own) and not finder.reasons.get(name):
            continue
        reason = finder.reasons.get(name) or (finder.refuse_shared(name) if is_layer(module) else None)
        found.append((name or "(model)", reason or f"a {type(module).__name__} is not cut"))
    return tuple(found)


def _head(trace: Trace, cuts: tuple[Cut, ...]) -> str:
    """The one head whose output goes nowhere but out of the model."""
    for cut in cuts:
        calls = trace.calls(cut.module)
        if cut.how == "head" and len(calls) == 1 and calls[0].outputs[0] in trace.returned:
            return cut.module if not trace.uses[calls[0].outputs[0]] else ""
    return ""


def _above(names: list[str]) -> str:
    """The innermost module that all of these are below."""
    words = [name.split(".")[:-1] for name in names]
    same = [set(level) for level in zip(*words, strict=False)]
    depth = next((place for place, level in enumerate(same) if len(level) > 1), len(same))
    return ".".join(words[0][:depth])


def _join(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
