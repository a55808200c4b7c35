"""Quality of drafts: offline, from the blocks that evaluation runs anyway, or by decoding."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from transformers import TrainerCallback

from hf_dart.decoding.stats import DraftStats
from hf_dart.drafters.base import Proposal
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.training.objective.losses import NO_LABEL, coupled_chain
from hf_dart.training.trainers.drafts import Drafts, as_columns
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.tree import best_chain
from hf_dart.trees.vocabulary import token_ids

_NEVER = -1e30  # logit of a token that is never drafted


def count_drafts(
    draft_logits: Tensor,  # [n, d, V], as the target's
    target_logits: Tensor,
    labels: Tensor,  # [n, d]
    drafted: Tensor | None = None,  # [n, d] tokens of the chains; None takes the likeliest
    chosen: Tensor | None = None,  # [n, d] tokens of the target, likewise
) -> Tensor:
    """Count the draft tokens of each block that the target would accept, for `draft_figures`: [n, 4 + 2 d]."""
    chosen = target_logits.argmax(-1) if chosen is None else chosen
    right = (draft_logits.argmax(-1) if drafted is None else drafted) == chosen
    accepted = right.cummin(-1).values  # [n, d]
    watched = F.pad((accepted & (labels == chosen)).cummin(-1).values[:, :-1], (1, 0), value=True)
    complete = (labels != NO_LABEL).all(-1)
    sampled = torch.where(complete, coupled_chain(draft_logits, target_logits, labels).exp().sum(-1), 0)
    scalars = (right.sum(-1), (right & ~accepted).sum(-1), complete, sampled)
    return torch.cat([torch.stack(scalars, dim=-1), watched, watched & right], dim=-1)


def draft_figures(counts: np.ndarray) -> dict[str, float]:  # [4 + 2 d] of `count_drafts`, summed over the blocks
    """Return the quality of drafts, each a chain of its likeliest tokens, as far as any block says something about it.

    Exact on rows that the target wrote itself: greedily for the greedy figures, at temperature 1 for `tau_sampled`.
    On other text a block says nothing about greedy decoding after the first token that the target would not have
    chosen; it counts up to there (Kaplan and Meier's estimate of survival). A selector counts in the greedy figures,
    not in `tau_sampled`.

    Returns:
        `tau` (greedy) and `tau_sampled` (draft and target with one noise): tokens committed per target forward,
        bonus included, at the blocks' anchors. Those are spread evenly; rounds of decoding begin after misses, where
        drafts are worse. `tau_se`: standard error of `tau`, blocks taken as independent; `acceptance_k`: share of the
        k-th draft tokens that are right, of those after right ones; `waste`: share of the right draft tokens that
        come after a wrong one.
    """
    right, wasted, complete, sampled = counts[:4].tolist()
    watched, accepted = (part.tolist() for part in np.split(counts[4:], 2))
    figures = {}
    if watched[0]:
        rates = [a / w if w else 0.0 for a, w in zip(accepted, watched, strict=True)]
        survival = list(itertools.accumulate(rates, operator.mul))
        variance = 0.0
        for depth, (rate, count) in enumerate(zip(rates, watched, strict=True)):
            if rate:  # Greenwood's formula for a sum of survivals
                variance += sum(survival[depth:]) ** 2 * (1 - rate) / (rate * count)
        figures = {"tau": 1 + sum(survival), "tau_se": math.sqrt(variance)}
        figures |= {f"acceptance_{k}": rate for k, rate in enumerate(rates, start=1) if watched[k - 1]}
    if complete:
        figures["tau_sampled"] = 1 + sampled / complete
    if right:
        figures["waste"] = wasted / right
    return figures


@torch.no_grad()
def counts_by_row(drafter: TrainedDrafter, drafts: Drafts, chunk_size: int) -> Tensor:
    """Return the counts [B, 4 + 2 d] of a batch's blocks, by row; 0 as `chunk_size` holds the logits of all blocks."""
    ids, vocabulary = drafts.inputs["input_ids"], drafter.draft_vocabulary
    counts = []
    for part in drafts.split(chunk_size):
        logits = drafter.logits(part.hidden)
        roots = ids.flatten()[part.places[:, 0]]
        scores, best = logits.log_softmax(-1).topk(min(drafter.tree_config.top_k, logits.shape[-1]))
        table = drafter.transitions(
            Proposal(logits, part.hidden, vocabulary), roots, token_ids(best, vocabulary), scores
        )
        chains = best_chain(best, scores[:, :, None] if table is None else table)
        wanted, chosen = part.goals.everything_at(part.places)
        if vocabulary is not None:  # what is never drafted is never right: all of it is one more token
            logits = F.pad(logits, (0, 1), value=_NEVER)
        labels = as_columns(part.labels, vocabulary, logits.shape[-1] - 1)
        counts.append(count_drafts(logits, wanted, labels, chains, chosen))
    per_block = torch.cat(counts).float()
    rows = (drafts.inputs["anchors"] >= 0).nonzero()[:, 0]
    return per_block.new_zeros(len(ids), per_block.shape[1]).index_add_(0, rows, per_block)


@torch.no_grad()
def agreement(drafter: TrainedDrafter, drafts: Drafts, blocks: int) -> Tensor | None:
    """[d] how often a draft token is the target's best one, over the first blocks of a batch; None without any.

    With a draft vocabulary, the best one in it.
    """
    part = next(drafts.split(blocks), None)
    if part is None or not len(part.hidden):
        return None
    best = drafter.logits(part.hidden).argmax(-1)
    return (best == part.goals.at(part.places).argmax(-1)).float().mean(0)


def first_prompts(rows: Iterable[dict[str, Tensor]], count: int, length: int) -> list[Tensor]:
    """Prompts from the first `count` rows: token ids [length or less] of their first documents.

    Of a text its beginning; of a conversation what comes before the first token that is learned, the assistant's.
    """
    prompts = []
    for row in itertools.islice(rows, count):
        if "beside" in row:
            raise ValueError("decode_prompts are of text, and these rows have images; leave decode_prompts out.")
        ids, documents = torch.as_tensor(row["input_ids"]), torch.as_tensor(row["documents"])
        first = documents == documents[0]
        ids, learned = ids[first], torch.as_tensor(row.get("loss_mask", torch.ones(len(ids))))[first].bool()
        given = int((~learned).cumprod(0).sum())
        # A token alone that is not learned begins a text.
        prompts.append(ids[:given][-length:] if 1 < given < len(ids) else ids[:length])
    return prompts


class CountedWrites(TrainerCallback):
    """Callback that counts writes, as fused optimizers do not: what is kept of a drafter's weights is made anew."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        increment_version([weight for weight in model.parameters() if weight.requires_grad])


class DecodingCallback(TrainerCallback):
    """Callback that decodes a few prompts greedily after every evaluation, with the drafter as it is then.

    Logs `eval_tau_decoded`, which `metric_for_best_model="tau_decoded"` can choose checkpoints by. For early
    stopping by it, add this callback before `EarlyStoppingCallback`.

    Args:
        trainer: the `DrafterTrainer` that the callback is added to.
        prompts: token ids [T] of each.
        max_new_tokens: for each.
        tree_config: of the draft trees; None is the drafter's own. Without a number of nodes drafting may pause, and
            the figure then depends on the machine.
    """

    def __init__(
        self, trainer: Any, prompts: Sequence[Tensor], max_new_tokens: int = 64, tree_config: TreeConfig | None = None
    ) -> None:
        self.trainer, self.prompts = trainer, list(prompts)
        self.max_new_tokens, self.tree_config = max_new_tokens, tree_config

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        target, drafter = self.trainer.target, self.trainer.drafter
        stats = DraftStats()
        for prompt in self.prompts:
            ids = prompt[None].to(target.device)
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                custom_generate=partial(drafter.generate, tree_config=self.tree_config),
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
            )
            stats.merge(drafter.last_stats)
        metrics["eval_tau_decoded"] = stats.tau
        self.trainer.log({"eval_tau_decoded": stats.tau})
