"""`hf-dart serve`: transformers' own server (`transformers serve`), whose every call drafts."""

from __future__ import annotations

import argparse
from typing import Any

from hf_dart.bench.pair import Pair
from hf_dart.cli import common
from hf_dart.errors import UserError, as_user_error


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", parents=[common.pair_options()], help="chat and completions over HTTP, as OpenAI's API, with drafts"
    )
    parser.add_argument("--host", default="localhost", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s; 0 is any free one")
    parser.add_argument("--enable-cors", action="store_true", help="answer pages of other origins too")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    app = build_app(common.load(arguments), enable_cors=arguments.enable_cors)
    import uvicorn

    uvicorn.Server(uvicorn.Config(app, host=arguments.host, port=arguments.port)).run()
    return 0


def build_app(pair: Pair, enable_cors: bool = False) -> Any:
    """Make the app of `transformers serve` for one model that is loaded already, and drafts by default.

    Requests name it or no model at all, and are served one at a time, in the order in which they come, as transformers
    serves them without continuous batching.

    Args:
        pair: target, drafter and tokenizer.
        enable_cors: answer pages of other origins too.

    Returns:
        A FastAPI app: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /health.

    Raises:
        UserError: what transformers' server needs is not installed.
    """
    from transformers.utils.import_utils import is_serve_available

    # First, as later imports fail with unclear errors without these packages.
    if not is_serve_available():
        raise UserError("A server needs more packages; install hf-dart[serve].")
    about = "This transformers has no server to build on; install hf-dart[serve]"
    with as_user_error(ImportError, about=about):
        from transformers.cli.serving.chat_completion import ChatCompletionHandler
        from transformers.cli.serving.completion import CompletionHandler
        from transformers.cli.serving.model_manager import ModelManager, TimedModel
        from transformers.cli.serving.response import ResponseHandler
        from transformers.cli.serving.server import build_server
        from transformers.cli.serving.systemone import SystemOneHandler
        from transformers.cli.serving.transcription import TranscriptionHandler
        from transformers.cli.serving.utils import GenerationState
    from hf_dart.decoding.api import attach

    class OneModel(ModelManager):
        """Model manager of transformers' server for the one model that is loaded already."""

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": ""}]

    if not pair.tokenizer.chat_template:
        common.say("The tokenizer has no chat template: /v1/completions answers, chat and responses cannot.")
    attach(pair.model, pair.head)
    models = OneModel()
    models.force_model = pair.target_name
    loaded = TimedModel(pair.model, timeout_seconds=-1, processor=pair.tokenizer)  # never unloaded
    models.loaded_models[models.process_model_name(pair.target_name)] = loaded
    shared = {"model_manager": models, "generation_state": GenerationState()}
    return build_server(
        models,
        ChatCompletionHandler(**shared),
        completion_handler=CompletionHandler(**shared),
        response_handler=ResponseHandler(**shared),
        transcription_handler=TranscriptionHandler(**shared),
        systemone_handler=SystemOneHandler(**shared),
        generation_state=shared["generation_state"],
        enable_cors=enable_cors,
    )
