"""Options of a DART head side by side: from the same start, on the same rows, for the same number of steps.

    python examples/experiments/head_options.py heads CORPUS OWN runs/options --json heads.json
    python examples/experiments/head_options.py selectors CORPUS OWN runs/options --json selectors.json

What the frozen target says of the rows is computed once and kept (`features.bin`): its last hidden state is among the
features, so that logits are one matrix product away. Heads then learn without the target. `DartTrainer` runs it online,
so the loop is this script's own; blocks, losses, drafting and tree growth are the library's. Options that did not pay
are written down here and nowhere else. All of them begin as the head that they start from.

Measured is τ of trees of 16 nodes at anchors spread over the target's own text after pytest's source: exact, no round
is run. When sampling, the noise is drawn given the token that the target took, so that it is the noise of that text.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)

from hf_dart import DartConfig, DartHead, TreeConfig
from hf_dart.decoding.grow import TreeGrower
from hf_dart.drafters.base import Proposal, pair_scores
from hf_dart.drafters.dart.modeling import BigramSelector
from hf_dart.drafters.dflash.modeling import BlockConvolution
from hf_dart.drafters.layers import DartLayer, take
from hf_dart.hub.machine import circumstances
from hf_dart.training import DataArguments, load_rows
from hf_dart.training.objective import losses
from hf_dart.training.objective.blocks import (
    build_blocks,
    document_positions,
    draw_anchors,
    labels_after,
    target_positions,
)

MODES = ("greedy", "greedy, penalty 1.1", "sampled, T=1")

# ---- options of the network: only what drafts, a block of the anchor's entry and its slots, is changed ---------------


class Convolutions(nn.Module):
    """Two-tap grouped dynamic convolutions of attention's output and around the MLP (DFlash2's idea)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = BlockConvolution(width, 2, 16), BlockConvolution(width, 2, 16)
        for part in (self.attention, self.mlp):
            nn.init.zeros_(part.base_kernel)
            nn.init.ones_(part.base_kernel[:, 0])
            nn.init.zeros_(part.kernel_projection.weight)

    def forward(self, hidden: Tensor, attended: Tensor, layer: DartLayer) -> Tensor:
        hidden = hidden + self.attention.before(attended)[0]
        x, given = self.mlp.before(layer.mlp_norm(hidden))
        return hidden + self.mlp.after(layer.mlp(x), given)


class Adjacent(nn.Module):
    """A gated injection of the entry in front, between attention and MLP (as DSpine, arXiv 2609.36173)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, 1e-6)
        self.gate, self.value = nn.Linear(2 * width, width), nn.Linear(width, width, bias=False)
        for weight in (self.gate.weight, self.gate.bias, self.value.weight):
            nn.init.zeros_(weight)

    def forward(self, hidden: Tensor, attended: Tensor, layer: DartLayer) -> Tensor:
        own = self.norm(hidden + attended)
        front = F.pad(own[:, :-1], (0, 0, 1, 0))
        gate = torch.sigmoid(self.gate(torch.cat([own, front], dim=-1)))
        hidden = hidden + attended + gate * self.value(front)
        return hidden + layer.mlp(layer.mlp_norm(hidden))


def with_option(head: DartHead, option: nn.Module) -> DartHead:
    """The head, the last layer of which hands blocks [n, d, H] to an option; real entries in front are only read."""
    layer, depth = head.layers[-1], head.draft_length
    layer.option = option

    def forward(
        x: Tensor, residual: Tensor, rotation: Any, mask: Any, remember: Any, wanted: Tensor | None = None
    ) -> Tensor:
        attended = layer.self_attn(layer.input_norm(x), rotation, mask, remember, wanted)
        hidden = take(residual, wanted)
        real = hidden.shape[1] % depth if wanted is not None else hidden.shape[1] - depth
        blocks = (part[:, real:].reshape(-1, depth, part.shape[-1]) for part in (hidden, attended))
        out = option(*blocks, layer).reshape(len(hidden), -1, hidden.shape[-1])
        return torch.cat([hidden[:, :real], out], dim=1)

    layer.forward = forward
    return head


def with_second_layer(head: DartHead, start: str, target: Any) -> DartHead:
    """The head with another layer on top, which adds nothing yet."""
    deeper = DartHead(DartConfig.from_pretrained(start, num_layers=2)).float()
    weights = deeper.state_dict() | head.state_dict()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.1.{name}.weight"].zero_()
    deeper.load_state_dict(weights)
    deeper.bind(target)
    return deeper


NETWORKS: dict[str, Callable[[DartHead, str, Any], DartHead]] = {
    "": lambda head, start, target: head,
    "convolutions": lambda head, start, target: with_option(head, Convolutions(head.config.hidden_size)),
    "adjacent injection": lambda head, start, target: with_option(head, Adjacent(head.config.hidden_size)),
    "second layer": with_second_layer,
}

# ---- losses of the head: per token, of log-probabilities log q and log p [n, d, V] -----------------------------------


def coupled(draft: Tensor, goal: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """0.1 KL, and 0.9 of -log of the chance that draft and target take one token with one noise (unpublished)."""
    noise = -torch.empty_like(goal).exponential_(generator=generator).log_()
    token = (goal + noise).argmax(-1, keepdim=True)
    other = draft - (draft.gather(-1, token) - goal.gather(-1, token))
    return 0.1 * losses.kl_divergence(draft, goal) + 0.9 * torch.maximum(goal, other).logsumexp(-1)


def noisy_ranking(draft: Tensor, goal: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Half KL, half cross-entropy of the scores that a tree ranks with, the noise added (unpublished)."""
    noise = -torch.empty_like(goal).exponential_(generator=generator).log_()
    token = (goal + noise).argmax(-1, keepdim=True)
    ranked = -(draft + noise).log_softmax(-1).gather(-1, token)[..., 0]
    return (losses.kl_divergence(draft, goal) + ranked) / 2


