"""`EditTrainer`: a head learns to look at its own drafts again, wrong tokens and all.

Behind the first drafts of all blocks come edit passes (`head.refine.Editor`) over the same blocks, whose slots now
hold tokens. An editor that has only seen right tokens in front would follow wrong ones: so a part of the blocks hold
the head's own draft as it is, in others some of its wrong tokens are put right, the likelier the less sure the head
was (the idea of DEdit's ProposalMix, arXiv 2609.38510; the rule is ours). In a third part, random true tokens are
shown and the others stay masked: those are trained by the bound of a masked diffusion model, or as score entropy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from hf_dart.head import DartHead
from hf_dart.head.model import Edits
from hf_dart.training.objective.blocks import build_blocks, gather_blocks, target_positions
from hf_dart.training.objective.chunks import chunked
from hf_dart.training.objective.losses import NO_LABEL, log_probabilities
from hf_dart.training.trainers.arguments import DartTrainingArguments
from hf_dart.training.trainers.base import seeded
from hf_dart.training.trainers.dart import DartTrainer
from hf_dart.training.trainers.diffusion import DENOISING, denoising_loss, draw_times
from hf_dart.training.trainers.evaluate import DraftQuality
from hf_dart.vocabulary import restricted, token_ids


@dataclass
class EditTrainingArguments(DartTrainingArguments):
    """`DartTrainingArguments` and what is the edit passes' own.

    Args:
        edit_passes: passes behind the first one.
        edit_weight: of their mean loss, beside that of the first drafts.
        editor_only: train the editor alone; the head's first drafts stay as they are.
        true_share: share of the blocks that hold the true tokens. With causal slots this alone is on target: what is
            drafted behind a wrong token is never accepted. 1 also saves the draft.
        own_share: share of the other blocks that hold the head's own draft as it is; in the rest, a wrong token with
            confidence c is put right with chance 1 - c.
        sampled_share: share of the blocks whose drafts are sampled, with the noise that the target's token was
            sampled with, as in `generate`; the others take the likeliest tokens.
        revealed_share: share of the blocks that show random true tokens, as far as a time t in (0, 1) leaves them
            unmasked, and learn the others.
        denoising_loss: of these: "masked_cross_entropy" or "score_entropy".
    """

    edit_passes: int = field(default=1, metadata={"help": "passes behind the first one"})
    edit_weight: float = field(default=1.0, metadata={"help": "of their mean loss"})
    editor_only: bool = field(default=False, metadata={"help": "train the editor of a frozen head"})
    true_share: float = field(default=0.5, metadata={"help": "of the blocks: those that hold the true tokens"})
    own_share: float = field(default=0.5, metadata={"help": "of the others: those that hold the draft as it is"})
    sampled_share: float = field(default=0.5, metadata={"help": "of the blocks: those whose drafts are sampled"})
    revealed_share: float = field(default=0.1, metadata={"help": "of the blocks: those with true tokens revealed"})
    denoising_loss: str = field(default="score_entropy", metadata={"help": f"one of {', '.join(DENOISING)}"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.edit_passes < 1:
            raise ValueError(f"edit_passes is {self.edit_passes}; give 1 or more, or train with DartTrainer.")
        if not self.edit_weight > 0:
            raise ValueError(f"edit_weight is {self.edit_weight}; give a number above 0.")
        for name in ("true_share", "own_share", "sampled_share", "revealed_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number from 0 to 1.")
        if self.denoising_loss not in DENOISING:
            raise ValueError(f"denoising_loss is {self.denoising_loss!r}; give one of {', '.join(DENOISING)}.")
        if self.selector_only:
            raise ValueError("selector_only and edit passes are trained apart; leave one of them out.")

    def metric_names(self, draft_length: int) -> set[str]:
        return super().metric_names(draft_length) | EditQuality.names(draft_length, self.edit_passes)


class EditTrainer(DartTrainer):
    """Trains a [`DartHead`] together with its editor, or the editor alone.

    Metrics of an evaluation say what each pass makes of greedy drafts: `tau_pass_r`, and the shares of tokens that it
    `changed_pass_r`, of drafts whose right beginning it made longer, `helped_pass_r`, or shorter, `harmed_pass_r`.
    `tau_sampled_edited` is that of drafts whose every token is drafted behind the right ones.

    Args:
        head: with an editor (`DartHead.add_editor`).
        target, args, kwargs: as for [`DartTrainer`].

    Raises:
        ValueError: the head has no editor, or one that would not be saved.
    """

    args: EditTrainingArguments

    def __init__(self, head: DartHead, target: Any, args: EditTrainingArguments, **kwargs: Any) -> None:
        if head.editor is None:
            raise ValueError("This head has no editor to train; call head.add_editor() first.")
        if head.adapted and not isinstance(head.editor, ModulesToSaveWrapper):
            raise ValueError("An adapter would be saved without the editor; merge it into its head first.")
        if args.editor_only:
            head.requires_grad_(False)
        super().__init__(head, target, args, **kwargs)
        head.editor.requires_grad_(True)
        self._edits: EditQuality | None = None  # while an evaluation runs

    def draw(self, inputs: dict[str, Any], generator: torch.Generator) -> int:
        """Adds `anchors` and per block `true`, `verbatim`, `sampled`, `times` [B, K], `masked` [B, K, d]; `seed`."""
        blocks = super().draw(inputs, generator)
        training, anchors = self._quality is None, inputs["anchors"]
        shape, device = anchors.shape, anchors.device

        def share(of: float) -> Tensor:
            return (torch.rand(shape, generator=generator) < of).to(device)

        inputs["true"] = share(self.args.true_share) & training
        inputs["verbatim"] = share(self.args.own_share) | (not training)
        inputs["sampled"] = share(self.args.sampled_share) & training
        times = torch.ones(shape, device=device)
        times[anchors >= 0] = draw_times(blocks, self.args.revealed_share * training, generator).to(device)
        inputs["times"] = times
        masked = torch.rand(*shape, self.head.draft_length, generator=generator).to(device) < times[..., None]
        inputs["masked"] = masked
        inputs["seed"] = int(torch.randint(2**31, (), generator=generator))
        return blocks

    def block_states(
        self, model: nn.Module, inputs: dict[str, Any], features: Tensor, target_logits: Tensor
    ) -> Tensor:
        """As `DartTrainer.block_states`, of the first drafts; adds `edited`, those of the passes behind it."""
        ids, documents, anchors = inputs["input_ids"], inputs["documents"], inputs["anchors"]
        config, evaluating = self.head.config, self._quality is not None
        bidirectional = config.block_attention == "bidirectional"
        blocks = build_blocks(
            documents,
            anchors,
            config.draft_length,
            bidirectional,
            self.flex,
            injected=config.inject_features,
        )
        # The last pass of an evaluation sees the true tokens.
        passes = self.args.edit_passes + evaluating
        draft = partial(self._draft, inputs, target_logits.flatten(0, 1))
        first, *edited = model(
            features=features[:, :-1],
            next_embeddings=self.head.embed(ids[:, 1:]),
            positions=blocks.positions,
            attention_mask=blocks.mask,
            edits=Edits(passes, blocks.slot_mask, draft),
        )
        inputs["edited"] = [gather_blocks(states, anchors, config.draft_length) for states in edited]
        return gather_blocks(first, anchors, config.draft_length)

    @torch.no_grad()
    def _draft(self, inputs: dict[str, Any], target_logits: Tensor, number: int, states: Tensor) -> Tensor:
        """What the slots hold in pass `number`: [B, K (d - 1)] tokens, -1 for slots that stay masked.

        Args:
            inputs: of `summed_loss`.
            target_logits: [B T, V].
            states: [B, T - 1 + K (d - 1), H] of the pass before.
        """
        ids, anchors = inputs["input_ids"], inputs["anchors"]
        present = anchors >= 0
        hidden = gather_blocks(states, anchors, self.head.draft_length)[present][:, :-1]  # [N, d - 1, H]
        rows = present.nonzero()[:, :1]
        places = target_positions(anchors[present], self.head.draft_length)
        goals = rows * ids.shape[1] + places  # [N, d]
        truth = ids.flatten()[goals[:, 1:]]
        held = ids.new_full((*anchors.shape, self.head.draft_length - 1), -1)
        if number <= self.args.edit_passes:
            known = inputs["true"][present][:, None]
            own = (inputs, target_logits, hidden, goals[:, :-1], truth)
            tokens = truth if bool(known.all()) else torch.where(known, truth, self._own(*own))
            shown = torch.where(inputs["masked"][present][:, :-1], -1, truth)
            truth = torch.where((inputs["times"][present] < 1)[:, None], shown, tokens)
        held[present] = truth
        return held.flatten(1)

    def _own(
        self, inputs: dict[str, Any], target_logits: Tensor, hidden: Tensor, goals: Tensor, truth: Tensor
    ) -> Tensor:
        """The head's own draft, some of its wrong tokens put right: [N, d - 1]."""
        present = inputs["anchors"] >= 0
        generator = seeded(inputs["seed"])  # the same noise in every pass
        # Numbers over the vocabulary are drawn where they are used: for one core of the host they are too many.
        noise = torch.Generator(hidden.device).manual_seed(inputs["seed"])
        drafted, confidence = [], []
        chunk = self.args.loss_chunk or max(len(hidden), 1)
        parts = (hidden, goals, truth, inputs["sampled"][present])
        for states, where, label, sampled in zip(*(part.split(chunk) for part in parts), strict=True):
            logits = self.head.logits(states)
            columns = logits.argmax(-1)
            if bool(sampled.any()):
                goal, vocabulary = target_logits[where[sampled]], self.head.draft_vocabulary
                wanted, label = restricted(goal, label[sampled], vocabulary, NO_LABEL)
                coupled = coupled_draft(logits[sampled], wanted, label, noise)
                columns[sampled] = torch.where(label != NO_LABEL, coupled, columns[sampled])
            drafted.append(token_ids(columns, self.head.draft_vocabulary))
            confidence.append(logits.softmax(-1).gather(-1, columns[..., None])[..., 0])
        chance = torch.rand(truth.shape, generator=generator).to(truth.device)
        mended = ~inputs["verbatim"][present][:, None] & (chance >= torch.cat(confidence))
        return torch.where(mended, truth, torch.cat(drafted))

    def draft_loss(
        self, inputs: dict[str, Any], hidden: Tensor, target_logits: Tensor, goals: Tensor, labels: Tensor
    ) -> Tensor:
        """The objective of the first drafts, and of every pass behind them."""
        present = inputs["anchors"] >= 0
        edited = [states[present] for states in inputs["edited"]]
        # Their first token is the first draft's, and not trained again.
        edited = [torch.cat([states[:, :1].detach(), states[:, 1:]], dim=1) for states in edited]
        if self._edits is not None:
            self._count(inputs, [hidden, *edited], target_logits, goals, labels)
        loss = hidden.new_zeros(())
        if not self.args.editor_only:
            loss = super().draft_loss(inputs, hidden, target_logits, goals, labels)
        times, masked = inputs["times"][present], inputs["masked"][present]
        whole, part = times == 1, times < 1
        weight = self.args.edit_weight / self.args.edit_passes
        for states in edited[: self.args.edit_passes]:
            edit = super().draft_loss(inputs, states[whole], target_logits, goals[whole], labels[whole])
            if bool(part.any()):
                edit = edit + self._denoising(states[part], labels[part], masked[part], times[part], target_logits)
            loss = loss + weight * edit
        return loss

    def _denoising(
        self, hidden: Tensor, labels: Tensor, masked: Tensor, times: Tensor, target_logits: Tensor
    ) -> Tensor:
        """The sum of the bound over blocks with hidden states [n, d, H] of which a part of the tokens was shown."""
        _, labels = restricted(target_logits[:1], labels, self.head.draft_vocabulary, NO_LABEL)

        def losses(hidden: Tensor, labels: Tensor, masked: Tensor, times: Tensor) -> Tensor:
            return denoising_loss(self.args.denoising_loss, self.head.logits(hidden), labels, masked, times)

        return chunked(losses, hidden, labels, masked, times, chunk_size=self.args.loss_chunk)

    @torch.no_grad()
    def _count(
        self, inputs: dict[str, Any], states: list[Tensor], target_logits: Tensor, goals: Tensor, labels: Tensor
    ) -> None:
        assert self._edits is not None
        rows = (inputs["anchors"] >= 0).nonzero()[:, 0]
        chunk = self.args.loss_chunk or max(len(goals), 1)
        counts = []
        for start in range(0, len(goals), chunk):
            part = slice(start, start + chunk)
            wanted = target_logits[goals[part]]
            logits = [self._full_logits(each[part], target_logits) for each in states]
            counts.append(self._edits.count(logits, wanted, labels[part]))
        per_block = torch.cat(counts).float()
        per_row = per_block.new_zeros(len(inputs["input_ids"]), per_block.shape[1]).index_add_(0, rows, per_block)
        self._edits.add(self.accelerator.gather_for_metrics(per_row))

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        edits = self._edits = EditQuality(self.head.draft_length, self.args.edit_passes)
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self._edits = None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in edits.metrics().items()})
        return output


