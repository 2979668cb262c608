"""SparseEmbedding: what nn.Embedding computes, from rows that are elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.embedding import SparseEmbedding
from shoal.errors import ConfigError


class Source:
    """Rows of a plain tensor, and what was asked."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.asked: list[tuple[str, list[int]]] = []

    def fetch(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64
        assert ids.dim() == 1
        self.asked.append((name, ids.tolist()))
        return self.weight[ids]


def pair(rows: int = 20, dim: int = 3) -> tuple[SparseEmbedding, nn.Embedding, Source]:
    dense = nn.Embedding(rows, dim, dtype=torch.float64)
    sparse = SparseEmbedding(rows, dim).double()
    source = Source(dense.weight.detach())
    sparse.source, sparse.name = source, "words"
    return sparse, dense, source


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 5), (2, 3, 4), (0,), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_it_computes_what_an_embedding_does(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sparse, dense, source = pair()
    ids = torch.randint(0, 20, shape, dtype=dtype)
    out, wanted = sparse(ids), dense(ids)
    assert torch.equal(out, wanted)
    assert source.asked == [("words", sorted(set(ids.view(-1).tolist())))]
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (wanted * weight).sum().backward()
    ((found, gradient),) = sparse.take_touched()
    whole = torch.zeros_like(dense.weight).index_add_(0, found, gradient)
    torch.testing.assert_close(whole, dense.weight.grad, rtol=1e-15, atol=1e-15)
    assert sparse.take_touched() == []


def test_several_calls_are_summed() -> None:
    sparse, dense, _ = pair()
    for ids in (torch.tensor([3, 5, 5]), torch.tensor([5, 1]), torch.tensor([9])):
        (sparse(ids) ** 2).sum().backward()
        (dense(ids) ** 2).sum().backward()
    ((found, gradient),) = sparse.take_touched()
    assert found.tolist() == [1, 3, 5, 9]
    assert dense.weight.grad is not None
    torch.testing.assert_close(gradient, dense.weight.grad[found], rtol=1e-15, atol=1e-15)


def test_a_result_that_is_not_used_has_no_part() -> None:
    sparse, _, _ = pair()
    sparse(torch.tensor([1]))
    sparse(torch.tensor([2])).sum().backward()
    ((found, _),) = sparse.take_touched()
    assert found.tolist() == [2]


def test_nothing_is_remembered_without_training() -> None:
    sparse, _, _ = pair()
    with torch.no_grad():
        assert not sparse(torch.tensor([1])).requires_grad
    sparse.eval()
    assert not sparse(torch.tensor([1])).requires_grad
    assert sparse.take_touched() == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_that_is_run_again_counts_once(reentrant: bool) -> None:
    sparse, dense, _ = pair()
    ids, head = torch.tensor([1, 2, 2]), torch.ones(3, dtype=torch.float64, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda h: (sparse(ids) * h).sin(), head, use_reentrant=reentrant)
    out.sum().backward()
    dense(ids).sin().sum().backward()
    ((found, gradient),) = sparse.take_touched()
    assert dense.weight.grad is not None
    torch.testing.assert_close(gradient, dense.weight.grad[found])


def test_its_type_follows_the_model() -> None:
    model = nn.Sequential(SparseEmbedding(10, 2), nn.Linear(2, 1))
    first = model[0]
    assert isinstance(first, SparseEmbedding)
    assert first.dtype == torch.get_default_dtype()
    first.source = Source(torch.ones(10, 2))
    assert model.to(torch.float64)(torch.tensor([1])).dtype == torch.float64
    assert model.to("cpu").float()(torch.tensor([1])).dtype == torch.float32
    with torch.device("meta"):
        assert SparseEmbedding(10, 2).double().dtype == torch.float64
    assert not model[0].state_dict()
    assert len(list(model.parameters())) == 2


def test_refusals_are_sentences() -> None:
    sparse, _, source = pair()
    with pytest.raises(ConfigError, match=r"got ids of torch.float32; give int64 or int32\."):
        sparse(torch.tensor([1.0]))
    with pytest.raises(ConfigError, match="got ids from 3 to 20 and has rows 0 to 19"):
        sparse(torch.tensor([3, 20]))
    with pytest.raises(ConfigError, match="got ids from -1 to 3"):
        sparse(torch.tensor([3, -1]))
    source.weight = torch.zeros(20, 4)
    with pytest.raises(ConfigError, match=r"gave \(1, 4\) for 1 rows of 3"):
        sparse(torch.tensor([3]))
    sparse.source = None
    with pytest.raises(ConfigError, match=r"use the model in shoal\.Run with strategy ps or solo"):
        sparse(torch.tensor([3]))
    for wrong in ((0, 3, 0.1, 0), (3, 0, 0.1, 0), (3, 3, -0.1, 0), (3, 3, 0.1, -1)):
        with pytest.raises(ConfigError, match="cannot be"):
            SparseEmbedding(*wrong)