def lk(draft: Tensor, goal: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    accepted = losses.log_acceptance(draft, goal).exp().mean(0).detach()
    return losses.lk_divergence(draft, goal, accepted)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]] = {
    "KL": lambda draft, goal, labels, generator: losses.kl_divergence(draft, goal),
    "0.1 CE + 0.9 TV": lambda draft, goal, labels, generator: (
        0.1 * losses.cross_entropy(draft, labels) + 0.9 * losses.total_variation(draft, goal)
    ),
    "LK": lk,
    "coupled": coupled,
    "noisy ranking": noisy_ranking,
}

# ---- selectors ------------------------------------------------------------------------------------------------------


class Selector(nn.Module):
    """A copy of the head's bigram selector.

    Args:
        base: it.
        embeddings: [V, E] of the target.
    """

    def __init__(self, base: BigramSelector, embeddings: Tensor) -> None:
        super().__init__()
        self.pairs = copy.deepcopy(base)
        self._embeddings = [embeddings]  # no part of it
        self._known: tuple[Tensor, Tensor] | None = None

    def added(self, hidden: Tensor, logits: Tensor, scores: Tensor, front: Tensor, candidates: Tensor) -> Tensor:
        """What is added to scores [n, d, K] after the true tokens in `front` [n, d]: [n, d, K]."""
        tokens, places = torch.cat([front[..., None], candidates], dim=-1).unique(return_inverse=True)
        embeddings = self._embeddings[0][tokens]
        return self.pairs(hidden, logits, embeddings, places[..., :1], places[..., 1:])[..., 0, :]

    def table(self, hidden: Tensor, logits: Tensor, scores: Tensor, front: Tensor, candidates: Tensor) -> Tensor:
        """The same after each of the tokens in `front` [n, d, J]: [n, d, J, K]."""
        phi, psi = self.tables()
        return self.pairs._delta(hidden, logits, phi[front], psi[candidates])

    def tables(self) -> tuple[Tensor, Tensor]:
        if self._known is None:
            every = self._embeddings[0]
            self._known = self.pairs.previous(every), self.psi(every)
        return self._known

    def psi(self, embeddings: Tensor) -> Tensor:
        return self.pairs.candidate(embeddings)


