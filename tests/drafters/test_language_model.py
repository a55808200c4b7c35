"""Small language models as drafters: exact like every drafter, and what they draft is what they say of the text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import GREEDY, SAMPLED
from support.compare import assert_identical, tally
from support.heads import assert_beam
from support.sentences import refused
from support.tiny import VOCABULARY, WINDOW, nearly, prompts, tiny_target
from support.turns import two_turns
from support.users import letters
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from hf_dart import LanguageModelDrafter, TreeConfig, attach, load_drafter
from hf_dart.drafters import base
from hf_dart.drafters.beams import BeamProposal

EXACT = tally("float64, language models as drafters", least=1.3)
padded = partial(pad_sequence, batch_first=True)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, LanguageModelDrafter]:
    target = tiny_target("llama")
    return target, LanguageModelDrafter(nearly(target), target)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("gemma3", {}), ("gemma3", {"sliding_window": 2}), ("gpt2", {})],
    ids=["full", "window", "window shorter than paths", "learned positions"],
)
def test_a_branch_is_what_the_model_says(family: str, config: dict[str, int]) -> None:
    """Caches, masks and positions of ragged rows against plain forwards over each path; some cross a window."""
    target = tiny_target(family, **config)
    drafter = LanguageModelDrafter(nearly(target), target, draft_length=4, beam=3)
    lengths = [WINDOW + 4, 3, WINDOW - 1]
    texts = [prompts([length], seed=length)["input_ids"][0] for length in lengths]
    state = drafter.begin(3, 4)
    nothing = torch.zeros(3, 0, 0)
    # The first row has read more than its first token before the first position.
    firsts = [3, 1, 1]
    drafter.read_first(state, padded([text[:n] for text, n in zip(texts, firsts, strict=True)]), torch.tensor(firsts))
    rest = [text[n:] for text, n in zip(texts, firsts, strict=True)]
    halves = [len(part) // 2 for part in rest]
    drafter.extend(
        state, nothing, padded([part[:n] for part, n in zip(rest, halves, strict=True)]), torch.tensor(halves)
    )
    left = [part[n:] for part, n in zip(rest, halves, strict=True)]
    proposal = drafter.propose(state, nothing, padded(left), torch.tensor([len(part) for part in left]))
    again = drafter.propose(state, nothing, padded([text[-1:] for text in texts]), torch.zeros(3, dtype=torch.long))
    assert isinstance(proposal, BeamProposal)
    assert isinstance(again, BeamProposal)
    for row, text in enumerate(texts):

        def after(path: list[int], text: Tensor = text) -> Tensor:
            whole = torch.cat([text, torch.tensor(path, dtype=torch.long)])
            return drafter.model(whole[None], use_cache=False).logits[0, -1].float().log_softmax(-1)

        assert_beam(proposal, row, after)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_turns_go_on_with_what_was_read(family: str, taken_up: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """And after a turn of stock's the model reads the cached text, too, piece by piece."""
    monkeypatch.setattr(base, "AT_ONCE", 5)
    target = tiny_target(family)
    drafter = LanguageModelDrafter(nearly(target, noise=0), target, beam=1)
    kind = lambda model: DynamicCache(config=model.config)  # noqa: E731
    want = two_turns(target, kind, [9, 3, 7], (None, None), GREEDY)[1:]
    for drafting in ((drafter, drafter), (None, drafter)):
        ours = two_turns(target, kind, [9, 3, 7], drafting, {**GREEDY, "tree_config": TreeConfig.chain(5)})[1:]
        for turn, stock in zip(ours, want, strict=True):
            assert torch.equal(turn.sequences, stock.sequences)
        assert drafter.last_stats.tau > 4, "it knows all of the text, and says what the target says"
    assert taken_up == [False, True, False]


def test_a_text_longer_than_the_models_positions(llama: tuple[Any, LanguageModelDrafter]) -> None:
    target, _ = llama
    short = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=24, n_embd=16, n_layer=1, n_head=2))
    drafter = LanguageModelDrafter(short.double(), target)
    for lengths in ([9, 3, 7], [30]):
        assert_identical(target, drafter, prompts(lengths), **GREEDY, into=EXACT)


def test_what_is_refused(llama: tuple[Any, LanguageModelDrafter], tmp_path: Path) -> None:
    target, drafter = llama
    other = tiny_target("qwen3", num_hidden_layers=1, vocab_size=VOCABULARY + 1)
    refused(lambda: LanguageModelDrafter(other, target), ValueError, "other tokens or ids")
    small = tiny_target("qwen3", num_hidden_layers=1)
    small.save_pretrained(tmp_path)
    letters("abcdefgh").save_pretrained(tmp_path)
    loaded = LanguageModelDrafter.from_pretrained(str(tmp_path), target=target, tokenizer=letters("abcdefgh"))
    other_order = {"tokenizer": letters("abcdefhg")}
    refused(lambda: LanguageModelDrafter(loaded.model, target, **other_order), ValueError, "other tokens or ids")
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1))
    for stateful in (recurrent.double(), tiny_target("falcon_h1")):
        refused(partial(LanguageModelDrafter, stateful, target), ValueError, "language model of attention layers")
    for wrong in ({"draft_length": 0}, {"beam": 0}):
        refused(lambda wrong=wrong: LanguageModelDrafter(small, target, **wrong), ValueError, "give 1 to")
    refused(lambda: load_drafter(str(tmp_path)), ValueError, "pass target=model")
    refused(lambda: load_drafter(str(tmp_path), target=target, trust_remote_code=True), ValueError, "is not run")
    wider = attach(tiny_target("llama", vocab_size=VOCABULARY + 1))
    refused(lambda: wider.generate(**prompts([3]), **GREEDY, assistant=drafter), ValueError, "other tokens or ids")
    assert_identical(target, drafter, prompts([3]), **GREEDY, into=EXACT)


def test_a_target_whose_table_is_resized() -> None:
    target = tiny_target("llama")
    drafter = LanguageModelDrafter(nearly(target), target)
    assert_identical(target, drafter, prompts([3]), **GREEDY, into=EXACT)
    target.resize_token_embeddings(VOCABULARY + 8)
    refused(lambda: target.generate(**prompts([3]), **SAMPLED, assistant=drafter), ValueError, "other tokens or ids")


def test_damaged_files_and_files_of_something_else(llama: tuple[Any, LanguageModelDrafter], tmp_path: Path) -> None:
    target, _ = llama
    tiny_target("qwen3", num_hidden_layers=1).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = {name: weight for name, weight in weights.items() if "k_proj" not in name}
    for content in (lacking, {**weights, "model.norm.weight": torch.zeros(3)}):
        save_file(content, tmp_path / "model.safetensors", metadata={"format": "pt"})
        refused(lambda: load_drafter(str(tmp_path), target=target), ValueError, "The language model in")


def test_tables_may_differ_in_padding_rows(tmp_path: Path) -> None:
    """As those of a family's small and large models do."""
    target, tokenizer = tiny_target("llama"), letters("".join(map(chr, range(97, 97 + 40))))
    for rows in (VOCABULARY - 4, VOCABULARY + 4):
        model = tiny_target("qwen3", num_hidden_layers=1, vocab_size=rows)
        model.save_pretrained(tmp_path / str(rows))
        tokenizer.save_pretrained(tmp_path / str(rows))
        drafter = load_drafter(str(tmp_path / str(rows)), target=target, tokenizer=tokenizer)
        assert isinstance(drafter, LanguageModelDrafter)
        for mode in (GREEDY, SAMPLED):
            assert_identical(target, drafter, prompts([9, 3]), **mode, into=EXACT)
