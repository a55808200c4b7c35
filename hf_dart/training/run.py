"""One training run, from its options to the saved head: what `hf-dart train` does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import constants
from peft import LoraConfig
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dart.drafters.registry import trainers
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.errors import as_user_error, refuse_unknown
from hf_dart.hub.download import cached_commit
from hf_dart.hub.loading import head_path, load_target
from hf_dart.training.checkpoints import newest_checkpoint, whole
from hf_dart.training.data.frequent import frequent_tokens, token_counts
from hf_dart.training.data.sources import load_rows
from hf_dart.training.recipe import Recipe, trainer_of
from hf_dart.training.record import last_evaluation
from hf_dart.training.trainers.arguments import DartTrainingArguments, LoraArguments, TargetArguments, json_object
from hf_dart.training.trainers.trainer import DrafterTrainer
from hf_dart.trees.config import TreeConfig

_OF_NO_USE = {"recipe.yaml", "runs", "logs"}  # what a run leaves that ended before its first checkpoint was whole
LACKS = "Install what is missing, or leave out the option that asks for it"  # a package is not there
_COUNTED = 10_000  # rows that say which tokens are frequent; a stream may have no end


def run(recipe: Recipe, say: Callable[[str], None] = lambda line: None) -> tuple[Path, dict[str, float]]:
    """Train as `recipe` says, evaluate, and save the head to `final` in the output folder; `say` what was prepared.

    Returned are the folder of the head, and the metrics of the last evaluation (none without evaluation data). If an
    option cannot be used, nothing has been written.
    """
    args = recipe.training
    checkpoint = checkpoint_of(args.output_dir, args.resume_from_checkpoint)
    model, tokenizer = _target(recipe.target, args.device)
    selector_only = isinstance(args, DartTrainingArguments) and args.selector_only
    head = _head(recipe, model, tokenizer, selector_only)
    if recipe.head.head is None:
        revision = recipe.target.target_revision or constants.DEFAULT_REVISION
        head.config.target_revision = cached_commit(recipe.target.target, revision)
        length = recipe.data.max_length
        head.draft_window = length if length >= head.config.least_window else None
    with args.main_process_first(desc="preparing the data"):
        train_rows, eval_rows = load_rows(recipe.data, tokenizer, head.draft_length, head.config)
    size = recipe.head.config().get("draft_vocab_size")
    if size is not None and size != head.config.draft_vocab_size:  # a head that goes on keeps its tokens
        covered = _reduce_vocabulary(head, size, train_rows, tokenizer.eos_token_id)
        if args.should_log:
            say(f"The draft vocabulary of {size} tokens covers {covered:.1%} of the text that is learned.")
    head = apply_lora(head, recipe.lora)
    with as_user_error(RuntimeError, about=LACKS):  # as transformers says that what report_to names is not installed
        trainer = trainer_of(recipe.head.drafter)(head, model, args, train_dataset=train_rows, eval_dataset=eval_rows)
    if best := args.metric_for_best_model:
        refuse_unknown([best.removeprefix("eval_")], trainer.figure_names(), "Evaluations give no", ValueError)
    trainer.recipe = recipe.given
    if args.should_save and checkpoint is None:
        Path(args.output_dir, "recipe.yaml").unlink(missing_ok=True)  # of a run that left no checkpoint
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = {} if eval_rows is None else _evaluation(trainer)
    final = Path(args.output_dir, "final")
    with whole(final):
        trainer.save_model(str(final), _internal_call=True)
    if args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=args.hub_revision)
    return final, metrics


def _reduce_vocabulary(head: Any, size: int, rows: Any, eos: int | None) -> float:
    """Let a head draft the `size` most frequent tokens of some rows; return their share of the text that is learned."""
    some: Any = islice(rows, _COUNTED)
    if hasattr(rows, "__len__"):  # else a stream: rows of all sources alike
        some = (rows[int(i)] for i in np.random.default_rng(0).permutation(len(rows))[:_COUNTED])
    counts = token_counts(some, head.config.vocab_size)
    head.reduce_vocabulary(frequent_tokens(counts, size, always=[] if eos is None else [eos]))
    return int(counts[head.draft_vocabulary.cpu()].sum()) / max(int(counts.sum()), 1)


def _evaluation(trainer: DrafterTrainer[Any]) -> dict[str, float]:
    """Metrics of the drafter as it is now."""
    last = last_evaluation(trainer.state.log_history)
    if last is None or last["step"] != trainer.state.global_step or trainer.args.load_best_model_at_end:
        trainer.evaluate()
        last = last_evaluation(trainer.state.log_history)
    return last or {}


def checkpoint_of(output_dir: str, asked: str | None) -> str | None:
    """Return the checkpoint to resume from: the one `asked` for, the newest of "true", none of None or "false"."""
    folder = Path(output_dir)
    if asked is None or asked.lower() == "false":
        others = (path.name for path in folder.glob("*") if not path.name.startswith(PREFIX_CHECKPOINT_DIR))
        if newest_checkpoint(folder) or set(others) - _OF_NO_USE:
            raise ValueError(f"{output_dir} is not empty; go on by resume_from_checkpoint, or give another output_dir.")
        return None
    if asked.lower() == "true":
        newest = newest_checkpoint(folder)
        if newest is None:
            raise ValueError(f"{output_dir} holds no checkpoint to go on from; leave resume_from_checkpoint out.")
        return newest
    if not Path(asked, TRAINER_STATE_NAME).is_file():
        raise ValueError(f"{asked} is no checkpoint; give a folder checkpoint-N of a run, or no name for the newest.")
    return asked


def _target(arguments: TargetArguments, device: Any) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    known = {"attn_implementation": arguments.attn_implementation, "revision": arguments.target_revision}
    options: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    if arguments.quantization:
        options["quantization_config"] = json_object("quantization", arguments.quantization, '{"load_in_4bit": true}')
    places = arguments.device_map or (None if device.type == "cpu" else {"": device})
    return load_target(arguments.target, arguments.dtype, places, tokenizer=arguments.tokenizer, **options)


def _head(recipe: Recipe, model: PreTrainedModel, tokenizer: Any, selector_only: bool) -> Any:
    """Return a new drafter, or the given one, with weights in float32."""
    arguments, copied = recipe.head, recipe.lora.copy_layer
    config = arguments.config()
    if copied is not None:
        config["copy_layer"] = copied if copied == "last" else int(copied)
    config.pop("draft_vocab_size", None)  # chosen when the rows are there
    kind = trainers()[arguments.drafter][0]
    if "selector_rank" in config and not selector_only:
        raise ValueError("selector_rank makes a selector, which only selector_only trains; add it, and a trained head.")
    if arguments.head is None:
        if selector_only:
            raise ValueError("selector_only trains the selector of a trained head; name it with head.")
        return kind.from_target(model, tokenizer=tokenizer, **config).float()
    head: Any = kind.from_pretrained(head_path(arguments.head), target=model, tokenizer=tokenizer).float()
    for name, value in config.items():
        if name not in kind.config_class.changeable and value != getattr(head.config, name, None):
            raise ValueError(f"{name} {value} shapes a new head, and {arguments.head} has its shape; leave one out.")
    rank, sort = config.pop("selector_rank", None), config.pop("selector_kind", "bigram")
    if rank is not None and head.selector is None:
        head.add_selector(rank, kind=sort)
    elif rank is not None and rank != head.config.selector_rank:
        has = head.config.selector_rank
        raise ValueError(f"{arguments.head} has a selector of rank {has}; leave out selector_rank.")
    made = type(head.config)(**{**head.config.to_dict(), **config})
    head.tree_config = TreeConfig(**made.tree)
    for name in config:
        setattr(head.config, name, getattr(made, name))
    return head


def apply_lora(head: TrainedDrafter, arguments: LoraArguments) -> TrainedDrafter:
    """Put LoRA on a head as `arguments` say; without a rank the head stays as it is."""
    rank = arguments.lora_rank
    if rank is None:
        return head
    if head.adapted:
        raise ValueError("The head has an adapter; leave lora_rank out to train that one, or merge it into the head.")
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if arguments.lora_alpha is None else arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=arguments.lora_targets,
    )
    head.add_adapter(lora, "default")
    return head