class Noticing(nn.Module):
    """A small network that sees each candidate's noise: by its logit, and its score with the noise."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.read, self.say = nn.Linear(5, 32), nn.Linear(32, 1)
        self.place, self.warmth = nn.Embedding(depth, 32), nn.Embedding(depth, 1)
        for weight in (self.say.weight, self.say.bias, self.place.weight, self.warmth.weight):
            nn.init.zeros_(weight)

    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Of candidates [n, d, K], what is added to their scores [n, d, K]."""
        depth = scores.shape[1]
        own = logits.log_softmax(-1)
        best = (part.amax(-1, keepdim=True).expand_as(part) for part in (scores, own))
        seen = torch.stack([own, scores, scores - own, *best], dim=-1) / 5
        hidden = F.silu(self.read(seen) + self.place.weight[:depth, None])
        return self.say(hidden)[..., 0] + (self.warmth.weight[:depth].exp() - 1) * scores


class PathSelector(Selector):
    """A selector with a state along the path, that is autoregressive refinement over the shared noise.

    What a token in front adds depends on the tokens before it; in a tree each candidate is taken after its best
    predecessor, as the noise has it. With `corrects`, the state also corrects the hidden state that the LM head's rows
    score, and a small network sees each candidate's noise.
    """

    def __init__(self, base: BigramSelector, embeddings: Tensor, corrects: bool, width: int) -> None:
        super().__init__(base, embeddings)
        rank = base.log_scale.weight.new_zeros(1, base.candidate[2].out_features).shape[1]
        self._corrects = corrects
        scored = rank + (embeddings.shape[1] if corrects else 0)
        self.read = nn.Linear(3 * rank, width)
        self.said, self.kept = nn.Linear(width, scored, bias=False), nn.Linear(width, rank, bias=False)
        self.sees = Noticing(len(base.log_scale.weight)) if corrects else None
        nn.init.zeros_(self.said.weight)

    def psi(self, embeddings: Tensor) -> Tensor:
        own = self.pairs.candidate(embeddings)
        return torch.cat([own, embeddings], dim=-1) if self._corrects else own

    def _step(self, state: Tensor, phi: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        read = F.silu(self.read(torch.cat([state, phi, context], dim=-1)))
        said = self.said(read)
        return said + F.pad(context * phi, (0, said.shape[-1] - phi.shape[-1])), torch.tanh(self.kept(read))

    def _alone(self, logits: Tensor, scores: Tensor) -> Tensor:
        """What does not depend on the token in front."""
        depth = logits.shape[-2]
        alone = (self.pairs.log_weight.weight[:depth].exp() - 1) * logits
        if self.sees is not None:
            alone = alone + self.sees(logits, scores)
        return alone

    def added(self, hidden: Tensor, logits: Tensor, scores: Tensor, front: Tensor, candidates: Tensor) -> Tensor:
        tokens, places = torch.cat([front[..., None], candidates], dim=-1).unique(return_inverse=True)
        embeddings = self._embeddings[0][tokens]
        phi, psi = self.pairs.previous(embeddings)[places[..., 0]], self.psi(embeddings)[places[..., 1:]]
        context, state, said = self.pairs.context(hidden), torch.zeros_like(phi[:, 0]), []
        for depth in range(hidden.shape[1]):
            here, state = self._step(state, phi[:, depth], context[:, depth])
            said.append(here)
        scaled = torch.stack(said, dim=1) * self.pairs.log_scale.weight[: hidden.shape[1]].exp()
        return (psi @ scaled[..., None])[..., 0] + self._alone(logits, scores)

    def table(self, hidden: Tensor, logits: Tensor, scores: Tensor, front: Tensor, candidates: Tensor) -> Tensor:
        phi, psi = self.tables()
        context, alone = self.pairs.context(hidden), self._alone(logits, scores)
        scale = self.pairs.log_scale.weight.exp()
        state = hidden.new_zeros(*candidates.shape[::2], phi.shape[1])  # [n, K, r] of each candidate's best path
        best, tables = hidden.new_zeros(candidates.shape[::2]), []
        for depth in range(hidden.shape[1]):
            before = phi[front[:, depth]]
            said, states = self._step(state, before, context[:, depth, None].expand_as(before))
            added = (said * scale[depth]) @ psi[candidates[:, depth]].transpose(-1, -2) + alone[:, depth, None]
            tables.append(added)
            paths = best[..., None] + (scores[:, depth, None] + added).log_softmax(-1)
            best, which = paths.max(1)
            state = states.gather(1, which[..., None].expand(-1, -1, states.shape[-1]))
        return torch.stack(tables, dim=1)


SELECTORS: dict[str, tuple[Callable[[BigramSelector, Tensor], Selector], bool]] = {
    "bigram, as trained so far": (Selector, False),
    "bigram, half with the noise": (Selector, True),
    "a state along the path, half with the noise": (lambda base, e: PathSelector(base, e, False, 256), True),
    "the same, corrects and sees the noise": (lambda base, e: PathSelector(base, e, True, 384), True),
}
"""By name: how it is made, and whether half of its blocks have noise."""

_FIRST, _NOISY = list(SELECTORS)[:2]


@dataclass(frozen=True)
class Variant:
    """What one row of a table trains, and where."""

    network: str = ""
    loss: str = "KL"
    selectors: tuple[str, ...] = (_FIRST,)  # they learn beside the head, whose loss does not reach it
    begun: float = 0.0  # share of the blocks that begin where a round would, after the tokens that another one accepted
    rounds: bool = False  # measure at the anchors of rounds, one after the other, not at anchors that are spread


SUITES: dict[str, dict[str, Variant]] = {
    "heads": {
        "today": Variant(),
        "convolutions": Variant(network="convolutions"),
        "adjacent injection": Variant(network="adjacent injection"),
        "second layer": Variant(network="second layer"),
        "0.1 CE + 0.9 TV": Variant(loss="0.1 CE + 0.9 TV"),
        "LK": Variant(loss="LK"),
        "coupled loss": Variant(loss="coupled"),
        "noisy ranking": Variant(loss="noisy ranking"),
    },
    "selectors": {"today": Variant(selectors=tuple(SELECTORS))},
    "together": {name: Variant(loss=name, selectors=(_FIRST, _NOISY)) for name in ("KL", "0.1 CE + 0.9 TV")},
    "anchors": {
        name: Variant(loss="0.1 CE + 0.9 TV", begun=begun, rounds=True)
        for name, begun in (("anywhere", 0.0), ("half where rounds begin", 0.5), ("all where rounds begin", 1.0))
    },
}


def selector_loss(
    selector: Selector, noisy: bool, hidden: Tensor, logits: Tensor, goals: Tensor, front: Tensor, noise: Tensor
) -> Tensor:
    """As `DartTrainer` has it for `selector_only`: summed over blocks [n], of which the first half get the `noise`."""
    ranked, goals = logits.clone(), goals.clone()
    half = len(noise) if noisy else 0
    ranked[:half] += noise[:half]
    best = ranked.topk(32)
    wanted = goals.gather(-1, best.indices)
    own = logits.gather(-1, best.indices)
    scores = best.values - ranked.logsumexp(-1, keepdim=True)
    taken = wanted[:half] + noise[:half].gather(-1, best.indices[:half])
    wanted[:half] = torch.where(taken == taken.amax(-1, keepdim=True), 1e4, 0.0)
    ranked = best.values + selector.added(hidden, own, scores, front, best.indices)
    return losses.annealed_kl(ranked, wanted, 0.8).sum()


# ---- rows, and what the target says of them -------------------------------------------------------------------------


class Lab:
    """The target, its rows, and what is measured on them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
        self.target.requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        self.start = DartHead.from_pretrained(arguments.head, target=self.target).float()
        self.layers, self.depth = self.start.feature_layers, self.start.draft_length
        if self.layers[-1] != self.target.config.num_hidden_layers:
            sys.exit("The head has to read the target's last layer, of which its logits are made.")
        self.width = len(self.layers) * self.target.config.hidden_size

    def rows(self) -> tuple[Tensor, Tensor, np.ndarray]:
        """Ids and documents [R, T], and features [R, T, F] in bfloat16, as int16."""
        arguments, length = self.arguments, self.arguments.length
        file, features = arguments.output / "rows.pt", arguments.output / "features.bin"
        if not file.exists():
            self._remember(file, features)
        kept = torch.load(file)
        shape = (*kept["ids"].shape, self.width)
        assert shape[1] == length
        return kept["ids"].long(), kept["documents"].long(), np.memmap(features, np.int16, "r", shape=shape)

    def _remember(self, file: Path, features: Path) -> None:
        arguments = self.arguments
        own = len(arguments.own)
        data = DataArguments(
            train_data=[arguments.corpus, *arguments.own],
            shares=[0.2] + [0.8 / own] * own,
            max_length=arguments.length,
            train_on="all",
        )
        rows, _ = load_rows(data, self.tokenizer, self.depth)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: arguments.rows]
        ids = torch.stack([torch.as_tensor(rows[int(row)]["input_ids"]) for row in order])
        documents = torch.stack([torch.as_tensor(rows[int(row)]["documents"]) for row in order])
        with features.open("wb") as stream:
            for part, of in zip(ids.long().split(16), documents.long().split(16), strict=True):
                states = self.states(part, document_positions(of))
                stream.write(states.bfloat16().view(torch.int16).numpy().tobytes())
        torch.save({"ids": ids.short(), "documents": documents.short()}, file)

    @torch.no_grad()
    def states(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Features [B, T, F] of ids [B, T]."""
        output = self.target(input_ids=ids, position_ids=positions, output_hidden_states=True, use_cache=False)
        return torch.cat([output.hidden_states[layer] for layer in self.layers], dim=-1)

    def goals(self, features: Tensor) -> Tensor:
        """The target's logits [..., V] at features [..., F]."""
        return self.target.lm_head(features[..., -self.target.config.hidden_size :])

    def held_out(self, mode: str) -> tuple[Tensor, Tensor]:
        """Text of the target's own after 64 tokens of pytest's source, which it has never seen: ids and features."""
        file = self.arguments.output / f"held_out_{MODES.index(mode)}.pt"
        if not file.exists():
            spec = find_spec("_pytest")
            if spec is None or not spec.submodule_search_locations:
                sys.exit("The held-out text begins with pytest's source: install pytest.")
            files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
            source = [i for path in files for i in self.tokenizer(path.read_text(encoding="utf8"))["input_ids"]]
            starts = np.random.default_rng(7).integers(0, len(source) - 64, 96)
            prompts = torch.tensor([source[start : start + 64] for start in starts])
            config = GenerationConfig(
                max_new_tokens=65,
                do_sample=mode.startswith("sampled"),
                temperature=1.0,
                top_k=0,
                repetition_penalty=1.1 if "penalty" in mode else 1.0,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.target.config.pad_token_id,
            )
            torch.manual_seed(0)
            ids = self.target.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
            ids = F.pad(ids, (0, 129 - ids.shape[1]), value=config.pad_token_id)
            torch.save((ids, self.states(ids)), file)
        return torch.load(file)

    def drafts(self, head: DartHead, ids: Tensor, documents: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [B, K, d, H] of the blocks at anchors [B, K]."""
        blocks = build_blocks(documents, anchors, self.depth)
        inputs = blocks.inputs(head.config.num_layers)
        states = head(features=features[:, :-1], next_embeddings=head.embed(ids[:, 1:]), **inputs)
        return states.unflatten(1, (-1, self.depth))

    # ---- measuring ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(
        self,
        head: DartHead,
        selectors: dict[str, Selector | None],
        top_k: int,
        modes: tuple[str, ...] = MODES,
        rounds: bool = False,
    ) -> dict[str, dict[str, Any]]:
        """By mode and selector: τ of trees of 16 nodes, its standard error, and how often each depth is reached.

        Of trees at 16 anchors of each row, or, with `rounds`, at those where rounds of that selector would begin.
        """
        found: dict[str, dict[str, Any]] = {}
        for mode in modes:
            generator = torch.Generator().manual_seed(11)
            counts: dict[str, list[np.ndarray]] = {name: [] for name in selectors}
            for ids, features in zip(*(part.split(16) for part in self.held_out(mode)), strict=True):
                spread = torch.linspace(62, 119, 16).long().expand(len(ids), -1)
                if rounds:
                    for name, selector in selectors.items():
                        counts[name] += self._rounds(head, selector, top_k, mode, ids, features, spread, generator)
                    continue
                found_here = self._accepted(head, selectors, top_k, mode, ids, features, spread, generator)
                for name, accepted in found_here.items():
                    counts[name].append(accepted)
            for name, parts in counts.items():
                accepted = np.concatenate(parts)
                found.setdefault(mode, {})[name] = {
                    "tau": 1 + float(accepted.mean()),
                    "error": float(accepted.std() / len(accepted) ** 0.5),
                    "reached": [float((accepted > depth).mean()) for depth in range(4)],
                }
        return found

    def _accepted(
        self,
        head: DartHead,
        selectors: dict[str, Selector | None],
        top_k: int,
        mode: str,
        ids: Tensor,
        features: Tensor,
        anchors: Tensor,
        generator: torch.Generator,
    ) -> dict[str, np.ndarray]:
        """By selector, how many drafted tokens are right after each anchor [B, K] with d known tokens."""
        whole = self._whole(ids, anchors)
        hidden = self.drafts(head, ids, torch.zeros_like(ids), features, anchors)[whole]
        rows, at = whole.nonzero()[:, :1], anchors[whole]
        places = target_positions(at, self.depth)
        truth = ids[rows, places + 1]
        noise = None
        if mode.startswith("sampled"):
            noise = noise_given(self.goals(features[rows, places]).log_softmax(-1), truth, generator)
        texts = [ids[row, : place + 2].tolist() for row, place in zip(rows[:, 0].tolist(), at.tolist(), strict=True)]
        penalty = [RepetitionPenaltyLogitsProcessor(1.1)] if "penalty" in mode else []
        config = TreeConfig(nodes=16, top_k=top_k, lookup=0)
        logits = head.logits(hidden)
        found = {}
        for name, selector in selectors.items():
            asked: Any = _Asked(selector, self.depth)
            grower = TreeGrower(asked, config, LogitsProcessorList(penalty), texts, torch.device("cpu"))
            tree = grower(Proposal(logits, hidden), noise, [self.depth] * len(texts))
            tokens, parents, true = tree.tokens.numpy(), tree.parents.numpy(), truth.numpy()
            node, count = np.zeros(len(true), int), np.zeros(len(true), int)
            going = np.ones(len(true), bool)
            for depth in range(self.depth):
                follows = (parents == node[:, None]) & (tokens == true[:, depth, None])
                going &= follows.any(1)
                node, count = np.where(going, follows.argmax(1), node), count + going
            found[name] = count
        return found

    def _whole(self, ids: Tensor, anchors: Tensor) -> Tensor:
        """Anchors [B, K] after which all d tokens of a draft are known, as bool."""
        return ids.gather(1, anchors + self.depth + 1) != self.target.config.pad_token_id

    def _rounds(
        self,
        head: DartHead,
        selector: Selector | None,
        top_k: int,
        mode: str,
        ids: Tensor,
        features: Tensor,
        spread: Tensor,
        generator: torch.Generator,
    ) -> list[np.ndarray]:
        """How many drafted tokens are right in the rounds from the first anchor of `spread` to its last."""
        anchors, found = spread[:, :1], []
        while len(ids):
            going = (anchors <= spread[:, -1:]) & self._whole(ids, anchors.clamp(max=int(spread.max())))
            ids, features, anchors, spread = (part[going[:, 0]] for part in (ids, features, anchors, spread))
            if len(ids):
                found.append(self._accepted(head, {"": selector}, top_k, mode, ids, features, anchors, generator)[""])
                anchors = anchors + 1 + torch.from_numpy(found[-1])[:, None]
        return found

    @torch.no_grad()
    def cost(self, heads: dict[str, DartHead], repeats: int = 60) -> dict[str, float]:
        """What a draft of each head costs beside one of the first, by the time of one thread; medians, interleaved."""
        states, spent = {}, {name: [] for name in heads}
        ids = torch.randint(6000, (1, 64), generator=torch.Generator().manual_seed(0))
        features, one = self.states(ids), torch.ones(1, dtype=torch.long)
        for name, head in heads.items():
            states[name] = head.begin(1, 600)
            head.extend(states[name], features, ids, 64 * one)
        for _ in range(repeats):
            for name, head in heads.items():
                began = time.thread_time()
                head.propose(states[name], features[:, :2], ids[:, :2], 2 * one)
                spent[name].append(time.thread_time() - began)
        first = statistics.median(next(iter(spent.values())))
        return {name: statistics.median(times) / first for name, times in spent.items()}

    # ---- training -----------------------------------------------------------------------------------------------

    def train(self, head: DartHead, variant: Variant, selectors: dict[str, tuple[Selector, bool]], seed: int) -> None:
        """Train a head, and selectors beside it, on the kept rows."""
        loss = LOSSES[variant.loss]
        arguments = self.arguments
        ids, documents, features = self.rows()
        head.selector.requires_grad_(False)
        weights = [weight for weight in head.parameters() if weight.requires_grad]
        groups = [weights, *(list(selector.parameters()) for selector, _ in selectors.values())]
        every = [weight for group in groups for weight in group]
        optimizer = torch.optim.AdamW(every, arguments.learning_rate, (0.9, 0.95), weight_decay=0.0)
        steps, generator = arguments.max_steps, torch.Generator().manual_seed(seed)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2
        )
        for _ in range(steps):
            chosen = torch.randint(len(ids), (arguments.batch_size,), generator=generator)
            row_ids, of = ids[chosen], documents[chosen]
            states = torch.from_numpy(np.ascontiguousarray(features[chosen.numpy()])).view(torch.bfloat16).float()
            anchors = draw_anchors(of, arguments.anchors, self.depth, generator)
            begun = round(variant.begun * arguments.anchors)
            if begun:
                chosen_blocks = torch.randperm(arguments.anchors, generator=generator)[:begun]
                anchors[:, chosen_blocks] = self._next_rounds(head, row_ids, of, states, anchors[:, chosen_blocks])
            present = anchors >= 0
            with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
                hidden = self.drafts(head, row_ids, of, states, anchors)[present]
                rows = present.nonzero()[:, :1]
                places = target_positions(anchors[present], self.depth)
                labels = labels_after(row_ids, of, rows, places)
                given = hidden.detach().requires_grad_()
                for part in torch.arange(len(hidden)).split(48):
                    with torch.no_grad():
                        goals = self.goals(states[rows[part], places[part]]).float()
                    logits = head.logits(given[part]).float()
                    draft, goal = losses.log_probabilities(logits), losses.log_probabilities(goals)
                    tokens = loss(draft, goal, labels[part], generator)
                    total = (tokens * losses.exponential_weights(tokens, 0.6)).sum()
                    noise = -torch.empty_like(goals[: len(goals) // 2]).exponential_(generator=generator).log_()
                    with torch.autocast("cpu", enabled=False):
                        seen = given[part].detach().float(), logits.detach(), goals, row_ids[rows[part], places[part]]
                        for selector, noisy in selectors.values():
                            total = total + selector_loss(selector, noisy, *seen, noise)
                    (total / len(hidden)).backward()
            hidden.backward(given.grad)
            for group in groups:
                nn.utils.clip_grad_norm_(group, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _next_rounds(self, head: DartHead, ids: Tensor, documents: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Anchors [B, K] of the rounds after those at `anchors` [B, K]; these themselves where a document ends.

        Accepted is what is among the two best of its depth, as a tree of about 16 nodes has it.
        """
        best = head.logits(self.drafts(head, ids, documents, features, anchors)).topk(2).indices  # [B, K, d, 2]
        at = anchors.clamp(min=0)
        truth = (
            ids[:, None]
            .expand(-1, at.shape[1], -1)
            .gather(2, (target_positions(at, self.depth) + 1).clamp(max=ids.shape[1] - 1))
        )
        count = (best == truth[..., None]).any(-1).cummin(-1).values.sum(-1)
        after = at + 1 + count
        last = (after + self.depth).clamp(max=ids.shape[1] - 1)
        inside = (last == after + self.depth) & (documents.gather(1, last) == documents.gather(1, at)) & (anchors >= 0)
        return torch.where(inside, after, anchors)

    def run(self, variant: Variant, seed: int) -> tuple[dict[str, Any], DartHead]:
        """Train one variant; what was measured of it, by the candidates per depth, and the head."""
        names = variant.selectors
        torch.manual_seed(seed)
        head = NETWORKS[variant.network](copy.deepcopy(self.start), self.arguments.head, self.target)
        embeddings = self.target.get_input_embeddings().weight.detach()
        selectors = {name: (SELECTORS[name][0](self.start.selector, embeddings), SELECTORS[name][1]) for name in names}
        self.train(head, variant, selectors, seed)
        asked: dict[str, Selector | None] = {"none": None} if len(names) == 1 else {}
        asked |= {name: selector for name, (selector, _) in selectors.items()}
        widths = (8,) if len(names) == 1 else (8, 24)
        return {str(width): self.measure(head, asked, width, rounds=variant.rounds) for width in widths}, head


class _Asked:
    """What a grower asks of a drafter: its selector."""

    ngram = None

    def __init__(self, selector: Selector | None, draft_length: int) -> None:
        self._selector, self.draft_length = selector, draft_length

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
        selector = self._selector
        if selector is None:
            return None

        def added(hidden: Tensor, logits: Tensor, front: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
            return selector.table(hidden, logits, scores, front, tokens)

        return pair_scores(proposal, roots, candidates, scores, added)


def noise_given(goals: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise [n, d, V] with which log-probabilities `goals` [n, d, V] are greatest at `tokens` [n, d]."""
    free = goals - torch.empty_like(goals).exponential_(generator=generator).log()
    most = -torch.empty_like(goals[..., :1]).exponential_(generator=generator).log()
    perturbed = -torch.logaddexp(-most, -free)  # as drawn below the greatest
    return perturbed.scatter(-1, tokens[..., None], most) - goals


# ---- the tables -----------------------------------------------------------------------------------------------------


def as_table(suite: str, results: dict[str, dict[str, Any]], costs: dict[str, float]) -> str:
    """The suite's table in Markdown; figures are means over seeds."""
    lines = [
        f"| {suite} | "
        + " | ".join(f"τ {mode} | to the first" for mode in MODES)
        + " | depth 1, 2, 3 at T=1 | draft |",
        "|---|" + "---|" * (2 * len(MODES) + 2),
    ]
    first: dict[str, float] = {}
    for name, runs in results.items():
        measured = [run for run in runs.values() if run]
        if not measured:
            continue
        for width in measured[0]:
            for selector in measured[0][width][MODES[0]]:
                label = " · ".join(part for part in (name, selector, f"{width} candidates") if part != "today")
                cells = [label]
                for mode in MODES:
                    taus = [run[width][mode][selector]["tau"] for run in measured]
                    tau = statistics.fmean(taus)
                    against = first.setdefault(f"{mode} {selector}" if suite in ("heads", "anchors") else mode, tau)
                    cells += [f"{tau:.3f}", "" if against == tau else f"{100 * (tau / against - 1):+.1f} %"]
                reached = [
                    statistics.fmean(run[width][MODES[2]][selector]["reached"][k] for run in measured) for k in range(3)
                ]
                cells += [", ".join(f"{share:.2f}" for share in reached), f"{costs.get(name, 1.0):.2f}"]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("corpus")
    parser.add_argument("own", nargs="+", help="folders that hf-dart regenerate wrote")
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default="hf_dart/demo_pair/model")
    parser.add_argument("--head", default="hf_dart/demo_pair/head", help="with a bigram selector")
    parser.add_argument("--only", nargs="+", metavar="VARIANT")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=2600)
    parser.add_argument("--length", type=int, default=257)
    parser.add_argument("--max-steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="for CPUs without bfloat16 instructions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    variants = SUITES[arguments.suite]
    lab, done = Lab(arguments), arguments.output / f"{arguments.suite}.json"
    kept = json.loads(done.read_text()) if done.exists() else {"results": {}, "costs": {}}
    results, costs = kept["results"], kept["costs"]
    for seed in range(arguments.seeds):
        for name in arguments.only or variants:
            if str(seed) in results.setdefault(name, {}):
                continue
            results[name][str(seed)], head = lab.run(variants[name], seed)
            if name not in costs:
                costs[name] = lab.cost({"today": lab.start, name: head})[name] if name != "today" else 1.0
            done.write_text(json.dumps(kept, indent=1))
            print(f"seed {seed}, {name}", file=sys.stderr, flush=True)
    ordered = {name: results[name] for name in variants if name in results}
    table = as_table(arguments.suite, ordered, costs)
    print(table)
    if arguments.json:
        content = {"suite": arguments.suite, "markdown": table, "results": ordered, "costs": costs}
        content |= circumstances(["python", *sys.argv], torch.device("cpu"))
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
