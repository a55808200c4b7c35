"""Trees through running states: every node as stock's own single steps, whatever states they start from."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch
from support.families import HYBRIDS, ROUNDS_INSIDE, VOCABULARY, needs_running_states, sampled
from support.tiny import tiny_target
from support.users import OwnError, fail
from torch import Tensor, nn
from transformers import DynamicCache

from hf_dart.cache.states import states_of
from hf_dart.cache.target_cache import TargetCache
from hf_dart.models.running_states.mixers import mixers_of
from hf_dart.models.running_states.tree_forward import Mixer
from hf_dart.models.stock_steps import StockSteps
from hf_dart.models.verify import Verifier, layer_windows, mask_kinds
from hf_dart.trees.tree import DraftTree

pytestmark = needs_running_states
SAMPLE = ["lfm3", "zaya", "qwen3_5", "falcon_h1", "nemotron_h", "jamba"]
PADS, PROMPT, NODES, DEPTH = [0, 3, 6], 13, 16, 5


class Stand:
    """A target after a padded prompt, with loud random states."""

    @torch.no_grad()
    def __init__(self, family: str, pads: list[int] = PADS) -> None:
        self.model, self.pads = tiny_target(family), pads
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCABULARY, (len(pads), PROMPT), generator=generator)
        self.cache = DynamicCache(config=self.model.config)
        self.steps = StockSteps(self.model, self.ids, pads, self.cache)
        self.outputs = self.steps.prefill()
        for slot, state in states_of(self.cache).items():
            if slot.kind == "recurrent_states" and state.is_floating_point():
                state.copy_(torch.randn(state.shape, generator=generator))

    def stocks(self, tokens: Tensor) -> Tensor:
        """Stock's logits [B, n, V] of the next tokens [B, n], one by one; the cache stays as it is."""
        return StockSteps(self.model, self.ids, self.pads, copy.deepcopy(self.cache)).resumed(self.outputs)(tokens)

    def verifier(self) -> Verifier:
        """Ours, over a copy of the cache."""
        prefilled = copy.deepcopy(self.cache)
        windows = layer_windows(self.model, prefilled)
        trees = TargetCache(prefilled, self.pads, PROMPT + 3 * NODES, keep=True, windows=windows)
        return Verifier(self.model, trees, mask_kinds(self.model, prefilled), [])


def drawn_tree(seed: int, rows: int) -> DraftTree:
    """Per row a path of full depth, and random branches off it, some of them empty."""
    random, parents = Random(seed), []
    for _ in range(rows):
        above, depths = [*range(-1, DEPTH)], [*range(DEPTH + 1)]
        while len(above) < NODES:
            above.append(random.choice([node for node, depth in enumerate(depths) if depth < DEPTH]))
            depths.append(depths[above[-1]] + 1)
        parents.append(above)
    parents[-1][-2:] = [-1, -1]
    tokens = torch.randint(3, VOCABULARY, (rows, NODES), generator=torch.Generator().manual_seed(seed))
    made = DraftTree.from_parents(tokens, torch.tensor(parents))
    return DraftTree(made.tokens, made.parents, made.depths * (made.parents >= 0), made.ancestors, DEPTH)


def paths(tree: DraftTree, row: int) -> list[list[int]]:
    """The nodes from the root to each node that is not empty, of one row."""
    real = [0, *(tree.parents[row] >= 0).nonzero().flatten().tolist()]
    return [tree.ancestors[row, node].nonzero().flatten().tolist() for node in real]


def filled(rows: list[Tensor]) -> Tensor:
    """[B, n] of rows of unequal lengths, the shorter ones filled up by token 3."""
    width = max(map(len, rows))
    return torch.stack([nn.functional.pad(row, (0, width - len(row)), value=3) for row in rows])


