"""`nn.MultiheadAttention` with some of its heads: what `F.multi_head_attention_forward` does, for this rank's heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.tensor.draws import Draws
from shoal.tensor.layout import TensorCut
from shoal.tensor.moves import Move, Ring, collect, leave
from shoal.torch_private import safe_softmax


def attention_pieces(name: str, module: nn.MultiheadAttention) -> tuple[tuple[str, TensorCut], ...]:
    """How the parameters of an attention are cut by heads; names are those of the whole model.

    >>> attention_pieces("attn", nn.MultiheadAttention(4, 2, bias=False))[0]
    ('attn.in_proj_weight', TensorCut(dim=0, groups=(4, 4, 4)))
    """
    size = module.embed_dim
    pieces = {
        "in_proj_weight": TensorCut(0, (size,) * 3),
        "in_proj_bias": TensorCut(0, (size,) * 3),
        "q_proj_weight": TensorCut(0, (size,)),
        "k_proj_weight": TensorCut(0, (size,)),
        "v_proj_weight": TensorCut(0, (size,)),
        "out_proj.weight": TensorCut(1, (size,)),
    }
    present = {own for own, _ in module.named_parameters()}
    prefix = f"{name}." if name else ""
    return tuple((prefix + own, piece) for own, piece in pieces.items() if own in present)


def local_of(parameter: Tensor | None) -> Tensor | None:
    """This rank's part of a cut parameter, or a whole parameter as it is."""
    return parameter.to_local() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter


class LocalAttention:
    """The forward of an `nn.MultiheadAttention` of which this rank has some heads; called as the module is.

    `come` brings data that all ranks have to the heads, `go` adds up what the heads give, with time first.
    """

    def __init__(self, module: nn.MultiheadAttention, ring: Ring, come: Move, go: Move, bias: Move) -> None:
        self.module = module
        self.ring = ring
        self.come = come
        self.go = go
        self.bias = bias
        self.heads = module.num_heads // ring.degree

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # noqa: ARG002  a hint only: whoever gives it must give the mask as well
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        batched = query.dim() == 3
        came: dict[int, Tensor] = {}
        for x in (query, key, value):  # the same tensor three times is brought once
            # Self-attention passes one tensor three times: its gradient is then summed over ranks once.
            if id(x) not in came:
                came[id(x)] = self.first(self.come(x), batched)
        q, k, v = self.projected(came[id(query)], came[id(key)], came[id(value)])
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        mask = self.mask(attn_mask, key_padding_mask, q)
        if self.module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            mask = None if mask is None else F.pad(mask, (0, 1))
        mixed, weights = self.attend(q, k, v, mask, need_weights)
        # Torch works with time as the first dimension, and dropout after this draws its mask in the order of memory.
        out = mixed.permute(2, 0, 1, 3).flatten(2)
        result = self.go(F.linear(out, _needed(self.module.out_proj.weight)))
        if self.module.out_proj.bias is not None:
            result = result + self.bias(self.module.out_proj.bias)
        result = self.order(result, batched)
        if weights is None:
            return result, None
        whole = self.weights(weights, average_attn_weights)
        return result, whole if batched else whole.squeeze(0)

    def first(self, x: Tensor, batched: bool) -> Tensor:
        """With the batch as the first dimension."""
        if not batched:
            return x.unsqueeze(0)
        return x if self.module.batch_first else x.transpose(0, 1)

    def order(self, x: Tensor, batched: bool) -> Tensor:
        """From time as the first dimension to what the module returns."""
        if not batched:
            return x.squeeze(1)
        return x.transpose(0, 1) if self.module.batch_first else x

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads: (batch, heads, positions, size of a head)."""
        module = self.module
        packed = local_of(module.in_proj_weight)
        if packed is not None:
            # The cut took the same heads of each third (TensorCut with three groups), so thirds of the part are q, k
            # and v.
            weights = packed.chunk(3)
        else:
            parts = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            weights = tuple(_needed(part) for part in parts)
        bias = local_of(module.in_proj_bias)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b).reshape(*x.shape[:2], self.heads, module.head_dim).transpose(1, 2)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def mask(self, attn_mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as one that is added to the scores of this rank's heads."""
        found = None
        if attn_mask is not None:
            found = _additive(attn_mask, like)
            if found.dim() == 3:  # one mask per sample and head
                start = self.ring.rank * self.heads
                # torch lays such masks out as batch * heads.
                found = found.reshape(-1, self.module.num_heads, *found.shape[1:])
                found = found.narrow(1, start, self.heads)
        if padding is not None:
            added = _additive(padding, like)[:, None, None, :]
            found = added if found is None else found + added
        return found

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        drop = self.module.dropout if self.module.training else 0.0
        if not need_weights and drop == 0.0:
            return F.scaled_dot_product_attention(q, k, v, mask), None
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        scores = scores if mask is None else scores + mask
        # As torch does: a position that sees nothing gives zero, or NaN if the weights are asked for.
        weights = scores.softmax(-1) if need_weights else safe_softmax(scores, -1)
        if drop > 0.0:
            # All ranks draw the mask of all heads and use their own: the same numbers as one process.
            with Draws(self.ring, axis=1) as draws:
                draws.inside = True
                weights = F.dropout(weights, drop)
        return weights @ v, weights if need_weights else None

    def weights(self, weights: Tensor, average: bool) -> Tensor:
        """The attention weights of all heads, or their mean."""
        if average:
            return leave(weights.sum(1) / self.module.num_heads, self.ring)
        return collect(weights, self.ring, 1, [self.heads] * self.ring.degree)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    return mask.to(like.dtype)


def _needed(parameter: Tensor | None) -> Tensor:
    local = local_of(parameter)
    assert local is not None
    return local
