"""What a head is (`DartConfig`) and how its guesses become a tree (`TreeConfig`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import REGEX_COMMIT_HASH, repo_folder_name
from transformers import PreTrainedConfig

from hf_dart.checks import MAX_DRAFT_LENGTH, check_shape, check_types
from hf_dart.features import layer_count
from hf_dart.trees.costs import ANY_TREE, DRAFT_COST, RoundCost, checked_points

MAX_NODES = 1024
"""Most nodes of a tree per row, and candidates and paths per depth: memory and time of masks grow with the square."""

MAX_LAYERS = 5
"""Most decoder layers of a head: those of DFlash (arXiv 2602.06036); more cost more than they bring there."""


class DartConfig(PreTrainedConfig):
    """The shape of a [`DartHead`]; `DartConfig.for_target` reads most of it off a target.

    Args:
        draft_length: d, how many tokens one pass guesses.
        feature_layers: which of the target's `hidden_states` are fused; 0 is the embedding output, L the
            output of the last of L layers. The paper's layers are `default_feature_layers(L)`.
        hidden_size: H, the width of the target's LM head, which the drafter shares.
        own_lm_head: score tokens with an LM head of the head's own [V, H] ([M, H] of a draft vocabulary) instead of
            the target's.
        double_norm: apply the final norm twice, as DART's released code does.
        embedding_size: E, the width of the target's token embeddings, which the drafter shares.
        feature_size: width of one target hidden state.
        num_layers: decoder layers of the head, 1 to 5.
        input_form: what the first layer attends over: "pair", next to each other the normed embedding and the normed
            features (width E + H), or "stream", the features plus a projection of the embedding (width H), which is
            what a layer of the target is used to.
        copied_layer: the head's layers are copies of the target's, from this one (counted from 0) on; they stay as
            they are, are not saved, and are copied again at load (`hf_dart.head.copied`). None for layers of its own.
        attention_bias, output_bias, qk_norm, rope_frequencies: what a copied layer has beside plain projections:
            biases of q, k and v, that of the output, norms of queries and keys, its own rotary frequencies
            [head_dim / 2] (None are those of rope_theta).
        fingerprint: `hf_dart.head.copied.fingerprint` of the weights that a checkpoint stands on and does not hold.
        inject_features: every layer also attends to keys and values that are projected from the fused features
            (KV injection of DFlash, arXiv 2602.06036; `hf_dart.layers` says in which form).
        mask_mode: what a mask slot puts into the first layer: "learned", one free vector, or "peagle", a learned
            feature vector and the embedding of `mask_token_id`, which go through `fc` and the norms like those of
            real positions (P-EAGLE, arXiv 2602.01469), so that such heads can be served elsewhere.
        mask_token_id: with "peagle", a token that no text contains; `hf_dart.vocabulary.unused_token` finds one.
        draft_vocab_size: M, how many tokens the head scores (`DartHead.reduce_vocabulary`); None is all of them.
        block_attention: what a mask slot sees of its own draft: "causal", the slots in front of it, or
            "bidirectional", all of them.
        shift_logits: the last real position drafts the first token and mask slot j the token j + 1, so that d - 1
            slots do; without, d slots draft a token each, their own. DART (arXiv 2601.19278) compares both.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rms_norm_eps, rope_theta: as
            in the target's own layers.
        tree: fields of the [`TreeConfig`] that suits this head best; what `head.tree_config` starts as.
        selector_rank: width of the bigram selector (`hf_dart.head.refine`); 0 for none.
        selector_kind: "bigram", whose scores depend on the draft's hidden states, or "markov", one low-rank matrix.
        editor: the head can run again on its own draft (`hf_dart.head.refine.Editor`, `TreeConfig.refine`).
        vocab_size: rows of the target's embedding table, padding rows included.
        target_name, target_model_type, target_num_layers: the target that the head was made for.
        target_revision: the commit of its repository on the Hub, or None if not known.
        tokenizer_hash: `hf_dart.fit.vocabulary_hash` of the target's tokenizer, or None if not recorded.
        chat_template_hash, enable_thinking: `hf_dart.fit.template_hash` of the chat template of the conversations
            that the head was trained on, and the thinking flag that was handed to it; None without.

    Raises:
        ValueError: a field is out of range; the message names the field and what it takes.
    """

    model_type = "dart"

    draft_length: int = 8
    feature_layers: list[int] | tuple[int, ...] = (2, 4, 6)
    hidden_size: int = 256
    own_lm_head: bool = False
    double_norm: bool = False
    embedding_size: int = 256
    feature_size: int = 256
    num_layers: int = 1
    input_form: str = "pair"
    copied_layer: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    rope_frequencies: list[float] | tuple[float, ...] | None = None
    fingerprint: list[float] | tuple[float, ...] | None = None
    inject_features: bool = False
    mask_mode: str = "learned"
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    block_attention: str = "causal"
    shift_logits: bool = True
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tree: dict[str, Any] = field(default_factory=dict)
    selector_rank: int = 0
    selector_kind: str = "bigram"
    editor: bool = False
    initializer_range: float = 0.02
    vocab_size: int = 6144
    target_name: str | None = None
    target_revision: str | None = None
    target_model_type: str | None = None
    target_num_layers: int = 8
    tokenizer_hash: str | None = None
    chat_template_hash: str | None = None
    enable_thinking: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_types(self, DartConfig)
        self.feature_layers = sorted(set(self.feature_layers))
        check_shape(self)
        check_tree(self.tree)
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise ValueError(f"num_layers is {self.num_layers}; give 1 to {MAX_LAYERS}.")
        if self.block_attention not in ("causal", "bidirectional"):
            raise ValueError(f"block_attention is {self.block_attention!r}; give 'causal' or 'bidirectional'.")
        if self.input_form not in ("pair", "stream"):
            raise ValueError(f"input_form is {self.input_form!r}; give 'pair' or 'stream'.")
        if self.copied_layer is not None and self.input_form != "stream":
            raise ValueError("A copied layer takes the width of the target's; leave input_form at 'stream'.")
        frequencies, pairs = self.rope_frequencies, self.head_dim // 2
        if frequencies is not None and len(frequencies) != pairs:
            raise ValueError(f"rope_frequencies has {len(frequencies)} entries; give {pairs}, half of head_dim.")
        self._check_mask_mode()
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; give 1 to {self.vocab_size}, the target's vocabulary, "
                "or None for all of it."
            )
        if self.selector_rank < 0:
            raise ValueError(f"selector_rank is {self.selector_rank}; give 0 for no selector, or more.")
        if self.selector_kind not in ("bigram", "markov"):
            raise ValueError(f"selector_kind is {self.selector_kind!r}; give 'bigram' or 'markov'.")
        if self.editor and not self.shift_logits:
            raise ValueError("Edit passes go with shifted logits; leave shift_logits True, or the editor out.")
        if not self.feature_layers:
            raise ValueError("feature_layers is empty; name at least one index of the target's hidden_states.")

    def _check_mask_mode(self) -> None:
        if self.mask_mode not in ("learned", "peagle"):
            raise ValueError(f"mask_mode is {self.mask_mode!r}; give 'learned' or 'peagle'.")
        if self.mask_mode == "learned":
            if self.mask_token_id is not None:
                raise ValueError("mask_token_id goes with mask_mode='peagle' only; leave it out.")
            return
        if self.mask_token_id is None:
            raise ValueError(
                "mask_mode='peagle' needs a token that no text contains; give mask_token_id, or pass tokenizer= to "
                "DartHead.from_target, which then looks for one."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; give one of 0..{self.vocab_size - 1}.")
        served = not self.inject_features and self.block_attention == "causal" and self.input_form == "pair"
        if not served or not self.shift_logits:
            raise ValueError(
                "mask_mode='peagle' is for heads that other engines serve, which know neither inject_features nor "
                "input_form='stream' nor block_attention='bidirectional' nor shift_logits=False; leave these out, or "
                "use mask_mode='learned'."
            )

    @property
    def draft_slots(self) -> int:
        """Mask slots of a whole draft: d - 1, or d where logits are not shifted."""
        return self.draft_length - int(self.shift_logits)

    @property
    def features_width(self) -> int:
        """F, the width of the concatenated features of one position."""
        return len(self.feature_layers) * self.feature_size

    @property
    def needs(self) -> dict[str, int]:
        """What a target has to have, in the words of `hf_dart.fit.check_fit`."""
        needs = {
            "hidden size": self.feature_size,
            "embedding width": self.embedding_size,
            "number of layers": self.target_num_layers,
        }
        return needs if self.own_lm_head else {**needs, "LM head width": self.hidden_size}

    @classmethod
    def for_target(cls, target: Any, **overrides: Any) -> DartConfig:
        """The paper's one-layer head for `target` (a causal LM); any field can be overridden.

        Raises:
            ValueError: the target has no token embeddings or no LM head to share.
        """
        text = target.config.get_text_config(decoder=True)
        embeddings, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        if embeddings is None or lm_head is None:
            raise ValueError(
                f"{type(target).__name__} has no input embeddings or no LM head to share; give a causal "
                "language model (AutoModelForCausalLM)."
            )
        heads = _first(text, ("num_attention_heads",), 0)
        if not heads:
            raise ValueError(
                f"{type(target).__name__} has no attention layers to verify a tree with; call generate without "
                "assistant=."
            )
        hidden = int(text.hidden_size)
        layers = layer_count(target)
        # A folder's path says nothing on another machine; its name may.
        name = target.config.name_or_path
        intermediate = _first(text, ("intermediate_size", "ffn_dim", "n_inner"), 4 * hidden)
        fields: dict[str, Any] = {
            "feature_layers": default_feature_layers(layers),
            "hidden_size": int(getattr(lm_head, "in_features", hidden)),
            "embedding_size": int(embeddings.embedding_dim),
            "feature_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": _first(text, ("num_key_value_heads",), heads),
            "head_dim": _first(text, ("head_dim",), hidden // heads),
            "intermediate_size": intermediate,
            "rms_norm_eps": _first(text, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-6),
            "rope_theta": _rope_theta(text),
            "vocab_size": int(embeddings.num_embeddings),
            "target_name": (Path(name).name if Path(name).is_dir() else name) or None,
            "target_revision": cached_commit(target.config.name_or_path),
            "target_model_type": target.config.model_type,
            "target_num_layers": layers,
        }
        return cls(**{**fields, **overrides})


def check_tree(fields_of_tree: dict[str, Any]) -> None:
    """Raise a `ValueError` if a config's `tree` does not make a [`TreeConfig`]."""
    known = [one.name for one in fields(TreeConfig)]
    if unknown := sorted(fields_of_tree.keys() - set(known)):
        raise ValueError(f"tree has the field {unknown[0]!r}; TreeConfig has {', '.join(known)}.")
    TreeConfig(**fields_of_tree)


