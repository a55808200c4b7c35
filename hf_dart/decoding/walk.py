"""Walk from verified logits to tokens: the target's own choice at every node that its text passes through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_dart.decoding.noise import NoiseStream
from hf_dart.decoding.processors import all_known, of_rows, scores_alone
from hf_dart.decoding.rows import Rows, Streaming
from hf_dart.models.devices import users_default
from hf_dart.trees.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """Nodes that a walk accepted of each row's tree.

    Attributes:
        path: [B, A] nodes from the root on, on the CPU; entries after a row's count mean nothing.
        counts: nodes of the path to commit, per row: the root and the accepted drafts. As many tokens were
            emitted, the last of them (the bonus token) not being in the tree. 0 for rows that stood still.
    """

    path: Tensor
    counts: list[int]


class Walker:
    """Walker through verified trees by the processors, noise and stopping rules of one `generate` call.

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
        self._everywhere = chooses_everywhere(processors, rows.device)
        self._roots_at_once = len(rows) > 1 and scores_alone(processors)
        self.scores: tuple[Tensor, ...] | None = () if keep_scores else None
        self.logits: tuple[Tensor, ...] | None = () if keep_logits else None

    def __call__(self, tree: DraftTree, logits: Tensor, limits: list[int]) -> Accepted:
        """Walk every row from its root and emit the tokens passed.

        Args:
            tree: the verified tree.
            logits: [B, N, V] of the target, any float type.
            limits: most tokens that each row may emit; 0 makes a row stand still.
        """
        in_step = self._rows.in_step
        at_once = self._everywhere or (tree.size == 1 and self._roots_at_once)
        chosen = self._choose_everywhere(tree, logits).tolist() if at_once and not in_step else None
        children = _children(tree) if tree.size > 1 else [{}] * len(limits)
        paths: list[list[int]] = [[] for _ in limits]
        nodes = {row: 0 for row, limit in enumerate(limits) if limit}  # reached by each row
        while nodes and not (in_step and len(nodes) < len(paths)):
            emitted = self._step(nodes, logits) if in_step else self._emit(nodes, logits, chosen)
            for row, node in nodes.items():
                paths[row].append(node)
            nodes = {
                row: children[row][nodes[row], token]
                for row, token in emitted.items()
                if len(paths[row]) < limits[row] and (nodes[row], token) in children[row]
            }
        longest = max(1, *map(len, paths))
        padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        return Accepted(padded, [len(path) for path in paths])

    def _emit(self, nodes: dict[int, int], logits: Tensor, chosen: list[list[int]] | None) -> dict[int, int]:
        """Return the target's token at one node of some rows, emitted; of rows that go on.

        Raises:
            RuntimeError: there is no token, as stock's `torch.multinomial` raises it.
        """
        going_on = {}
        for row, node in nodes.items():
            token = chosen[row][node] if chosen else self._choose(row, logits[row : row + 1, node])
            check_token(token)
            if self._rows.append(row, token):
                going_on[row] = token
            self._streaming.send()
        return going_on

    def _step(self, nodes: dict[int, int], logits: Tensor) -> dict[int, int]:
        """Stock's own step: the target's tokens at one node of every row, emitted; nothing once all rows have ended."""
        chosen = self._choose_as_stock(logits[torch.arange(len(nodes)), torch.tensor([*nodes.values()])])
        tokens = self._rows.append_all(chosen, self.scores)
        self._streaming.send()
        return {} if self._rows.finished else dict(enumerate(tokens))

    def _choose_everywhere(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """Return the target's token after every node, [B, N]."""
        scores = logits.to(dtype=torch.float32, device=self._rows.device).flatten(0, 1)
        no_text = tree.tokens.new_empty(len(scores), 0)  # which none of the processors reads
        scores = self._processors(no_text, scores).view_as(logits)
        if self._noise is None:
            return scores.argmax(-1)
        window = self._noise.exponentials(self._rows.emitted, tree.max_depth + 1).to(scores.device)
        at_node = window[torch.arange(len(window), device=window.device)[:, None], tree.depths]
        return drawn(scores.softmax(-1).div_(at_node))

    def _choose(self, row: int, logits: Tensor) -> int:
        """Return the target's next token of a row from its logits [1, V]."""
        logits = logits.to(dtype=torch.float32, device=self._rows.device)
        if self._of_rows is not None:
            scores = self._of_rows[row](self._rows.ids(row), logits)
        else:
            # Some processors take row b of their input for row b of the batch: give them this row's text in every row.
            full = logits.new_zeros(len(self._rows), logits.shape[-1])
            full[row] = logits[0]
            ids = self._rows.ids(row).expand(len(self._rows), -1)  # shorter rows have no text of this length
            scores = self._processors(ids, full)[row : row + 1]
        if self._noise is None:
            return int(scores.argmax(-1))
        noise = self._noise.exponential(row, self._rows.emitted[row])
        return int(drawn(scores.softmax(-1) / noise))

    def _choose_as_stock(self, logits: Tensor) -> Tensor:
        """Return the target's next tokens [B] from logits [B, V], call by call as in stock's `_sample`.

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


def chooses_everywhere(processors: LogitsProcessorList, device: torch.device) -> bool:
    """Return True if a token is chosen at every node in one call, rather than only along the accepted path.

    On an accelerator that saves reading back every token before the next one is chosen. On a CPU nothing is saved: for
    the packaged pair it took 2.5 to 7.7 times as long at batch 1 and 1.2 to 6.8 times at batch 4 (medians over rounds,
    greedy and sampled, trees of 1 to 64 nodes). `tests/decoding/test_walk.py` holds both to stock's tokens.
    """
    return device.type != "cpu" and scores_alone(processors)


def check_token(token: int) -> None:
    """Raise a RuntimeError where `drawn` found no token."""
    if token < 0:
        raise RuntimeError("The target's logits give no probabilities (inf or nan), so no token can be drawn.")


def drawn(races: Tensor) -> Tensor:
    """Return the winner of each p / E [..., V]; -1 where p is not a distribution."""
    best, tokens = races.max(-1)
    return tokens.masked_fill(best.isnan(), -1)


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """Return a map per row from (node, token) to the child node that holds the token."""
    return [
        {
            (parent, token): child
            for child, (parent, token) in enumerate(zip(parents, tokens, strict=True))
            if parent >= 0
        }
        for parents, tokens in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ]
