"""Training recipes side by side: the same initial weights, rows, order and steps, several seeds.

    python examples/experiments/compare.py causal corpus.bin regenerated.bin runs/losses --json losses.json

Trains every variant of a suite for the packaged target, from scratch or on from one head (`--start-from`), with each
seed, and prints one table: τ of chains after held-out text, offline and exact (`draft_figures`), with
standard errors over seeds. The data are those of `examples/demo_pair`: the corpus and what `hf-dart regenerate` made of
it. What is done is kept in the output folder, the heads as well: an interrupted run goes on, and `--seeds` may be
raised later.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_dart import DartConfig, DartHead
from hf_dart.training import DartTrainer, DartTrainingArguments, DataArguments, load_rows
from hf_dart.training.run import apply_lora
from hf_dart.training.trainers.arguments import LoraArguments


@dataclass(frozen=True)
class Variant:
    """One row of a table.

    Args:
        head: fields of `DartConfig`.
        training: fields of `DartTrainingArguments`.
        own_share: of the rows, text that the target wrote itself.
        lora: fields of `LoraArguments`.
    """

    head: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    own_share: float = 1.0
    lora: dict[str, Any] = field(default_factory=dict)


_CE = {"divergence": "ce", "position_weights": "uniform"}
_DECAY = {"loss": "left_to_right", "focal_weight": 0.0, "chain_weight": 0.0}
# "Teaching Diffusion to Speculate Left-to-Right" (arXiv 2606.11552): its ladder, and each rung alone.
_LADDER = {
    "uniform": _CE,
    "+ decay": _DECAY,
    "+ focal": {"loss": "left_to_right", "chain_weight": 0.0},
    "+ chain (left_to_right)": {"loss": "left_to_right"},
    "focal alone": {**_CE, "focal_weight": 0.3},
    "chain alone": {"loss": "left_to_right", "token_weight": 0.0, "focal_weight": 0.0},
}
_WITH_LAST = [2, 4, 7, 8]  # what a copy of the last layer reads is among them
_COPIED = {"copy_layer": "last", "feature_layers": _WITH_LAST}
_OTHERS = {name: {"loss": name} for name in ("dart", "dpace", "lk")}

SUITES: dict[str, dict[str, Variant]] = {
    "causal": {name: Variant(training=training) for name, training in (_LADDER | _OTHERS).items()},
    "bidirectional": {
        name: Variant({"block_attention": "bidirectional"}, training) for name, training in (_LADDER | _OTHERS).items()
    },
    "basics": {
        "shifted, the target's own text": Variant(),
        "not shifted": Variant({"shift_logits": False}),
        "corpus text": Variant(own_share=0.0),
    },
    "copied": {
        "a layer of its own": Variant({"feature_layers": _WITH_LAST}),
        "the target's last layer, LoRA 8": Variant(_COPIED, lora={"lora_rank": 8}),
        "the target's last layer, LoRA 32": Variant(_COPIED, lora={"lora_rank": 32}),
    },
    "optimizers": {
        "AdamW": Variant(),
        "AdamW, Muon for matrices": Variant(training={"muon_learning_rate": 1e-2}),
    },
}
"""Variants by table and name; the first of each is what the others are compared with."""


class Experiment:
    """Trains and evaluates variants on one target."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        self.held_out = [self._held_out("greedy"), self._held_out("sampled")]

    def _held_out(self, mode: str) -> list[dict[str, torch.Tensor]]:
        """What the target writes after pieces of pytest's source, which it has never seen: half a row each."""
        file = self.arguments.output / f"held_out_{mode}_{self.arguments.evaluation_rows}x{self.arguments.length}.pt"
        if not file.exists():
            torch.save(self._written(mode), file)
        ids = torch.load(file)
        prefix, pad = self.arguments.length // 2, self.target.config.pad_token_id
        written = torch.arange(ids.shape[1]) >= prefix
        return [
            {"input_ids": row, "documents": torch.where(row == pad, -1, 0), "loss_mask": written & (row != pad)}
            for row in ids
        ]

    def _written(self, mode: str) -> torch.Tensor:
        """Token ids [rows, length] of the target's own text."""
        spec = find_spec("_pytest")
        if spec is None or not spec.submodule_search_locations:
            sys.exit("The held-out text begins with pytest's source: install pytest.")
        files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
        ids = [i for path in files for i in self.tokenizer(path.read_text(encoding="utf8"))["input_ids"]]
        length = self.arguments.length
        prefix = length // 2
        starts = np.random.default_rng(0).integers(0, len(ids) - prefix, self.arguments.evaluation_rows)
        prompts = torch.tensor([ids[start : start + prefix] for start in starts])
        config = GenerationConfig(
            max_new_tokens=length - prefix,
            do_sample=mode == "sampled",
            temperature=1.0,
            top_k=0,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.target.config.pad_token_id,
        )
        torch.manual_seed(0)
        rows = torch.full((len(prompts), length), config.pad_token_id)
        for part, into in zip(prompts.split(64), rows.split(64), strict=True):
            written = self.target.generate(part, attention_mask=torch.ones_like(part), generation_config=config)
            into[:, : written.shape[1]] = written
        return rows

    def _head(self, variant: Variant, seed: int) -> DartHead:
        if self.arguments.start_from is None:
            fields = {"feature_layers": self.arguments.feature_layers, **variant.head}
            head = DartHead.from_target(self.target, tokenizer=self.tokenizer, seed=seed, **fields)
            if variant.lora:
                head.save_pretrained(self.arguments.output / "base")  # an adapter names the head that it stands on
            return apply_lora(head, LoraArguments(**variant.lora))
        config = DartConfig.from_pretrained(self.arguments.start_from, **variant.head)
        return DartHead.from_pretrained(self.arguments.start_from, target=self.target, config=config)

    def _rows(self, variant: Variant, draft_length: int, seed: int) -> Any:
        shares = {self.arguments.corpus: 1 - variant.own_share, self.arguments.regenerated: variant.own_share}
        used = {str(path): share for path, share in shares.items() if share}
        data = DataArguments(
            train_data=list(used),
            shares=list(used.values()) if len(used) > 1 else None,
            max_length=self.arguments.length,
            train_on="all",
            shuffle_seed=seed,
        )
        return load_rows(data, self.tokenizer, draft_length)[0]

    def run(self, variant: Variant, seed: int, folder: Path) -> dict[str, float]:
        """Train one head, keep it in `folder` and evaluate it; the metrics of `draft_figures`, time and bytes."""
        arguments = self.arguments
        head = self._head(variant, seed)
        trainer = DartTrainer(
            head,
            self.target,
            DartTrainingArguments(
                output_dir=str(arguments.output / "trainer"),
                max_steps=arguments.max_steps,
                per_device_train_batch_size=arguments.batch_size,
                anchors_per_row=arguments.anchors,
                learning_rate=arguments.learning_rate,
                adam_beta2=0.95,
                max_grad_norm=1.0,
                lr_scheduler_type="cosine",
                warmup_steps=arguments.max_steps // 20,
                use_cpu=not torch.cuda.is_available(),
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=seed,
                **variant.training,
            ),
            train_dataset=self._rows(variant, head.draft_length, seed),
        )
        seconds = trainer.train().metrics["train_runtime"]
        head.save_pretrained(folder)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        greedy, sampled = (trainer.evaluate(rows, metric_key_prefix="") for rows in self.held_out)
        kept = {name.removeprefix("_"): value for name, value in greedy.items() if name not in _NOT_QUALITY}
        return {**kept, "tau_sampled": sampled["_tau_sampled"], "seconds": seconds, "bytes": size}


