"""What shape the rounds of a call have."""

from __future__ import annotations

from dataclasses import replace

from hf_dart.engine import processing
from hf_dart.engine.budget import batch_sizes
from hf_dart.engine.job import HeadJob
from hf_dart.engine.state import Shape, filled_up, most_nodes
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.costs import nodes_worth


def shapes_of(job: HeadJob, running: list[tuple[int, int]], first_tier: int, share: int) -> list[Shape]:
    """Those that the rounds of a call may have, for as few rows as will do first, and for all of them last.

    Args: as for `shape_of`.
    """
    batch = len(job.rows)
    sizes = [batch] if job.returns_cache else batch_sizes(len(running), batch)
    shapes = [shape_of(job, size, running, first_tier, share) for size in sizes]
    # A row that shared its nodes with others may come with a longer path than a round of its own has room for.
    return [shape for shape in shapes if shape.path >= shapes[-1].path]


def shape_of(job: HeadJob, batch: int, running: list[tuple[int, int]], first_tier: int, share: int) -> Shape:
    """The shape of rounds of `batch` rows, among them all that run, in the shortest tier that they fit into.

    Args:
        job: whose rounds are to be captured.
        running: committed tokens of the rows that run, and how many more they may emit.
        first_tier, share: of `EngineConfig`; with a share of 1 each row has nodes of its own.
    """
    session, config, rows = job.session, job.config, job.rows
    words = job.head.draft_vocabulary
    nodes = config.resolve_nodes(batch, rows.device.type)
    if config.nodes is None and nodes > 1:
        nodes = nodes_worth(config.round_cost(batch, rows.device.type))
    depth = session.grower.depth if nodes > 1 else 0
    most = most_nodes(depth, config, session.vocab_size if words is None else len(words))
    nodes = widest = min(nodes, most)
    budget = None
    if batch > 1 and nodes > 1 and share > 1:
        widest = min(share * nodes, most)
        budget = min(-(-batch * nodes // 8) * 8, batch * filled_up(widest))
    sampled = session.noise is not None
    # What the round does not read is as in every other call.
    read = {name: getattr(config, name) for name in ("top_k", "beam", "selector", "scores")}
    tree = TreeConfig(
        nodes=widest,
        lookup=min(config.lookup, depth),
        ngram_weight=config.ngram_weight if job.head.ngram is not None and depth else 0,
        shared_noise=sampled and config.shared_noise,
        **read,
    )
    processors = processing.key(session.request.processors, rows.prompt_length)
    assert processors is not None
    shape = Shape(batch, first_tier, tree, session.vocab_size, depth, processors, sampled, budget)
    # Of rows that have ended nothing is kept, unless the cache is handed back.
    longest = max(job.cache.lengths.tolist()) if job.returns_cache else 0
    while max(longest, max(length for length, _ in running) + 2 * shape.path) > shape.slots:
        shape = replace(shape, slots=2 * shape.slots)
    return shape
