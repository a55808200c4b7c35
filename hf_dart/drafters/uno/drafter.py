"""`UnoDrafter`: the target drafts for itself, through a LoRA, a block of masked tokens in one pass.

The last token of the text and d - 1 masked tokens after it are run over the keys and values that the target keeps of
the text; each predicts the token after it. The LoRA works on the masked ones alone (gated LoRA, arXiv 2507.11851), so
that the first token of a draft is the target's own choice. What they leave is dropped, and the target verifies the tree
that grows of them. There is no second model, no second cache, and the prompt is read once.

The LoRA stands on a twin of the target: other modules with the very same weights. The target itself has no adapter at
any time, so that nothing has to be switched off before it verifies, or put back after a call that broke off, and calls
in other threads see nothing of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import ref

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.cache.slots import SlotSpec
from hf_dart.drafters import adapters
from hf_dart.drafters.cost import model_sizes, relative_cost, sizes
from hf_dart.drafters.proposal import Proposal, Verified
from hf_dart.drafters.registry import register
from hf_dart.drafters.trained import TrainedDrafter, attach_to
from hf_dart.drafters.uno.configuration import UnoConfig
from hf_dart.drafters.vocabulary import unused_token
from hf_dart.hub import card_texts
from hf_dart.hub.download import ADAPTER_CONFIG, HUB_OPTIONS, checkpoint_config, optional_json, refuse_fields
from hf_dart.interop.lora_config import lora_of
from hf_dart.models.attention import for_trees
from hf_dart.models.devices import as_dtype
from hf_dart.models.features import features_request, gather_features, layer_count
from hf_dart.models.positions import position_limit
from hf_dart.models.verify import Verifier
from hf_dart.trees.ngram.table import NgramTable
from hf_dart.trees.tree import DraftTree

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"

# Where the LoRA works among the Q entries of the pass that is running, [1, Q, 1]; None outside of any.
_gate: ContextVar[Tensor | None] = ContextVar("_gate", default=None)


def _gated(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Zero what a LoRA adds where it does not apply; some modules also run over the target's cached text."""
    gate = _gate.get()
    if gate is None:
        return output
    gate = nn.functional.pad(gate, (0, 0, output.shape[1] - gate.shape[1], 0))
    return output * gate.to(device=output.device, dtype=output.dtype)


@contextmanager
def _working(gate: Tensor) -> Iterator[None]:
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


class Loan(SlotCache):
    """The state of one call, which keeps nothing itself: the target's cache is lent."""

    verify: Verifier | None = None
    """Runs trees over it through the twin; None before it is lent."""