_NOT_QUALITY = ("_runtime", "_samples_per_second", "_steps_per_second", "epoch", "_loss")


def with_error(values: list[float], form: str) -> str:
    """The mean of several seeds and its standard error over them; of one seed, the figure alone."""
    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {form.replace('+', '').format(error)}"


def as_table(results: dict[str, dict[str, dict[str, float]]], names: list[str]) -> str:
    """The suite's table in Markdown.

    Args:
        results: by variant and seed, what `Experiment.run` gave.
        names: of the variants, in order.
    """
    lines = [
        "| recipe | seeds | τ greedy | to the first | τ T=1 | to the first | acceptance 1, 2, 3 | waste | MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = results.get(names[0], {})
    for name in names:
        runs = results.get(name, {})
        if not runs:
            continue
        cells = [name, str(len(runs))]
        for figure in ("tau", "tau_sampled"):
            cells.append(with_error([run[figure] for run in runs.values()], "{:.3f}"))
            # Drafted tokens beyond the bonus are what training can change, but speed follows τ: ratios are of τ.
            ratios = [100 * (run[figure] / base[seed][figure] - 1) for seed, run in runs.items() if seed in base]
            cells.append("" if name == names[0] or not ratios else with_error(ratios, "{:+.1f}") + " %")
        depths = [statistics.fmean(run.get(f"acceptance_{k}", 0.0) for run in runs.values()) for k in (1, 2, 3)]
        cells.append(", ".join(f"{share:.2f}" for share in depths))
        cells.append(f"{statistics.fmean(run['waste'] for run in runs.values()):.0%}")
        cells.append(f"{statistics.fmean(run['bytes'] for run in runs.values()) / 1e6:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def circumstances(arguments: argparse.Namespace) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("hf-dart", "torch", "transformers"))
    begun = f"on from {Path(arguments.start_from).name}" if arguments.start_from else "from scratch"
    return (
        f"{Path(arguments.target).name}, {begun}, {arguments.max_steps} steps of {arguments.batch_size} rows of "
        f"{arguments.length - 1} positions with {arguments.anchors} blocks each, learning rate "
        f"{arguments.learning_rate:g}; {arguments.evaluation_rows} held-out rows, the second half of each "
        f"written by the target; float32, {platform.processor() or platform.machine()}; {versions}"
    )


def _same_settings(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses an output folder whose results were made with other settings."""
    now = {name: str(value) for name, value in vars(arguments).items() if name not in _FREE}
    file = arguments.output / f"{arguments.suite}_settings.json"
    if not file.exists():
        file.write_text(json.dumps(now, indent=1))
    for name, value in json.loads(file.read_text()).items():
        if now[name] != value:
            option = f"--{name.replace('_', '-')} {value}"
            parser.error(f"the results in {arguments.output} were made with {option}; give another folder")


_FREE = ("output", "seeds", "only", "threads", "json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("regenerated", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default="hf_dart/demo_pair/model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="of the suite's variants")
    parser.add_argument("--max-steps", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=129, help="tokens of a row")
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--start-from", metavar="HEAD", help="train this head on in place of a new one")
    parser.add_argument("--feature-layers", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--evaluation-rows", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the table's figures there")
    arguments = parser.parse_args()
    variants = SUITES[arguments.suite]
    unknown = set(arguments.only or ()) - set(variants)
    if unknown:
        parser.error(f"{arguments.suite} has no variant {unknown.pop()!r}; it has {', '.join(variants)}")

    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    _same_settings(arguments, parser)
    done = arguments.output / f"{arguments.suite}.json"
    results: dict[str, dict[str, dict[str, float]]] = json.loads(done.read_text()) if done.exists() else {}
    experiment = None
    for seed in range(arguments.seeds):
        for name in arguments.only or variants:
            runs = results.setdefault(name, {})
            if str(seed) in runs:
                continue
            experiment = experiment or Experiment(arguments)
            folder = arguments.output / "heads" / f"{arguments.suite}-{list(variants).index(name)}-{seed}"
            runs[str(seed)] = experiment.run(variants[name], seed, folder)
            done.write_text(json.dumps(results, indent=1))
            print(f"seed {seed}, {name}: τ {runs[str(seed)]['tau']:.3f}", file=sys.stderr, flush=True)
    table = f"{circumstances(arguments)}\n\n{as_table(results, list(variants))}"
    print(table)
    if arguments.json:
        content = {"suite": arguments.suite, "markdown": table, "results": results}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
