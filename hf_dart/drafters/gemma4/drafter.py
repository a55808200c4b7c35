"""`Gemma4Drafter`: Gemma 4's own assistants as `assistant=`.

An assistant has no text of its own. Each pass asks from the position of the last committed token, whatever the depth:
its layers attend to the keys and values of the target's last layer of their kind. Queries differ by their input alone,
the target's embedding of a token beside the state that predicted it, so branches of a tree are queries side by side.

The keys and values are projected again from the target's hidden states, by the target's own modules, and kept as those
of any drafter: they outlive windows and caches that the target's may have.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base_config import DrafterConfig, told_of
from hf_dart.drafters.beams import BeamDrafter, last_of
from hf_dart.drafters.layers import rotate
from hf_dart.drafters.published import note_origin
from hf_dart.drafters.registry import register
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.hub import card_texts
from hf_dart.interop.gemma4 import assistant_format, part_of, read_assistant
from hf_dart.models.attention import added_mask, in_place_of
from hf_dart.models.devices import device_of


class Gemma4Config(DrafterConfig):
    """The config of a [`Gemma4Drafter`]: the config.json that it was published with, and what is known of its target.

    Args:
        published: the config.json that the assistant was published with.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`, told by that one and the target.
    """

    model_type = "dart_gemma4"

    published: dict[str, Any] = dataclasses.field(default_factory=dict)
    draft_length: int = 4

    def check_window(self, window: int | None, sink: int) -> None:
        super().check_window(window, sink)
        if window is not None:
            raise ValueError("An assistant of Gemma 4 attends to its target's own text; leave draft_window out.")

    @property
    def needs(self) -> dict[str, int]:
        return {name: size for name, size in super().needs.items() if name != "LM head width"}

    @classmethod
    def of(cls, published: dict[str, Any], target: PreTrainedModel) -> Self:
        """Return the config of an assistant, by its config.json, for a target of Gemma 4."""
        config, last, told = read_assistant(published), last_layers(target), told_of(target)
        text = config.text_config
        widths = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
        if not last.keys() >= {*text.layer_types}:
            raise ValueError(
                f"An assistant of Gemma 4 drafts for a Gemma 4 with its kinds of layers, and {type(target).__name__} "
                "is none; give the target that it was published for."
            )
        return cls(
            published=published,
            feature_layers=[*(last[kind] for kind in dict.fromkeys(text.layer_types)), told["target_num_layers"]],
            hidden_size=text.hidden_size,
            **{name: getattr(text.per_layer_config[0], name) for name in widths},  # full layers may have others
            embedding_size=config.backbone_hidden_size,
            feature_size=config.backbone_hidden_size,
            vocab_size=text.vocab_size,
            **told,
        )


def last_layers(target: PreTrainedModel) -> dict[str, int]:
    """Return the last layer of each kind that has keys and values of its own; none of other models than Gemma 4."""
    text = target.config.get_text_config(decoder=True)
    if not text.model_type.startswith("gemma4"):
        return {}
    shared = getattr(text, "num_kv_shared_layers", 0)
    return {kind: index for index, kind in enumerate(text.layer_types[: len(text.layer_types) - shared])}


@register("gemma4", config=Gemma4Config, card=card_texts.GEMMA4, reads=lambda content, _: assistant_format(content))
class Gemma4Drafter(BeamDrafter[SlotCache], TrainedDrafter):
    """An assistant that was published for a Gemma 4, as `assistant=`.

    `Gemma4Drafter.from_pretrained("google/gemma-4-e2b-it-assistant", target=model)` loads one.

    Attributes:
        beam: W, number of different tokens per depth from which drafting continues; 1 drafts a chain.
        published: the published config.json, as transformers reads it.
    """

    config: Gemma4Config
    described_as = "Gemma 4 assistant"
    beam = 4
    lm_head_weights = 0  # tokens are scored by a table of its own

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        self.published = published = read_assistant(config.published)
        text, wide, hidden = published.text_config, published.backbone_hidden_size, published.text_config.hidden_size
        text._attn_implementation = "sdpa"
        text.num_kv_shared_layers = 0  # transformers 5.23 makes no model all of whose layers share
        self._kinds = tuple(dict.fromkeys(text.layer_types))
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(text.vocab_size, hidden)
        layer_class = part_of(published, "TextDecoderLayer")
        self.model.layers = nn.ModuleList(layer_class(text, index) for index in range(text.num_hidden_layers))
        for layer in self.model.layers:
            attention: Any = layer.self_attn
            attention.is_kv_shared_layer = True
            for own in ("k_proj", "v_proj", "k_norm", "v_norm"):
                delattr(attention, own)
        self.model.norm = part_of(published, "RMSNorm")(hidden, eps=text.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * wide, hidden, bias=False)
        self.post_projection = nn.Linear(hidden, wide, bias=False)
        if published.use_ordered_embeddings:
            self.masked_embedding: Any = nn.Module()
            self.masked_embedding.centroids = nn.Linear(hidden, published.num_centroids, bias=False)
            self.masked_embedding.register_buffer("token_ordering", torch.arange(text.vocab_size))
        with torch.device("cpu"):  # no submodule: a change of dtype must not round its frequencies
            self._rotary = (part_of(published, "TextRotaryEmbedding")(text),)
        self.post_init()

    @classmethod
    def _of_published(
        cls, path: str, content: dict[str, Any], target: PreTrainedModel | None, tokenizer: Any, **where: Any
    ) -> Self:
        if target is None:
            raise ValueError(f"{path} is an assistant of Gemma 4, which does not say whose; pass target=.")
        return cls._of_files(path, note_origin(Gemma4Config.of(content, target), path, **where), **where)

    @classmethod
    def _of_files(cls, path: str, config: Gemma4Config, **where: Any) -> Self:
        drafter = super()._of_files(path, config, **where)
        if drafter.published.use_ordered_embeddings:
            ordering = drafter.masked_embedding.token_ordering
            if not torch.equal(ordering.sort().values, torch.arange(len(ordering))):
                raise ValueError(f"The token_ordering of {path} does not name every token once; fetch it again.")
        return drafter

    def _check_compatible(self, target: PreTrainedModel, tokenizer: Any) -> None:
        super()._check_compatible(target, tokenizer)
        last = last_layers(target)
        for kind, place in zip(self._kinds, self.feature_layers, strict=False):
            heads, size = self._heads(kind)
            attention = target.get_decoder().layers[place].self_attn if last.get(kind) == place else None
            if attention is None or (attention.head_dim, attention.k_proj.out_features) != (size, heads * size):
                raise ValueError(
                    f"This assistant reads {heads} heads of width {size} of layer {place} of its target, a layer of "
                    f"{kind}, which this target has not; give the target that it was published for."
                )

    def _heads(self, kind: str) -> tuple[int, int]:
        """Return the number of heads of keys and values in layers of that kind, and their width."""
        text = self.published.text_config
        layer = text.per_layer_config[text.layer_types.index(kind)]
        return layer.num_key_value_heads, layer.head_dim

    def begin(self, batch_size: int, capacity: int) -> SlotCache:
        state = SlotCache(torch.zeros(batch_size, dtype=torch.long, device=self.device), capacity)
        for kind in self._kinds:
            heads, width = self._heads(kind)
            state.add(torch.empty(0, heads, 0, width, dtype=self.dtype, device=self.device), 2)
        return state

    def read_last(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Tensor:
        *read, last = features.chunk(len(self._kinds) + 1, dim=-1)
        positions, slots, _ = state.following(features.shape[1])
        for kind, place, x, store in zip(self._kinds, self.feature_layers, read, state.stores, strict=False):
            for number, part in enumerate(self._keys_and_values(kind, place, x, positions)):
                store.write(number, part.to(self.device), slots)
        state.advance(counts)
        last = last_of(last, counts).to(device=self.device, dtype=self.dtype)
        return self._run(state, last_of(next_tokens, counts), last)

    def draft_level(self, state: SlotCache, tokens: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        return self._run(state, tokens, self.post_projection(previous))

    def log_chances(self, states: Tensor) -> Tensor:
        table = self.model.embed_tokens.weight
        if not self.published.use_ordered_embeddings:
            return F.linear(states, table).float().log_softmax(-1)
        clusters = self.masked_embedding
        chosen = clusters.centroids(states).topk(self.published.centroid_intermediate_top_k, dim=-1).indices
        members = clusters.token_ordering.view(self.published.num_centroids, -1)[chosen].flatten(-2)  # [B, W, M]
        scores = (table[members] @ states[..., None])[..., 0]
        # One value for all others, below those; stock takes it from the whole call, here it is the entry's own.
        outside = (scores.amin(-1, keepdim=True) - 1).expand(*states.shape[:-1], len(table))
        return outside.scatter(-1, members, scores).float().log_softmax(-1)

    def bind(self, target: PreTrainedModel, tokenizer: Any = None) -> Self:
        super().bind(target, tokenizer)
        self.shared.decoder = target.get_decoder()
        return self

    def _keys_and_values(self, kind: str, place: int, x: Tensor, positions: Tensor) -> list[Tensor]:
        """Project what the target's layer `place` reads, x [B, A, H], as it does itself: [B, kv heads, A, head_dim]."""
        decoder = self.shared.decoder
        layer, attention = decoder.layers[place], decoder.layers[place].self_attn
        x = layer.input_layernorm(x.to(device_of(attention.k_proj)))
        cos, sin = (part.to(x.device) for part in decoder.rotary_emb(x, positions.to(x.device), kind))
        made = (attention.k_proj, attention.v_proj or attention.k_proj)
        key, value = (project(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for project in made)
        return [rotate(attention.k_norm(key), (cos[:, None], sin[:, None])), attention.v_norm(value)]

    def _run(self, state: SlotCache, tokens: Tensor, before: Tensor) -> Tensor:
        """States [B, W, H] of tokens [B, W] or their embeddings, each after the state that predicted it.

        All ask from the position of the last committed token, and none attends to another.
        """
        x = self.pre_projection(torch.cat([self.embed(tokens), before], dim=-1))
        text, end, (rotary,) = self.published.text_config, state.longest, self._rotary
        at = state.lengths[:, None].expand(-1, x.shape[1])
        distance = at[..., None] - torch.arange(end, device=at.device)  # [B, W, S]
        keys, masks, rotations = {}, {}, {}
        for kind, store in zip(self._kinds, state.stores, strict=True):
            reach = text.sliding_window if kind == "sliding_attention" else end + 1
            masks[kind] = added_mask(((distance > 0) & (distance < reach))[:, None], x.dtype)
            keys[kind] = tuple(store.buffer(part)[:, :, :end] for part in range(2))
            rotations[kind] = rotary(x, at, kind)
        for layer, kind in zip(self.model.layers, text.layer_types, strict=True):
            shared = {"shared_kv_states": keys, "position_embeddings": rotations[kind], "attention_mask": masks[kind]}
            with in_place_of("sdpa", "sdpa"):  # by groups of heads
                x = layer(x, **shared, position_ids=at)
        return self.model.norm(x)
