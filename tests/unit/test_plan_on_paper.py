"""Machines on paper: published runs are predicted after one calibration, and what is asked wrongly gets a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.plan.paper.cards import CARDS
from shoal.plan.paper.cluster import Cluster, cluster_of, read_cluster
from shoal.plan.paper.gpt import Gpt, parse_gpt
from shoal.plan.paper.layout import Layout
from shoal.plan.paper.paper_memory import paper_memory
from shoal.plan.paper.paper_search import paper_plan, search_paper
from shoal.plan.paper.published import read_published, run_of
from shoal.plan.paper.replay import replay

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "plan" / "published.json"


def test_published_runs_are_predicted_within_ten_percent() -> None:
    found = replay(read_published(PUBLISHED))
    assert sum(len(one.runs) for one in found) > 200
    errors = [error for one in found for error in one.errors]
    assert sum(errors) / len(errors) < 0.06
    for one in found:
        assert one.mean < 0.10, one.hardware
        assert one.order > 0.6, one.hardware
    held = [one.held_out for one in found if one.held_out is not None and len(one.runs) > 10]
    assert sum(held) / len(held) < 0.10


# Table 3 of "Reducing Activation Recomputation in Large Transformer Models", as Figure 1 of Calculon draws it; GiB.
MEGATRON = [
    (Gpt(48, 6144, 64, 2048), Layout(4, tensor=8, micro_batch=4), 104.8),
    (Gpt(48, 6144, 64, 2048), Layout(4, tensor=8, micro_batch=4, sequence=True, recompute="selective"), 55.1),
    (Gpt(96, 12288, 96, 2048), Layout(64, tensor=8, stages=8, virtual=3), 112.4),
    (Gpt(105, 20480, 128, 2048), Layout(280, tensor=8, stages=35, virtual=3), 145.7),
    (Gpt(128, 25600, 160, 2048), Layout(512, tensor=8, stages=64), 164.2),
]


@pytest.mark.parametrize(("gpt", "layout", "gib"), MEGATRON)
def test_memory_is_that_of_megatron(gpt: Gpt, layout: Layout, gib: float) -> None:
    assert sum(paper_memory(gpt, layout).values()) / 2**30 == pytest.approx(gib, rel=0.05)


def test_more_of_anything_takes_longer() -> None:
    gpt, cluster = Gpt(32, 4096, 32, 2048), Cluster(CARDS["A100-80GB"], 4)
    plain = paper_plan(gpt, Layout(64, data=32), cluster).time.seconds
    assert paper_plan(gpt, Layout(128, data=32), cluster).time.seconds > plain
    assert paper_plan(gpt, Layout(64, data=32, recompute="full"), cluster).time.seconds > plain
    assert paper_plan(gpt, Layout(64, data=32), Cluster(CARDS["H100"], 4)).time.seconds < plain
    plans = search_paper(gpt, cluster, 64)
    assert plans[0].fits
    low, high = plans[0].interval
    assert low < plans[0].time.seconds < high


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layers=2", "needs hidden"),
        ("layers=2,hiden=4,heads=2,seq=8", "no 'hiden'"),
        ("layers=-1,hidden=4,heads=2,seq=8", "a number above 0"),
        ("layers=2,hidden=5,heads=2,seq=8", "do not divide"),
        ("layers=1e9,hidden=4,heads=2,seq=8", "a number above 0"),
    ],
)
def test_a_wrong_description_of_a_model(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_gpt(text)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"card": "H1000"}, "did you mean 'H100'"),
        ({"card": "H100", "hosts": 0}, "whole number above 0"),
        ({"card": "H100", "memory": "lots"}, "no amount"),
        ({"crad": "H100"}, "no 'crad'"),
        ({"memory": "80GB"}, "neither card nor peak"),
        ({"card": "H100", "achieved": {"speed": 1}}, "has no 'speed'"),
        ({"card": "H100", "achieved": {"matrix": -1}}, "above 0"),
        ({"card": "H100", "peak": {"fp8": 1e15}}, "no bf16"),
        ({"card": 3}, "card is 3"),
    ],
)
def test_a_wrong_cluster(found: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cluster_of(found, "--cluster x.toml")


def test_a_cluster_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('card = "A100-80GB"\nhosts = 4\nbetween = "100Gb/s"\n[achieved]\nmatrix = 0.5\n')
    made = read_cluster(file)
    assert (made.cards, made.card.between, made.achieved.matrix) == (32, 12.5e9, 0.5)
    file.write_text("card = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_cluster(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_cluster(tmp_path / "none.toml")


def test_rows_that_cannot_be_replayed_say_why(tmp_path: Path) -> None:
    row = json.loads(PUBLISHED.read_text())["rows"][0]
    assert not isinstance(run_of(row), str)
    assert "layers" in str(run_of({**row, "model": {"name": "moe"}}))
    assert "contradict" in str(run_of({**row, "consistent": False}))
    assert "FLOP/s" in str(run_of({**row, "measured": {**row["measured"], "step_time_s": 1e3}}))
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{**row, "parallel": {}}, 3]))
    assert sum(read_published(file).left_out.values()) == 2
    file.write_text("{")
    with pytest.raises(ConfigError, match="no published runs"):
        read_published(file)
