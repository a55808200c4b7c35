"""Trees that were saved with a drafter: fields of earlier versions are read, unknown ones refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import tiny_head, tiny_target

from hf_dart import DartHead, TreeConfig
from hf_dart.trees.config import checked_tree


def test_a_field_of_an_earlier_version_is_left_out() -> None:
    assert checked_tree({"nodes": 4, "calibrate": True}) == {"nodes": 4}
    with pytest.raises(ValueError, match="TreeConfig, which has no 'leaves'; "):
        checked_tree({"leaves": 3, "calibrate": True})
    with pytest.raises(ValueError, match=r"TreeConfig.nodes is 0; give 1 or more\."):
        checked_tree({"nodes": 0, "calibrate": False})


def test_a_head_of_an_earlier_version_loads(tmp_path: Path) -> None:
    target = tiny_target("llama")
    tiny_head(target, tree={"nodes": 7}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["tree"]["calibrate"] = False
    path.write_text(json.dumps(config))
    head = DartHead.from_pretrained(str(tmp_path), target=target)
    assert head.tree_config == TreeConfig(nodes=7)
    head.save_pretrained(tmp_path)
    assert json.loads(path.read_text())["tree"] == {"nodes": 7}
