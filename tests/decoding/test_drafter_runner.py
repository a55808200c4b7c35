"""The drafter's side of a call: positions that wait for a draft are read as they came."""

from __future__ import annotations

import torch

from hf_dart.decoding.drafter_runner import joined
from hf_dart.drafters.proposal import Verified


def test_positions_that_waited_are_taken_in_as_they_came() -> None:
    """Those of several rounds, of which each row has some, none or all; features and tokens stay together."""
    rounds = [[2, 0, 3], [1, 1, 1], [0, 2, 1]]
    came: list[list[int]] = [[], [], []]
    chunks, number = [], 0
    for counts in rounds:
        tokens = torch.full((3, 3), -1)
        for row, count in enumerate(counts):
            for place in range(count):
                number += 1
                tokens[row, place] = number
                came[row].append(number)
        chunks.append(Verified(tokens[..., None] * torch.tensor([1.0, 0.5]), tokens, torch.tensor(counts)))
    features, tokens, counts = joined(chunks)
    assert counts.tolist() == [len(row) for row in came]
    for row, wanted in enumerate(came):
        assert tokens[row, : len(wanted)].tolist() == wanted
        assert features[row, : len(wanted), 1].tolist() == [0.5 * token for token in wanted]
