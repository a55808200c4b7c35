"""Replicas of `hf-dart serve` on Ray Serve; requests of one session go to the replica that has its texts.

    python examples/ray_serve/replicas.py --replicas 2 --threads 1

All options of `hf-dart serve` are taken. Requests with the same `x-session-id` header go to the same replica.
"""

from __future__ import annotations

import argparse
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from hf_dart.cli import parser
from hf_dart.cli.serve import app_of


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--replicas", type=int, default=2, help="default: %(default)s")
    own.add_argument("--gpus", type=float, default=0, help="of each replica (default: none)")
    options, words = own.parse_known_args()
    arguments = parser().parse_args(["serve", *words])

    def build() -> FastAPI:
        app = app_of(arguments)
        app.add_middleware(Named, name=serve.get_replica_context().replica_id.unique_id)
        return app

    replica = serve.deployment(
        serve.ingress(build)(),
        num_replicas=options.replicas,
        max_ongoing_requests=arguments.seats + arguments.waiting,
        ray_actor_options={"num_gpus": options.gpus, "num_cpus": 0 if options.gpus else 1},
        graceful_shutdown_timeout_s=arguments.grace,
        request_router_config=RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
        ),
    )
    serve.start(http_options={"host": arguments.host, "port": arguments.port})
    serve.run(replica.bind(), blocking=True)


class Named:
    """Middleware that names a replica in the header `x-replica` of its answers."""

    def __init__(self, app: Any, name: str) -> None:
        self._app, self._header = app, (b"x-replica", name.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await send(message)

        await self._app(scope, receive, named)


if __name__ == "__main__":
    main()
