"""What a loss may return: a sum and a count, or a mean. Everything else gets a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.train.technique.loss import as_sum_and_count, check_gradient

BATCH = (torch.zeros(8, 2), torch.zeros(8))


@pytest.mark.parametrize(
    ("returned", "total", "count"),
    [
        ((torch.tensor(3.0), 4), 3.0, 4.0),
        ((torch.tensor([3.0]), 4.5), 3.0, 4.5),
        ((torch.tensor(3.0), torch.tensor(4)), 3.0, 4.0),
        ((torch.tensor(3.0), torch.tensor([4])), 3.0, 4.0),
        ((torch.tensor(0.0), 0), 0.0, 0.0),
        (torch.tensor(0.5), 4.0, 8.0),
        (torch.tensor([[0.5]]), 4.0, 8.0),
    ],
)
def test_sums_counts_and_means(returned: Any, total: float, count: float) -> None:
    found, over = as_sum_and_count(returned, BATCH)
    assert (float(found), found.dim(), over) == (total, 0, count)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.zeros(8), "loss= returned a tensor of shape [8]; return (sum, count) or one mean."),
        (torch.zeros(0), "a tensor of shape [0]"),
        (None, "loss= returned NoneType; return (sum, count), where"),
        (0.5, "loss= returned float;"),
        ([torch.tensor(1.0), 2], "loss= returned list;"),
        ({"loss": 1}, "loss= returned dict;"),
        ((torch.tensor(1.0),), "loss= returned a tuple of 1 (Tensor);"),
        ((torch.tensor(1.0), 2, 3), "loss= returned a tuple of 3 (Tensor, int, int);"),
        ((1.0, 2), "loss= returned a tuple of 2 (float, int);"),
        ((torch.zeros(8), 8), "loss= returned a tuple of 2 (Tensor of shape [8], int);"),
        ((torch.tensor(1.0), "8"), "loss= returned a tuple of 2 (Tensor, str);"),
        ((torch.tensor(1.0), True), "loss= returned a tuple of 2 (Tensor, bool);"),
    ],
)
def test_everything_else_gets_a_sentence(returned: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_sum_and_count(returned, BATCH)
    assert words in str(caught.value)


def test_a_loss_cut_off_from_the_parameters() -> None:
    check_gradient(torch.tensor(1.0, requires_grad=True) * 2)
    with pytest.raises(
        ConfigError, match=r"does not depend on any trainable parameter; did loss= use .item\(\)"
    ):
        check_gradient(torch.tensor(1.0))
