"""From verified logits to tokens: the target's own choice at every node that its text passes through."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_dart.decoding.noise import NoiseStream
from hf_dart.decoding.processors import all_known, of_rows, scores_alone
from hf_dart.decoding.rows import Rows, Streaming
from hf_dart.target.devices import users_default
from hf_dart.trees.tree import DraftTree

_FEW = 2  # nodes per row


@dataclass(frozen=True)
class Accepted:
    """What a walk took from each row's tree.

    Attributes:
        path: [B, A] nodes from the root on, on the CPU; entries after a row's count mean nothing.
        counts: nodes of the path to commit, per row: the root and the accepted drafts. As many tokens were
            emitted, the last of them (the bonus token) not being in the tree. 0 for rows that stood still.
    """

    path: Tensor
    counts: list[int]


class Walker:
    """Chooses tokens with the processors, noise and stopping rules of one `generate` call.

    Args:
        processors: as `generate` prepared them.
        rows: grows with every token.
        streaming: is told of every token.
        noise: the noise stream when sampling; None for greedy.
        keep_scores, keep_logits: collect what `output_scores` / `output_logits` ask for.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        rows: Rows,
        streaming: Streaming,
        noise: NoiseStream | None,
        *,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self._processors = processors
        self._rows = rows
        self._streaming = streaming
        self._noise = noise
        self._known = all_known(processors)
        self._of_rows = of_rows(processors, len(rows))
        # The most nodes on which to run the processors all at once. Sampling on a CPU, softmax over all nodes costs
        # more than a few calls for those on the path.
        self._everywhere = 0
        if scores_alone(processors, rows.device):
            self._everywhere = _FEW if noise is not None and rows.device.type == "cpu" else sys.maxsize
        self.scores: tuple[Tensor, ...] | None = () if keep_scores else None
        self.logits: tuple[Tensor, ...] | None = () if keep_logits else None

    def __call__(self, tree: DraftTree, logits: Tensor, limits: list[int]) -> Accepted:
        """Walk every row from its root and emit the tokens passed.

        Args:
            tree: the verified tree.
            logits: [B, N, V] of the target, any float type.
            limits: most tokens that each row may emit; 0 makes a row stand still.
        """
        if self._rows.in_step:
            return self._walk_in_step(tree, logits, limits)
        if tree.size <= self._everywhere:
            return self._emit(*follow(tree, self._choose_everywhere(tree, logits)), limits)
        return self._walk_by_token(tree, logits, limits)

    def _choose_everywhere(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """The target's token after every node, [B, N]."""
        scores = logits.to(dtype=torch.float32, device=self._rows.device).flatten(0, 1)
        for processor in self._processors:
            scores = processor(None, scores)  # type: ignore[arg-type]
        scores = scores.view_as(logits)
        if self._noise is None:
            return scores.argmax(-1)
        emitted = self._rows.emitted
        if tree.size == 1 and min(emitted) == max(emitted):
            at_node = self._noise.block(emitted[0])[:, None]
        else:
            window = self._noise.exponentials(emitted, tree.max_depth + 1).to(scores.device)
            at_node = window[torch.arange(len(window), device=window.device)[:, None], tree.depths]
        return drawn(scores.softmax(-1).div_(at_node))

    def _emit(self, path: Tensor, tokens: Tensor, lengths: Tensor, limits: list[int]) -> Accepted:
        counts = []
        for row, (row_tokens, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
            start = self._rows.emitted[row]
            for token in row_tokens[: min(length, limits[row])]:
                if not self._append(row, token):
                    break
            counts.append(self._rows.emitted[row] - start)
        return Accepted(path.cpu(), counts)

    def _walk_by_token(self, tree: DraftTree, logits: Tensor, limits: list[int]) -> Accepted:
        """One processor call per emitted token, row by row."""
        paths: list[list[int]] = []
        for row, (limit, children) in enumerate(zip(limits, _children(tree), strict=True)):
            node = 0
            path: list[int] = []
            while len(path) < limit:
                path.append(node)
                token = self._choose(row, logits[row : row + 1, node])
                if not self._append(row, token):
                    break
                if (node, token) not in children:
                    break
                node = children[node, token]
            paths.append(path)
        longest = max(1, max(map(len, paths)))
        padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        return Accepted(padded, [len(path) for path in paths])

    def _append(self, row: int, token: int) -> bool:
        """Add a token to a row; False if the row ends with it.

        Raises:
            RuntimeError: there is no token, as stock's `torch.multinomial` raises it.
        """
        check_token(token)
        goes_on = self._rows.append(row, token)
        self._streaming.send()
        return goes_on

    def _choose(self, row: int, logits: Tensor) -> int:
        """The target's next token of a row from its logits [1, V]."""
        logits = logits.to(dtype=torch.float32, device=self._rows.device)
        if self._of_rows is not None:
            scores = self._of_rows[row](self._rows.ids(row), logits)
        else:
            # Some processors take row b of what they see for row b of the batch: show them this row's text in all.
            full = logits.new_zeros(len(self._rows), logits.shape[-1])
            full[row] = logits[0]
            ids = self._rows.ids(row).expand(len(self._rows), -1)  # rows that are shorter have none to show
            scores = self._processors(ids, full)[row : row + 1]
        if self._noise is None:
            return int(scores.argmax(-1))
        noise = self._noise.exponential(row, self._rows.emitted[row])
        return int(drawn(scores.softmax(-1) / noise))

    def _walk_in_step(self, tree: DraftTree, logits: Tensor, limits: list[int]) -> Accepted:
        """Stock's own steps over the whole batch, as long as every row's tree holds what is chosen."""
        rows, children = self._rows, _children(tree)
        nodes = [0] * len(rows)
        path: list[list[int]] = []
        while len(path) < min(limits):
            path.append(nodes)
            chosen = self._step(logits[torch.arange(len(rows)), torch.tensor(nodes)])
            tokens = rows.append_all(chosen, self.scores)
            self._streaming.send()
            onward = [below.get(step) for below, step in zip(children, zip(nodes, tokens, strict=True), strict=True)]
            if rows.finished or None in onward:
                break
            nodes = [node for node in onward if node is not None]
        return Accepted(torch.tensor(path).T, [len(path)] * len(rows))

    def _step(self, logits: Tensor) -> Tensor:
        """The target's next tokens [B] from logits [B, V], call by call as in stock's `_sample`.

        Processors may draw from the global generator, so the tokens are drawn from it too; the noise stream is
        then a forecast.
        """
        logits = logits.to(copy=True, dtype=torch.float32, device=self._rows.device)
        ids = self._rows.ids_in_step()
        before = None if self._known else ids.clone()
        with users_default():
            scores = self._processors(ids, logits)
        if before is not None and not torch.equal(ids, before):
            raise ValueError(
                "A logits processor writes into input_ids, the text that drafts were verified after; let it work on a "
                "copy, or leave assistant= out."
            )
        if isinstance(scores, Tensor) and len(scores) != len(logits):
            raise ValueError(
                f"The logits processors leave scores of {len(scores)} rows for a batch of {len(logits)}; they have to "
                "return as many rows as they are given."
            )
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self._noise is None:
            return torch.argmax(scores, dim=-1)
        return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)


def check_token(token: int) -> None:
    """Raise a RuntimeError where `drawn` found no token."""
    if token < 0:
        raise RuntimeError("The target's logits give no probabilities (inf or nan), so no token can be drawn.")


def drawn(races: Tensor) -> Tensor:
    """The winner of each p / E [..., V]; -1 where p is not a distribution."""
    best, tokens = races.max(-1)
    return tokens.masked_fill(best.isnan(), -1)


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """Of each row, the node that follows on a (node, token)."""
    return [
        {
            (parent, token): child
            for child, (parent, token) in enumerate(zip(parents, tokens, strict=True))
            if parent >= 0
        }
        for parents, tokens in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ]


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


