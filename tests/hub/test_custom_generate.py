"""The `custom_generate` of saved drafters: by folder, carried by a model's own repository, as an example."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny import prompts, tiny_head, tiny_target
from transformers import AutoModelForCausalLM

from hf_dart import TreeConfig, detach, load_once
from hf_dart.hub import publish

FOLDER = Path(publish.__file__).parent
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
    assert head.last_stats.accepted > 0
    seeded(model, *ids, **inputs, **remote, tree_config=TreeConfig(nodes=1, lookup=0))
    assert head.last_stats.drafted == 0
    model.generation_config.eos_token_id = stock[0, -4:].tolist()
    endless = {"eos_token_id": None, "top_k": None, "max_new_tokens": 20, "do_sample": True}
    torch.manual_seed(3)
    longest = model.generate(*ids, **inputs, **endless)
    torch.manual_seed(3)
    assert torch.equal(model.generate(*ids, **inputs, **endless, **remote, token="of the Hub"), longest)
    assert longest.shape == stock.shape, "None is a setting, too"
    with pytest.raises(ValueError, match=r"hub holds no config\.json of DART heads"):
        seeded(model, *ids, **inputs, **{**remote, "assistant": None})


def test_carried_by_the_models_own_repository(tmp_path: Path) -> None:
    """As it lies in the examples, which are what heads are pushed with."""
    for name in ("generate.py", "requirements.txt"):
        assert (EXAMPLE / "custom_generate" / name).read_bytes() == (FOLDER / "custom_generate" / name).read_bytes()
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
    assert head.last_stats.accepted > 0
    with pytest.raises(ValueError, match="assistant=DartHead"):
        seeded(carried, **inputs)


FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM
assert "hf_dart" not in sys.modules
target, folders = AutoModelForCausalLM.from_pretrained("target", dtype=torch.float64), sys.argv[1:]
options = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "return_dict_in_generate": True}
def run(**remote):
    torch.manual_seed(3)
    output = target.generate(torch.tensor([[5, 6, 7, 8, 9]]), **options, **remote)
    return output.sequences.tolist(), torch.get_rng_state().tolist(), output
*stock, _ = run()
for folder in folders:
    *ours, output = run(custom_generate=folder, trust_remote_code=True)
    print(json.dumps([ours == stock, output.draft_stats.tau]))
import hf_dart
from hf_dart.drafters.registry import trainers
assert {"dart", "edit", "eagle", "diffusion"} <= trainers().keys()
assert not hasattr(hf_dart, "ToyDrafter")
"""


def test_a_saved_folder_drafts_in_a_fresh_process_without_the_network(tmp_path: Path) -> None:
    """Which then knows all kinds of drafters, and `hf_dart` has no names of others."""
    target = tiny_target("llama")
    head = tiny_head(target)
    target.save_pretrained(tmp_path / "target")
    head.save_pretrained(tmp_path / "head-1.5")
    publish.write_folder(tmp_path / "head-1.5", tmp_path / "dry", "someone/head")
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(tmp_path / "adapter")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    folders = ["./head-1.5/", str(tmp_path / "dry"), "adapter"]
    command = [sys.executable, "-c", FRESH, *folders]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(folders)
    assert all(same and tau > 1.3 for same, tau in found)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks for it
def test_folders_of_one_name_and_folders_that_are_saved_again(tmp_path: Path) -> None:
    """transformers runs one copy of the code for all of them."""
    target = tiny_target("llama")
    first, second = tmp_path / "first" / "head", tmp_path / "second" / "head"
    tiny_head(target, draft_length=2).save_pretrained(first)
    tiny_head(target, draft_length=3).save_pretrained(second)
    detach(target)

    def drafts(folder: Path) -> int:
        seeded(target, **prompts([7]), custom_generate=str(folder), trust_remote_code=True)
        drafter = load_once(str(folder), target)
        assert drafter.last_stats.rounds > 0
        assert drafter is load_once(str(folder), target)
        return drafter.draft_length

    assert [drafts(first), drafts(second), drafts(first)] == [2, 3, 2]
    tiny_head(target, draft_length=4).save_pretrained(first)
    assert [drafts(first), drafts(second)] == [4, 3]
    tiny_head(target, draft_length=5).save_pretrained(second)
    detach(target)
    assert load_once(str(second), get_peft_model(target, LoraConfig(r=2))).draft_length == 5
    assert "generate" not in vars(target), "as it was"