def default_feature_layers(num_layers: int) -> list[int]:
    """The paper's three fused layers, as indices of HF `hidden_states` (DART, section 3.1)."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return sorted({min(max(index, 1), num_layers) for index in wanted})


def _first(config: Any, names: Sequence[str], default: Any) -> Any:
    """The first of several names under which families keep one field; where layers differ in it, their maximum."""
    layers = list(config.per_layer_config)
    for name in names:
        given = [getattr(layer, name, None) for layer in layers]
        lists = [value if isinstance(value, (list, tuple)) else [value] for value in given]
        values = [value for per_layer in lists for value in per_layer if value is not None]
        if values:
            return max(values)
    return default


def cached_commit(repository: str | None, revision: str | None = None) -> str | None:
    """The commit of a Hub repository that a model on this machine came from, as far as the cache tells.

    Args:
        repository: its id; a folder has no commit.
        revision: what was asked for when it was loaded; None if that is not known, since a loaded model does not
            say: then the commit is told only if no other one is cached.
    """
    if not repository or Path(repository).is_dir():
        return None
    try:
        cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
    except HFValidationError:  # the path of a folder that is gone
        return None
    if revision is not None:
        ref = cache / "refs" / revision
        if ref.is_file():
            return ref.read_text().strip()
        return revision if REGEX_COMMIT_HASH.match(revision) else None
    snapshots = cache / "snapshots"
    commits = [folder.name for folder in snapshots.iterdir()] if snapshots.is_dir() else []
    return commits[0] if len(commits) == 1 else None


def _rope_theta(text: Any) -> float:
    parameters = getattr(text, "rope_parameters", None) or {}
    # By kind of layer, where these differ; None for a kind without rotary positions.
    kinds = (parameters, parameters.get("full_attention"), *parameters.values())
    bases = (kind["rope_theta"] for kind in kinds if isinstance(kind, dict) and kind.get("rope_theta"))
    return float(next(bases, 10000.0))


@dataclass(frozen=True)
class TreeConfig:
    """How draft distributions grow into a token tree; per call by `generate(..., tree_config=TreeConfig(...))`.

    Args:
        nodes: N, nodes per row, the root included, at most 1024; with 1 nothing is drafted. None lets the batch, the
            device and, on a CPU, the worth of each node decide, and drafting pause where it does not pay.
        depth: deepest node; None is the drafter's draft length.
        top_k: K, candidates per depth, at most 1024.
        beam: W, paths that are expanded at each depth where trees grow in tensors, or with n-grams; otherwise the best
            nodes of all paths are found on a CPU without it. At most 1024; 1 with `top_k=1` is a chain.
        lookup: longest copy of earlier text that may be grafted onto the tree (`hf_dart.lookup`); 0 for none.
        node_cost: on a CPU, what verifying one more node in one row costs, relative to a round without drafts.
        verify_costs: in place of `node_cost`, on any device: what a forward of so many tokens costs, relative to one of
            a single token, as rising pairs (tokens, cost) from (1, 1) on; straight lines between them. `hf-dart
            profile` measures them. Empty for none.
        draft_cost: what a draft costs, relative to the same; None is the drafter's own estimate (`Drafter.draft_cost`).
            Where drafts bring less than they cost, they pause for a while and only copied text is verified
            (`generation.pace`).
        selector: ask the drafter's selector, if it has one, which neighbouring tokens go together.
        ngram_weight: how much the drafter's n-gram table counts (`Drafter.ngram`), if it has one: the power that its
            probabilities are raised to.
        scores: how a node's score is put together: "survival", an estimate of its chance, or "paper", DART's
            weighted sum (`hf_dart.trees.scoring`), which cannot tell a node's worth: give `nodes` with it.
        refine: how often the drafter looks at its draft again before the tree grows; 0 takes the first draft, and 31
            looks settle any. Each costs about as much as the draft itself, which pays where the target is much slower.
        calibrate: correct the scores of each depth by what the target accepts, as the call goes on
            (`hf_dart.generation.calibration`).
        shared_noise: when sampling, rank candidates with the noise that the target will draw its tokens
            with. The output is the same either way; more drafts are accepted with it.

    Raises:
        ValueError: a field is out of range.
    """

    nodes: int | None = None
    depth: int | None = None
    top_k: int = 16
    beam: int = 12
    lookup: int = 24
    node_cost: float = 0.03
    verify_costs: tuple[tuple[float, float], ...] = ()
    draft_cost: float | None = None
    selector: bool = True
    ngram_weight: float = 0.5
    scores: str = "survival"
    refine: int = 0
    calibrate: bool = False
    shared_noise: bool = True

    def __post_init__(self) -> None:
        check_types(self, TreeConfig, "TreeConfig.")
        for name, most in (("nodes", MAX_NODES), ("top_k", MAX_NODES), ("beam", MAX_NODES), ("depth", None)):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"TreeConfig.{name} is {value}; give 1 or more.")
            if value is not None and most is not None and value > most:
                raise ValueError(f"TreeConfig.{name} is {value}; give {most} or less.")
        for name in ("lookup", "node_cost", "draft_cost", "ngram_weight", "refine"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"TreeConfig.{name} is {getattr(self, name)}; give 0 or more.")
        if self.refine > MAX_DRAFT_LENGTH:  # a draft is settled from its first token on, one by each pass
            raise ValueError(f"TreeConfig.refine is {self.refine}; give {MAX_DRAFT_LENGTH} or less.")
        if self.verify_costs not in ((), []):
            # Lists, where they come from a JSON file.
            object.__setattr__(self, "verify_costs", checked_points("TreeConfig.verify_costs", self.verify_costs))
        if self.scores not in ("survival", "paper"):
            raise ValueError(f"TreeConfig.scores is {self.scores!r}; give 'survival' or 'paper'.")
        if self.scores == "paper" and self.nodes is None:
            raise ValueError("TreeConfig.scores 'paper' does not say what a node is worth; give nodes, such as 60.")
        if self.scores == "paper" and self.calibrate:
            raise ValueError("TreeConfig.scores 'paper' is no chance that could be calibrated; leave calibrate=False.")

    @classmethod
    def paper(cls) -> TreeConfig:
        """The draft trees of the paper (DART, arXiv 2601.19278, section 3.3), for a drafter with an n-gram table.

        59 nodes and the root, 25 candidates per depth, a beam of 20, its scores, and nothing that it does not have.
        """
        return cls(
            nodes=60, top_k=25, beam=20, lookup=0, selector=False, scores="paper", shared_noise=False
        )

    @classmethod
    def chain(cls, depth: int) -> TreeConfig:
        """One path of `depth` tokens: the width-1 tree."""
        return cls(nodes=depth + 1, depth=depth, top_k=1, beam=1, lookup=0)

    def resolve_nodes(self, batch_size: int, device_type: str) -> int:
        """The most nodes per row in a batch of `batch_size` rows."""
        if self.nodes is not None:
            return self.nodes
        if device_type != "cpu":
            return max(2, min(64, 256 // batch_size))
        return max(2, 32 // batch_size)

    def round_cost(self, batch_size: int, device_type: str, drafted: bool = True) -> RoundCost:
        """What rounds of a batch cost, with a draft or without.

        Where neither is known, an accelerator verifies many nodes in the time of one; `nodes` says to take so many
        anyway.
        """
        once = DRAFT_COST if self.draft_cost is None else self.draft_cost
        draft = once * (1 + self.refine) if drafted else 0.0
        if self.nodes is None and self.verify_costs:
            return RoundCost.measured(draft, self.verify_costs, batch_size)
        counts = self.nodes is None and device_type == "cpu"
        if counts and self.node_cost:
            return RoundCost.linear(draft, self.node_cost, batch_size, ANY_TREE)
        return RoundCost.linear(draft, 0.0, batch_size)
