"""A user's script, for the type checkers alone: what README and docs/use.md show, with the types that it promises."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import (
    Batcher,
    DartConfig,
    DartHead,
    Learner,
    LookupDrafter,
    SuffixStore,
    TreeConfig,
    View,
    attach,
    detach,
    generate,
    generate_many,
    iterate_many,
    load_drafter,
)
from hf_dart.training import DartTrainer, DartTrainingArguments, losses


def drafted(path: str, head_path: str) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    head: DartHead = DartHead.from_pretrained(head_path, target=model)
    drafter = load_drafter("auto", target=model, default=True)
    attach(model, head, learner=Learner(), memory=SuffixStore())
    inputs = tokenizer("import os", return_tensors="pt")
    options: dict[str, Any] = {"tree_config": TreeConfig(nodes=16), "trace": True, "return_dict_in_generate": True}
    page: str = View.of(generate(model, **inputs, assistant=drafter, **options), tokenizer).html()
    detach(model)
    return len(page) + float(drafter.last_stats.tau)


def many(model: Any, prompts: list[Tensor]) -> Iterator[Tensor]:
    with Batcher(model, LookupDrafter()) as batcher:
        request = batcher.submit(prompts[0], max_new_tokens=8, seed=0)
        first: Tensor = request.result()
    yield first
    yield from generate_many(model, prompts, max_new_tokens=8)
    for handle in iterate_many(model, prompts, max_new_tokens=8):
        yield handle.result()


def trained(model: Any, rows: Any) -> DartConfig:
    head = DartHead.from_target(model, draft_length=4, target_name="a/model")
    arguments = DartTrainingArguments(output_dir="runs/head", max_steps=10)
    DartTrainer(head, model, arguments, train_dataset=rows).train()
    assert callable(losses.kl_divergence)
    return head.config
