"""`TrainedDrafter`: a drafter with weights of its own, made for one target: create, load, save and bind it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn, Self

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters import hooks
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.base_config import HeadConfig
from hf_dart.drafters.compatibility import check_compatible, unwrapped
from hf_dart.drafters.cost import relative_cost, sizes
from hf_dart.drafters.draft_vocabulary import LMHeadRows, checked
from hf_dart.drafters.layers import rotate, rotation_at
from hf_dart.drafters.registry import registered
from hf_dart.hub.checkpoint import read_tensors, refused, weight_shapes
from hf_dart.hub.download import ADAPTER_CONFIG, head_config, optional_file, refuse_fields, tensor_names, weight_files
from hf_dart.hub.kinds import Names
from hf_dart.hub.publish import push_folder
from hf_dart.models.devices import TargetModules, device_of, has_rows, host_by_default, rows_of, where_it_runs
from hf_dart.models.features import lent_modules, lm_head_of, table_of, vocabulary_size
from hf_dart.models.tokenizers import vocabulary_hash
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.ngram.table import NgramTable


class TrainedDrafter(Drafter[SlotCache], PreTrainedModel):
    """A drafter whose network reads tokens through its target's embeddings and scores them with its LM head.

    `from_target(model)` makes an untrained one, `from_pretrained(path, target=model)` loads a trained one. Both check
    the fit and let `model.generate(..., assistant=drafter)` work. The target's modules are no part of the network:
    `bind` lends them.

    A subclass makes its modules in `__init__`, which ends with `self.post_init()`, has the training pass as `forward`,
    and keeps what it attends to in a `SlotCache`. It may have an `embed_tokens` and an `lm_head` of its own. Loading
    makes its modules on the meta device: other tensors are to be made with `torch.device("cpu")`.
    """

    config: Any
    described_as: ClassVar[str]
    """Name of its kind in messages."""
    draft_vocabulary: Tensor | None
    """[M] ids of the tokens that its logits are about, ascending; None for all."""
    lm_head: nn.Linear | None
    """[V, H], or [M, H] of the draft vocabulary, where it scores tokens with one of its own; None for the target's."""
    embed_tokens: nn.Embedding | None
    """[V, E] where it reads tokens by a table of its own; None for the target's."""
    reads_rows = False
    """True if tokens are read by the rows of the target's table alone, without the factors of some families."""
    name_or_path: str
    _place: dict[str, Any]
    """Revision and subfolder of its weights, in addition to `name_or_path`."""
    _shared: TargetModules | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tree_config = TreeConfig(**config.tree)
        self.last_stats = None
        self._place = {}
        self.lm_head = self.embed_tokens = None
        self.head_rows = LMHeadRows()
        self.register_buffer("draft_vocabulary", None)

    # ---- the target -----------------------------------------------------------------------------------

    @property
    def shared(self) -> TargetModules:
        """The target's modules; without a target, a `ValueError`."""
        if self._shared is None:
            name = type(self).__name__
            raise ValueError(
                f"This {self.described_as} has no target: load it with {name}.from_pretrained(path, target=model), or "
                "call its bind(model)."
            )
        return self._shared

    def bind(self, target: PreTrainedModel, tokenizer: Any = None) -> Self:
        """Draft for `target` from now on, through its embeddings and LM head.

        Args:
            target: a causal LM.
            tokenizer: of the target, compared with that of the target the drafter was made for. Left out, it is looked
                up in the folder of the target's weights, if on this machine.

        Raises:
            ValueError: the drafter was made for another target, or drafts a token that is none of the target's.
        """
        self._check_compatible(target, tokenizer)
        self._shared = TargetModules(target)
        if self.draft_vocabulary is not None:
            checked(self.draft_vocabulary, self._shared.rows(self.config.vocab_size))
        self._pace_records = None  # costs and acceptance differ for another target
        return self

    def check_target(self, target: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for; its own, deep copies and PEFT wrappers of it are fine.

        Raises:
            ValueError: the drafter has no target, or was made for another one.
        """
        lent = lent_modules(target)
        if not self.shared.fits(lent):
            self._check_compatible(target, None)
            self.shared.take(lent)
            if lent[0] is self.shared.embeddings and type(lent[1]) is nn.Linear:  # the same target with a new LM head
                self.shared.lm_head = lent[1]

    def _check_compatible(self, target: PreTrainedModel, tokenizer: Any) -> None:
        check_compatible(self.config, target, tokenizer)

    def make_tables(self, config: Any) -> None:
        """Make what tokens are read and scored by, as a `HeadConfig` says."""
        size = config.draft_vocab_size
        scored = config.vocab_size if size is None else size
        self.lm_head = nn.Linear(config.hidden_size, scored, bias=False) if config.own_lm_head else None
        own = config.embeddings == "own"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size) if own else None
        self.reads_rows = config.embeddings == "table"
        self.register_buffer("draft_vocabulary", None if size is None else torch.arange(size))

    def reduce_vocabulary(self, tokens: Sequence[int] | Tensor | None) -> Self:
        """Score and draft these tokens only; the output of `generate` stays the same.

        Fewer rows of the target's LM head are read for a draft. A trained drafter may be given any vocabulary, at any
        time; `hf_dart.training.data.frequent.frequent_tokens` counts which one loses least.

        Args:
            tokens: [M] ids; None for the whole vocabulary.

        Raises:
            ValueError: there are none, or some are no ids of the target's; or the drafter has an LM head of its own, or
                is no head (`HeadConfig`).
        """
        if self.lm_head is not None or not isinstance(self.config, HeadConfig):
            own = "all tokens" if self.lm_head is None else "tokens with an LM head of its own"
            raise ValueError(f"This {self.described_as} scores {own}, which cannot be changed; leave them as they are.")
        rows = self.config.vocab_size if self._shared is None else self._shared.rows(self.config.vocab_size)
        ids = None if tokens is None else checked(tokens, rows).to(self.device)
        self.config.draft_vocab_size = None if ids is None else len(ids)
        self.draft_vocabulary = ids
        return self

    @property
    def lm_head_weights(self) -> int:
        """Number of weights of the target's LM head that score a draft."""
        if self.lm_head is not None:
            return 0
        weights = int(self.shared.lm_head.weight.numel())
        if self.draft_vocabulary is None:
            return weights
        return weights * len(self.draft_vocabulary) // table_of(self.shared.embeddings).num_embeddings

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to embeddings [..., E], on the network's device and in its dtype.

        What is floating already is a prompt given as `inputs_embeds`, of the target's width.
        """
        if self.embed_tokens is not None:
            if tokens.is_floating_point():  # nobody knows which tokens these are
                return self.embed_tokens.weight.new_zeros(*tokens.shape[:-1], self.embed_tokens.embedding_dim)
            return self.embed_tokens(tokens.to(self.device))
        if tokens.is_floating_point():
            embeddings = tokens
        elif self.reads_rows:
            embeddings = rows_of(self.shared.embeddings, tokens)
        else:
            embeddings = self.shared.embed(tokens)
        return embeddings.to(device=self.device, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits of the LM head: [..., V], or [..., M] of `draft_vocabulary`."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        lm_head = self.shared.lm_head
        dtype = lm_head.weight.dtype
        hidden = hidden.to(dtype) if dtype.is_floating_point else hidden
        if self.draft_vocabulary is None:
            return where_it_runs(lm_head, hidden)
        return self.head_rows(lm_head, hidden, self.draft_vocabulary)

    @property
    def rows_read(self) -> list[nn.Linear]:
        """The layer of the rows of the target's LM head that `logits` reads, if that is not the LM head as a whole."""
        if self.lm_head is not None or self.draft_vocabulary is None or not has_rows(self.shared.lm_head):
            return []
        return [self.head_rows.layer(self.shared.lm_head, self.draft_vocabulary)]

    def get_input_embeddings(self) -> None:
        """None: tokens are embedded by the target. FSDP asks."""

    # ---- drafting -----------------------------------------------------------------------------------

    @property
    def runs_in(self) -> tuple[torch.device, torch.dtype]:
        return self.device, self.dtype

    @property
    def draft_window(self) -> int | None:
        """Number of last entries that the network attends to, in addition to the first `draft_sink`; None for all."""
        return self.config.draft_window

    @draft_window.setter
    def draft_window(self, window: int | None) -> None:
        self.config.check_window(window, self.draft_sink)
        self.config.draft_window = window

    @property
    def draft_sink(self) -> int:
        """Number of first entries that it attends to, whatever its `draft_window`."""
        return self.config.draft_sink

    @draft_sink.setter
    def draft_sink(self, sink: int) -> None:
        self.config.check_window(self.draft_window, sink)
        self.config.draft_sink = sink

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [B, 1, Q, head_dim] of positions [B, Q]."""
        return rotation_at(positions, self.config, self.dtype)

    def turned_back(self, keys: Tensor, steps: int) -> Tensor:
        """Keys [..., n, head_dim] of positions that many steps earlier."""
        cos, sin = self.rotation(torch.tensor([[steps]], device=keys.device))
        return rotate(keys, (cos, -sin)) / torch.hypot(cos, sin)  # which may be scaled

    @property
    def cache_buffers(self) -> int:
        """Number of buffers that `begin` makes: keys and values of each layer."""
        return 2 * self.config.num_layers

    def begin(self, batch_size: int, capacity: int) -> SlotCache:
        shape = (0, self.config.num_key_value_heads, 0, self.config.head_dim)
        cache = SlotCache(torch.zeros(batch_size, dtype=torch.long, device=self.device), 0)
        cache.reader = self
        cache.capacity = cache.bound(capacity) + self.drafted_entries
        cache.add(torch.empty(shape, dtype=self.dtype, device=self.device), self.cache_buffers)
        return cache

    @property
    def drafted_entries(self) -> int:
        """Entries of a row that a draft adds to the text's."""
        return self.draft_length

    def passes(self, depth: int) -> int:
        """Return the number of passes of the network for a draft of `depth` tokens."""
        return 1

    def draft_cost(self, target: PreTrainedModel, depth: int | None = None) -> float:
        """Cost of a draft relative to a forward of the target, by the weights that both read and how many they are."""
        return relative_cost(target, self.passes(depth or self.draft_length), [*sizes(self), self.lm_head_weights])

    def check_ngram(self, table: NgramTable) -> None:
        table.check_vocabulary(self.config.tokenizer_hash, self.config.vocab_size)

    @property
    def adapted(self) -> bool:
        """True if the drafter has PEFT adapters."""
        return bool(self._hf_peft_config_loaded)

    @property
    def draft_length(self) -> int:
        return self.config.draft_length

    @property
    def reads_embeddings(self) -> bool:
        return self.embed_tokens is None and not self.reads_rows

    @property
    def feature_layers(self) -> list[int]:
        return list(self.config.feature_layers)

    # ---- create, load, save -----------------------------------------------------------------------------

    @classmethod
    @host_by_default
    def from_target(cls, target: PreTrainedModel, *, tokenizer: Any = None, seed: int = 0, **config: Any) -> Self:
        """Return a new, untrained drafter fitted to `target`.

        Args:
            target: the causal LM to draft for.
            tokenizer: its tokenizer, whose hash is then kept in the config and checked at load.
            seed: of the initial weights; the global generators are not moved.
            config: fields of the config that shall differ from `for_target`'s.

        Returns:
            The drafter, attached to `target`.

        Raises:
            TypeError: a field is unknown, or `target` is no model.
            ValueError: a field is out of range, or the target cannot verify trees.
        """
        fields = cls.config_class.for_target(target, **config)
        if tokenizer is not None and "tokenizer_hash" not in config:
            fields.tokenizer_hash = vocabulary_hash(tokenizer, vocabulary_size(target))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed accelerators too
            drafter = cls(fields)
        return attach_to(drafter, target, tokenizer)

    @classmethod
    def _load(cls, path: str, target: PreTrainedModel | None, tokenizer: Any, dtype: Any, **where: Any) -> Self:
        config = where.pop("config", None)
        content, commit = head_config(path, **where)
        if commit is not None:
            where["revision"] = commit  # the weights that go with it, whatever is pushed meanwhile
        if content.get("model_type") == cls.config_class.model_type:
            refuse_fields(path, content, cls.config_class)
            with refused(f"The config.json in {path}", "give files of one save_pretrained"):
                config = cls.config_class.from_dict(content) if config is None else config
            drafter = cls._of_files(path, config, **where)
        elif cls.reads(content, names := partial(tensor_names, path, **where)):
            drafter = cls._of_published(path, content, target, tokenizer, **where)
        else:
            cls._refuse(path, content, names)
        drafter.name_or_path = path
        dtype = drafter.dtype if dtype == "auto" else dtype
        if target is None:
            return drafter.to(dtype=dtype or drafter.dtype).eval()
        return attach_to(drafter, target, tokenizer, dtype)

    @classmethod
    def _of_files(cls, path: str, config: Any, **where: Any) -> Self:
        """Return a drafter of this config with the weights in `path`, bound to no target."""
        if optional_file(path, ADAPTER_CONFIG, **where) is not None:
            raise ValueError(f"{path} holds an adapter ({ADAPTER_CONFIG}); give the folder of the {cls.described_as}.")
        missing = f"{path} holds no weights (model.safetensors); save, push or fetch the head as a whole."
        files = weight_files(path, missing, **where)
        with refused(f"The config.json in {path}", "give files of one save_pretrained"), torch.device("meta"):
            if vars(config).get("num_layers", 1) > len(weight_shapes(files, path)):
                raise ValueError(f"num_layers is {config.num_layers}, and there are fewer weights")
            drafter = cls(config)  # on no device: sizes come from a file
        own = drafter.state_dict()
        left_out = own.keys() & set(drafter._keys_to_ignore_on_save or ())
        shapes = {name: tuple(weight.shape) for name, weight in own.items() if name not in left_out}
        whole = {name: weight.dtype for name, weight in own.items() if not weight.dtype.is_floating_point}
        weights = read_tensors(files, path, shapes, dtypes=whole)
        drafter.load_state_dict({**weights, **{name: torch.empty(own[name].shape) for name in left_out}}, assign=True)
        return drafter

    @classmethod
    def _of_published(
        cls, path: str, content: dict[str, Any], target: PreTrainedModel | None, tokenizer: Any, **where: Any
    ) -> Self:
        """Read a checkpoint in another format, whose config.json (`content`) the class `reads`."""
        raise NotImplementedError

    @classmethod
    def _refuse(cls, path: str, content: dict[str, Any], names: Names) -> NoReturn:
        """Raise the `ValueError` for files that are not those of such a drafter."""
        for kind in registered().values():
            if found := kind.recognises(content, names):
                train = "" if kind.trained_as is None else f", or train it on with --drafter {kind.trained_as}"
                raise ValueError(
                    f"{path} holds {found}, and no {cls.described_as}: load it with {kind.drafter.__name__}{train}."
                )
        said = ", ".join(f"{name} {content[name]!r:.80}" for name in ("model_type", "architectures") if name in content)
        raise ValueError(
            f"{path} holds no config.json of {cls.described_as}s{f' ({said})' if said else ''}; give what "
            "save_pretrained wrote, or a published drafter in a format that docs/drafters.md lists."
        )

    def record_location(self, name: str, **place: Any) -> None:
        """Record that the weights were written to this folder or repository; ignored for an adapter alone."""
        if not self.adapted:
            self.name_or_path, self._place = name, place

    def push_to_hub(self, repo_id: str, *, max_shard_size: int | str = "50GB", **options: Any) -> CommitInfo:
        """Push to the Hub in one commit: weights, config, a card, `custom_generate` and what else is known about it.

        Args:
            repo_id: "name" or "user/name".
            max_shard_size: as for `save_pretrained`.
            options: private, token, revision, create_pr, commit_message, commit_description, card, bench, training,
                base_model, license, language, datasets, tags, as for
                `hf_dart.hub.publish.push_folder`, which also says what is raised.
        """
        name, place = self.name_or_path, self._place
        with TemporaryDirectory() as folder:
            try:
                self.save_pretrained(folder, max_shard_size=max_shard_size)
            finally:
                self.name_or_path, self._place = name, place  # a folder of a temporary name is none to be found in
            commit = push_folder(folder, repo_id, **options)
        if not options.get("create_pr"):
            self.record_location(commit.repo_url.repo_id, revision=options.get("revision"))
        return commit


def attach_to(drafter: Any, target: PreTrainedModel, tokenizer: Any, dtype: torch.dtype | None = None) -> Any:
    """Bind a drafter to `target`, move it to its LM head's device and dtype (or `dtype`), and attach the target."""
    unwrapped(target)
    drafter.bind(target, tokenizer)
    lm_head = lm_head_of(target)
    floating = lm_head.weight.dtype if lm_head.weight.dtype.is_floating_point else target.dtype
    drafter.to(device=device_of(lm_head), dtype=dtype or floating)
    hooks.decoding().attached(target)
    return drafter.eval()
