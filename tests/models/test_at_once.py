"""A tree through a gated delta rule in one call: the same as level by level, and as stock's own steps."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from support.families import needs_running_states
from support.tiny import tiny_target
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

from hf_dart import attach
from hf_dart.cache.states import RunningStates, StatefulCache, StateSlot, states_of
from hf_dart.models.running_states import tree_forward
from hf_dart.models.running_states.at_once import convolution, delta_rule
from hf_dart.models.running_states.mixers import mixers_of
from hf_dart.models.running_states.tree_forward import Mixer
from hf_dart.models.stock_steps import StockSteps
from hf_dart.trees.tree import DraftTree, TreePaths

pytestmark = needs_running_states

DELTA = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid"]
SHORT = ["lfm2", "lfm2_moe", "lfm3"]
# Of three rows: a path and branches off it, two paths, and a tree with empty nodes.
PARENTS = torch.tensor(
    [[-1, 0, 1, 2, 3, 4, 1, 0, 7, 2], [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7], [-1, 0, 1, 1, 2, -1, 3, 6, -1, -1]]
)
TREE = DraftTree.from_parents(torch.arange(30).view(3, 10) + 3, PARENTS)
PATHS = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 0], [0, 1, 3, 6, 7, 0]])
LENGTHS = [6, 5, 5]
REAL = (PARENTS >= 0) | (torch.arange(10) == 0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def node_by_node(text: Tensor, query: Tensor, key: Tensor, value: Tensor, log: Tensor, rate: Tensor) -> Any:
    """Outputs [B, N, H, V] and states [B, N, H, K, V] of a gated delta rule, written down as it is defined."""
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    query, key = (part.repeat_interleave(value.shape[2] // part.shape[2], 2) for part in (query, key))
    outputs, states = torch.zeros_like(value), torch.zeros(*value.shape[:2], *text.shape[1:], dtype=text.dtype)
    for row, parents in enumerate(PARENTS.tolist()):
        for node, parent in enumerate(parents):
            at = row, node
            before = text[row] if parent < 0 else states[row, parent]
            kept = before * log[at].exp().view(len(before), -1, 1)
            correction = rate[at][:, None] * (value[at] - torch.einsum("hk,hkv->hv", key[at], kept))
            states[at] = kept + key[at][..., None] * correction[:, None]
            outputs[at] = torch.einsum("hk,hkv->hv", query[at], states[at]) / key.shape[-1] ** 0.5
    return outputs, states


@pytest.mark.parametrize(("key_heads", "decays"), [(2, "head"), (4, "channel")])
def test_the_rule_is_what_it_is_defined_as(key_heads: int, decays: str) -> None:
    """To 1e-12 in float64: outputs, and states after 0, 1, 2, ... accepted nodes of each row."""
    rows, nodes = PARENTS.shape
    shape = (rows, nodes, 4, 5) if decays == "channel" else (rows, nodes, 4)
    query, key = (drawn(rows, nodes, key_heads, 5, seed=seed) for seed in (1, 2))
    # From next to no decay to one that forgets the text.
    log = -drawn(*shape, seed=4).mul(2).exp()
    value, rate, text = drawn(rows, nodes, 4, 3, seed=3), drawn(rows, nodes, 4, seed=5).sigmoid() * 2, drawn(3, 4, 5, 3)
    wanted, states = node_by_node(text, query, key, value, log, rate)
    got, state = delta_rule(query, key, value, log, rate, text, TreePaths.of(TREE, text.device))
    torch.testing.assert_close(got[REAL], wanted[REAL], rtol=1e-12, atol=1e-12)
    slot = StateSlot(0, "recurrent_states", 0)
    made = RunningStates({slot: text})
    made.keep({slot: state})
    for first in range(7):
        counts = [min(first + row, length) if first else 0 for row, length in enumerate(LENGTHS)]
        after = made.after(PATHS, counts)[slot]
        for row, count in enumerate(counts):
            want = states[row, PATHS[row, count - 1]] if count else text[row]
            torch.testing.assert_close(after[row], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("width", "kernel"), [(2, 2), (4, 4), (6, 7)])
def test_windows_are_those_of_stocks_steps(width: int, kernel: int) -> None:
    rows, nodes = PARENTS.shape
    text, inputs, weight = drawn(rows, 6, width), drawn(rows, nodes, 6, seed=1), drawn(6, 1, kernel, seed=2)
    got, after = convolution(inputs, text, TreePaths.of(TREE, text.device), weight, None, "silu")
    states: dict[tuple[int, int], Tensor] = {}
    for row, parents in enumerate(PARENTS.tolist()):
        for node, parent in enumerate(parents):
            state = (text[row] if parent < 0 else states[row, parent]).clone()[None]
            want = causal_conv1d_update(inputs[row, node][None, :, None], state, weight[:, 0], activation="silu")
            states[row, node] = state[0]
            torch.testing.assert_close(got[row, node], want[0, :, 0], rtol=1e-13, atol=1e-13)
            at = torch.zeros(rows, dtype=torch.long)
            at[row] = node
            assert torch.equal(after(at)[row], state[0])


def loud(family: str, dtype: torch.dtype) -> tuple[Mixer, StatefulCache, Tensor]:
    """A mixer of a family, a cache of three rows with random states, and inputs for the nodes of a tree."""
    model = tiny_target(family, dtype=dtype)
    cache = DynamicCache(config=model.config)
    StockSteps(model, torch.arange(3, 24).view(3, 7), [0, 0, 0], cache).prefill()
    for number, state in enumerate(states_of(cache).values()):
        state.copy_(drawn(*state.shape, seed=number))
    held = StatefulCache(cache.layers, cache, RunningStates(states_of(cache)))
    held.states.begin(TREE)
    return mixers_of(model)[1], held, drawn(*PARENTS.shape, model.config.hidden_size).to(dtype)


def called(mixer: Mixer, cache: StatefulCache, hidden: Tensor, **kwargs: Any) -> Any:
    """What a mixer gives, with the cache under the name that its module has for it."""
    taken = inspect.signature(mixer.module.forward).parameters
    (name,) = {"cache", "cache_params", "past_key_values"} & taken.keys()
    return mixer(hidden, **{name: cache, **kwargs})


def both(mixer: Mixer) -> tuple[Mixer, Mixer]:
    """A mixer that takes trees at once, and one of the same module that takes them by levels."""
    assert mixer.family is not None
    return mixer, Mixer(mixer.module, mixer.slots)


@torch.no_grad()
@pytest.mark.parametrize("family", [*DELTA, *SHORT])
def test_modules_give_what_they_give_by_levels(family: str) -> None:
    """In float32, in which the models' rules are computed, whatever their dtype."""
    mixer, cache, hidden = loud(family, torch.float32)
    counts = [[min(first + row, length) for row, length in enumerate(LENGTHS)] for first in range(7)]
    found = []
    for one in both(mixer):
        cache.states.begin(TREE)
        outputs = called(one, cache, hidden, attention_mask=None)
        states = [cache.states.after(PATHS, its) for its in counts]
        found.append([outputs[REAL], *(state[slot] for state in states for slot in mixer.slots)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6 * float(wanted.abs().max()))


def test_what_is_not_shown_to_be_right_stays_by_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rule or forward in its place, states that are used otherwise, a rule in float32 of a wider target."""
    plain = modeling_qwen3_5.torch_recurrent_gated_delta_rule
    changing = attach(tiny_target("qwen3_5", dtype=torch.bfloat16))
    assert all(mixer.family is not None for mixer in mixers_of(changing))

    def slower(*args: Any, g: Tensor, **kwargs: Any) -> Any:
        return plain(*args, g=g * 1.001, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(modeling_qwen3_5, "torch_recurrent_gated_delta_rule", slower)
        for target in (tiny_target("qwen3_5", dtype=torch.bfloat16), attach(changing)):
            assert all(mixer.family is None for mixer in mixers_of(target))
    assert all(mixer.family is None for mixer in mixers_of(tiny_target("falcon_h1", dtype=torch.float32)))
    assert all(mixer.family is None for mixer in mixers_of(tiny_target("qwen3_5", dtype=torch.float64)))
    target = tiny_target("qwen3_5", dtype=torch.float32)
    module = mixers_of(target)[1].module
    monkeypatch.setattr(module, "forward", partial(type(module).forward, module))
    assert [mixer.family is None for mixer in mixers_of(target)] == [False, True, False]


@torch.no_grad()
@pytest.mark.parametrize("nodes", ["one", "many"])
def test_a_single_node_and_very_many_go_by_levels(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, cache, hidden = loud("qwen3_5", torch.float32)
    if nodes == "one":
        tree, hidden = DraftTree.chain(torch.full((3, 1), 5)), hidden[:, :1]
    else:
        tree = TREE
        monkeypatch.setattr(tree_forward, "MOST", 9)
    outputs = []
    for one in both(mixer):
        cache.states.begin(tree)
        outputs.append(called(one, cache, hidden))
    assert torch.equal(*outputs), "not the same operations"
