"""The network of a draft head: target features and next-token embeddings in, d token distributions out, in one pass.

The architecture is that of DART (arXiv 2601.19278, section 3.1): position i carries the fused features of
the target at i and the embedding of token i + 1; d - 1 mask slots follow the last real position; logits are
shifted, so that the last real position predicts the first draft token and mask slot j the token j + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.drafters.layers import DartLayer, fuse, fusion_norm
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.models.devices import device_of, state_of
from hf_dart.models.features import table_of


class Entries(NamedTuple):
    """Inputs of the first layer.

    Attributes:
        x: [B, Q, E + H] normed embeddings and normed features, or [B, Q, H] in the "stream" form, the residual itself.
        residual: [B, Q, H].
    """

    x: Tensor
    residual: Tensor

    def followed_by(self, others: Entries) -> Entries:
        """Return these entries, followed by others."""
        return Entries(*(torch.cat(parts, dim=1) for parts in zip(self, others, strict=True)))

    def where(self, chosen: Tensor, others: Entries) -> Entries:
        """Return these entries where `chosen` [B, Q] is true, and others elsewhere."""
        return Entries(*(torch.where(chosen[..., None], *parts) for parts in zip(self, others, strict=True)))


class Edits(NamedTuple):
    """The edit pass of `DartModel.forward`."""

    mask: Tensor  # [B, 1, M, T + M] what the slots attend to
    draft: Callable[[Tensor], Tensor]  # from states [B, T + M, H] of the first pass to tokens [B, M]; -1 stays masked


class Editor(nn.Module):
    """Layers of edit passes, which put a draft token into a mask slot and correct the hidden state there.

    The head runs again on its own draft (as DEdit does, arXiv 2609.38510, here on the head itself): first draft, edited
    draft, 1 to 3 passes. Mask slot j, which drafts token j + 1, now holds draft token j and what the first pass knew
    there. The token stands where a real position has the token after it; the missing features are guessed from it and
    from the slot's hidden state. The pass corrects that state, by nothing as long as the editor is untrained.

    If a slot attends to earlier slots only, its new distribution is that of token j + 1 after the draft tokens 1..j,
    and passes are Jacobi iterations: the k-th has the k + 1 first tokens of the draft that tokens drafted one by one
    would have. That needs the passes to be one function of the draft: all start from the hidden states of the first
    pass, never from each other's.
    """

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.embedding_size + config.hidden_size, config.hidden_size, bias=False)
        self.correction = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def features(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Fused features [..., H] of slots, from normed embeddings [..., E] and hidden states [..., H]."""
        return self.fc(torch.cat([embeddings, hidden], dim=-1))

    def forward(self, first: Tensor, again: Tensor) -> Tensor:
        """Hidden states [..., H] of the edited draft, from those of the first draft and of the pass over it."""
        return first + self.correction(again)


