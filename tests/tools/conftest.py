"""Packages that call `generate` themselves; `pip install -e '.[tools]'` brings them. And a server to ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_dart.bench.pair import Pair, load_pair

TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def pair() -> Pair:
    """The packaged pair, with a chat template."""
    pair = load_pair()
    pair.tokenizer.chat_template = TEMPLATE
    return pair


@pytest.fixture(scope="module")
def address(pair: Pair) -> Iterator[str]:
    """Where `hf-dart serve` answers, for that pair."""
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    from support.serving import served

    from hf_dart.serve.service import Limits, Service

    service = Service(pair.model, pair.tokenizer, pair.head, [pair.target_name], Limits(length=2048))
    with served(service) as address:
        yield f"{address}/v1"
