"""Tiny random targets of Gemma 4 and assistants for them: their files, and what transformers drafts with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from hf_dart import load_drafter
from support.checkpoints import changed, save

VOCABULARY, WINDOW = 12, 8
_KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def _text(family: str, hidden: int, **more: Any) -> Any:
    plain = {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0} if family == "Gemma4" else {}
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
        "initializer_range": 0.1,
    }  # fmt: skip
    return getattr(transformers, f"{family}TextConfig")(**(sizes | plain | more))


def gemma4_target(family: str = "Gemma4", shared: int = 0, **more: Any) -> Any:
    """A target of six layers in float64, the last `shared` of which read the keys and values of others."""
    if shared:  # stock's prefill fails without
        more |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4}
    config = _text(family, 32, num_hidden_layers=6, layer_types=_KINDS * 2, num_kv_shared_layers=shared, **more)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    model.generation_config.eos_token_id = None
    return model


def stock_assistant(family: str = "Gemma4", ordered: bool = False, **more: Any) -> Any:
    """An assistant of transformers' own, in float64; 5.23 makes none unless it is told that all layers share."""
    text = _text(family, 16, num_hidden_layers=3, layer_types=_KINDS, **more)
    clusters = {"use_ordered_embeddings": ordered, "num_centroids": 6, "centroid_intermediate_top_k": 3}
    config = getattr(transformers, f"{family}AssistantConfig")(text_config=text, backbone_hidden_size=32, **clusters)
    with torch.random.fork_rng(), patch.object(type(text), "kv_sharing_modes", ["reuse"] * 3):
        torch.manual_seed(1)
        assistant = getattr(transformers, f"{family}AssistantForCausalLM")(config).double().eval()
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    assistant.generation_config.num_assistant_tokens = 4
    return assistant


def assistant_checkpoint(folder: Path, assistant: Any, **changes: Any) -> str:
    """Write the files of an assistant; `text_config__x` is the field x of its text config."""
    state = {name: value for name, value in assistant.state_dict().items() if name != "lm_head.weight"}
    return save(folder, changed(assistant.config.to_dict() | {"dtype": "float64"}, changes), state)


def gemma4_drafter(folder: Path, target: Any, assistant: Any = None) -> Any:
    assistant = assistant or stock_assistant(vocab_size=target.config.get_text_config().vocab_size)
    return load_drafter(assistant_checkpoint(folder, assistant), target=target)


class Stock:
    """What transformers' own assistant drafts after a text [1, T], which its target reads again.

    Targets without layers that share hand out no keys, unless they are told to. Stock cuts keys too late, and shows two
    entries more than the window of the target's own query: its window is set to two less.
    """

    def __init__(self, target: Any, assistant: Any, ids: Tensor) -> None:
        self.target, self.assistant, self.ids = target, assistant, ids
        assistant.config.get_text_config().sliding_window = WINDOW - 2
        text = target.config.get_text_config()
        own = text.layer_types[: text.num_hidden_layers - text.num_kv_shared_layers]
        for index in {kind: index for index, kind in enumerate(own)}.values():
            target.get_decoder().layers[index].self_attn.store_full_length_kv = True
        self.run = target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)

    def chain(self) -> list[int]:
        """Draft by the candidate generator of `generate(..., assistant_model=...)`."""
        embeddings = self.target.get_input_embeddings()
        generator = SinglePositionMultiTokenCandidateGenerator(
            self.assistant, embeddings, GenerationConfig(max_length=10**6)
        )
        given = {"attention_mask": torch.ones_like(self.ids)}
        drafted, _ = generator.get_candidates(self.ids, given, self.run, is_first_iteration=False, n_last_matches=0)
        return drafted[0, self.ids.shape[1] :].tolist()

    def after(self, path: list[int]) -> Tensor:
        """Log-probabilities [V] after a path of drafted tokens."""
        before = self.run.hidden_states[-1][:, -1:]
        for token in (int(self.ids[0, -1]), *path):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            outputs = self.assistant(
                inputs_embeds=torch.cat([embedded, before], dim=-1),
                attention_mask=torch.ones_like(self.ids),
                position_ids=torch.tensor([[self.ids.shape[1] - 1]]),
                shared_kv_states=dict(self.run.shared_kv_states),
            )
            before = outputs.last_hidden_state
        return outputs.logits[0, 0].float().log_softmax(-1)
