"""`Drafter`: what `assistant=` takes, all that the decoding loop asks of it, and what it hands back: a `Proposal`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters import hooks
from hf_dart.hub.kinds import Reads
from hf_dart.models.devices import as_dtype
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.costs import DRAFT_COST
from hf_dart.trees.ngram.table import NgramTable
from hf_dart.trees.vocabulary import columns_of

State = TypeVar("State")

AT_ONCE = 512  # positions that a drafter takes in at once: its masks grow with them, times all positions before

# A logit next to which all others vanish, in any float type.
_CERTAIN = 1e4

Score = Callable[[int, Tensor], Tensor]
"""Function from a depth (from 0) and logits [B, W, V] of W branches to log-scores [B, W, V] that rank the tree."""


class Verified(NamedTuple):
    """Verified positions of all rows, as `Drafter.extend` takes them in.

    Attributes:
        features: [B, A, F] hidden states of the target at `Drafter.feature_layers`, concatenated.
        next_tokens: [B, A] the token after each position; [B, A, E] its embedding where the prompt was given as
            `inputs_embeds`.
        counts: [B] how many of the A entries of a row are real.
    """

    features: Tensor
    next_tokens: Tensor
    counts: Tensor

    def padded(self, width: int) -> Verified:
        """Add entries that are not real, up to `width` of them."""
        more = width - self.next_tokens.shape[1]
        features, tokens = (nn.functional.pad(part, (0, 0) * (part.ndim - 2) + (0, more)) for part in self[:2])
        return Verified(features, tokens, self.counts)

    def parts(self, size: int) -> Iterator[Verified]:
        """Yield the same positions in parts of `size` entries."""
        for first in range(0, self.next_tokens.shape[1], size):
            features, tokens = (part[:, first : first + size] for part in self[:2])
            yield Verified(features, tokens, (self.counts - first).clamp(0, tokens.shape[1]))

    def split(self, size: int) -> tuple[Verified, Verified]:
        """Split off the last `size` entries of each row: the entries before them, and those last ones."""
        features, tokens, counts = self
        before = (counts - size).clamp(min=0)
        width = int(before.max())
        last = before[:, None] + torch.arange(min(size, tokens.shape[1] - width), device=before.device)
        ahead = Verified(features[:, :width], tokens[:, :width], before)
        return ahead, Verified(entries_of(features, last), entries_of(tokens, last), counts - before)


def entries_of(states: Tensor, entries: Tensor) -> Tensor:
    """Gather the `entries` [B, A] of each row from `states` [B, T, ...]."""
    entries = entries.to(states.device)
    if len(entries) == 1:  # takes a third of the time
        return states.index_select(1, entries[0])
    return states[torch.arange(len(entries), device=states.device)[:, None], entries]


@dataclass(frozen=True)
class Proposal:
    """One draft: distributions over the next d tokens of each row.

    Attributes:
        logits: [B, d, V], entry i for the token i + 1 places after the last committed one; [B, d, M] where the
            drafter scores some tokens only.
        hidden: [B, d, H], what the logits were read from.
        vocabulary: [M] ids of those tokens, ascending; None for all.
    """

    logits: Tensor
    hidden: Tensor
    vocabulary: Tensor | None = None

    def row(self, row: int) -> Self:
        """Return the draft of one row."""
        return replace(self, **{name: getattr(self, name)[row : row + 1] for name in self._of_rows()})

    @classmethod
    def joint(cls, drafts: list[Self]) -> Self:
        """Return the draft of the rows of several, which score the same tokens."""
        like = drafts[0]
        parts = {name: torch.cat([getattr(draft, name) for draft in drafts]) for name in like._of_rows()}
        return replace(like, **parts)

    def _of_rows(self) -> list[str]:
        """Names of the fields that have a row for each text."""
        return [one.name for one in fields(self) if one.name != "vocabulary"]

    def within(self, vocab_size: int) -> Self:
        """Fit the proposal to a target with V logits, where a drafter's own table has more or fewer padding rows."""
        rows = self.logits.shape[-1]
        if self.vocabulary is not None or rows == vocab_size:
            return self
        vocabulary = torch.arange(rows, device=self.logits.device) if rows < vocab_size else None
        return replace(self, logits=self.logits[..., :vocab_size], vocabulary=vocabulary)

    def force_token(self, rows: list[bool], token: int) -> None:
        """Let those rows draft `token` alone, if they can."""
        column = token
        if self.vocabulary is not None:
            column = int(columns_of(torch.tensor(token, device=self.vocabulary.device), self.vocabulary, -1))
        if 0 <= column < self.logits.shape[-1]:
            self.logits[torch.tensor(rows), :, column] = _CERTAIN