class _Twin:
    """Keeps a model out of the modules of the one that holds it: its weights are the target's."""

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel) -> None:
        self.model, self.target = model, ref(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copied drafter is bound again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@register("uno", config=UnoConfig, trainer="hf_dart.training.trainers.uno:UnoTrainer", card=card_texts.UNO)
class UnoDrafter(TrainedDrafter):
    """A LoRA by which its target drafts for itself (gated LoRA, arXiv 2507.11851), as `assistant=`.

    `UnoDrafter.from_target(model, tokenizer=tokenizer)` makes an untrained one, `UnoDrafter.from_pretrained(path,
    target=model)` loads a trained one: its folder holds the adapter alone, in PEFT's format.
    """

    config: UnoConfig
    described_as: ClassVar[str] = "self-drafting LoRA"
    base_model_prefix = "uno"

    def __init__(self, config: UnoConfig) -> None:
        super().__init__(config)
        # The LoRA's weights, by where they stand in the twin.
        self.lora = nn.ModuleDict()
        self._held: _Twin | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """PEFT does it."""

    @property
    def engine(self) -> None:
        """None: captured forwards keep the text elsewhere."""
        return None

    @engine.setter
    def engine(self, engine: Any) -> None:
        if engine is not None:
            raise ValueError(
                "A self-drafting LoRA drafts over the target's own cache, and captured rounds keep the text elsewhere; "
                "call generate without hf_dart.compile."
            )

    # ---- the twin -----------------------------------------------------------------------------------

    @property
    def twin(self) -> PreTrainedModel:
        """The target's twin, with the LoRA.

        Raises:
            ValueError: the drafter has no target.
        """
        if self._held is None:
            self.shared  # noqa: B018  # says how to get one
            raise ValueError("This copy of a drafter has no target; call its bind(model).")
        return self._held.model

    def bind(self, target: PreTrainedModel, tokenizer: Any = None) -> Self:
        super().bind(target, tokenizer)
        if self._held is None or self._held.target() is not target:
            learned = dict(self.lora.named_parameters())
            self._held = _Twin(self._made(target), target)
            if learned:  # for another target before
                like = next(iter(learned.values()))
                self.to(device=like.device, dtype=like.dtype).lora.load_state_dict(learned)
        return self

    def _made(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return a twin of `target` with a new LoRA, whose modules become this drafter's."""
        if any(isinstance(module, BaseTunerLayer) for module in target.modules()):
            raise ValueError("This target has an adapter of its own; merge it into the model first.")
        weights = list(chain(target.parameters(), target.buffers()))
        twin = copy.deepcopy(target, {id(weight): weight for weight in weights})
        vars(twin).pop("generate", None)  # it is never generated with
        self.config.target_modules = self._stands_on(twin)
        with _as_they_were(weights), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            inject_adapter_in_model(self._lora_config(), twin, _NAME)
        self.lora = nn.ModuleDict()
        for name, module in twin.named_modules():
            if isinstance(module, LoraLayer):
                parts = {"A": module.lora_A[_NAME], "B": module.lora_B[_NAME]}
                parts["B"].register_forward_hook(_gated)
                self.lora[name.replace(".", "__")] = nn.ModuleDict(parts)
        return twin.eval()

    def _stands_on(self, twin: PreTrainedModel) -> list[str]:
        """Return the modules that the LoRA stands on, by the last part of their names."""
        linears = [name for name, module in twin.named_modules() if isinstance(module, nn.Linear)]
        found = {name.rpartition(".")[2] for name in linears}
        experts = any("expert" in name for name, _ in twin.named_modules())
        usual = _ATTENTION if experts else (*_ATTENTION, *_MLP)  # what routes to experts learns nothing from so few
        wanted = set(self.config.target_modules) or {name for name in usual if name in found}
        if missing := sorted(wanted - found) or (["q_proj"] if not wanted else []):
            raise ValueError(
                f"This target has no linear module {missing[0]!r} for LoRA to stand on; name those it has with "
                "target_modules."
            )
        return sorted(wanted)

    def _lora_config(self) -> LoraConfig:
        alpha = 2 * self.config.rank if self.config.alpha is None else self.config.alpha
        return LoraConfig(r=self.config.rank, lora_alpha=alpha, target_modules=list(self.config.target_modules))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = type(self)(copy.deepcopy(self.config))
        target = None if self._held is None else self._held.target()
        if target is not None:
            other.bind(target)
            other.load_state_dict(self.state_dict())
            other.to(device=self.device, dtype=self.dtype)
        other.tree_config, other.ngram = self.tree_config, self.ngram
        return other.train(self.training)

    def forward(
        self,
        tokens: Tensor,  # [B, Q]
        positions: Tensor,  # [B, Q]
        attention_mask: Any,  # additive, [B, 1, Q, T + Q], or one for each kind of layer
        cache: Any,  # the target's keys and values of T tokens
    ) -> Tensor:
        """Run the training pass: states [B, Q, H] of masked tokens of many blocks, over a text that the target read."""
        twin = self.twin
        last = [layer_count(twin)]
        with _working(torch.ones(1, tokens.shape[1], 1)), for_trees(twin):
            outputs = twin(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=True,
                **features_request(last),
            )
        return gather_features(outputs, last, tokens)

    # ---- drafting -----------------------------------------------------------------------------------

    def draft_cost(self, target: PreTrainedModel, depth: int | None = None) -> float:
        return relative_cost(target, 1, model_sizes(target) + sizes(self.lora))

    @property
    def slot_spec(self) -> SlotSpec:
        """Empty spec: this drafter has no cache of its own."""
        return SlotSpec(0, 0, self.dtype, self.device)

    def begin(self, batch_size: int, capacity: int) -> Loan:
        return Loan.begin(self.slot_spec, 0, batch_size, capacity)

    def lend(self, state: SlotCache, verify: Verifier) -> None:
        assert isinstance(state, Loan)
        state.verify = Verifier(self.twin, verify.cache, verify.kinds, [], shift=verify.shift)

    def extend(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        """Nothing is taken in: the target keeps the text."""

    def resume(self, state: SlotCache, pending: list[Verified], lengths: Tensor) -> bool:
        return True

    def propose(
        self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        """Draft after each row's last token, over the target's own cache, which is left as it was."""
        verify = state.verify if isinstance(state, Loan) else None
        if verify is None:
            raise ValueError(
                "A self-drafting LoRA drafts over the target's own cache, which is not lent here; call "
                "model.generate(..., assistant=drafter)."
            )
        cache: Any = verify.cache
        ends = (counts - 1).clamp(min=0).to(next_tokens.device)
        roots = next_tokens.gather(1, ends[:, None])  # [B, 1]
        masked = roots.new_full((len(roots), (depth or self.draft_length) - 1), self.config.mask_token_id)
        block = DraftTree.chain(torch.cat([roots, masked], dim=1))
        cache.prepare(block.size)
        # No entry stands beyond the target's positions; what is drafted there is not verified either.
        last = max(position_limit(self.twin)[0] - block.size + 1, 0)
        try:
            with _working(torch.arange(block.size)[None, :, None] > 0):
                logits, _ = verify.run(block, cache.lengths.clamp(max=last).to(block.tokens.device))
        finally:
            cache.commit(torch.zeros(len(roots), 1, dtype=torch.long), [0] * len(roots))
        return Proposal(logits, logits)

    # ---- files --------------------------------------------------------------------------------------

    @property
    def adapted(self) -> bool:
        """True: this drafter is an adapter, and nothing else."""
        return True

    @property
    def peft_config(self) -> dict[str, LoraConfig]:
        """PEFT's config of the LoRA, by its name."""
        return {_NAME: self._lora_config()}

    def active_adapters(self) -> list[str]:
        return [_NAME]

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write the adapter in PEFT's format to a folder, and config.json beside it."""
        if not kwargs.get("is_main_process", True):
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        config = self._lora_config()
        config.base_model_name_or_path, config.inference_mode = self.config.target_name, True
        config.save_pretrained(str(folder))
        state = get_peft_model_state_dict(self.twin, adapter_name=_NAME, save_embedding_layers=False)
        named = {f"base_model.model.{name}": weight.detach().cpu().contiguous() for name, weight in state.items()}
        save_file(named, folder / _WEIGHTS, metadata={"format": "pt"})

    @classmethod
    def from_target(cls, target: PreTrainedModel, *, tokenizer: Any = None, seed: int = 0, **config: Any) -> Self:
        """Return a new, untrained LoRA on `target`.

        Args:
            target: the causal LM.
            tokenizer: its tokenizer, to find a token for masks with.
            seed: not looked at: new LoRA changes nothing yet.
            config: fields of [`UnoConfig`] that shall differ.

        Raises:
            ValueError: without a tokenizer or `mask_token_id`, no token is known that no text contains.
        """
        if config.get("mask_token_id") is None:
            if tokenizer is None:
                raise ValueError("Masked tokens need a token that no text contains; give tokenizer= or mask_token_id=.")
            config["mask_token_id"] = unused_token(tokenizer, int(target.get_input_embeddings().num_embeddings))
        return super().from_target(target, tokenizer=tokenizer, seed=seed, **config)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        target: PreTrainedModel | None = None,
        tokenizer: Any = None,
        ngram: NgramTable | str | Path | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load the adapter in a folder or Hub repository, on its target.

        Args:
            path: what `save_pretrained` wrote.
            target, tokenizer, ngram: as for other drafters.
            kwargs: dtype of the LoRA's weights; revision, token, ...

        Raises:
            ValueError: adapter and target do not fit together, or the files are not those of such an adapter.
            OSError: there are no such files, or the Hub does not give them.
        """
        where = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        content = checkpoint_config(path, **where)
        if content.get("model_type") != UnoConfig.model_type:
            return cls._from_published(path, content, target, tokenizer, **kwargs)
        if target is None:
            raise ValueError(f"{path} is an adapter of its target; pass target=model.")
        refuse_fields(path, content, UnoConfig)
        listed = optional_json(path, ADAPTER_CONFIG, **where)
        if listed is None:
            raise ValueError(f"{path} holds no {ADAPTER_CONFIG}; fetch the adapter as a whole.")
        state = adapters.read_state(path, **where)
        try:
            drafter = cls(UnoConfig.from_dict(content))
        except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
            words = " ".join(str(error).split())
            raise ValueError(f"The config.json in {path} describes no {cls.described_as} ({words}).") from error
        drafter._check_compatible(target, tokenizer)
        dtype = as_dtype(kwargs.get("dtype"))
        if dtype == "auto":
            dtype = next(iter(state.values())).dtype
        drafter._check(path, target, listed, state)
        attach_to(drafter, target, tokenizer, dtype=dtype)
        adapters.read(drafter.twin, state, path, _NAME)
        return drafter._with_table(ngram)

    def _check(self, path: str, target: PreTrainedModel, listed: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Refuse an adapter_config.json that is not that of this config, before anything is made by it."""
        lora, own = lora_of(target, path, listed, state), self._lora_config()
        for name in ("r", "lora_alpha", "target_modules"):
            theirs, ours = (getattr(one, name) for one in (lora, own))
            theirs, ours = (sorted(one) if isinstance(one, (set, list)) else one for one in (theirs, ours))
            if theirs != ours:
                raise ValueError(
                    f"The {ADAPTER_CONFIG} in {path} has {name}={theirs!r} and its config.json {ours!r}; both files "
                    "have to come from one save_pretrained."
                )

    def reload_adapter(self, path: str) -> None:
        """Fill the LoRA from a checkpoint of it."""
        adapters.read(self.twin, adapters.read_state(path), path, _NAME)


@contextmanager
def _as_they_were(weights: list[Tensor]) -> Iterator[None]:
    """PEFT takes gradients from all weights but its own; these stay as they are."""
    learned = [weight for weight in weights if weight.requires_grad]
    try:
        yield
    finally:
        for weight in learned:
            weight.requires_grad_(True)
