"""Adapters in the names and files of peft, in both directions; what `start` takes from other people's files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.recipe.lora import CONFIG, WEIGHTS, Lora, LoraLinear, save_adapter
from shoal.recipe.start import Start


class Net(nn.Module):
    """Two layers to adapt, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 9)
        self.down = nn.Linear(9, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.down(torch.relu(self.up(x)))))
        return out


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Net()


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def run_of(recipes: object, model: nn.Module | None = None) -> shoal.Run:
    return shoal.Run(
        model=model or net(),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        data=TensorDataset(X, torch.arange(16) % 3),
        global_batch=8,
        strategy="solo",
        recipes=recipes,  # type: ignore[arg-type]
        log=None,
        progress=False,
    )


def peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        pytest.skip(f"peft cannot be imported ({error}); pip install -e '.[dev]'")


@pytest.mark.all_only  # to import peft takes longer than all else here
def test_peft_reads_what_was_trained(tmp_path: Path) -> None:
    asked = Lora(2, alpha=6.0, targets="up,down", train="head")
    run = run_of([asked])
    list(run.steps(4))
    save_adapter(tmp_path / "adapter", run.state_dict(), asked)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [CONFIG, WEIGHTS]
    theirs = peft().PeftModel.from_pretrained(net(), str(tmp_path / "adapter"))
    with torch.no_grad():
        wanted = run.module(X)
        assert (net()(X) - wanted).abs().max() > 0.01
        torch.testing.assert_close(theirs(X), wanted, rtol=0, atol=1e-6)
        plain = net()
        plain.load_state_dict(run.state_dict(weights="export"))
        torch.testing.assert_close(plain(X), wanted, rtol=0, atol=1e-6)


@pytest.mark.all_only
def test_a_run_begins_with_what_peft_has_written(tmp_path: Path) -> None:
    config = peft().LoraConfig(r=3, lora_alpha=9, target_modules=["up", "down"])
    theirs = peft().get_peft_model(net(), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(str(tmp_path))
    run = run_of([Lora(3, alpha=9.0, targets="up,down", adapter=str(tmp_path))])
    with torch.no_grad():
        torch.testing.assert_close(run.module(X), theirs(X), rtol=0, atol=1e-6)
    merged = theirs.merge_and_unload().state_dict()
    exported = run.state_dict(weights="export")
    assert exported.keys() == merged.keys()
    for name, value in merged.items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=1e-6)
    with pytest.raises(shoal.ConfigError, match="fits no parameter of the model"):
        run_of([Lora(2, targets="up,down", adapter=str(tmp_path))])
    with pytest.raises(shoal.ConfigError, match=r"has no 'head\.lora_A\.weight'"):
        run_of([Lora(3, targets="up,down,head", adapter=str(tmp_path))])


def test_only_adapters_learn() -> None:
    run = run_of("lora(2, train=head)")
    before = run.state_dict()
    list(run.steps(3))
    after = run.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {
        *("up.lora_A.weight", "up.lora_B.weight", "down.lora_A.weight", "down.lora_B.weight"),
        *("head.weight", "head.bias"),
    }
    layer = run.module.get_submodule("up")
    assert isinstance(layer, LoraLinear)
    torch.testing.assert_close(layer.weight, run.state_dict(weights="export")["up.weight"])


def test_a_transformer_in_evaluation_sees_its_adapters() -> None:
    """Its fast path reads the weights of its layers and calls none of them."""
    block = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    run = run_of(
        "lora(2, targets='linear1,linear2')", nn.Sequential(nn.Linear(4, 8), Rows(block), nn.Linear(8, 3))
    )
    list(run.steps(4))
    model = run.module
    with torch.no_grad():
        slow = model.train()(X)
        fast = model.eval()(X)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-5)


class Rows(nn.Module):
    """Each sample as a sequence of one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x.unsqueeze(1)).squeeze(1)
        return out


def test_a_shared_weight_gets_no_adapter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    assert [n for n, m in run_of("lora(2)", model).module.named_modules() if isinstance(m, LoraLinear)] == [
        "3"
    ]
    with pytest.raises(shoal.ConfigError, match="shares its weight with another module"):
        run_of("lora(2, targets=0)", model)


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    asked = Lora(2, targets="up", train="head")
    run = run_of([asked])
    list(run.steps(2))
    save_adapter(tmp_path, run.state_dict(), asked)
    again = run_of([Lora(2, targets="up", train="head", adapter=str(tmp_path))])
    assert all(torch.equal(value, run.state_dict()[name]) for name, value in again.state_dict().items())


# start


def test_start_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {f"encoder.{name}": value for name, value in net().state_dict().items()}
    other["encoder.up.weight"] = other["encoder.up.weight"].reshape(9, 4, 1)
    other["encoder.head.weight"] = torch.zeros(7, 6)
    other["pooler"] = torch.zeros(2)
    torch.save(other, tmp_path / "old.pt")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        fresh = Net()
    first = fresh.head.weight.detach().clone()
    run = run_of([Start(str(tmp_path / "old.pt"), drop="encoder.")], fresh)
    said = capsys.readouterr().err
    assert (
        f"start: 5 of 6 tensors are from {tmp_path}/old.pt; reshaped: up.weight; of another size, so new"
        in said
    )
    assert "head.weight; only in it: pooler." in said
    found = run.state_dict()
    assert torch.equal(found["up.weight"], net().up.weight)
    assert torch.equal(found["head.weight"], first), "a new head"


def test_start_from_a_checkpoint(tmp_path: Path) -> None:
    run = run_of("")
    list(run.steps(2))
    run.save(str(tmp_path / "runs" / "named"))
    for path in (tmp_path / "runs", tmp_path / "runs" / "named"):
        again = run_of([Start(str(path))])
        assert all(torch.equal(value, run.state_dict()[name]) for name, value in again.state_dict().items())
    with pytest.raises(shoal.ConfigError, match=r"nothing in .* has the name and size of a parameter"):
        run_of([Start(str(tmp_path / "runs"), add="other.")])
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(shoal.ConfigError, match="cannot be read"):
        run_of([Start(str(tmp_path / "text.pt"))])
