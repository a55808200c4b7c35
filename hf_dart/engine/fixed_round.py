"""One round on fixed shapes. Read `hf_dart.engine` first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_dart.decoding.candidates import Ranker
from hf_dart.decoding.topk import largest
from hf_dart.decoding.walk import drawn
from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.drafters.proposal import Proposal
from hf_dart.engine.attention import PackedVerifier
from hf_dart.engine.budget import computed, shared
from hf_dart.engine.cache import FixedCache, FixedDraftCache
from hf_dart.engine.compiling import Backend, compiled
from hf_dart.engine.processing import FixedProcessors
from hf_dart.engine.state import RING, Shape, State
from hf_dart.trees.candidates import Candidates
from hf_dart.trees.copies import BatchLookup, up_to_end, with_copies
from hf_dart.trees.in_tensors import grow_in_tensors
from hf_dart.trees.ngram.table import NgramTable
from hf_dart.trees.scores import DraftScores
from hf_dart.trees.tree import DraftTree
from hf_dart.trees.vocabulary import token_ids


class FixedRound:
    """A round of one shape: `propose`, `accept`, `commit`.

    Args:
        head: what drafts.
        verifier: of the target, over `cache`.
        cache, draft, state: what the round works on; `draft` is the head's.
        processors: that the target's scores go through.
        backend: that compiles `propose`, `accept` and `move_on`, each apart. Between the last two the
            entries of all layers move at once, in one storage that the others see as a tensor per layer. None runs
            them as they are.
        text: of the rows, where trees follow it.
        ngram: the table that drafts ask.

    Attributes:
        whole: was no commit broken off since this was set?
    """

    def __init__(
        self,
        shape: Shape,
        head: DartHead,
        verifier: PackedVerifier,
        cache: FixedCache,
        draft: FixedDraftCache,
        state: State,
        processors: FixedProcessors,
        backend: Backend | None = None,
        text: BatchLookup | None = None,
        ngram: NgramTable | None = None,
    ) -> None:
        self.shape, self.head, self.verifier, self.whole = shape, head, verifier, True
        self.cache, self.draft, self.state = cache, draft, state
        self.processors, self._rank = processors, Ranker(processors.processors, shape.tree.top_k)
        self._formula, self.text = DraftScores(shape.tree, ngram), text
        self._propose, self._accept = compiled(self.propose, backend), compiled(self.accept, backend)
        self._move_on = compiled(self.move_on, backend)

    def __call__(self) -> None:
        """One round; nothing is returned and nothing read back."""
        # Also in inference mode: what runs is what was compiled.
        with torch.inference_mode(False), torch.no_grad(), self.verifier.packed():
            propose, accept, commit = self.parts()
            commit(*accept(propose()))

    def run_uncompiled(self) -> None:
        """One round of which nothing is compiled."""
        with torch.inference_mode(False), torch.no_grad(), self.verifier.packed():
            self.commit(*self.accept(self.propose()))

    def parts(self) -> tuple[Callable[[], DraftTree], Callable[..., tuple[Tensor, ...]], Callable[..., None]]:
        """`propose`, `accept` and `commit`, compiled as they are in a round."""
        return self._propose, self._accept, partial(self.commit, move_on=self._move_on)

    def propose(self) -> DraftTree:
        """The trees [B, N]: what the head drafts after the roots, none deeper than its row may still emit.

        Changes nothing that `propose` would not do again: what the head takes in counts as soon as the round is kept.
        """
        state, shape = self.state, self.shape
        if not shape.drafts:
            return DraftTree.chain(state.roots[:, None])
        draft = self.draft.ahead()
        proposal = self.head.propose(draft, state.features, state.next_tokens, state.counts, shape.depth)
        proposal = proposal.within(shape.vocab_size)
        tokens, scores = self._candidates(proposal)
        none = tokens.new_zeros(shape.batch, 0)
        copied, chances = none, none.float()
        if self.text is not None and shape.tree.lookup:
            copied, chances = self.text.suggest()
            copied, chances = up_to_end(copied, chances, self._ending(copied))
            tokens, scores = with_copies(tokens, scores, copied)
        table = None
        if shape.tree.selector:
            table = self.head.transitions(proposal, state.roots, tokens, scores)
        candidates = Candidates(
            state.roots[:, None] if self.text is None else self.text.last(max(self._formula.context, 1)),
            tokens,
            (scores[:, :, None] if table is None else table).float(),
            self._formula,
            copied,
            chances,
            # A path of k drafts emits k + 1 tokens.
            (self._left() - 1).minimum(self.verifier.room(self.cache.lengths)).masked_fill(state.ended, 0),
            self._ending(tokens),
        )
        tree = grow_in_tensors(candidates, nodes=shape.tree.nodes or 1, beam=shape.tree.beam)
        tree = tree.padded(shape.bucket)
        return tree if shape.budget is None else shared(tree, self._left() > 0, shape.budget)

    def _ending(self, tokens: Tensor) -> Tensor:
        """Which tokens [B, ...] end a row; -1 is none, and what is no token of the target's ends nothing."""
        ends = self.state.ends
        return ends[tokens.clamp(min=0, max=len(ends) - 1)] & (tokens >= 0) & (tokens < len(ends))

    def _left(self) -> Tensor:
        """[B] tokens that each row may emit now; 0 where it has ended, or waits for slower rows and their noise."""
        state = self.state
        left = state.limits - state.emitted
        if self.shape.sampled:
            left = left.minimum(state.ready - state.emitted)
        return left.masked_fill(state.ended, 0)

    def _candidates(self, proposal: Proposal) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [B, d, K], best first."""
        state, shape = self.state, self.shape
        vocabulary = proposal.vocabulary
        if shape.sampled or self._rank.needs_history:
            gumbel = seen = None
            if shape.tree.shared_noise:
                steps = torch.arange(shape.depth, device=state.emitted.device)
                gumbel = -self._noise(state.emitted[:, None] + steps).log()
            if self._rank.needs_history:
                seen = state.seen if vocabulary is None else state.seen[:, vocabulary]
            return self._rank(proposal.logits, gumbel, seen, vocabulary)
        logits = proposal.logits.float()
        best, columns = largest(logits, min(shape.tree.top_k, logits.shape[-1]))
        return token_ids(columns, vocabulary), best - logits.logsumexp(-1, keepdim=True)

    def accept(self, tree: DraftTree) -> tuple[Tensor, ...]:
        """The target's verdict.

        Returns:
            path [B, A] nodes from the root on, tokens [B, A] the target's own after each, counts [B] how many of
            them are emitted, ended [B] the rows that end with them or had before, features [B, A, F] of the path,
            and the running states after what is emitted.
        """
        state, shape = self.state, self.shape
        logits, features, places = self.verify(tree)
        path, tokens, reached = self.walk(tree, logits, places)
        steps = torch.arange(shape.path, device=path.device)
        # A text ends with its first end token; what the tree holds after it was accepted for nothing.
        is_end = state.ends[tokens] & (steps < reached[:, None])
        to_end = torch.where(is_end, steps + 1, shape.path + 1).amin(-1)
        counts = reached.minimum(to_end).minimum(self._left())
        ended = state.ended | (to_end <= counts) | (state.limits <= state.emitted + counts)
        states = [] if self.cache.states is None else self.cache.states.accepted(path, counts)
        return path, tokens, counts, ended, features[places.gather(1, path)], *states

    def walk(self, tree: DraftTree, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The path of each row that the target's own tokens take through the tree, as `follow` has it.

        Args:
            tree, logits, places: what was verified, and what `verify` returned.

        Returns:
            path [B, A], tokens [B, A], lengths [B]; a token is -1 where there is none to draw.
        """
        if not self.chooses_everywhere(len(logits)):
            return self.walk_by_token(tree, logits, places)
        if self.shape.sampled or self.processors.processors:
            choices = self._choices(tree, logits)
        else:
            # Stock compares logits as float32, which narrower ones are in the same order.
            choices = (logits.float() if logits.dtype == torch.float64 else logits).argmax(-1)
        path, tokens, lengths = follow(tree, choices[places])
        return path[:, : self.shape.path], tokens[:, : self.shape.path], lengths

    def chooses_everywhere(self, nodes: int) -> bool:
        """Is a token chosen after all R nodes at once, instead of node after node along the paths?

        That is no more than a few operations, on more scores. On a GPU it is the quicker way. On a CPU, measured with
        the packaged pair, it takes 0.4 to 1.4 times as long as `walk_by_token` for 16 nodes, and for 240 nodes 2.3 to
        5.8 times.
        """
        if not self.shape.sampled and not self.processors.processors:
            return True
        return nodes <= self.shape.path * self.shape.batch or self.state.roots.is_cuda

    def _choices(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """The target's token [R] after each of R nodes, from its logits [R, V]; -1 where there is none to draw."""
        state, size = self.state, tree.size
        nodes = self.cache.computed
        nodes = torch.arange(len(logits), device=logits.device) if nodes is None else nodes
        rows = nodes // size
        positions = state.emitted[rows] + tree.depths.flatten()[nodes]
        seen = state.seen[rows]
        if self._rank.needs_history:
            passed = torch.where(tree.ancestors.flatten(0, 1)[nodes], tree.tokens[rows], state.roots[rows, None])
            # What is no token of the target's, no path comes to.
            seen = seen.scatter(1, passed.clamp(min=0, max=seen.shape[1] - 1), True)
        scores = self.processors(logits.float(), seen, positions)
        if not self.shape.sampled:
            return scores.argmax(-1)
        return drawn(scores.softmax(-1) / state.noise[positions % self.shape.noise_rows, rows])

    def walk_by_token(self, tree: DraftTree, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Walk the trees in stock's shapes: node after node, and no others; returns what `walk` does."""
        state, shape = self.state, self.shape
        seen, going_on = state.seen, torch.ones_like(state.ended)
        node = lengths = torch.zeros_like(state.roots)
        path, tokens = [], []
        for step in range(shape.path):
            scores = self.processors(logits[places.gather(1, node[:, None])[:, 0]].float(), seen, state.emitted + step)
            if shape.sampled:
                noise = self._noise((state.emitted + step)[:, None])[:, 0]
                token = drawn(scores.softmax(-1) / noise)
            else:
                token = scores.argmax(-1)
            path.append(node)
            tokens.append(token)
            lengths = lengths + going_on
            if step + 1 < shape.path:
                if self._rank.needs_history:
                    seen = seen.scatter(1, token.clamp(min=0)[:, None], True)
                follows = (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
                going_on = going_on & follows.any(-1)
                node = torch.where(going_on, follows.long().argmax(-1), 0)
        return torch.stack(path, dim=1), torch.stack(tokens, dim=1), lengths

    def _noise(self, positions: Tensor) -> Tensor:
        """E [B, n, V] of output positions [B, n]."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return self.state.noise[positions % self.shape.noise_rows, rows]

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
        """The target's logits [R, V] and features [R, F] of R nodes, and where those of each node stand, [B, N].

        With a budget, nodes that are empty stand anywhere.
        """
        shape, device = self.shape, tree.tokens.device
        # The root of a row that has ended may lie beyond the end of the position table.
        roots = (self.cache.lengths - self.state.ended.long()).clamp(min=0)
        if self.cache.computed is None:
            logits, features = self.verifier.run(tree, roots)
            places = torch.arange(tree.tokens.numel(), device=device)
        else:
            nodes = self.cache.computed.copy_(computed(tree, self._left() > 0, len(self.cache.computed)))
            logits, features = self.verifier.run(tree, roots, nodes)
            places = torch.zeros(tree.tokens.numel(), dtype=torch.long, device=device)
            places = places.index_copy(0, nodes, torch.arange(len(nodes), device=device))
        return logits.flatten(0, 1), features.flatten(0, 1), places.view(shape.batch, -1)

    def commit(self, path: Tensor, *verdict: Tensor, move_on: Callable[..., None] | None = None) -> None:
        """Commit what `accept` returned, and go on by `move_on`, which may be compiled."""
        self.whole = False
        self.cache.commit(path)
        (move_on or self.move_on)(*verdict)
        self.whole = True

    def move_on(self, tokens: Tensor, counts: Tensor, ended: Tensor, features: Tensor, *states: Tensor) -> None:
        """Count what was committed, and put the tokens [B, A] where the host will find them.

        A row that emits nothing stands still: the head will draft the same from the same.
        """
        state, moves = self.state, counts > 0
        self.cache.lengths.add_(counts)
        if self.cache.states is not None:
            self.cache.states.take(states)
        if self.shape.drafts:
            self.draft.lengths.add_(state.counts.masked_fill(~moves, 0))
        known = tokens.clamp(min=0)  # the host says that there is none, and the round after must not trip over it
        last = known.gather(1, (counts - 1).clamp(min=0)[:, None])
        state.roots.copy_(torch.where(moves, last[:, 0], state.roots))
        state.emitted.add_(counts)
        state.ended.copy_(ended)
        state.features.copy_(torch.where(moves[:, None, None], features, state.features))
        # After a row's last token the head is shown that one again: anything that is a token will do.
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        following = torch.where(steps < counts[:, None], known, state.roots[:, None])
        state.next_tokens.copy_(torch.where(moves[:, None], following, state.next_tokens))
        state.counts.copy_(torch.where(moves, counts, state.counts))
        if self._rank.needs_history:
            state.seen.scatter_(1, state.next_tokens, True)
        if self.text is not None:
            self.text.append(known, counts)
        state.ring.index_copy_(0, (state.turn % RING)[None], torch.cat([tokens, counts[:, None]], dim=1)[None])
        state.turn.add_(1)


def follow(tree: DraftTree, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The path of each row that the target's own tokens take through the tree, on fixed shapes.

    A node is reached if it and all its ancestors carry the token that the target chose at their parents. At
    most one child of a node does, so the reached nodes form one path, and its deepest node names it.

    Args:
        tree: N nodes per row.
        targets: [B, N] the target's token after every node.

    Returns:
        path [B, N] (node indices from the root on, then zeros), tokens [B, N] (the target's tokens along it),
        lengths [B] (nodes on the path, the root included).
    """
    if tree.size == 1:
        return torch.zeros_like(targets), targets, torch.ones_like(targets[:, 0])
    chosen = targets.gather(1, tree.parents.clamp(min=0))
    matches = (tree.tokens == chosen) & (tree.parents >= 0)
    matches[:, 0] = True
    reached = ~(tree.ancestors & ~matches[:, None]).any(-1)
    end = tree.depths.masked_fill(~reached, -1).argmax(-1)
    on_path = tree.ancestors.gather(1, end[:, None, None].expand(-1, 1, tree.size))[:, 0]
    path = tree.depths.masked_fill(~on_path, tree.size).argsort(dim=-1, stable=True)
    lengths = on_path.sum(-1)
    path = path.masked_fill(torch.arange(tree.size, device=path.device) >= lengths[:, None], 0)
    return path, targets.gather(1, path), lengths
