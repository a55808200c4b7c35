"""Arguments that fit no batch: stock's tokens, stock's own error, or one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.outcome import call
from support.tiny import prompts, tiny_head, tiny_target
from torch import Tensor

IDS, MASK = prompts([7, 5]).values()
EMBEDDINGS = torch.nn.functional.one_hot(IDS % 32, 32).double()
POSITIONS = torch.arange(7)[None]


def processor(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {"input_ids": IDS, "logits_processor": [lambda ids, scores: change(scores)]}


# By what is wrong; True where stock raises.
MISFITS: dict[str, tuple[dict[str, Any], bool]] = {
    "ids of one dimension": ({"input_ids": IDS[0]}, True),
    "ids of three dimensions": ({"input_ids": IDS[None]}, True),
    "ids without rows": ({"input_ids": IDS[:0]}, True),
    "ids without tokens": ({"input_ids": IDS[:, :0], "attention_mask": MASK[:, :0]}, True),
    "ids without tokens, in chunks": ({"input_ids": IDS[:, :0], "prefill_chunk_size": 2}, True),
    "ids as floats": ({"input_ids": IDS.float()}, True),
    "ids as truths": ({"input_ids": IDS > 5}, True),
    "ids beyond the vocabulary": ({"input_ids": IDS + 60}, True),
    "ids twice": ({"input_ids": IDS, "inputs": IDS}, True),
    "embeddings without tokens": ({"inputs_embeds": EMBEDDINGS[:, :0]}, True),
    "embeddings of two dimensions": ({"inputs_embeds": EMBEDDINGS[0]}, True),
    "embeddings of another width": ({"inputs_embeds": EMBEDDINGS[..., :5]}, True),
    "embeddings of more rows than ids": ({"inputs_embeds": EMBEDDINGS, "input_ids": IDS[:1]}, True),
    "a mask of fewer tokens": ({"input_ids": IDS, "attention_mask": MASK[:, 1:]}, True),
    "a mask of more tokens": ({"input_ids": IDS, "attention_mask": torch.cat([MASK, MASK], 1)}, False),
    "a mask of more ones": ({"input_ids": IDS, "attention_mask": torch.ones(2, 9).long()}, False),
    "a mask of more rows": ({"input_ids": IDS, "attention_mask": torch.cat([MASK, MASK])}, True),
    "a mask of no tokens": ({"input_ids": IDS, "attention_mask": MASK[:, :0]}, True),
    "a mask of one row": ({"input_ids": IDS, "attention_mask": MASK[1:]}, True),
    "a mask as a list": ({"input_ids": IDS, "attention_mask": MASK.tolist()}, True),
    "positions of more rows": ({"input_ids": IDS, "position_ids": POSITIONS.expand(3, 7)}, True),
    "no positions": ({"input_ids": IDS, "position_ids": POSITIONS[:, :0]}, True),
    "logits of places": ({"input_ids": IDS, "logits_to_keep": torch.tensor([6])}, True),
    "scores of fewer rows": (processor(lambda scores: scores[:1]), True),
    "scores of one dimension": (processor(lambda scores: scores[0]), True),
    "no scores": (processor(lambda scores: None), True),
    "no chunks": ({"input_ids": IDS, "prefill_chunk_size": 0}, True),
    "no sequences": ({"input_ids": IDS, "num_return_sequences": 0}, False),
}


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    target = tiny_target(request.param)
    return target, tiny_head(target)


@pytest.mark.filterwarnings("ignore:Passing `")
@pytest.mark.parametrize("name", MISFITS)
def test_what_fits_no_batch(pair: tuple[Any, Any], name: str) -> None:
    given, raises = MISFITS[name]
    given = {**given, "do_sample": False, "max_new_tokens": 8}
    target, head = pair
    stock, ours = call(target, 0, **given), call(target, 0, **given, assistant=head)
    assert (stock.error is not None) is raises, stock.output
    if ours.error is None:
        assert torch.equal(ours.sequences, stock.sequences)
        return
    message = str(ours.output)
    sentence = ours.error in (TypeError, ValueError) and "\n" not in message and message.endswith(".")
    assert sentence or (ours.error, message) == (stock.error, str(stock.output)), message
