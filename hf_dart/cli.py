"""The command line: `hf-dart demo | generate | bench | audit`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from hf_dart.pair import DTYPES, Pair, UserError, load_pair, sentence
from hf_dart.version import __version__

_SMOKE = {"prompts": 2, "prompt_tokens": 24, "new_tokens": 12, "repeats": 2, "batches": (1, 2)}
_AUDIT_PROMPTS, _AUDIT_PROMPT_TOKENS = 8, 96

# torch and transformers are imported by the commands that need them: --help must not wait for them.


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if all was well, 1 if an output was not stock's, 2 for input that cannot be used."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    arguments.words = words
    try:
        return arguments.command(arguments)
    except UserError as error:
        print(f"hf-dart: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left; nothing to say
        return 141


def _demo(arguments: argparse.Namespace) -> int:
    pair = _load(arguments)
    from hf_dart.demo import demo, fastest_threads

    _set_threads(arguments.threads or fastest_threads(pair.model))
    color = arguments.color or sys.stdout.isatty()
    same = demo(pair, new_tokens=arguments.new_tokens, seed=arguments.seed, color=color)
    return 0 if same else 1


def _generate(arguments: argparse.Namespace) -> int:
    options = _sampling(arguments)
    _set_threads(arguments.threads)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    pair = _load(arguments)
    import torch
    from transformers import TextStreamer

    model, tokenizer = pair.model, pair.tokenizer
    if arguments.chat:
        if not tokenizer.chat_template:
            raise UserError("This target's tokenizer has no chat template; leave --chat out.")
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not arguments.chat)
    if encoded["input_ids"].shape[1] == 0:
        raise UserError("The prompt is empty; give some text.")
    drafting = (
        {}
        if arguments.stock
        else {"assistant": pair.head, "tree_config": _tree_config(arguments, pair.head.tree_config)}
    )
    torch.manual_seed(arguments.seed)
    try:
        model.generate(
            encoded["input_ids"].to(model.device),
            attention_mask=encoded["attention_mask"].to(model.device),
            max_new_tokens=arguments.max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **options,
            **drafting,
        )
    except ValueError as error:
        raise UserError(sentence(error)) from error
    if arguments.stats and not arguments.stock:
        print(_stats_line(pair.head.last_stats), file=sys.stderr)
    return 0


def _stats_line(stats: Any) -> str:
    seconds = ", ".join(f"{phase} {spent:.2f}" for phase, spent in stats.seconds.items())
    return (
        f"{stats.tokens} tokens in {stats.rounds} rounds, tau {stats.tau:.2f}; {stats.accepted} of "
        f"{stats.drafted} drafts accepted, by depth {stats.accepted_per_depth}; seconds: {seconds}"
    )


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `generate`: what was not asked for is as the target's own generation_config says."""
    options: dict[str, Any] = {}
    if arguments.temperature == 0:
        if arguments.top_p is not None:
            raise UserError("--top-p chooses among sampled tokens and --temperature 0 samples none; leave one out.")
        options["do_sample"] = False
    elif arguments.temperature is not None or arguments.top_p is not None:
        options["do_sample"] = True
        if arguments.temperature is not None:
            options["temperature"] = arguments.temperature
        if arguments.top_p is not None:
            options["top_p"] = arguments.top_p
    return options


def _bench(arguments: argparse.Namespace) -> int:
    _check_folder(arguments.json)
    _set_threads(arguments.threads)
    from hf_dart.bench import report, speed, suites

    given = {
        name: getattr(arguments, name) for name in ("prompts", "prompt_tokens", "new_tokens", "repeats", "batches")
    }
    smoke = _SMOKE if arguments.smoke else {}
    try:
        settings = speed.Settings(**{**smoke, **{name: value for name, value in given.items() if value is not None}})
    except ValueError as error:
        raise UserError(sentence(error)) from error
    files = suites.default_files() if arguments.text is None else arguments.text
    text = "pytest's source" if arguments.text is None else ", ".join(path.name for path in files)
    pair = _load(arguments)
    prompts = suites.cut_prompts(pair.tokenizer, files, settings.prompts, settings.prompt_tokens)
    tree = _tree_config(arguments, pair.head.tree_config)
    measurements = speed.measure(pair, prompts, settings, tree, lambda line: print(line, file=sys.stderr, flush=True))
    about = report.circumstances(pair, settings, tree, text, ["hf-dart", *arguments.words])
    print(report.as_table(measurements, about))
    _write_json(arguments.json, report.as_json(measurements, about))
    return 0 if all(one.verdict.identical for one in measurements if one.method == speed.OURS) else 1


