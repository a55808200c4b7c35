"""`TreeConfig`: costs of rounds, and what is kept with a head."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target
from support.trees import candidates_of, random_draft

from hf_dart import DartHead, TreeConfig
from hf_dart.trees.config import checked_tree
from hf_dart.trees.costs import interpolated
from hf_dart.trees.on_host import grow_on_host

POINTS = ((1.0, 1.0), (4.0, 1.3), (8.0, 1.3), (16.0, 2.1))


def test_straight_lines_between_points() -> None:
    """Steps may fall: products of 4 rows may take longer than those of 16; nothing is guessed to fall on."""
    sizes, costs = zip(*POINTS, (2.5, 1.15), (6.0, 1.3), (12.0, 1.7), (24.0, 2.9), strict=True)
    assert interpolated(POINTS, sizes).tolist() == pytest.approx(costs)
    points = TreeConfig(verify_costs=((1, 1), (4, 2.5), (16, 1.7))).verify_costs
    assert interpolated(points, (4, 10, 16, 64)).tolist() == pytest.approx([2.5, 2.1, 1.7, 1.7])
    cost = TreeConfig(verify_costs=points, draft_cost=0.0).round_cost(1, "cpu")
    candidates = candidates_of(*random_draft(1, 4, 4, 0))
    assert grow_on_host(candidates, nodes=16, cost=cost).size not in (2, 3, 4)


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_a_batch_shares_its_forwards(batch: int) -> None:
    """And every look at a draft costs a draft."""
    cost = TreeConfig(verify_costs=POINTS, draft_cost=0.4).round_cost(batch, "cpu")
    for nodes in range(1, 64 // batch + 1):
        assert cost.of(nodes) == pytest.approx(0.4 + interpolated(POINTS, batch * nodes) / interpolated(POINTS, batch))
    config = TreeConfig(draft_cost=0.3, refine=2, node_cost=0.0)
    assert config.round_cost(batch, "cpu").of(2) == pytest.approx(1.9)
    assert config.round_cost(batch, "cpu", drafted=False).of(2) == 1


NO_COSTS: list[Any] = [
    *([(1, 1)], [(2, 1), (3, 2)], [(1, 1), (1, 2)], [(1, 1), (2, 0)], [(1, 1), (2,)], 7, [(1, 1), (2, "x")])
]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"verify_costs": points}, r"verify_costs is .*; give two or more pairs of") for points in NO_COSTS),
        ({"nodes": 0, "calibrate": False}, r"TreeConfig.nodes is 0; give 1 or more\."),
        ({"leaves": 3, "calibrate": True}, "TreeConfig, which has no 'leaves'; "),
        ({"scores": "paper"}, "give nodes"),
        ({"scores": "other"}, "'survival' or 'paper'"),
        ({"ngram_weight": -1}, "ngram_weight is -1"),
        *(({name: 1025}, f"TreeConfig.{name} is 1025; give 1024 or less") for name in ("nodes", "top_k", "beam")),
        ({"refine": 32}, "TreeConfig.refine is 32; give 31 or less"),
    ],
)
def test_what_is_no_tree(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_tree(fields)


def test_configs_come_back_from_json() -> None:
    for tree in (TreeConfig(), TreeConfig(verify_costs=POINTS)):
        assert len({tree, TreeConfig(**json.loads(json.dumps(asdict(tree))))}) == 1


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
def test_costs_change_no_token(tmp_path: Path, options: dict[str, Any]) -> None:
    """Kept with a head of an earlier version, in whose next one equal calls make equal rounds."""
    target = tiny_target("llama")
    tree = {"verify_costs": [[1, 1], [8, 1.01], [64, 1.5]], "draft_cost": 0.0}
    tiny_head(target, tree=tree).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tree": {**config["tree"], "calibrate": False}}))
    committed = []
    for _ in range(2):
        head = DartHead.from_pretrained(str(tmp_path), target=target)
        assert head.tree_config.verify_costs == ((1, 1), (8, 1.01), (64, 1.5))
        assert_identical(target, head, prompts([9, 3]), **options, max_new_tokens=20)
        committed.append((head.last_stats.committed, head.last_stats.drafted))
    assert committed[0] == committed[1]
    assert committed[0][1] > 0
    head.save_pretrained(tmp_path)
    assert json.loads(path.read_text())["tree"] == tree
