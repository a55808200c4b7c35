"""Parts of a draft head: what goes into its layers, the editor of its drafts and the selector of pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.models.devices import state_of
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
    """The edit pass of `DartHead.forward`."""

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


class BigramSelector(nn.Module):
    """s_i(a, b) = weight_i * u_i(b) + scale_i * <P h_i * phi(a), psi(b)> for candidate b after candidate a at depth i.

    u is the head's own logit. phi and psi read the token embeddings that the head reads, so that nothing grows with the
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

    def lookup(self, hidden: Tensor, logits: Tensor, head: Any, previous: Tensor, candidates: Tensor) -> Tensor:
        """Score pairs of candidates given as token ids of a head's whole vocabulary; shapes as in `forward`.

        A token is projected when it is met for the first time, and again when the weights have changed.
        """
        phi, psi = self._tables(head, torch.cat([previous.flatten(), candidates.flatten()]))
        return self._delta(hidden, logits, phi[previous], psi[candidates])

    def _delta(self, hidden: Tensor, logits: Tensor, phi: Tensor, psi: Tensor) -> Tensor:
        depth = hidden.shape[-2]
        scale, weight = self.log_scale.weight[:depth].exp(), self.log_weight.weight[:depth].exp()  # [d, 1]
        context = scale if self.context is None else self.context(hidden) * scale
        context = context[..., None, :]  # [..., d, 1, r], or [d, 1, 1]
        return (context * phi) @ psi.transpose(-1, -2) + ((weight - 1) * logits)[..., None, :]

    @torch.inference_mode(False)  # tables that were made in that mode could not be written to outside of it
    @torch.no_grad()
    def _tables(self, head: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi and psi of the whole vocabulary, [V, r] each, in which the rows of `tokens` are filled in."""
        embeddings = head.embed_tokens or head.shared.embeddings
        weights = [*self.previous.parameters(), *self.candidate.parameters()]
        key = [state_of(weight) for weight in (*weights, *embeddings.parameters())]
        if self._known is None or self._known[0] != key:
            size, rank = table_of(embeddings).num_embeddings, len(weights[1])
            phi, psi = weights[0].new_empty(2, size, rank)
            self._known = key, torch.zeros(size, dtype=torch.bool, device=phi.device), phi, psi
        _, known, phi, psi = self._known
        new = tokens[~known[tokens]]
        if len(new):
            vectors = head.embed(new).to(phi)
            phi[new], psi[new] = self.previous(vectors).to(phi), self.candidate(vectors).to(psi)  # of autocast's dtype
            known[new] = True
        return phi, psi


def _projection(width: int, rank: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * rank, bias=False), nn.SiLU(), nn.Linear(4 * rank, rank, bias=False))