class DartModel(TrainedDrafter):
    """The network of a [`DartHead`]: its modules, and the pass that training runs."""

    config_class = DartConfig
    config: DartConfig
    described_as = "DART head"
    base_model_prefix = "dart"
    main_input_name = "features"
    _no_split_modules = ["DartLayer"]  # noqa: RUF012

    def __init__(self, config: DartConfig) -> None:
        super().__init__(config)
        self.fusion_norm = fusion_norm(config)
        self.fc = nn.Linear(config.features_width, config.hidden_size, bias=config.fusion_bias)
        self.embedding_norm = nn.RMSNorm(config.embedding_size, config.rms_norm_eps)
        pairs = config.input_form == "pair"
        self.embedding_projection = None if pairs else nn.Linear(config.embedding_size, config.hidden_size, bias=False)
        if pairs:
            self.feature_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        slot_width = config.embedding_size + config.hidden_size if pairs else config.hidden_size
        if config.mask_mode == "peagle":
            slot_width = config.features_width
        # An Embedding, not a Parameter: PEFT's modules_to_save trains and saves modules only.
        self.mask_slot = nn.Embedding(1, slot_width)
        first = [pairs and index == 0 for index in range(config.num_layers)]
        self.layers = nn.ModuleList(DartLayer.of(config, pairs=one, normed=not one) for one in first)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.make_tables(config)
        self.selector = BigramSelector(config) if config.selector_rank else None
        self.editor = Editor(config) if config.editor else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BigramSelector):
            first = module.candidate.get_parameter("2.weight") if module.context is None else module.context.weight
            for weight in (first, module.log_scale.weight, module.log_weight.weight):  # then delta is zero
                nn.init.zeros_(weight)
        elif isinstance(module, Editor):
            nn.init.zeros_(module.correction.weight)
        else:
            super()._init_weights(module)

    # ---- the pass -----------------------------------------------------------------------------------

    def inputs(self, features: Tensor, embeddings: Tensor) -> Entries:
        """Return the first layer's entries of positions i, from features [B, T, F] and embeddings of tokens i + 1."""
        return self._entries(fuse(features, self.fusion_norm, self.fc), self.embedding_norm(embeddings))

    def _entries(self, fused: Tensor, token: Tensor) -> Entries:
        """Make entries of fused features [B, T, H] and normed embeddings [B, T, E]."""
        if self.embedding_projection is not None:
            stream = fused + self.embedding_projection(token)
            return Entries(stream, stream)
        known = self.feature_norm(fused)
        residual = known if self.config.norm_before_residual else fused
        return Entries(torch.cat([token, known], dim=-1), residual)

    def slot_inputs(self, batch: int, count: int) -> Entries:
        """Return the entries [B, count, ...] of mask slots, alike; the first H of a learned vector are the residual."""
        learned = self.mask_slot.weight[None]
        if self.config.mask_mode == "peagle":
            # Filled in place: a CUDA graph takes no number from the host.
            where = device_of(self.shared.embeddings)
            assert self.config.mask_token_id is not None
            token = torch.full((1, 1), self.config.mask_token_id, dtype=torch.long, device=where)
            slot = self.inputs(learned, self.embed(token))
        else:
            slot = Entries(learned, learned[..., : self.config.hidden_size])
        return Entries(*(part.expand(batch, count, -1) for part in slot))

    def edit_inputs(self, tokens: Tensor, hidden: Tensor) -> Entries:
        """Return the entries of slots that hold draft tokens [B, M] (`Editor`); where one is -1, its slot stays masked.

        `hidden` [B, M, H] is that of the first pass at these slots.
        """
        assert self.editor is not None
        slots = self.slot_inputs(*tokens.shape)
        token = self.embedding_norm(self.embed(tokens.clamp(min=0)))
        edited = self._entries(self.editor.features(token, hidden), token)
        return edited.where((tokens >= 0).to(edited.x.device), slots)

    def forward(
        self,
        features: Tensor,  # [B, T, F]
        next_embeddings: Tensor,  # [B, T, E]
        positions: Tensor,  # [B, T + M]
        attention_mask: Tensor | None,  # [B, 1, T + M, T + M] bool
        edits: Edits | None = None,
        wanted: Tensor | None = None,  # [B, W] entries
        wanted_mask: Tensor | None = None,  # [B, 1, W, T + M] the rows of `attention_mask` of these
    ) -> Tensor:
        """Run the training pass: T real positions, then M mask slots of many blocks.

        The edit pass runs the slots alone; keys and values of the real positions are those of the first pass. With
        `wanted`, which goes without it, the last layer gives real positions keys and values only, unless they are
        asked for; a head of one layer then needs no `attention_mask`.

        Returns:
            Hidden states [B, T + M or W, H] after the final norm; with `edits` those of both passes, [2, B, T + M, H].
        """
        if any(self.config.windows):
            raise ValueError("This head's layers see a window of the text, and are trained by the code that made them.")
        batch, real = features.shape[:2]
        slots = self.slot_inputs(batch, positions.shape[1] - real)
        x, residual = self.inputs(features, next_embeddings).followed_by(slots)
        rotation = self.rotation(positions)
        known: list[tuple[Tensor, Tensor]] = []  # keys and values of real positions, in the order of their use

        def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            known.append((key[:, :, :real], value[:, :, :real]))
            return key, value

        *before, last = self.layers
        remember = None if edits is None else keep
        for layer in before:
            x = residual = layer(x, residual, rotation, attention_mask, remember)
        mask = attention_mask if wanted is None else wanted_mask
        first = self.final(last(x, residual, rotation, mask, remember, wanted))
        if edits is None:
            return first
        assert self.editor is not None
        x, residual = self.edit_inputs(edits.draft(first), first[:, real:])
        places, left = self.rotation(positions[:, real:]), iter(known)

        def recall(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            known_key, known_value = next(left)
            return torch.cat([known_key, key], dim=2), torch.cat([known_value, value], dim=2)

        for layer in self.layers:
            x = residual = layer(x, residual, places, edits.mask, recall)
        again = self.editor(first[:, real:], self.final(x))
        return torch.stack([first, torch.cat([first[:, :real], again], dim=1)])

    def final(self, x: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output [..., H], for the LM head."""
        return self.norm(self.norm(x)) if self.config.double_norm else self.norm(x)


class BigramSelector(nn.Module):
    """s_i(a, b) = weight_i * u_i(b) + scale_i * <P h_i * phi(a), psi(b)> for candidate b after candidate a at depth i.

    u is the head's own logit. phi and psi read the target's frozen token embeddings, so that nothing grows with the
    vocabulary. A Markov head has no P: its second part is scale_i * <phi(a), psi(b)>. With P, or psi, at zero and all
    weights 1, as it starts, the scores are the head's own. What is computed is delta = s - u: u may be seen through
    processors, and with the noise of sampling, before delta is added.
    """

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        rank = config.selector_rank
        self.context = nn.Linear(config.hidden_size, rank, bias=False) if config.selector_kind == "bigram" else None
        self.previous = _projection(config.embedding_size, rank)
        self.candidate = _projection(config.embedding_size, rank)
        self.log_scale = nn.Embedding(config.draft_length, 1)
        self.log_weight = nn.Embedding(config.draft_length, 1)
        self._known: tuple[Any, Tensor, Tensor, Tensor] | None = None

    def forward(
        self,
        hidden: Tensor,  # [..., d, H] what the draft logits were read from
        logits: Tensor,  # [..., d, K] u of the candidates
        embeddings: Tensor,  # [n, E]
        previous: Tensor,  # [..., d, J]
        candidates: Tensor,  # [..., d, K]
    ) -> Tensor:
        """`delta` of all pairs [..., d, J, K]: of those of n different tokens that are in front and the candidates."""
        return self._delta(hidden, logits, self.previous(embeddings)[previous], self.candidate(embeddings)[candidates])

    def lookup(
        self, hidden: Tensor, logits: Tensor, embeddings: nn.Embedding, previous: Tensor, candidates: Tensor
    ) -> Tensor:
        """Score pairs of candidates given as token ids of the whole vocabulary; shapes as in `forward`.

        A token is projected when it is met for the first time, and again when the weights have changed.
        """
        phi, psi = self._tables(embeddings, torch.cat([previous.flatten(), candidates.flatten()]))
        return self._delta(hidden, logits, phi[previous], psi[candidates])

    def _delta(self, hidden: Tensor, logits: Tensor, phi: Tensor, psi: Tensor) -> Tensor:
        depth = hidden.shape[-2]
        scale, weight = self.log_scale.weight[:depth].exp(), self.log_weight.weight[:depth].exp()  # [d, 1]
        context = scale if self.context is None else self.context(hidden) * scale
        context = context[..., None, :]  # [..., d, 1, r], or [d, 1, 1]
        return (context * phi) @ psi.transpose(-1, -2) + ((weight - 1) * logits)[..., None, :]

    @torch.inference_mode(False)  # tables that were made in that mode could not be written to outside of it
    @torch.no_grad()
    def _tables(self, embeddings: nn.Embedding, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi and psi of the whole vocabulary, [V, r] each, in which the rows of `tokens` are filled in."""
        weights = [*self.previous.parameters(), *self.candidate.parameters()]
        key = [state_of(weight) for weight in (*weights, *embeddings.parameters())]
        if self._known is None or self._known[0] != key:
            size, rank = table_of(embeddings).num_embeddings, len(weights[1])
            phi, psi = weights[0].new_empty(2, size, rank)
            self._known = key, torch.zeros(size, dtype=torch.bool, device=phi.device), phi, psi
        _, known, phi, psi = self._known
        new = tokens[~known[tokens]]
        if len(new):
            vectors = embeddings(new.to(device_of(embeddings))).to(phi)
            phi[new], psi[new] = self.previous(vectors), self.candidate(vectors)
            known[new] = True
        return phi, psi


def _projection(width: int, rank: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * rank, bias=False), nn.SiLU(), nn.Linear(4 * rank, rank, bias=False))
