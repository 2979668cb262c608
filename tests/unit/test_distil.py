"""What a teacher adds to the loss, where it comes from, and what of it is kept on disk. One process; parity with
several workers is in tests/contracts/test_recipe_contract.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import ConfigError
from shoal.recipe.teacher.distil import Distil, Distilling
from shoal.recipe.teacher.inner import attention_map
from shoal.recipe.teacher.logits_cache import LogitsCache, checksum_of, keys_of_rows
from shoal.recipe.teacher.outputs import counted_rows, logits_of
from shoal.recipe.teacher.placement import nbytes
from shoal.testing.parity import largest_difference, trace_run
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.world.world import World

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 4


def student() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def teacher(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def config(recipes: Any = "", **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "model": student,
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": TensorDataset(X, Y),
        "global_batch": 12,
        "strategy": "solo",
        "precision": "fp64",
        "recipes": recipes,
        "shuffle": False,
    }
    return RunConfig(**{**settings, **changes})


def first_loss(recipes: Any, **changes: Any) -> float:
    return float(trace_run(World.alone(), config(recipes, **changes), 1).losses[0])


def test_the_loss_is_the_one_of_the_paper() -> None:
    big = teacher().double()
    kept = [parameter.clone() for parameter in big.parameters()]
    small = build(config(), World.alone(), "")[1].model
    with torch.no_grad():
        said, wanted = small(X[:12].double()), big(X[:12].double())
        plain = F.cross_entropy(said, Y[:12])
        soft = F.kl_div(
            F.log_softmax(said / 3, 1), F.log_softmax(wanted / 3, 1), log_target=True, reduction="batchmean"
        )
    found = first_loss(Distil(big, alpha=0.7, temperature=3.0))
    assert found == pytest.approx(float(0.3 * plain + 0.7 * 9 * soft), rel=1e-12)
    trained = trace_run(World.alone(), config(Distil(big, alpha=0.7)), 4)
    assert trained.losses[-1] < trained.losses[0]
    assert all(torch.equal(a, b) for a, b in zip(big.parameters(), kept, strict=True)), "a teacher is frozen"
    assert not any(parameter.requires_grad for parameter in big.parameters())


def test_layers_inside_are_compared() -> None:
    small, big = build(config(), World.alone(), "")[1].model, teacher(8).double()
    with torch.no_grad():
        x = X[:12].double()
        near = (small[:2](x) - big[:2](x)).pow(2).mean()
        looks = (attention_map([small[:2](x)]) - attention_map([big[:2](x)])).pow(2).sum(1).mean()
    plain = first_loss(Distil(big))
    assert first_loss(Distil(big, hidden="1:1", inner=2.0)) == pytest.approx(
        plain + 2 * float(near), rel=1e-12
    )
    assert first_loss(Distil(big, attention="1:1")) == pytest.approx(plain + float(looks), rel=1e-12)
    maps = torch.rand(3, 2, 5, 5)
    assert attention_map([torch.zeros(3, 5, 8), maps]).shape == (3, 25), "heads are averaged"


def test_rows_count_as_they_do_in_the_loss() -> None:
    logits = torch.zeros(3, 5, 7)
    labels = torch.zeros(3, 5, dtype=torch.long)
    labels[0, 2:] = -100
    rows = counted_rows(logits, (None, labels), 12, -100)
    assert float(rows.total(torch.ones(3, 5))) == 12
    samples = counted_rows(logits, (torch.zeros(3, 2), torch.zeros(3)), 3, -100)
    assert float(samples.total(torch.ones(3, 5))) == pytest.approx(3)
    with pytest.raises(ConfigError, match="loss= counts 4, and 12 of 15 rows"):
        counted_rows(logits, (torch.zeros(3, 5), labels), 4, -100)
    with pytest.raises(ConfigError, match="the student returned a str without logits"):
        logits_of("no", "the student")


def shares_of(world: World, strategy: str) -> tuple[float, int, int]:
    """The gap to a whole teacher, what this worker holds of one, and what it is whole."""
    asked = Distil(teacher, alpha=0.6, place="sharded")
    gap = largest_difference(
        trace_run(world, config(Distil(teacher, alpha=0.6), strategy=strategy), 4),
        trace_run(world, config(asked, strategy=strategy), 4),
    )[0]
    running = build(config(asked, strategy=strategy), world, "")[1].recipes.running("distil")
    assert isinstance(running, Distilling)
    held = sum(unit.part.numel() * unit.part.element_size() for unit in running.units)
    return gap, held, nbytes(teacher().double())


@pytest.mark.parametrize("strategy", ["zero3", "ddp * tp2"])
def test_a_teacher_in_parts(strategy: str) -> None:
    """The same numbers, at half of the memory and at most a few elements of padding."""
    for gap, held, whole in spawn(shares_of, 2, strategy):
        assert gap < 1e-12
        assert held <= whole / 2 + 64


def test_logits_are_asked_for_once(tmp_path: Path) -> None:
    asked = Distil(teacher, cache=str(tmp_path / "logits"))
    wanted = trace_run(World.alone(), config(Distil(teacher)), 6)
    for _ in range(2):
        assert largest_difference(wanted, trace_run(World.alone(), config(asked), 6))[0] < 1e-12
    parts = build(config(asked), World.alone(), "")[1]
    running = parts.recipes.running("distil")
    assert isinstance(running, Distilling)
    calls: list[object] = []
    running.teacher.register_forward_hook(lambda *given: calls.append(given))
    batch = (X[:12].double(), Y[:12])
    running.on_loss(parts.model(batch[0]), batch, torch.tensor(1.0), 12)
    assert not calls, "another run has asked before"
    running.on_loss(parts.model(batch[0] + 1), (batch[0] + 1, Y[:12]), torch.tensor(1.0), 12)
    assert len(calls) == 1, "other inputs are another sample"


def test_what_is_damaged_is_computed_again(tmp_path: Path) -> None:
    logits, keys = torch.randn(3, 4), keys_of_rows((X[:3], Y[:3]))
    LogitsCache(str(tmp_path), "teacher", torch.float32, 0).keep(keys, logits)
    again = LogitsCache(str(tmp_path), "teacher", torch.float32, 1)
    found = again.find(keys)
    assert found is not None
    assert torch.equal(found, logits)
    file = next(tmp_path.glob("*.logits"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    assert LogitsCache(str(tmp_path), "teacher", torch.float32, 1).find(keys) is None
    assert LogitsCache(str(tmp_path), "teacher", torch.float32, 1).find(keys[:2]) is not None
    file.write_bytes(whole[:-3] + b"\0\0\0")
    assert LogitsCache(str(tmp_path), "teacher", torch.float32, 1).find(keys) is None
    with pytest.raises(ConfigError, match="holds logits of another teacher"):
        LogitsCache(str(tmp_path), "other", torch.float32, 1)
    assert checksum_of(teacher()) != checksum_of(teacher())


def test_a_teacher_from_a_checkpoint_and_from_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    run = shoal.Run(
        model=teacher,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        data=TensorDataset(X, Y),
        global_batch=12,
        strategy="solo",
        checkpoint=str(tmp_path / "big"),
        log=None,
        progress=False,
    )
    for _ in run.steps(3):
        pass
    run.save("final")
    save_file(
        {name: value.contiguous() for name, value in run.state_dict().items()}, tmp_path / "big.safetensors"
    )
    wanted = first_loss(Distil(run.module.double()))
    for weights in ("big", "big/final", "big.safetensors"):
        found = first_loss(Distil(teacher, weights=str(tmp_path / weights)))
        assert found == pytest.approx(wanted, rel=1e-6)
    save_file({"0.weight": torch.zeros(16, 6)}, tmp_path / "part.safetensors")
    with pytest.raises(ConfigError, match=r"has no '0.bias', which the model has \(5 of 6 are missing\)"):
        first_loss(Distil(teacher, weights=str(tmp_path / "part.safetensors")))


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    """Student and teacher compute their own loss from labels, shifted by one: samples are counted."""
    transformers = pytest.importorskip("transformers", reason="transformers: a teacher from its folder")
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    big = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    big.save_pretrained(tmp_path / "hub")
    tokens = torch.randint(0, 11, (12, 8))

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(x))
            return out

    def next_token(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()

    common = {"model": Small, "loss": next_token, "data": TensorDataset(tokens, tokens.roll(-1, 1))}
    text = f"distil({tmp_path / 'hub'}, alpha=0.5)"
    found = trace_run(World.alone(), config(text, **common), 3).losses
    assert found != trace_run(World.alone(), config("", **common), 3).losses
    with pytest.raises(ConfigError, match="is no Hugging Face folder with safetensors"):
        first_loss(f"distil({tmp_path / 'none'})")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"alpha": 2.0}, "alpha=2, temperature=2"),
        ({"place": "here"}, "place=here; it is auto, whole, sharded"),
        ({"place": "sharded", "cache": "x"}, "cache= lets workers ask a teacher at different times"),
        ({"hidden": "1"}, "hidden=1; write pairs of modules"),
        ({"hidden": "1:1", "cache": "x"}, "cache= keeps logits only"),
        ({"hidden": "1:nine"}, "the teacher has no module 'nine'"),
        ({"hidden": "1:3"}, "'1' of the student gives [12, 8] and '3' of the teacher [12, 16]"),
        ({"teacher": lambda: nn.Linear(6, 3)}, "the student gives logits [12, 4] and the teacher [12, 3]"),
    ],
)
def test_mistakes_with_teachers_are_said(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        first_loss(Distil(**{"teacher": teacher, **asked}))
    assert words in str(found.value)


def test_the_first_classes_alone() -> None:
    few = first_loss(Distil(lambda: nn.Linear(6, 3), classes=3))
    assert few != first_loss("")