def close(family: str, got: Tensor, want: Tensor) -> None:
    """Equal but for the rounding of sums."""
    rounding = 1e-5 if family in ROUNDS_INSIDE else 1e-11
    torch.testing.assert_close(got, want, rtol=rounding, atol=rounding * float(want.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("family", sampled(HYBRIDS, *SAMPLE))
def test_every_node_is_stocks_single_step(family: str) -> None:
    stand = Stand(family)
    tree = drawn_tree(0, len(PADS))
    logits, _ = stand.verifier()(tree)
    all_paths = [paths(tree, row) for row in range(len(PADS))]
    for number in range(max(map(len, all_paths))):
        taken = [its[min(number, len(its) - 1)] for its in all_paths]
        wanted = stand.stocks(filled([tree.tokens[row, path] for row, path in enumerate(taken)]))
        for row, path in enumerate(taken):
            close(family, logits[row, path], wanted[row, : len(path)])


@torch.no_grad()
@pytest.mark.parametrize("family", sampled(HYBRIDS, *SAMPLE))
def test_a_commit_takes_the_state_of_the_accepted_node(family: str) -> None:
    """After 0, 1, ..., d + 1 accepted nodes of each row, in ragged batches; two rounds, then one token more."""
    stand = Stand(family)
    verify = {first: stand.verifier() for first in range(DEPTH + 2)}
    for first, one in verify.items():
        texts: list[list[Tensor]] = [[] for _ in PADS]
        for round_, shift in enumerate((0, 2)):
            tree = drawn_tree(first + 7 * round_, len(PADS))
            one(tree)
            counts = [(first + 2 * row + shift) % (DEPTH + 2) for row in range(len(PADS))]
            chosen = []
            for row, count in enumerate(counts):
                able = [path for path in paths(tree, row) if len(path) >= count]
                chosen.append(torch.tensor(able[-1][:count], dtype=torch.long))
                texts[row].append(tree.tokens[row, chosen[-1]])
            one.cache.commit(filled(chosen) if max(counts) else torch.zeros(len(PADS), 0, dtype=torch.long), counts)
        committed = [torch.cat([*its, torch.tensor([5])]) for its in texts]
        logits, _ = one(DraftTree.chain(torch.full((len(PADS), 1), 5)))
        wanted = stand.stocks(filled(committed))
        for row, text in enumerate(committed):
            close(family, logits[row, 0], wanted[row, len(text) - 1])


@torch.no_grad()
def test_a_row_that_went_too_far_goes_back_to_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand("qwen3_5")
    verify = stand.verifier()
    tokens = torch.tensor([[7, 8, 9]] * len(PADS))
    verify(DraftTree.chain(tokens))
    path, prompts = torch.tensor([[0, 1, 2]] * len(PADS)), verify.cache.prompt_lengths
    verify.cache.commit(path, [1, 3, 2])
    assert verify.cache.write_back(1) is None
    assert verify.cache.stock.get_seq_length() == PROMPT, "rows of other lengths were written"
    verify.cache.truncate(prompts + 2)
    assert (verify.cache.lengths - prompts).tolist() == [1, 0, 2]
    rest = DraftTree.chain(torch.tensor([[8, 9], [7, 8], [9, 9]]))
    logits, _ = verify(rest)
    wanted = stand.stocks(tokens)
    close("qwen3_5", logits[0], wanted[0, 1:])
    close("qwen3_5", logits[1], wanted[1, :2])
    close("qwen3_5", logits[2, 0], wanted[2, 2])
    # Broken off on the way back, the cache is not read.
    monkeypatch.setattr(verify.cache.states, "back_to_prompt", lambda *_: fail())
    with pytest.raises(OwnError):
        verify.cache.truncate(prompts + 1)
    with pytest.raises(RuntimeError, match="cannot be read"):
        verify.cache.write_back(1)


@torch.no_grad()
def test_forwards_are_back_after_any_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that an instance has of its own is used, and stays."""
    stand = Stand("qwen3_5")
    mixers, tree = mixers_of(stand.model), drawn_tree(0, len(PADS))
    assert len(mixers) == 3
    with monkeypatch.context() as patch:
        patch.setattr(mixers[1].module.norm, "forward", lambda *_: fail())
        with pytest.raises(OwnError):
            stand.verifier()(tree)
    assert not any("forward" in vars(mixer.module) for mixer in mixers)
    module = mixers[0].module
    plain, calls = module.forward, []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return plain(*args, **kwargs)

    module.forward = own
    stand.verifier()(tree)
    assert vars(module)["forward"] is own
    assert len(calls) >= DEPTH + 1


@torch.no_grad()
def test_other_threads_do_not_notice() -> None:
    """Stock's steps in one thread while trees are verified in two others."""
    stand = Stand("qwen3_5")
    tree, tokens = drawn_tree(0, len(PADS)), torch.randint(3, VOCABULARY, (len(PADS), 6))
    wanted, nodes = stand.stocks(tokens), stand.verifier()(tree)[0]

    @torch.no_grad()
    def work(kind: int) -> bool:
        if kind == 0:
            return torch.equal(stand.stocks(tokens), wanted)
        return torch.equal(stand.verifier()(tree)[0], nodes)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, [0, 1, 2] * 8))
    assert not any(isinstance(vars(part).get("forward"), Mixer) for part in stand.model.modules())
