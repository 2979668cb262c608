"""What cut layers send: read off one pass of the whole model, by the moves that `apply.py` puts around each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from shoal.cost import Cost, CutProfile, ModelProfile
from shoal.tensor.cut import Cut, Cuts, SequenceBlock, TensorOptions
from shoal.tensor.layout import TensorCut
from shoal.tensor.projection import bias_of
from shoal.world.traffic import ring_bytes, share_of


def tensor_cost(profile: ModelProfile, degree: int) -> Cost:
    """What a worker sends along the tensor axis in a step."""
    times = profile.accumulate if profile.stages is None else profile.stages.microbatches
    sent = sum(ring_bytes(nbytes, degree) for nbytes in profile.cut.summed)
    sent += sum(share_of(nbytes, degree) for nbytes in profile.cut.gathered)
    return Cost(wire={"tensor": times * sent}) if degree > 1 else Cost()


def profile_pass(
    model: nn.Module, run: Callable[[], object], cuts: Cuts, options: TensorOptions
) -> CutProfile:
    """Run the whole model once, with gradients enabled, and note what would be summed and gathered.

    With `loss=true`, what the loss itself sums is not counted: a few numbers for each row of logits.
    """
    watch = _Watch(cuts, options)
    with ExitStack() as hooks:
        for name, see in watch.modules():
            handle = model.get_submodule(name).register_forward_hook(_hook(see), with_kwargs=True)
            hooks.callback(handle.remove)
        run()
    return CutProfile(tuple(watch.summed), tuple(watch.gathered))


@dataclass(frozen=True)
class _Call:
    """A module that was called, with the tensors that went in and came out."""

    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


See = Callable[[_Call], None]


def _hook(see: See) -> Callable[[nn.Module, tuple[object, ...], dict[str, object], object], None]:
    def seen(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        outputs = [x for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, Tensor)]
        see(_Call(module, inputs, outputs))

    return seen


class _Watch:
    """One pass: the bytes of what moves, in the order in which modules end."""

    def __init__(self, cuts: Cuts, options: TensorOptions) -> None:
        self.summed: list[int] = []
        self.gathered: list[int] = []
        self._cuts = cuts
        self._kept_head = cuts.head if options.loss else None
        """The head whose logits stay cut."""
        self._blocks = cuts.blocks if options.sequence else ()
        self._came: dict[str, Tensor] = {}
        """The input that was last brought to the columns of a group."""

    def modules(self) -> Iterator[tuple[str, See]]:
        """What to watch, and how."""
        kinds = {
            "column": self._column,
            "row": self._row,
            "heads": self._heads,
            "vocabulary": self._words,
            "head": self._head,
        }
        for cut in self._cuts.cuts:
            yield cut.module, partial(kinds[cut.how], cut)
        for block in self._blocks:
            yield from ((norm, self._norm) for norm in block.norms)
            yield block.module, partial(self._block, block)

    def _in_slices(self, cut: Cut) -> bool:
        """Whether data around a layer is cut along the sequence."""
        return any(cut.module.startswith(f"{block.module}.") for block in self._blocks)

    def _come(self, cut: Cut, x: Tensor) -> None:
        """Data goes to the parts of a layer; backward, its gradient comes in terms."""
        if self._in_slices(cut):
            # An all-gather forward and a reduce-scatter of the gradient backward: the same bytes each.
            self.gathered += [x.nbytes] * (2 if x.requires_grad else 1)
        elif x.requires_grad:
            self.summed.append(x.nbytes)

    def _go(self, cut: Cut, out: Tensor, bias: Tensor | None) -> None:
        """The terms that the parts of a layer give become a sum."""
        if not self._in_slices(cut):
            self.summed.append(out.nbytes)
            return
        self.gathered += [out.nbytes] * (2 if out.requires_grad else 1)
        if bias is not None and bias.requires_grad:
            self.summed.append(bias.nbytes)

    def _column(self, cut: Cut, call: _Call) -> None:
        x, group = call.inputs[0], cut.group or cut.module
        if self._came.get(group) is not x:
            self._came[group] = x
            self._come(cut, x)

    def _row(self, cut: Cut, call: _Call) -> None:
        self._came.pop(cut.group or cut.module, None)
        self._go(cut, call.outputs[0], bias_of(call.module))

    def _heads(self, cut: Cut, call: _Call) -> None:
        assert isinstance(call.module, nn.MultiheadAttention)
        for x in {
            id(x): x for x in call.inputs[:3]
        }.values():  # queries, keys and values; masks come after them
            self._come(cut, x)
        self._go(cut, call.outputs[0], call.module.out_proj.bias)
        self.summed += [weights.nbytes for weights in call.outputs[1:]]

    def _words(self, cut: Cut, call: _Call) -> None:
        del cut
        self.summed.append(call.outputs[0].nbytes)

    def _head(self, cut: Cut, call: _Call) -> None:
        x, logits = call.inputs[0], call.outputs[0]
        if x.requires_grad:
            self.summed.append(x.nbytes)
        if cut.module != self._kept_head:
            degree = self._cuts.degree
            widest = TensorCut(0, (logits.shape[-1],)).local(degree, 0)
            self.gathered.append(logits.nbytes // logits.shape[-1] * widest * degree)

    def _norm(self, call: _Call) -> None:
        self.summed += [p.nbytes for p in call.module.parameters() if p.requires_grad]

    def _block(self, block: SequenceBlock, call: _Call) -> None:
        if block is self._blocks[0] and call.inputs[0].requires_grad:
            self.gathered.append(call.inputs[0].nbytes)
        if block is self._blocks[-1]:
            self.gathered.append(call.outputs[0].nbytes)
