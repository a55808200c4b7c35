"""`hf-dart audit`: drafted against stock, prompt by prompt."""

from __future__ import annotations

import argparse
from typing import Any

from hf_dart.cli import common
from hf_dart.errors import UserError, check_text


def add(commands: Any) -> None:
    about = "drafted against stock, prompt by prompt: the first differences, in ulp"
    parser = commands.add_parser("audit", parents=[common.pair_options()], help=about)
    parser.add_argument("prompts", nargs="*", help="texts to continue (default: 8 from the installed pytest's source)")
    parser.add_argument("--new-tokens", type=common.positive, default=64, help="of each prompt and run (default: 64)")
    parser.add_argument("--seed", type=common.seed, default=0, help="seed of the sampled runs (default: %(default)s)")
    common.json_option(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    common.check_file(arguments.json)
    from hf_dart.bench import auditing, report, speed, suites

    pair = common.load(arguments)
    if arguments.prompts:
        text = "from the command line"
        prompts = [pair.tokenizer(check_text(prompt, "A prompt"))["input_ids"] for prompt in arguments.prompts]
        if not all(prompts):
            raise UserError("A prompt is empty; give some text.")
        prompts *= 2 if len(prompts) == 1 else 1  # the control needs a batch
    else:
        text, files = suites.texts()
        prompts = suites.cut_prompts(pair.tokenizer, files, count=8, length=96)
    settings = speed.Settings(len(prompts), max(map(len, prompts)), arguments.new_tokens, seed=arguments.seed)
    content = {
        **report.circumstances(pair, settings, text, ["hf-dart", *arguments.words]),
        **auditing.audit(pair, prompts, settings, quiet=False),
    }
    common.show(auditing.as_table(content))
    common.write_json(arguments.json, content)
    return 0 if content["passed"] else 1
