"""The options that `examples/experiments/head_options.py` compares, each against a plain reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from support.scripts import experiment
from support.tiny_training import tiny_head, tiny_target
from torch import Tensor, nn

from hf_dart import DartHead
from hf_dart.training.objective.blocks import build_blocks


@pytest.fixture(scope="module")
def options() -> ModuleType:
    return experiment("head_options")


def loud(part: nn.Module, seed: int = 5) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for weight in part.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    return part


def trained(head: DartHead, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """Hidden states [B, K, d, H] as the training pass has them."""
    blocks = build_blocks(torch.zeros_like(ids), anchors, head.draft_length)
    states = head(features=features[:, :-1], next_embeddings=head.embed(ids[:, 1:]), **blocks.inputs(layers=1))
    return states.unflatten(1, (-1, head.draft_length))


@pytest.mark.parametrize("name", ["Convolutions", "Adjacent"])
def test_an_option_begins_as_nothing_and_drafts_as_it_was_trained(name: str, options: ModuleType) -> None:
    target = tiny_target().double()
    head, plain = (tiny_head(target).double() for _ in range(2))
    width, features_width = head.config.hidden_size, head.config.features_width
    option = getattr(options, name)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(head.config.vocab_size, (1, 12), generator=generator)
    features = torch.randn(1, 12, features_width, dtype=torch.float64, generator=generator)
    anchors = torch.tensor([[2, 6]])
    options.with_option(head, option(width).double())
    torch.testing.assert_close(trained(head, features, ids, anchors), trained(plain, features, ids, anchors))
    loud(head.layers[-1].option)
    drafts = trained(head, features, ids, anchors)
    assert not torch.allclose(drafts, trained(plain, features, ids, anchors))
    for block, anchor in enumerate(anchors[0].tolist()):
        count = torch.tensor([anchor + 1])
        proposal = head.propose(head.begin(1, 20), features[:, : anchor + 1], ids[:, 1 : anchor + 2], count)
        torch.testing.assert_close(proposal.hidden[0], drafts[0, block])


@pytest.mark.parametrize("corrects", [False, True])
def test_in_a_tree_a_selector_adds_what_it_learnt_to_add(corrects: bool, options: ModuleType) -> None:
    """Along a path on which every token is its depth's one candidate, a tree's table is the sum that is trained."""
    target = tiny_target().double()
    head = tiny_head(target).add_selector(4).double()
    embeddings = target.get_input_embeddings().weight.detach()
    selector = options.PathSelector(head.selector, embeddings, corrects, 16).double()
    loud(selector)
    generator, depth = torch.Generator().manual_seed(3), head.draft_length
    hidden = torch.randn(2, depth, head.config.hidden_size, dtype=torch.float64, generator=generator)
    path = torch.randint(len(embeddings), (2, depth + 1), generator=generator)
    front, candidates = path[:, :-1], path[:, 1:, None]
    logits, scores = torch.randn(2, 2, depth, 1, dtype=torch.float64, generator=generator)
    learnt = selector.added(hidden, logits, scores, front, candidates)
    torch.testing.assert_close(selector.table(hidden, logits, scores, front[..., None], candidates)[..., 0, :], learnt)
