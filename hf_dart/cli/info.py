"""`hf-dart info`: what is known of a target, what fits it, and what is recommended; or what a drafter is."""

from __future__ import annotations

import argparse
from typing import Any

from hf_dart.errors import UserError, as_user_error
from hf_dart.hub.loading import target_path


def add(commands: Any) -> None:
    parser = commands.add_parser("info", help="which published drafters a model has, and which one is recommended")
    parser.add_argument("model", help="a target or a drafter: a folder or a Hub id, of which config.json alone is read")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    from hf_dart.drafters.registry import registered
    from hf_dart.hub.download import optional_json
    from hf_dart.hub.failures import hub_errors
    from hf_dart.hub.known_drafters import last_name, published_drafters, published_table
    from hf_dart.interop.mtp_module import module_format
    from hf_dart.models.support import refuse_target

    path = target_path(arguments.model)
    with as_user_error(OSError, ValueError, about=f"Cannot read the config of {path!r}"), hub_errors(path):
        content = optional_json(path, "config.json") or {}
        # Targets are language models, too: kinds that read any of these are asked about speculators' files alone.
        heads = (kind for kind in registered().values() if kind.config_class or "speculators_model_type" in content)
        if found := next(filter(None, (kind.recognises(content, frozenset) for kind in heads)), None):
            target = content.get("target_name")
            print(f"{path}: {found}" + (f" for {target}" if isinstance(target, str) else ""))
            print(f"load it: load_drafter({path!r}, target=model)")
            return 0
        config = AutoConfig.from_pretrained(path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{path!r} is a {config.model_type}, no causal language model, which drafts are for.")
    text = config.get_text_config(decoder=True)
    print(f"{path}: {text.model_type}, {text.num_hidden_layers} layers of {text.hidden_size}, {text.vocab_size} tokens")
    with as_user_error(ValueError), torch.device("meta"):
        refuse_target(AutoModelForCausalLM.from_config(config).eval())
    print("fits: as far as its config says; a trial makes sure when it is attached")
    if module_format(content, lambda: ["mtp.fc.weight"]):  # as it is called where no config tells
        print("of its own: a multi-token prediction module, if its weights have one: MtpDrafter.from_target(model)")
    known, drafters = published_drafters(config)
    if drafters:
        date, same = published_table()["date"], last_name(known) == last_name(path)
        by = "" if same else ", by architecture and sizes; fewer tokens are accepted if it is a fine-tune"
        print(f"published for {known} (as of {date}{by}), best first:")
        for one in drafters:
            figure = f"{one['acceptance']} tokens per forward, " if "acceptance" in one else ""
            print(f"  {one['repository']} ({figure}{one['source']})")
    else:
        print("published: nothing that is known here; copies of earlier text draft without a head")
    print('recommended: load_drafter("auto", target=model, default=True)')
    print(f"train one: hf-dart train --target {path} --train_data FILES --output_dir runs/head")
    return 0
