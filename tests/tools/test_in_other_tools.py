"""The snippets of docs/tools.md, word for word but for names, sizes and addresses: drafts, and stock's answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dart import detach
from hf_dart.bench import exact
from hf_dart.bench.pair import Pair
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf8")
PROMPTS = ["import os\n", "def read(path):\n    ", "class Table:\n", "for name in sorted("]


def snippet(heading: str) -> str:
    """The Python under a heading; under the page's title without one."""
    part = PAGE.partition(f"## {heading}")[2] if heading else PAGE
    return re.search(r"^```python\n(.*?)^```$", part.partition("\n## ")[0], re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]


def run(code: str, names: dict[str, Any], **stands_for: str) -> None:
    always = {
        '"Qwen/Qwen3-4B"': repr(str(PACKAGED_TARGET)),
        '"z-lab/Qwen3-4B-DFlash-b16"': repr(str(PACKAGED_HEAD)),
        'device_map="auto"': 'dtype="float32"',
    }
    for shown, meant in {**stands_for, **always}.items():
        assert shown in code or shown in always, shown
        code = code.replace(shown, meant)
    exec(compile(code, "tools.md", "exec"), names)


@pytest.fixture
def names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    run(snippet(""), names)
    return names


def drafted(names: dict[str, Any]) -> bool:
    stats, names["drafter"].last_stats = names["drafter"].last_stats, None
    return stats is not None and stats.accepted > 0


def test_lm_eval(names: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": "x"}) + "\n" for text in PROMPTS))
    names["task"] = {
        "task": "continue",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    }

    def answers() -> list[Any]:
        code = snippet("lm-eval")
        run(code, names, **{'["gsm8k"]': "[task]"})
        return [sample["resps"] for sample in names["results"]["samples"]["continue"]]

    found = answers()
    assert drafted(names)
    detach(names["model"])
    assert found == answers()
    assert not drafted(names)


def test_lighteval(names: dict[str, Any]) -> None:
    pytest.importorskip("lighteval")
    from lighteval.tasks.requests import Doc, SamplingMethod

    run(snippet("lighteval"), names, **{"batch_size=4": 'batch_size=4, dtype="float32"'})
    names["evaluated"]._cache = None  # else answers are kept, next to the target's weights
    docs = [Doc(query=text, choices=[""], gold_index=0, generation_size=24) for text in PROMPTS]
    for number, doc in enumerate(docs):
        doc.id, doc.sampling_methods, doc.stop_sequences = str(number), [SamplingMethod.GENERATIVE], []

    def answers() -> list[Any]:
        return [response.text for response in names["evaluated"].greedy_until(docs)]

    found = answers()
    assert drafted(names)
    detach(names["evaluated"].model)
    assert found == answers()
    assert not drafted(names)


def served(pair: Pair, address: str) -> dict[str, str]:
    """What stands for the page's address and model."""
    return {'"http://localhost:8000/v1"': repr(address), 'model="Qwen/Qwen3-4B"': f'model="{pair.target_name}"'}


def test_openai(pair: Pair, address: str) -> None:
    pytest.importorskip("openai")
    names: dict[str, Any] = {}
    pair.head.last_stats = None
    run(snippet("A server: `hf-dart serve`"), names, **served(pair, address), **{"max_tokens=512": "max_tokens=32"})
    names["client"].close()
    assert pair.head.last_stats.accepted > 0
    prompt = pair.tokenizer.apply_chat_template(names["question"], tokenize=False, add_generation_prompt=True)
    inputs = pair.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids = pair.model.generate(**inputs, max_new_tokens=32, assistant=None)[0, inputs["input_ids"].shape[1] :]
    assert names["answer"].choices[0].message.content == pair.tokenizer.decode(ids, skip_special_tokens=True)


def test_gradio(pair: Pair, address: str) -> None:
    pytest.importorskip("gradio")
    names: dict[str, Any] = {}
    run(snippet("Gradio and Open WebUI"), names, **served(pair, address), **{"chat.launch()": ""})
    pair.head.last_stats = None
    answer = list(names["chat"].fn("imports", []))[-1]
    assert len(answer) > 32
    assert pair.head.last_stats is not None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own use of transformers
@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
def test_trl_at_its_defaults(names: dict[str, Any], tmp_path: Path, trainer: str) -> None:
    """Weights in float32 under bfloat16 autocast: each rollout beside stock's own, near-ties of the target counted."""
    pytest.importorskip("trl")
    from datasets import Dataset

    model, taus, near_ties = names["model"], [], 0
    names["prompts"] = Dataset.from_dict({"prompt": PROMPTS})
    names["tokenizer"].pad_token = names["tokenizer"].eos_token
    small = {
        "GRPO": trainer,
        '"runs/policy"': repr(str(tmp_path)),
        "max_steps=100": "max_steps=2, report_to='none', per_device_train_batch_size=4, num_generations=4, "
        "learning_rate=1e-3, seed=1, use_cpu=not torch.cuda.is_available()",
        "max_completion_length=256": "max_completion_length=24",
    }
    attached = model.generate

    def both(**kwargs: Any) -> Any:
        nonlocal near_ties
        inputs = {name: kwargs.pop(name) for name in ("input_ids", "attention_mask")}
        ours = exact.run(model, inputs, {**kwargs, "assistant": names["drafter"]}, seed=len(taus))
        taus.append(ours.stats.tau)
        stock = exact.run(model, inputs, {**kwargs, "assistant": None}, seed=len(taus) - 1)
        found = exact.compare(stock, ours)
        assert found.differences == 0
        near_ties += found.near_ties
        return ours.sequences

    def generate(**kwargs: Any) -> Any:
        model.generate = attached
        try:
            return both(**{name: value for name, value in kwargs.items() if value is not None})
        finally:
            model.generate = generate

    model.generate = generate
    reward = lambda completions, **known: [float(len(text)) for text in completions]  # noqa: E731
    with torch.enable_grad():
        run(snippet("TRL"), made := {**names, "reward": reward, "torch": torch}, **small)
    assert made["args"].bf16
    print(f"{trainer}Trainer: tau {taus}, near-ties {near_ties}")
    assert len(taus) == 2
    assert min(taus) > 1
