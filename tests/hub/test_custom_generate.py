"""The `custom_generate` that heads are pushed with: by folder, carried by a model's own repository, as an example."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import prompts, tiny_head, tiny_target
from transformers import AutoModelForCausalLM

from hf_dart import TreeConfig, detach
from hf_dart.hub import push

FOLDER = Path(push.__file__).parent
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_generate"
OPTIONS = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}


def seeded(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(*args, **OPTIONS, **kwargs)


@pytest.mark.parametrize("positional", [True, False])
def test_by_folder(positional: bool) -> None:
    model = tiny_target("llama")
    head = tiny_head(model)
    detach(model)
    inputs = prompts([7, 4])
    remote = {"custom_generate": str(FOLDER), "trust_remote_code": True, "assistant": head}
    ids = (inputs.pop("input_ids"),) if positional else ()
    stock = seeded(model, *ids, **inputs)
    assert torch.equal(seeded(model, *ids, **inputs, **remote), stock)
    assert head.last_stats is not None
    assert head.last_stats.accepted > 0
    seeded(model, *ids, **inputs, **remote, tree_config=TreeConfig(nodes=1, lookup=0))
    assert head.last_stats.drafted == 0
    with pytest.raises(ValueError, match="assistant=DartHead"):
        seeded(model, *ids, **inputs, **{**remote, "assistant": None})


def test_carried_by_the_models_own_repository(tmp_path: Path) -> None:
    tiny_target("llama").save_pretrained(tmp_path)
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "custom_generate")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    carried = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert "generate" in vars(carried)
    own = carried.generate
    head = tiny_head(plain)  # fitted to an equal model, so that the other's own generate stays
    inputs = prompts([7])
    stock = seeded(plain, **inputs)
    assert torch.equal(seeded(carried, **inputs, assistant=head), stock)
    assert carried.generate is own
    assert head.last_stats is not None
    assert head.last_stats.accepted > 0


@pytest.mark.parametrize("name", ["generate.py", "requirements.txt"])
def test_the_example_is_what_heads_are_pushed_with(name: str) -> None:
    assert (EXAMPLE / "custom_generate" / name).read_bytes() == (FOLDER / "custom_generate" / name).read_bytes()
