"""What commands share that continue one prompt: its options, its tokens, how it is sampled."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hf_dart.cli.common import given, positive, seed, share, temperature
from hf_dart.errors import UserError, as_user_error, check_text, sentence


def prompt_options() -> argparse.ArgumentParser:
    """A parent parser: the prompt and what follows it."""
    prompt = argparse.ArgumentParser(add_help=False)
    prompt.add_argument("prompt", help="the text to continue; - reads it from standard input")
    prompt.add_argument("--max-new-tokens", type=positive, default=256, help="default: %(default)s")
    prompt.add_argument("--temperature", type=temperature, help="0 is greedy (default: the target's generation_config)")
    prompt.add_argument("--top-p", type=share, help="sample from the smallest set of this probability")
    prompt.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    prompt.add_argument("--chat", action="store_true", help="put the prompt into the chat template")
    prompt.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="handed to the chat template; default: as in the conversations that the head was trained on",
    )
    return prompt


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt, from standard input if so wished.

    Raises:
        UserError: it is no text, or --chat is missing.
    """
    if arguments.thinking is not None and not arguments.chat:
        raise UserError("--thinking is for chat templates; add --chat.")
    with as_user_error(UnicodeDecodeError, about="Standard input is no UTF-8 text"):
        prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    return check_text(prompt, "The prompt")


def encode_prompt(arguments: argparse.Namespace, prompt: str, pair: Any) -> dict[str, Any]:
    """`input_ids` and `attention_mask` [1, P] on the target's device.

    Raises:
        UserError: there is nothing in it, or the chat template does not take it.
    """
    if arguments.chat:
        prompt = _in_template(prompt, pair, arguments.thinking)
    encoded = pair.tokenizer(prompt, return_tensors="pt", add_special_tokens=not arguments.chat)
    if encoded["input_ids"].shape[1] == 0:
        raise UserError("The prompt is empty; give some text.")
    return {name: encoded[name].to(pair.model.device) for name in ("input_ids", "attention_mask")}


def _in_template(prompt: str, pair: Any, thinking: bool | None) -> str:
    """`prompt` as a user's message, up to where the assistant begins to write."""
    from hf_dart.drafters.pretrained import PretrainedDrafter

    if thinking is None and isinstance(pair.head, PretrainedDrafter):
        thinking = pair.head.config.enable_thinking
    turn = [{"role": "user", "content": prompt}]
    flags = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return pair.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **flags)
    except Exception as error:  # a template is a program
        raise UserError(
            f"The target's chat template does not take this prompt ({sentence(error)}); leave --chat out."
        ) from error


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `generate`: what was not asked for is as the target's own generation_config says."""
    options: dict[str, Any] = {}
    if arguments.temperature == 0:
        if arguments.top_p is not None:
            raise UserError("--top-p chooses among sampled tokens and --temperature 0 samples none; leave one out.")
        options["do_sample"] = False
    elif asked := given(arguments, ("temperature", "top_p")):
        options = {"do_sample": True, **asked}
    return options