class EditQuality:
    """What edit passes make of greedy drafts.

    Args:
        draft_length: d.
        passes: R, behind the first.
    """

    def __init__(self, draft_length: int, passes: int) -> None:
        self._qualities = [DraftQuality(draft_length) for _ in range(passes + 1)]
        self._sums = torch.zeros(1 + 3 * passes, dtype=torch.float64)
        self._width, self._length = len(self._qualities[0].sums), draft_length

    def count(self, logits: list[Tensor], target_logits: Tensor, labels: Tensor) -> Tensor:
        """What each block adds.

        Args:
            logits: [n, d, V] of the first draft, of R passes, and of one over the true tokens.
            target_logits: [n, d, V].
            labels: [n, d].

        Returns:
            [n, ...] for `add`.
        """
        chosen = target_logits.argmax(-1)
        # Behind a token that the target would not have chosen, a block says nothing.
        watched = 1 + (labels == chosen).cummin(-1).values[:, :-1].sum(-1)
        drafts = [each.argmax(-1) for each in logits[:-1]]
        lengths = [(draft == chosen).cummin(-1).values.sum(-1).minimum(watched) for draft in drafts]
        parts = [torch.ones_like(watched)]
        for draft, length in zip(drafts[1:], lengths[1:], strict=True):
            parts += [(draft != drafts[0]).sum(-1), length > lengths[0], length < lengths[0]]
        qualities = [self._qualities[0].count(each, target_logits, labels) for each in logits[1:]]
        return torch.cat([torch.stack(parts, dim=-1), *qualities], dim=-1)

    def add(self, counts: Tensor) -> None:
        """Add the counts [..., C] of some blocks."""
        own = len(self._sums)
        self._sums += counts[..., :own].flatten(0, -2).sum(0).double().cpu()
        for quality, part in zip(self._qualities, counts[..., own:].split(self._width, dim=-1), strict=True):
            quality.add(part)

    @classmethod
    def names(cls, draft_length: int, passes: int) -> set[str]:
        """All that `metrics` can tell."""
        edits = cls(draft_length, passes)
        for sums in (edits._sums, *(quality.sums for quality in edits._qualities)):
            sums.add_(1)
        return set(edits.metrics())

    def metrics(self) -> dict[str, float]:
        """`EditTrainer` says which."""
        blocks, *sums = self._sums.tolist()
        if not blocks:
            return {}
        figures: dict[str, float] = {}
        for number, quality in enumerate(self._qualities[:-1], start=1):
            found = quality.metrics()
            figures |= {f"{name}_pass_{number}": value for name, value in found.items() if name in ("tau", "waste")}
            figures |= {f"{name}_pass_{number}": v for name, v in found.items() if name.startswith("acceptance")}
            changed, helped, harmed = sums[3 * number - 3 : 3 * number]
            figures[f"changed_pass_{number}"] = changed / (blocks * self._length)
            figures |= {f"helped_pass_{number}": helped / blocks, f"harmed_pass_{number}": harmed / blocks}
        sampled = self._qualities[-1].metrics().get("tau_sampled")
        return figures if sampled is None else {**figures, "tau_sampled_edited": sampled}


def coupled_draft(draft_logits: Tensor, target_logits: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draft tokens [n, m] sampled with the noise of the target's own sampling, given which tokens that gave.

    The target takes argmax p / E, E ~ Exp(1). Given that it took y: E_y = p_y E', and every other E_v is p_v E' more
    than an Exp(1) variable, with one E' ~ Exp(1); min_v E_v / p_v = E' does not depend on y.

    Args:
        draft_logits, target_logits: [n, m, V].
        labels: [n, m] what the target took; where there is none, the result means nothing.
        generator: of random numbers, on the device of the logits.
    """
    target = log_probabilities(target_logits).exp()
    own = torch.empty_like(target[..., :1]).exponential_(generator=generator)
    noise = torch.empty_like(target).exponential_(generator=generator)
    noise.scatter_(-1, labels.clamp(min=0)[..., None], 0.0)
    return (log_probabilities(draft_logits) - (noise + own * target).log()).argmax(-1)
