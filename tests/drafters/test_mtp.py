"""Multi-token prediction modules of targets: read as transformers reads them, and exact like every drafter."""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.cases import GREEDY, SAMPLED, batch
from support.compare import assert_identical, run, tally
from support.heads import draft_after, features_of
from support.modules import speculators_module, with_module
from support.sentences import refused
from support.tiny import prompts, tiny_target
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hf_dart import MtpDrafter, TreeConfig, load_drafter
from hf_dart.drafters.beams import BeamProposal, View
from hf_dart.interop.mtp_module import module_count

EXACT = tally("float64, multi-token prediction modules", least=1.3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a family: its target, the folder that it was loaded from, and the module's weights."""
    made: dict[str, Any] = {}

    def of(family: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Path, dict[str, Tensor]]:
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family, dtype] = (*with_module(family, folder, dtype), folder)
        target, weights, folder = made[family, dtype]
        return target, folder, weights

    return of


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_drafts_are_those_of_transformers(folders: Any, family: str, dtype: torch.dtype) -> None:
    """Logits along paths of the beam, against `MtpModel` as stock's `use_mtp` loads and runs it, pass by pass."""
    target, _, weights = folders(family, dtype)
    drafter = MtpDrafter.from_target(target, beam=2, draft_length=4)
    theirs = MtpModel.from_pretrained(known_to_stock(target)).to(dtype)
    assert all(torch.allclose(theirs.state_dict()[name], weight) for name, weight in weights.items())  # a bias is fp32
    ids = prompts([9])["input_ids"]
    states = features_of(target, drafter.feature_layers, ids)
    proposal = draft_after(target, drafter, ids)
    assert isinstance(proposal, BeamProposal)
    largest = 0.0
    for branch in range(2):
        cache = MtpCache(config=theirs.config)
        hidden = theirs.forward_layer(0, states, torch.arange(1, 9)[None], cache, input_ids=ids[:, 1:9])
        first = theirs._project_to_logits(hidden[:, -1:])[0, 0].log_softmax(-1)
        largest = max(largest, float((first - proposal.logits[0, 0]).abs().max()))
        token, hidden = proposal.branches[0, 0, branch], hidden[:, -1:]
        hidden = theirs.forward_layer(0, hidden, torch.tensor([[9]]), cache, input_ids=token.view(1, 1))
        after = theirs._project_to_logits(hidden)[0, 0].log_softmax(-1)
        largest = max(largest, float((after - proposal.conditional[0, 0, branch]).abs().max()))
    assert largest < (1e-4 if dtype == torch.float32 else 1e-6)


def known_to_stock(target: Any) -> Any:
    """Stock knows the numbers of the last layers of what is published, not of tiny ones."""
    number = target.config.num_hidden_layers
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}.*"]
    return target


