"""`drafter.push_to_hub`: transformers' own, with a card."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo


class PushWithCard:
    """In front of `PreTrainedModel`, whose `push_to_hub` would write an empty card."""

    save_pretrained: Any
    keeping_name: Any
    lies_in: Any

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
        **known: Any,
    ) -> CommitInfo:
        """As `PreTrainedModel.push_to_hub`, with a card, `custom_generate` and what else is `known` about it.

        Args:
            known: card, bench, training, base_model, bench_dataset, license, language, datasets, as for
                `hf_dart.hub.push.push_folder`, which also says what is raised.
        """
        from hf_dart.hub.push import push_folder

        with TemporaryDirectory() as folder:
            with self.keeping_name():
                self.save_pretrained(folder, max_shard_size=max_shard_size)
            commit = push_folder(
                folder,
                repo_id,
                commit_message=commit_message,
                commit_description=commit_description,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                tags=tuple(tags or ()),
                **known,
            )
        if not create_pr:
            self.lies_in(commit.repo_url.repo_id, revision=revision)
        return commit
