"""`DartHead`: a draft head that is made for a target, kept in files and attached to the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from hf_dart.drafters.dart.copied import copied_fields, initialise
from hf_dart.drafters.dart.drafting import DraftingModel
from hf_dart.drafters.dart.low_rank import LowRankHead
from hf_dart.drafters.dart.refine import BigramSelector, Editor
from hf_dart.drafters.vocabulary import checked, unused_token
from hf_dart.errors import missing_folder
from hf_dart.hub.download import ADAPTER_CONFIG, HUB_OPTIONS, optional_json
from hf_dart.target.devices import host_by_default

if TYPE_CHECKING:
    from typing import Self

    from hf_dart.drafters.dart.configuration import DartConfig
    from hf_dart.trees.ngram.table import NgramTable

Part = TypeVar("Part", bound=nn.Module)


class DartHead(DraftingModel):
    """A draft head for one target, which lends its token embeddings and its LM head.

    `DartHead.from_target(model)` makes an untrained head, `DartHead.from_pretrained(path, target=model)`
    loads a trained one, also as DART's own code published it (`hf_dart.interop.original_dart`); both check the fit and
    let `model.generate(..., assistant=head)` work.
    """

    _base_fingerprint: list[float] | None = None
    """Of the weights under its adapters."""
    name_or_path: str

    @classmethod
    @host_by_default
    def from_target(
        cls,
        target: Any,
        *,
        tokenizer: Any = None,
        draft_vocabulary: Sequence[int] | Tensor | None = None,
        copy_layer: int | Literal["last"] | None = None,
        seed: int = 0,
        **config: Any,
    ) -> Self:
        """A new, untrained head fitted to `target`.

        Args:
            target: the causal LM to draft for.
            tokenizer: its tokenizer, whose hash is then kept in the config and checked at load.
            draft_vocabulary: [M] the only tokens to be drafted (`reduce_vocabulary`); None for all.
            copy_layer: make the head's layers frozen copies of the target's, from this one (0..L - 1) on, or of its
                last ones; LoRA and the new parts are then to be trained (`hf_dart.drafters.dart.copied`).
            seed: of the initial weights; the global generators are not moved.
            config: fields of [`DartConfig`] that shall differ from the paper's head.

        Raises:
            ValueError: a field is out of range, or the target's layers cannot be copied.
        """
        if tokenizer is not None and config.get("mask_mode") == "peagle" and config.get("mask_token_id") is None:
            config["mask_token_id"] = unused_token(tokenizer, int(target.get_input_embeddings().num_embeddings))
        if copy_layer is not None:
            config = copied_fields(target, copy_layer, **config)
        head = super().from_target(target, tokenizer=tokenizer, seed=seed, **config)
        if copy_layer is not None:
            initialise(head, target)
        return head if draft_vocabulary is None else head.reduce_vocabulary(draft_vocabulary)

    @classmethod
    def _from_published(cls, path: str, content: dict[str, Any], target: Any, tokenizer: Any, **kwargs: Any) -> Self:
        from hf_dart.interop.original_dart import is_original, read_original

        if not is_original(content):
            return super()._from_published(path, content, target, tokenizer, **kwargs)
        dtype = kwargs.pop("dtype", None)
        head = read_original(cls, path, content, target, tokenizer, **kwargs)
        return head._fit(target, tokenizer, dtype=head.dtype if dtype == "auto" else dtype)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        path: str,
        *,
        target: Any = None,
        tokenizer: Any = None,
        ngram: NgramTable | str | Path | None = None,
        base: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """As `PretrainedDrafter.from_pretrained`; `path` may also be that of an adapter, which brings its head with it.

        Args:
            path: what `save_pretrained` wrote, of a head or of its adapter.
            target, tokenizer, ngram, kwargs: as for heads.
            base: the head that the adapter stands on, where it lies elsewhere than in training.

        Raises:
            ValueError: as for heads; or the adapter is damaged, its head is missing, or it is that of another head.
            OSError: there are no such files, or the Hub does not give them.
        """
        where = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        adapter = None if missing_folder(path) else optional_json(path, ADAPTER_CONFIG, **where)
        if adapter is None:
            if base is not None:
                raise ValueError(f"base= is for adapters, and {path} holds none; leave it out.")
            head = super().from_pretrained(path, target=target, tokenizer=tokenizer, ngram=ngram, **kwargs)
            head._place = {name: where.get(name) for name in ("revision", "subfolder")}
            return head
        from hf_dart.drafters import adapters  # PEFT takes a second to import

        head = adapters.head_of(cls, path, base, adapter, target, tokenizer, **kwargs)
        head.load_adapter(path, **where)
        adapters.take_settings(head, path, **where)
        return head.eval()._with_table(ngram)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """As `PreTrainedModel.save_pretrained`; of a head with adapters, the active one alone is saved."""
        super().save_pretrained(save_directory, **kwargs)
        if self.adapted:
            from hf_dart.drafters import adapters

            if kwargs.get("is_main_process", True):
                adapters.save(self, Path(save_directory))
        else:
            self.lies_in(str(Path(save_directory).absolute()))  # adapters can name it from now on

    # ---- adapters -----------------------------------------------------------------------------------

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None, seed: int = 0) -> None:
        """Put a new adapter on the head, which alone is trained and saved from then on.

        Args:
            adapter_config: such as a `peft.LoraConfig`. Without `target_modules` it stands on all projections of the
                layers and on `fc`; without `modules_to_save` the mask slot is trained with it. Heads of copied layers
                also train all their new parts, and the norms.
            adapter_name: "default" if left out.
            seed: of its initial weights; the global generators are not moved.

        Raises:
            ValueError: the head lies in no folder as it is now, has such an adapter already, or lacks the modules that
                are named.
        """
        from hf_dart.drafters import adapters

        adapters.add(self, adapter_config, adapter_name or "default", seed)

    def load_adapter(  # type: ignore[override]
        self, path: str, adapter_name: str = "default", **where: Any
    ) -> None:
        """Put a trained adapter on the head beside those that it has, and let it work.

        Args:
            path: a folder or a Hub repository.
            adapter_name: what `set_adapter` will call it.
            where: revision, token, ... as for `from_pretrained`.

        Raises:
            ValueError: there is no adapter, it is damaged, or it was trained on another head; the head is as it was.
        """
        from hf_dart.drafters import adapters

        adapters.load(self, path, adapter_name, **where)

    def reload_adapter(self, folder: str) -> None:
        """Give the active adapter the weights of one of its checkpoints.

        Raises:
            ValueError: they are damaged, or those of an adapter of another shape.
        """
        from hf_dart.drafters import adapters

        adapters.reread(self, folder)

    def set_adapter(self, adapter_name: str) -> None:  # type: ignore[override]
        """Let this adapter work, at any time, between calls and between turns.

        A draft cache that another adapter left stays in use: its keys are nearly right, and nothing but the number of
        accepted drafts depends on them.

        Raises:
            ValueError: the head has no such adapter.
        """
        from hf_dart.drafters import adapters

        adapters.activate(self, adapter_name)

    def disable_adapters(self) -> None:
        """Draft as the head without adapters."""
        from hf_dart.drafters import adapters

        adapters.enable(self, False)

    def enable_adapters(self) -> None:
        """Undo `disable_adapters`."""
        from hf_dart.drafters import adapters

        adapters.enable(self, True)

    def merge_adapter(self) -> Self:
        """Fold the active adapter into the weights and drop the others: a head as if trained whole.

        Raises:
            ValueError: there is none.
        """
        from hf_dart.drafters import adapters

        if not self.adapted:
            raise ValueError("This head has no adapter to merge; load one with head.load_adapter(path).")
        adapters.unwrap(self, self.active_adapters()[0])
        self.name_or_path = ""  # it is no longer the head that lies there
        return self.adopt_layers()

    # ---- other parts --------------------------------------------------------------------------------

    def add_selector(self, rank: int, seed: int = 0, kind: str = "bigram") -> Self:
        """Give a trained head a bigram selector (`hf_dart.drafters.dart.refine`); untrained, it changes no score.

        Args:
            rank: its width.
            seed: of its initial weights; the global generators are not moved.
            kind: "bigram" or "markov".
        """
        self.config.selector_rank, self.config.selector_kind = rank, kind
        self.selector = self._new(BigramSelector, seed)
        return self

    def add_editor(self, seed: int = 0) -> Self:
        """Let a trained head run again on its own draft (`refine.Editor`); untrained, that changes nothing.

        Args:
            seed: of its initial weights; the global generators are not moved.

        Raises:
            ValueError: the head's logits are not shifted.
        """
        if not self.config.shift_logits:
            raise ValueError("Edit passes go with shifted logits; train a head with shift_logits=True for them.")
        self.config.editor = True
        self.editor = self._new(Editor, seed)
        return self

    def _new(self, part: Callable[[DartConfig], Part], seed: int) -> Part:
        """A new part of the head, as its config says."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made = part(self.config)
            made.apply(self._init_weights)
        return made.to(device=self.device, dtype=self.dtype)

    def reduce_vocabulary(self, tokens: Sequence[int] | Tensor | None) -> Self:
        """Let the head score and draft these tokens only; the output of `generate` stays the same.

        Fewer rows of the target's LM head are read for a draft. A trained head may be given any vocabulary, at any
        time; `hf_dart.drafters.vocabulary.frequent_tokens` counts which one loses least.

        Args:
            tokens: [M] ids; None for the whole vocabulary.

        Raises:
            ValueError: there are none, or some are no ids of the target's; or the head has an LM head of its own.
        """
        if self.lm_head is not None:
            raise ValueError("This head scores tokens with an LM head of its own, whose vocabulary cannot be changed.")
        rows = self.config.vocab_size if self._shared is None else self._shared.rows(self.config.vocab_size)
        ids = None if tokens is None else checked(tokens, rows).to(self.device)
        self.config.draft_vocab_size = None if ids is None else len(ids)
        self.draft_vocabulary = ids
        return self

    def reduce_rank(self, rank: int | None) -> Self:
        """Let drafts be scored by an LM head of low rank (`hf_dart.drafters.dart.low_rank`); the output stays the same.

        Less of the target's LM head is read for a draft, and drafts are a little worse. Nothing is trained or saved; it
        goes with a draft vocabulary, and only unquantized LM heads are taken apart.

        Args:
            rank: r, below the width H of the LM head to gain something; None for the LM head as it is.

        Raises:
            ValueError: the rank is out of range.
        """
        if rank is not None and not 1 <= rank <= self.config.hidden_size:
            raise ValueError(f"rank is {rank}; give 1 to {self.config.hidden_size}, or None for the whole LM head.")
        self.draft_rank, self._low_rank = rank, LowRankHead()
        return self