WRITTEN: dict[str, tuple[str, list[str], str]] = {
    "qwen3_next": ("mtp.", ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"], "token first"),
    "mimo": ("model.mtp_layers.0.", ["input_proj", "final_layernorm", "token_layernorm", "hidden_layernorm"], ""),
}
"""What names of a module's weights begin with, and its projection and norms."""


@torch.no_grad()
@pytest.mark.parametrize("family", WRITTEN)
def test_the_modules_of(folders: Any, family: str) -> None:
    """Against their rules, written down: no released code runs here. What drafts is a layer that the target has."""
    target, folder, weights = folders(family)
    prefix, (projection, last, of_token, of_state), token_first = WRITTEN[family]
    drafter = load_drafter(str(folder), target=target)
    assert isinstance(drafter, MtpDrafter)
    module = drafter.module
    assert all(torch.equal(module.state_dict()[name], weight) for name, weight in weights.items())
    ids = prompts([9])["input_ids"]
    states, files = features_of(target, drafter.feature_layers, ids), load_file(folder / "model.safetensors")

    def norm(x: Tensor, name: str) -> Tensor:
        scale = files[f"{prefix}{name}.weight"] + (family == "qwen3_next")
        return F.rms_norm(x, x.shape[-1:], scale, target.config.rms_norm_eps)

    pair = norm(target.get_input_embeddings()(ids[:, 1:9]), of_token), norm(states, of_state)
    x = F.linear(torch.cat(pair if token_first else pair[::-1], dim=-1), files[f"{prefix}{projection}.weight"])
    layer = copy.deepcopy(next(one for one in target.model.layers if hasattr(one, "self_attn")))
    layer.load_state_dict(module.layers[0].mtp_block.state_dict())
    places = torch.arange(1, 9)[None]
    mask = torch.full((8, 8), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
    rotation = target.model.rotary_emb(x, position_ids=places)
    x = layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=places)
    expected = target.lm_head(norm(x, last)).log_softmax(-1)
    # The first 3 of tokens 1 to 8 are taken in before.
    state = drafter.begin(1, 4)
    drafter.extend(state, states[:, :3], ids[:, 1:4], torch.tensor([3]))
    found = drafter.log_chances(drafter._run(state, states[:, 3:], ids[:, 4:9], View.after(state, 5)))
    assert torch.allclose(expected[:, 3:].float(), found, atol=1e-5)


def test_a_head_of_speculators(folders: Any, tmp_path: Path) -> None:
    """MiMo's names without the target's, and the embedding first: told by the config."""
    target, folder, _ = folders("mimo")
    width = target.config.hidden_size
    files = {name.removeprefix("model."): one for name, one in load_file(folder / "model.safetensors").items()}
    files = {name: one for name, one in files.items() if name.startswith("mtp_layers.0.")}
    hidden, token = files["mtp_layers.0.input_proj.weight"].split(width, dim=1)
    files["mtp_layers.0.input_proj.weight"] = torch.cat([token, hidden], dim=1)
    theirs = load_drafter(speculators_module(tmp_path, target, files), target=target)
    mimos = load_drafter(str(folder), target=target)
    ids = prompts([9])["input_ids"]
    states = features_of(target, theirs.feature_layers, ids)
    found = [one.read_last(one.begin(1, 4), states, ids[:, 1:], torch.tensor([8])) for one in (theirs, mimos)]
    assert torch.allclose(*found)


def test_the_modules_of_mimo_v2(folders: Any) -> None:
    """Told by its tensors alone: sliding attention with sinks, and a dense MLP."""
    target, folder, weights = folders("mimo_v2")
    drafter = load_drafter(str(folder), target=target)
    assert isinstance(drafter, MtpDrafter)
    assert all(torch.equal(drafter.module.state_dict()[name], weight) for name, weight in weights.items())
    block = drafter.module.layers[0].mtp_block
    assert type(block.mlp).__name__ == "MiMoV2FlashMLP"
    assert block.self_attn.sinks is not None
    assert drafter._kind.name == "sliding_attention"
    assert_identical(target, drafter, batch(1, "eager"), **SAMPLED, tree_config=TreeConfig(nodes=16), into=EXACT)


def test_the_text_of_stocks_own_use(folders: Any) -> None:
    """Greedy text is the same, and the module is found by load_drafter and on the command line."""
    target, folder, _ = folders("glm4_moe")
    inputs = prompts([9])
    stock = run(known_to_stock(target), inputs, 0, **GREEDY, use_mtp=True).sequences
    drafter = load_drafter(str(folder), target=target)
    assert isinstance(drafter, MtpDrafter)
    assert torch.equal(run(target, inputs, 0, **GREEDY, assistant=drafter).sequences, stock)
    assert module_count({"text_config": {"mtp_num_hidden_layers": 1}}) == 1
    assert module_count({"num_nextn_predict_layers": None}) == 0


def test_of_a_target_that_was_saved(tmp_path: Path) -> None:
    """Saving leaves the name of the dtype in its config, where there was the dtype."""
    target, _ = with_module("glm4_moe", tmp_path / "loaded", torch.float64)
    target.save_pretrained(tmp_path / "saved")
    drafter = MtpDrafter.from_target(target, beam=2, draft_length=4)
    assert_identical(target, drafter, batch(1, "eager"), **GREEDY, into=EXACT)


def test_in_fp8(folders: Any, tmp_path: Path) -> None:
    """Read with its scales beside a target that was unpacked; beside others it would be noise."""
    plain, folder, own = folders("glm4_moe", torch.float32)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    name = f"model.layers.{plain.config.num_hidden_layers}.self_attn.q_proj.weight"
    scale = (weights[name].abs().max() / 448).view(1, 1)
    weights |= {name: (weights[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: MtpDrafter.from_pretrained(str(tmp_path), target=plain), ValueError, "saved as F8_E4M3")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [*weights[name].shape]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    module = MtpDrafter.from_target(type(plain).from_pretrained(tmp_path, dtype=torch.float32)).module
    read = module.layers[0].mtp_block.self_attn.q_proj.weight
    assert torch.allclose(read, own["layers.0.mtp_block.self_attn.q_proj.weight"], atol=16 * float(scale))


def test_of_the_revision_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else of the only one that is here."""
    target, asked = tiny_target("llama"), list[Any]()
    target.config._name_or_path = "them/model"
    monkeypatch.setattr("hf_dart.drafters.mtp.drafter.cached_commit", lambda path: "here")
    monkeypatch.setattr(MtpDrafter, "from_pretrained", lambda path, target, revision: asked.append(revision))
    for options in {}, {"revision": "main"}:
        MtpDrafter.from_target(target, **options)
    assert asked == ["here", "main"]


def test_what_is_refused(folders: Any, tmp_path: Path) -> None:
    target, folder, _ = folders("glm4_moe")
    drafter = MtpDrafter.from_target(target)
    weights = load_file(folder / "model.safetensors")
    last = f"model.layers.{target.config.num_hidden_layers}."
    damaged: dict[str, Any] = {
        "stripped": {name: one for name, one in weights.items() if not name.startswith(last)},
        "one is missing": {name: one for name, one in weights.items() if name != f"{last}eh_proj.weight"},
        "another shape": {**weights, f"{last}eh_proj.weight": torch.zeros(3, 3)},
    }
    for name, content in damaged.items():
        other = tmp_path / name
        shutil.copytree(folder, other)
        save_file(content, other / "model.safetensors", metadata={"format": "pt"})
        load = partial(MtpDrafter.from_pretrained, str(other), target=target)
        refused(load, ValueError, "multi-token prediction module in")
    refused(lambda: load_drafter(str(folder)), ValueError, "pass target=model")
    refused(lambda: MtpDrafter.from_target(tiny_target("glm4_moe")), ValueError, "not loaded from files")
    llama = tiny_target("llama")
    llama.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="names no multi-token"):
        MtpDrafter.from_pretrained(str(tmp_path / "llama"), target=llama)
    refused(lambda: drafter.check_target(tiny_target("glm4_moe", seed=1)), ValueError, "belongs to another target")
    for wrong in ({"draft_length": 0}, {"beam": 0}):
        refused(lambda wrong=wrong: MtpDrafter.from_target(target, **wrong), ValueError, "give 1 to")
    assert_identical(target, drafter, prompts([3]), **GREEDY, into=EXACT)