def _audit(arguments: argparse.Namespace) -> int:
    _check_folder(arguments.json)
    _set_threads(arguments.threads)
    from hf_dart.bench import audit, report, speed, suites

    pair = _load(arguments)
    if arguments.prompts:
        text = "from the command line"
        prompts = [pair.tokenizer(prompt)["input_ids"] for prompt in arguments.prompts]
        if not all(prompts):
            raise UserError("A prompt is empty; give some text.")
        prompts *= 2 if len(prompts) == 1 else 1  # the control needs a batch
    else:
        text = "pytest's source"
        prompts = suites.cut_prompts(pair.tokenizer, suites.default_files(), _AUDIT_PROMPTS, _AUDIT_PROMPT_TOKENS)
    settings = speed.Settings(
        prompts=len(prompts),
        prompt_tokens=max(map(len, prompts)),
        new_tokens=arguments.new_tokens,
        repeats=1,
        batches=(1, len(prompts)),
        seed=arguments.seed,
    )
    tree = _tree_config(arguments, pair.head.tree_config)
    done = audit.audit(pair, prompts, settings, tree, lambda line: print(line, file=sys.stderr, flush=True))
    about = report.circumstances(pair, settings, tree, text, ["hf-dart", *arguments.words])
    print(audit.as_table(done, about))
    _write_json(arguments.json, audit.as_json(done, about))
    return 0 if done.passed else 1


def _check_folder(file: Path | None) -> None:
    """Before a long run, not behind it."""
    if file is not None and not file.parent.is_dir():
        raise UserError(f"There is no folder {str(file.parent)!r} to write the JSON to.")


def _write_json(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf8")


def _load(arguments: argparse.Namespace) -> Pair:
    return load_pair(arguments.target, arguments.head, arguments.dtype, arguments.device_map)


def _tree_config(arguments: argparse.Namespace, default: Any) -> Any:
    """The head's own tree, with what the command line asks for."""
    given = {name: getattr(arguments, name) for name in ("nodes", "depth")}
    try:
        return replace(default, **{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise UserError(sentence(error)) from error


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number < inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} does not lie above 0 and up to 1")
    return number


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(_positive(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 1,4") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-dart",
        description="Faster model.generate() with draft heads and token trees, token for token the same.",
    )
    parser.add_argument("--version", action="version", version=f"hf-dart {__version__}")
    commands = parser.add_subparsers(required=True, metavar="{demo,generate,bench,audit}")

    pair = argparse.ArgumentParser(add_help=False)
    pair.add_argument("--target", help="the model: a folder or a Hub id (default: the packaged one)")
    pair.add_argument("--head", help="its draft head: a folder or a Hub id (default: the packaged one)")
    pair.add_argument("--dtype", choices=DTYPES, help="default: float32 for the packaged pair, else as saved")
    pair.add_argument("--device-map", help="as for from_pretrained: auto, cpu, cuda, cuda:1, ...")
    pair.add_argument("--threads", type=_positive, help="CPU threads (default: torch's choice; demo tries)")

    tree = argparse.ArgumentParser(add_help=False)
    tree.add_argument(
        "--nodes", type=_positive, help="size of the draft tree, root included (default: by batch and device)"
    )
    tree.add_argument("--depth", type=_positive, help="deepest draft (default: the head's draft length)")

    demo = commands.add_parser("demo", parents=[pair], help="a tour on the packaged pair, offline")
    demo.add_argument("--new-tokens", type=_positive, default=96, help="per prompt and run (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of the sampled runs")
    demo.add_argument("--color", action="store_true", help="colours also where the output is no terminal")
    demo.set_defaults(command=_demo)

    generate = commands.add_parser("generate", parents=[pair, tree], help="continue a prompt, streaming")
    generate.add_argument("prompt", help="the text to continue; - reads it from standard input")
    generate.add_argument("--max-new-tokens", type=_positive, default=256, help="default: %(default)s")
    generate.add_argument(
        "--temperature", type=_temperature, help="0 is greedy (default: the target's generation_config)"
    )
    generate.add_argument("--top-p", type=_share, help="sample from the smallest set of this probability")
    generate.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the chat template")
    generate.add_argument("--stock", action="store_true", help="without the head, to compare")
    generate.add_argument("--stats", action="store_true", help="what the drafts did, on standard error")
    generate.set_defaults(command=_generate)

    bench = commands.add_parser("bench", parents=[pair, tree], help="speed against stock, in one interleaved run")
    bench.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="default: the source of the installed pytest"
    )
    bench.add_argument("--prompts", type=_positive, help="default: 8")
    bench.add_argument(
        "--prompt-tokens",
        type=_positive,
        help="of the longest prompt; the shortest has two thirds (default: 96)",
    )
    bench.add_argument("--new-tokens", type=_positive, help="per prompt (default: 128)")
    bench.add_argument("--repeats", type=_positive, help="default: 5")
    bench.add_argument("--batch", dest="batches", type=_sizes, metavar="SIZES", help="such as 1,4, the default")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    bench.add_argument("--smoke", action="store_true", help="a few seconds, to see that it works; no figures to quote")
    bench.set_defaults(command=_bench)

    audit = commands.add_parser(
        "audit", parents=[pair, tree], help="drafted against stock, prompt by prompt: the first differences, in ulp"
    )
    audit.add_argument("prompts", nargs="*", help="texts to continue (default: 8 from the installed pytest's source)")
    audit.add_argument("--new-tokens", type=_positive, default=64, help="per prompt and run (default: %(default)s)")
    audit.add_argument("--seed", type=int, default=0, help="of the sampled runs (default: %(default)s)")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    audit.set_defaults(command=_audit)
    return parser


if __name__ == "__main__":
    sys.exit(main())
