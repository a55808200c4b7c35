"""Where weights and bookkeeping lie must not matter: targets that accelerate offloads, torch's default device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig
from support.compare import assert_identical
from support.guests import dflash_drafter
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_dart import Batcher, DartCandidateGenerator, LookupDrafter, attach

SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "head": tiny_head,
    "peagle": lambda target: tiny_head(target, mask_mode="peagle", mask_token_id=47),
    "eagle": tiny_eagle_drafter,
    "diffusion": tiny_diffusion_drafter,
}


@pytest.mark.parametrize("kind", [*DRAFTERS, "dflash"])
def test_an_offloaded_target(kind: str, tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.get_output_embeddings().weight.is_meta
    drafter = dflash_drafter(tmp_path, target) if kind == "dflash" else DRAFTERS[kind](target)
    assert not any(weight.is_meta for weight in drafter.parameters())
    assert_identical(target, drafter, prompts([9, 4]), **SAMPLED)
    (prompt,) = prompts([9])["input_ids"].tolist()
    with Batcher(target, drafter) as batcher:
        text = batcher.submit(prompt, seed=5, **SAMPLED).result()
    torch.manual_seed(5)
    assert torch.equal(text, target.generate(torch.tensor([prompt]), **SAMPLED))
    assert target.get_output_embeddings().weight.is_meta


def test_a_target_on_disk(tmp_path: Path) -> None:
    target = tiny_target("gemma3", tie_word_embeddings=False)
    disk_offload(target, str(tmp_path), execution_device=torch.device("cpu"))
    attach(target)
    assert_identical(target, LookupDrafter(), prompts([9]), **SAMPLED)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Whatever is made without naming a device can be computed with by nobody."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("kind", ["head", "eagle", "diffusion"])
def test_another_default_device(kind: str, tmp_path: Path) -> None:
    with torch.device("cpu"):
        target = tiny_target("llama")
        inputs = {size: prompts([9, 4][:size]) for size in (1, 2)}
    drafter = DRAFTERS[kind](target)
    assert not any(weight.is_meta for weight in drafter.parameters())
    for size in (1, 2):
        assert_identical(target, drafter, inputs[size], **SAMPLED)
    if kind == "head":
        drafter.add_selector(4)
        drafter.add_editor()
        drafter.save_pretrained(tmp_path)
        drafter.add_adapter(LoraConfig(r=2))
        assert not any(weight.is_meta for weight in drafter.parameters())
        assert_identical(target, drafter, inputs[1], **SAMPLED)
        greedy = {"do_sample": False, "max_new_tokens": 12}
        loop = DartCandidateGenerator.stock_loop(drafter)
        text = target.generate(**inputs[1], **greedy, custom_generate=loop)
        assert torch.equal(text, target.generate(**inputs[1], **greedy))


class Notes(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Where code of the user's own makes its tensors."""

    def __init__(self, target: Any) -> None:
        self.devices: set[str] = set()
        target.model.register_forward_pre_hook(lambda module, args: self.put(None))

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        self.put(input_ids)
        return scores if isinstance(scores, Tensor) else torch.zeros(len(input_ids), dtype=torch.bool, device="cpu")

    def put(self, value: Tensor | None) -> None:
        self.devices.add(torch.zeros(1).device.type)

    def end(self) -> None:
        """Nothing to do."""


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("own", ["logits_processor", "stopping_criteria", "streamer"])
def test_users_code_finds_its_default_device(own: str) -> None:
    with torch.device("cpu"):
        target, inputs = tiny_target("llama"), prompts([9])
    head = tiny_head(target)
    notes = Notes(target)
    given = notes if own == "streamer" else [notes]
    target.generate(**inputs, do_sample=False, max_new_tokens=8, assistant=head, **{own: given})
    assert notes.devices == {"meta"}


def test_a_static_cache_that_stock_would_compile_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: it is said that drafted rounds are not compiled."""
    target = tiny_target("llama")
    head = tiny_head(target)
    monkeypatch.setattr(type(target), "_valid_auto_compile_criteria", lambda self, kwargs, config: True)
    with pytest.warns(UserWarning, match=r"hf_dart\.compile"):
        target.generate(**prompts([9]), **SAMPLED, cache_implementation="static", assistant=head)
