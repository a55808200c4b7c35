"""`AdaptableHead`: a head that may carry LoRA adapters: adding, loading, choosing, saving and merging them.

`hf_dart.drafters.adapters` does the work; it imports PEFT, and so is imported once there is an adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from hf_dart.drafters.bound import attach_to
from hf_dart.drafters.dart.copied import initialise
from hf_dart.drafters.pretrained import PretrainedDrafter
from hf_dart.errors import missing_folder
from hf_dart.hub.download import ADAPTER_CONFIG, HUB_OPTIONS, optional_file, optional_json, refuse_fields
from hf_dart.models.devices import as_dtype
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.ngram.table import NgramTable

# Fields of the config that tell what an adapter was made for, and are no matter of its head's weights.
_SETTINGS = ("tree", "enable_thinking", "chat_template_hash")


class AdaptableHead(PretrainedDrafter):
    """A head on which adapters stand; without one it is any other drafter."""

    _base_fingerprint: list[float] | None = None
    """Of the weights under its adapters."""
    name_or_path: str

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        target: PreTrainedModel | None = None,
        tokenizer: Any = None,
        ngram: NgramTable | str | Path | None = None,
        base: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a head; `path` may also be that of an adapter, which brings its head with it.

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

        head = cls._base_of_adapter(path, base, adapter, target, tokenizer, **kwargs)
        head.load_adapter(path, **where)
        head._take_settings(path, **where)
        return head.eval()._with_table(ngram)

    @classmethod
    def _base_of_adapter(
        cls,
        path: str,
        base: str | None,
        adapter: dict[str, Any],
        target: PreTrainedModel | None,
        tokenizer: Any,
        **kwargs: Any,
    ) -> Self:
        """The head that the adapter in `path` stands on: in `base`, else where its adapter_config.json says."""
        where = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        content = optional_json(path, "config.json", **where) or {}
        refuse_fields(path, content, cls.config_class)
        if content.get("copied_layer") is not None:
            if target is None:
                raise ValueError(f"The head of {path} stands on layers of its target; pass target=.")
            with torch.random.fork_rng(devices=[]):
                head = cls(cls.config_class.from_dict(content))
            dtype = as_dtype(kwargs.get("dtype"))
            attach_to(head, target, tokenizer, dtype=None if dtype == "auto" else dtype)
            initialise(head, target)
            return head
        base, revision = (base, None) if base else (adapter.get("base_model_name_or_path"), adapter.get("revision"))
        if not base or not isinstance(base, str):
            raise ValueError(
                f"The adapter in {path} does not say which head it stands on; pass base=, the head's path (adapters "
                "of a target, which draft for it, are read as `hf-dart train --drafter uno` writes them)."
            )
        where = {name: value for name, value in where.items() if name not in ("revision", "subfolder")}  # the adapter's
        if missing_folder(base):
            raise ValueError(f"The adapter in {path} stands on the head in {base}, which is not there; pass base=.")
        where |= {"revision": revision} if isinstance(revision, str) else {}
        if optional_file(base, ADAPTER_CONFIG, **where) is not None:
            raise ValueError(f"The adapter in {path} stands on {base}, an adapter itself; pass base=, the head's path.")
        return cls.from_pretrained(base, target=target, tokenizer=tokenizer, **where, **kwargs)

    def _take_settings(self, path: str, **where: Any) -> None:
        """Draft what the adapter in `path` was trained to draft, and as its config.json says.

        Raises:
            ValueError: the file describes no head.
        """
        from hf_dart.drafters import adapters

        content = optional_json(path, "config.json", **where)
        if content is None:
            return  # PEFT alone wrote the adapter
        refuse_fields(path, content, type(self.config))
        try:
            config = type(self.config).from_dict({**self.config.to_dict(), **content})
            self.tree_config = TreeConfig(**config.tree)
        except (ValueError, *adapters.NO_ADAPTER) as error:
            words = " ".join(str(error).split()).rstrip(".")
            raise ValueError(f"The config.json in {path} describes no DART head ({words}); fetch it again.") from error
        for name in _SETTINGS:
            setattr(self.config, name, getattr(config, name))
        if config.draft_vocab_size is not None:
            self.reduce_vocabulary(adapters.read_state(path, adapters.VOCABULARY, **where)["draft_vocabulary"])

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write weights and config.json to a folder; of a head with adapters, the active one alone is saved."""
        super().save_pretrained(save_directory, **kwargs)
        if self.adapted:
            from hf_dart.drafters import adapters

            if kwargs.get("is_main_process", True):
                adapters.save(self, Path(save_directory))
        else:
            self.record_location(str(Path(save_directory).absolute()))  # adapters can name it from now on

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None, seed: int = 0) -> None:
        """Put a new adapter on the head, which alone is trained and saved from then on.

        Args:
            adapter_config: such as a `peft.LoraConfig`. Without `target_modules` it stands on all projections of the
                layers and on `fc`; without `modules_to_save` the mask slot is trained with it. Heads of copied layers
                also train all their new parts, and the norms.
            adapter_name: "default" if left out.
            seed: of its initial weights; the global generators are not moved.

        Raises:
            TypeError: `adapter_config` is none of PEFT's.
            ValueError: the head lies in no folder as it is now, has such an adapter already, or lacks the modules that
                are named.
        """
        from hf_dart.drafters import adapters

        adapters.add(self, adapter_config, adapter_name or "default", seed)

    def load_adapter(
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

    def set_adapter(self, adapter_name: str) -> None:
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