class _Plain:
    """First base of drafters: FSDP gives a model another class, which needs a layout that does not begin with ABC's."""


class Drafter(_Plain, ABC, Generic[State]):
    """A model that guesses the target's next d tokens: `model.generate(..., assistant=drafter)`; subclass it.

    A subclass implements `draft_length`, `feature_layers`, `check_target`, `begin`, `extend` and `propose`, and sets
    `tree_config` and `last_stats`; trees, sampling, batches, caches and statistics then work as they are.

    The decoding loop calls `begin` once, `extend` for every chunk of verified positions, `propose` once a
    round. All that belongs to one call lives in the state that `begin` returns, so that one drafter serves
    several calls at a time.
    """

    tree_config: TreeConfig
    """The shape of its draft trees in calls that give none themselves (`generate(..., tree_config=...)`)."""
    last_stats: Any
    """The `DraftStats` of the last finished call with it: τ, acceptance, time; None before the first."""
    engine: Any = None
    """The `Engine` that `hf_dart.compile` made for it; None runs the eager round."""
    fixed_shapes: bool = False
    """True if it drafts in one pass over a `SlotCache` that reads nothing from the host, so that it can be captured."""
    observers: tuple[Callable[[Any], Any], ...] = ()
    """Functions that are called with the `Session` of each call that it drafts; each returns a
    `decoding.session.Observer`, which is told of what the call commits."""
    warned: bool = False
    """True once the user was warned that its drafts cost more than they bring."""
    reads: ClassVar[Reads] = staticmethod(lambda content, names: None)
    """What tells checkpoints in other formats (`hf_dart.drafters.registry.register`)."""
    _ngram: NgramTable | None = None
    _pace_records: dict[Hashable, Any] | None = None

    @property
    def pace_records(self) -> dict[Hashable, Any]:
        """Records of earlier calls by their kind (`decoding.pace`); they change drafts, never tokens."""
        if self._pace_records is None:
            self._pace_records = {}
        return self._pace_records

    @property
    def draft_window(self) -> int | None:
        """Number of last entries that it attends to, in addition to the first `draft_sink`; None for all of them."""
        return None

    @draft_window.setter
    def draft_window(self, window: int | None) -> None:
        if window is not None:
            raise ValueError(f"A {type(self).__name__} has no window of its own; leave draft_window out.")

    @property
    def at_once(self) -> int:
        """Positions that are taken in at once."""
        return AT_ONCE if self.draft_window is None else min(AT_ONCE, self.draft_window // 2)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        target: PreTrainedModel | None = None,
        tokenizer: Any = None,
        ngram: NgramTable | str | Path | None = None,
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> Self:
        """Load a drafter; with `target=` also check that it fits, move it there and attach it.

        Args:
            path: a folder or a Hub repository, of `save_pretrained` and `push_to_hub` or of another project.
            target: the model to draft for. Heads of our own format load without it; their `bind` has to be called
                before drafting then.
            tokenizer: the target's, to be compared with the one that the drafter was made with. Left out, it is looked
                up in the folder of the target's weights, if on this machine.
            ngram: a table of n-grams or its path, as `drafter.ngram = NgramTable.load(path)`.
            dtype: of its weights; the target's if left out, "auto" is that of the files.
            options: revision, token, cache_dir, ... as for `PreTrainedModel.from_pretrained`. Of heads: `draft_window`
                and `draft_sink`; `config`, in place of the one in their files, with the same shapes; `base`, the path
                of the head that an adapter belongs to, if it is another than in training. Of language models and
                multi-token prediction modules: `draft_length` and `beam`.

        Returns:
            The drafter in eval mode, for `generate(..., assistant=...)`.

        Raises:
            TypeError: an option is unknown, or `target` is no model.
            ValueError: drafter, target and table do not fit together, or the files are not those of a drafter; the
                message says what differs.
            OSError: there are no such files, or the Hub does not give them.
        """
        settings = {name: options.pop(name) for name in ("draft_window", "draft_sink") if name in options}
        drafter = cls._load(path, target, tokenizer, as_dtype(dtype), **options)
        for name, value in settings.items():
            setattr(drafter, name, value)
        if ngram is not None:
            drafter.ngram = ngram if isinstance(ngram, NgramTable) else NgramTable.load(ngram)
        return drafter

    @classmethod
    def _load(cls, path: str, target: PreTrainedModel | None, tokenizer: Any, dtype: Any, **options: Any) -> Self:
        """Load what `from_pretrained` returns, without a table; drafters that have files implement it."""
        raise NotImplementedError(f"A {cls.__name__} is made, not loaded.")

    def generate(
        self, model: PreTrainedModel, input_ids: Tensor, tree_config: TreeConfig | None = None, **kwargs: Any
    ) -> Any:
        """`model.generate(..., custom_generate=drafter.generate)`: drafting without `attach`.

        transformers passes neither `streamer` nor `tokenizer` on to a callable; `attach` does.

        Args:
            model: the target.
            input_ids: [B, P] as `generate` has prepared them, as is the rest.
            tree_config: replaces that of the drafter for this call.

        Raises:
            ValueError: something was asked for that could not equal stock's output.
        """
        run = hooks.decoding().speculative_generate
        return run(model, input_ids, assistant=self, tree_config=tree_config, **kwargs)

    @property
    def ngram(self) -> NgramTable | None:
        """Counts of a corpus that tell which draft tokens go together (`TreeConfig.ngram_weight`); None for none.

        Setting it raises a `ValueError` if it was counted with another tokenizer than the target's.
        """
        return self._ngram

    @ngram.setter
    def ngram(self, table: NgramTable | None) -> None:
        if table is not None:
            self.check_ngram(table)
        self._ngram = table

    def check_ngram(self, table: NgramTable) -> None:
        """Raise a `ValueError` that names the remedy if the table's token ids are not the target's.

        By default every table will do.
        """

    @property
    @abstractmethod
    def draft_length(self) -> int:
        """d, the number of tokens that `propose` guesses."""

    @property
    @abstractmethod
    def feature_layers(self) -> list[int]:
        """Indices of the target's `hidden_states` that the drafter reads; may be empty."""

    @property
    def reads_embeddings(self) -> bool:
        """True if the drafter reads tokens through the target's embeddings.

        Then `extend` gets embeddings for a prompt with images or sounds, and token ids otherwise.
        """
        return False

    @abstractmethod
    def check_target(self, target: nn.Module) -> None:
        """Raise a `ValueError` that names the remedy if this drafter cannot draft for `target`."""

    def draft_cost(self, target: nn.Module, depth: int | None = None) -> float:
        """Return the cost of a draft of `depth` tokens (default: d), in forwards of the target over one token.

        It decides where `TreeConfig.draft_cost` does not say: on a CPU until the first rounds have shown what their
        drafts took (`decoding.pace`), elsewhere in all rounds.
        """
        return DRAFT_COST

    @abstractmethod
    def begin(self, batch_size: int, capacity: int) -> State:
        """Return a state for one call: `batch_size` rows of about `capacity` positions."""

    def read_first(self, state: State, tokens: Tensor, counts: Tensor) -> None:
        """Take in the tokens that come before those which positions bring: a text's first one, or a cached prefix.

        Called once, right after `begin`. `tokens` [B, A], or their embeddings [B, A, E], go up to the one at the first
        position to come; `counts` [B] of each row are real, at least one, the rest is padding. By default they are not
        looked at: features say what came before.
        """

    @abstractmethod
    def extend(self, state: State, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        """Take in verified positions, as `Verified` has them, without drafting; the longest row has no padding.

        Where a prompt has images or sounds, too, its tokens come as embeddings [B, A, E] (`reads_embeddings`).
        """

    @property
    def runs_in(self) -> tuple[torch.device, torch.dtype] | None:
        """Device and dtype of what it keeps in a `SlotCache`; None for drafters whose state is another."""
        return None

    def resume(self, state: State, pending: Verified, lengths: Tensor) -> bool:
        """Go on with a state of an earlier call: take in what it lacks, then drop what follows `lengths` [B].

        Return whether the state now holds `lengths` positions per row; a new one is begun otherwise.
        """
        if self.runs_in is None or not isinstance(state, SlotCache) or not state.writable(*self.runs_in):
            return False
        self.extend(state, *pending)
        return state.cut(lengths)

    @abstractmethod
    def propose(
        self, state: State, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal | None:
        """Take in verified positions (as `extend`) and draft `depth` tokens (d where left out) after the last one.

        What is returned for a row with no new position (`counts` 0) is not used. None drafts nothing: then copied
        text alone is verified (`TreeConfig.lookup`).
        """

    def propose_ranked(
        self, state: State, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None, score: Score
    ) -> Proposal | None:
        """Take in verified positions and draft, for drafters that choose tokens to draft on from by their `score`.

        The score knows the target's processors and, when sampling, the noise that it will draw its tokens with.
        By default nothing is chosen, and this is `propose`.
        """
        return self.propose(state, features, next_tokens, counts, depth)

    @property
    def refines(self) -> bool:
        """True if this drafter can look at its own draft again (`refine`)."""
        return False

    def refine(self, state: State, first: Proposal, tokens: Tensor) -> Proposal:
        """Return a better draft than the `first` one, which `propose` has just returned.

        Entry i of its distributions holds after the tokens 0..i - 1 of those that are drafted so far, `tokens` [B, d].
        """
        raise NotImplementedError(f"{type(self).__name__} does not refine its drafts.")

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
        """Scores that depend on the token in front; None if the tokens of a draft are independent of each other.

        Of `candidates` [B, d, K] (-1 is none), whose log-probabilities by `proposal` alone, with the noise if there is
        any, are `scores` [B, d, K], after the last committed tokens `roots` [B]. Entry (i, j, k) of the result
        [B, d, K, K] is for candidate k of depth i after candidate j of depth i - 1, at depth 0 after the root.
        """
        return None

    def read_ahead(self, state: State, seen: Verified) -> Verified:
        """Take in all but the last positions of a long text, whose masks would be large; returns those."""
        if seen.next_tokens.shape[1] <= self.at_once:
            return seen
        ahead, last = seen.split(self.at_once)
        self.extend(state, *ahead)
        return last


def pair_scores(
    proposal: Proposal,
    roots: Tensor,
    candidates: Tensor,
    scores: Tensor,
    added: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """`Drafter.transitions` of drafters that score pairs of tokens.

    `added` gives what is added to logits, [B, d, J, K], of hidden states [B, d, H], the candidates' logits [B, d, K],
    the tokens in front [B, d, J], and the candidates [B, d, K], as tokens and as columns of the logits.
    """
    depth, width = candidates.shape[1:]
    device, own = scores.device, proposal.hidden.device
    roots, candidates, scores = roots.to(own), candidates.to(own), scores.to(own)
    tokens = candidates.clamp(min=0)
    in_front = torch.cat([roots[:, None, None].expand(-1, 1, width), tokens[:, :-1]], dim=1)
    columns = tokens if proposal.vocabulary is None else columns_of(tokens, proposal.vocabulary, 0)
    logits = proposal.logits[:, :depth].gather(-1, columns).clamp(min=-_CERTAIN)  # inf - inf is nan
    delta = added(proposal.hidden[:, :depth], logits, in_front, tokens, columns).float()
    # After each predecessor, the candidates together keep the probability that the draft gave them.
    together = scores.logsumexp(-1, keepdim=True)[:, :, None]
    return ((scores[:, :, None] + delta).log_softmax(-1) + together).to(device)
