"""The representative matrix on a CUDA device, in fp32 with TF32 off: tokens, and both generators after them.

Where there is none, on `support.simulated_gpu`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support.cases import MODES
from support.compare import assert_identical_up_to_near_ties, tally
from support.simulated_gpu import needs_a_driver
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from surveys.matrix import attentions

from hf_dart import TreeConfig
from hf_dart.bench.auditing import audit
from hf_dart.bench.pair import load_pair
from hf_dart.bench.speed import Settings
from hf_dart.decoding.api import close_call, open_request, requested
from hf_dart.decoding.pace import Pace
from hf_dart.decoding.seats import Seats
from hf_dart.errors import UserError
from hf_dart.models.attention import masked_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_fp32")]
FAMILIES = ["llama", "qwen3", "gemma3", "gemma2", "mistral", "gpt2", "gptj", "deepseek_v3", "llama4"]
ALL = [*product(FAMILIES, ("eager", "sdpa"), MODES)]
TOKENS = 40 if torch.cuda.is_available() else 16
FEW = ("llama", "sdpa", "top-p, penalty")


def compare(target: Any, drafter: Any, lengths: list[int], label: str, place: str = "cuda", **options: Any) -> None:
    inputs = {name: ids.to(place) for name, ids in prompts(lengths).items()}
    into = tally("fp32 on a GPU")
    assert_identical_up_to_near_ties(target, drafter, inputs, into=into, label=label, max_new_tokens=TOKENS, **options)


@pytest.mark.parametrize(
    ("family", "attention", "mode"), [FEW, *(pytest.param(*one, marks=pytest.mark.matrix) for one in ALL if one != FEW)]
)
def test_families(family: str, attention: str, mode: str) -> None:
    target: Any = tiny_target(family, attention if attention in attentions(family) else "eager", torch.float32)
    target = target.to("cuda")
    head = tiny_head(target)
    assert head.device.type == "cuda"
    for lengths in ([7], [9, 3, 7, 13]):
        for tree in (TreeConfig(), TreeConfig(nodes=16), TreeConfig(nodes=16, shared_noise=False)):
            head.tree_config = tree
            compare(target, head, lengths, f"{family}, {attention}, {mode}", **MODES[mode])


def test_prompts_on_the_host() -> None:
    """transformers moves the ids where they are needed and draws on the host."""
    target: Any = tiny_target("llama", dtype=torch.float32).to("cuda")
    head = tiny_head(target)
    for mode in ("greedy", "T=1"):
        compare(target, head, [9, 3, 7, 13], f"prompts on the host, {mode}", "cpu", **MODES[mode])


@pytest.mark.parametrize("mode", ["greedy", "T=1"])
def test_prompts_on_the_host_and_on_the_gpu(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side in seats; each draws where its own lies, and all are paced as the target's device is."""
    target: Any = tiny_target("llama", dtype=torch.float32).to("cuda")
    monkeypatch.setattr(Pace, "timed_costs", lambda config, device: {device})
    head, seats, texts, paces = tiny_head(target), Seats(2), {}, []
    for length, place in ((7, "cpu"), (9, "cuda")):
        options = {name: ids.to(place) for name, ids in prompts([length]).items()} | MODES[mode]
        options |= {"max_new_tokens": TOKENS}
        request = requested(target, assistant=head, tree_config=TreeConfig(), **options)
        session = open_request(request, torch.Generator(place).manual_seed(3))
        paces.append((request.timed, session.pace.cost().of(9)))
        seats.take(session)
        torch.manual_seed(3)
        texts[session] = target.generate(**options)
    assert paces[0] == paces[1]
    while seats.taken:
        for session, failure in seats.round():
            assert failure is None
            assert torch.equal(close_call(session), texts[session])


def test_outputs_that_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an offloaded target those of the prompt do, as the prompt lies there, and those of rounds do not."""
    target: Any = tiny_target("llama", dtype=torch.float32).to("cuda")
    add_hook_to_module(target, AlignDevicesHook("cuda:0", io_same_device=True))
    head = tiny_head(target, tree={"nodes": None, "lookup": 0, "draft_cost": 3.0})
    monkeypatch.setattr(type(target), "device", torch.device("meta"))
    for _ in range(90 // TOKENS):  # the last begins in a pause, and drafts then
        compare(target, head, [9], "offloaded", "cpu", **MODES["greedy"])


@pytest.mark.parametrize("kind", ["head", "draft vocabulary", "eagle", "diffusion"])
def test_a_drafter_on_another_device_than_the_lm_head(kind: str) -> None:
    """As `DrafterTrainer` has it where the target lies on several."""
    target: Any = tiny_target("llama", dtype=torch.float32)
    made: dict[str, Any] = {"eagle": tiny_eagle_drafter, "diffusion": tiny_diffusion_drafter}
    drafter = made.get(kind, tiny_head)(target)
    if kind == "draft vocabulary":
        drafter.reduce_vocabulary([3, 5, 8])
    hidden = torch.randn(2, 3, target.config.hidden_size)
    there = drafter.logits(hidden)
    target.to("cuda")
    found = drafter.logits(hidden)
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, there)


def test_masks_whose_rows_begin_anywhere() -> None:
    """The memory-efficient kernel refuses them; ours are copied to rows that it takes."""
    query, key, value = (torch.randn(2, 3, 4, 8, dtype=torch.bfloat16).cuda() for _ in range(3))
    for shown in (torch.rand(2, 1, 4, 4) > 0.3, torch.ones(2, 1, 4, 4, dtype=torch.bool)):
        shown[..., 0] = True
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(part.cpu().float() for part in (query, key, value)), attn_mask=shown
        )
        found = masked_attention(query, key, value, shown.cuda())
        torch.testing.assert_close(found.cpu().float(), wanted, atol=0.02, rtol=0.02)
    bias = torch.zeros(2, 1, 4, 4, dtype=torch.bfloat16, device="cuda").expand(2, 3, 4, 4)
    with pytest.raises(RuntimeError, match="not correctly aligned"):
        torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, False)


@needs_a_driver
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_flex_attention(family: str) -> None:
    """As it is compiled: trees by SDPA, or by eager attention where there is none."""
    target: Any = tiny_target(family, "eager" if family in ("gemma2", "gpt_oss") else "sdpa", torch.float32).to("cuda")
    target.set_attn_implementation("flex_attention")
    head = tiny_head(target)
    for lengths in ([7], [9, 3, 7, 13]):
        compare(target, head, lengths, f"{family}, flex", **MODES["greedy"])


@needs_a_driver
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_flash_attention(name: str) -> None:
    """The packaged pair in 16 bits: differences are near-ties."""
    try:
        pair = load_pair(dtype="bfloat16", device_map="cuda", attn_implementation=name)
    except UserError as error:
        pytest.skip(str(error))
    texts = [pair.tokenizer(text)["input_ids"] for text in ("def main():", "import os\n\n\nclass Reader:\n    ")]
    report = audit(pair, texts, Settings(prompts=2, new_tokens=64, batches=(1, 2)))
    assert report["attention"] == {"own": name, "trees": "sdpa"}
    assert report["passed"], report["findings"]
