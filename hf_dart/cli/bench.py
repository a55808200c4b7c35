"""`hf-dart bench`: speed against stock, in one interleaved run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_dart.bench.pair import Pair, load_head, target_of
from hf_dart.cli import common
from hf_dart.errors import as_user_error

_MODES = ("greedy", "penalty", "sampled", "sampled-0.7", "top-p")
_METHODS = ("compiled", "lookup", "chain", "tree", "engine", "copies")
_SMOKE = {"prompts": 2, "new_tokens": 12, "repeats": 2}
_PROMPT_TOKENS, _SMOKE_TOKENS = 96, 24


def add(commands: Any) -> None:
    about = "speed against stock, in one interleaved run"
    parser = commands.add_parser("bench", parents=[common.pair_options()], help=about)
    texts = parser.add_mutually_exclusive_group()
    common.text_option(texts)
    texts.add_argument(
        "--suite",
        nargs="+",
        metavar="SUITE",
        help="gsm8k, humaneval, mbpp, math500, mt-bench, spec-bench or speed-bench (NAME=FILE: from a file or folder); "
        "code, chat, math or summarisation, which are packaged; a .jsonl file, or a data set",
    )
    parser.add_argument("--prompts", type=common.positive, help="prompts of each suite and category (default: 8)")
    longest = "tokens of the longest prompt; those from files have 2/3 of it or more (default: 96; suites: as they are)"
    parser.add_argument("--prompt-tokens", type=common.positive, metavar="LENGTH", help=longest)
    parser.add_argument("--new-tokens", type=common.positive, help="new tokens per prompt (default: 128)")
    parser.add_argument("--repeats", type=common.positive, help="repeats of the run (default: 5)")
    batches = "default: 1,4, as far as --prompts fills them"
    parser.add_argument("--batch", dest="batches", type=common.sizes, metavar="SIZES", help=batches)
    parser.add_argument("--modes", type=_of(_MODES), metavar="MODES", help=f"of {','.join(_MODES)} (default: all)")
    rivals = f"of {','.join(_METHODS)}, or all (default: lookup,tree; suites: copies, too)"
    parser.add_argument("--rivals", type=_of(_METHODS), metavar="METHODS", help=rivals)
    thinking = "flag of the chat template (default: as the head was trained with)"
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, help=thinking)
    parser.add_argument("--assistant-model", metavar="PATH", help="also stock's assisted decoding with this small LM")
    drafter = {"dest": "drafters", "action": "append", "default": [], "metavar": "PATH"}
    parser.add_argument("--drafter", **drafter, help="also this drafter; repeatable")
    common.json_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it works; no figures to quote")
    parser.set_defaults(command=_run)
    about = "servers with many clients; two benches in one table"
    more = parser.add_subparsers(dest="second", metavar="serve | compare", help=about)
    _add_serve(more)
    compare = more.add_parser("compare", help="two benches side by side, from the files of --json")
    compare.add_argument("files", type=Path, nargs=2, metavar="FILE", help="the earlier one, and the later one")
    compare.set_defaults(command=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from hf_dart.hub import tables
    from hf_dart.hub.checkpoint import read_json

    about = f"Give two files of hf-dart bench --json, not {' and '.join(map(str, arguments.files))}"
    with as_user_error(*tables.UNREADABLE, about=about):
        common.show(tables.compared(*map(read_json, arguments.files)))
    return 0


def _add_serve(commands: Any) -> None:
    about = "hf-dart serve and transformers serve, with so many clients"
    parser = commands.add_parser("serve", parents=[common.pair_options()], help=about)
    common.text_option(parser)
    parser.add_argument("--clients", type=common.sizes, metavar="COUNTS", help="default: 1,4,8,16")
    parser.add_argument("--requests", type=common.positive, help="of each client (default: 2)")
    parser.add_argument("--new-tokens", type=common.positive, help="of each answer (default: 64)")
    parser.add_argument("--prompts", type=common.positive, default=8, help="that clients send (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=common.positive, default=96, help="of the longest (default: 96)")
    parser.add_argument("--temperature", type=common.temperature, help="of all requests (default: 0, greedy)")
    parser.add_argument("--seats", type=common.positive, default=16, help="of hf-dart serve (default: %(default)s)")
    parser.add_argument("--ours-alone", action="store_true", help="leave transformers' server out")
    common.json_option(parser)
    parser.set_defaults(command=_run_serve)


def _run_serve(arguments: argparse.Namespace) -> int:
    common.check_file(arguments.json)
    from hf_dart.bench import report, serving, suites
    from hf_dart.hub import tables
    from hf_dart.hub.loading import PACKAGED, target_path

    settings = serving.Settings(**common.given(arguments, ("clients", "requests", "new_tokens", "temperature")))
    pair = common.load(arguments)  # which also finds what is wrong with it before a server does
    text, files = suites.texts(arguments.text)
    prompts = suites.cut_prompts(pair.tokenizer, files, arguments.prompts, arguments.prompt_tokens)
    content = report.circumstances(pair, settings, text, ["hf-dart", *arguments.words])
    asked = [pair.tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]
    named = arguments.target or target_of(arguments.head)
    target = target_path(named)  # by which both servers know it
    names = ("head", "seats", "ngram", "dtype", "device_map", "attn_implementation", "threads")
    given = {**({"head": PACKAGED} if named == PACKAGED else {}), **common.given(arguments, names), "target": target}
    if arguments.quantization is not None:
        given["quantization"] = json.dumps(arguments.quantization)
    ours = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    commands = serving.commands(ours, target, content["dtype"], pair.model.device.type)
    if arguments.ours_alone:
        commands = dict([*commands.items()][:1])
    content["results"] = serving.measure(commands, target, asked, settings)
    content["markdown"] = "\n".join([tables.headline(content), "", serving.as_table(content["results"])])
    common.show(content["markdown"])
    common.write_json(arguments.json, content)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    common.check_file(arguments.json)
    from transformers import AutoModelForCausalLM

    from hf_dart.bench import baselines, report, speed
    from hf_dart.hub import tables

    asked = common.given(arguments, ("prompts", "new_tokens", "repeats", "batches"))
    with as_user_error(ValueError):
        smoke = {**_SMOKE, "batches": (1, 2)[: asked.get("prompts", 2)]} if arguments.smoke else {}
        settings = speed.Settings(**{**smoke, **asked})
    modes = dict(zip(_MODES, speed.MODES.items(), strict=True))
    wanted = dict(modes[name] for name in arguments.modes or _MODES)
    pair = common.load(arguments)
    small, path = None, arguments.assistant_model
    if path is not None:
        with as_user_error(Exception, about=f"Cannot load the assistant model {path!r}"):  # as in load_target
            small = AutoModelForCausalLM.from_pretrained(path, dtype=pair.model.dtype).to(pair.model.device).eval()
    drafters = {path: load_head(path, pair.model, pair.tokenizer) for path in arguments.drafters}
    rivals = arguments.rivals or ("lookup", *(["copies"] if arguments.suite else []), "tree")
    methods = baselines.methods(pair, rivals, small, drafters)
    content = report.circumstances(pair, settings, "", ["hf-dart", *arguments.words])
    if arguments.thinking is not None:
        content["template_flags"] = {"enable_thinking": arguments.thinking}
    content = _begun(arguments.json, content | {"drafters": baselines.parameters(pair, methods), "results": []})
    firsts = (tables.STOCK, next(iter(wanted)), settings.batches[0])  # of which each text has one result
    measured = [one["text"] for one in content["results"] if (one["method"], one["mode"], one["batch"]) == firsts]
    for text, prompts in _prompts(arguments, pair, settings, content["template_flags"]):
        if text in measured:
            measured.remove(text)
            common.say(f"{text}: measured before it was interrupted")
            continue
        longest = max(map(len, prompts))
        case = {"text": text, "dtype": content["dtype"], "prompts": len(prompts), "prompt_tokens": longest}
        common.say(f"{text}, {content['dtype']}, {len(prompts)} prompts of up to {longest} tokens")
        measurements = speed.measure(pair, prompts, settings, methods, wanted, quiet=False)
        content["results"] += report.results(measurements, **case)
        common.write_json(arguments.json, content)  # so that what was measured is not lost
    content["settings"]["prompt_tokens"] = max(one["prompt_tokens"] for one in content["results"])
    content["text"] = ", ".join(dict.fromkeys(one["text"] for one in content["results"]))
    common.show(tables.as_table(content) + ("\n\n" + tables.by_category(content) if arguments.suite else ""))
    common.write_json(arguments.json, content)
    return 0 if all(one["identical"] for one in content["results"] if one["ours"]) else 1


def _begun(file: Path | None, content: dict[str, Any]) -> dict[str, Any]:
    """Return the report that an interrupted run of the same command, pair and machine left; else `content`."""
    from hf_dart.hub.checkpoint import read_json

    if file is None or not file.is_file():
        return content
    try:
        kept = read_json(file)
    except ValueError:
        return content
    # What has run to its end names its text, and is measured again.
    aside = {name: kept.get(name) for name in ("date", "results")}
    return kept if kept == {**json.loads(json.dumps(content)), **aside} else content


def _prompts(
    arguments: argparse.Namespace, pair: Pair, settings: Any, flags: dict[str, Any]
) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the texts that are measured on, one after the other: the name of each, and its prompts."""
    from hf_dart.bench import speed, suites

    length = arguments.prompt_tokens
    if arguments.suite is None:
        text, files = suites.texts(arguments.text)
        length = length or (_SMOKE_TOKENS if arguments.smoke else _PROMPT_TOKENS)
        yield text, suites.cut_prompts(pair.tokenizer, files, settings.prompts, length)
    for name in arguments.suite or ():
        called = Path(name).name if Path(name).exists() else name.partition("=")[0]
        found = suites.open_suite(
            name,
            pair.tokenizer,
            settings.prompts,
            length,
            least=max(settings.batches),
            answer=lambda ids: speed.answer(pair, ids, settings.new_tokens),
            flags=flags,
        )
        for category, prompts in found.items():
            yield f"{called}: {category}" if category else called, prompts


def _of(choices: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Names out of `choices` with commas between them, or "all", for argparse."""
    return common.checked(
        lambda text: choices if text == "all" else tuple(text.split(",")),
        lambda names: set(names) <= {*choices},
        f"all, or some of {','.join(choices)}",
    )
