"""Published formats, held against the code that they come from, which hf_dart does not depend on.

    python examples/experiments/surveys/originals.py write FOLDER        # in hf_dart's environment
    python examples/experiments/surveys/originals.py compare FOLDER NAME # in one of the original's, such as a venv

The first makes tiny random checkpoints in float32 and what hf_dart computes of them: the log-probabilities of each
draft token after every beginning of a text, along the text itself. The second loads the same checkpoints as their own
code does and prints, per checkpoint, the largest difference; it exits with 1 if one is above 1e-4. NAME is

    speculators   `pip install speculators==0.9.0`: its EAGLE-3, P-EAGLE, DFlash, DFlash2, DSpark and MTP, and P-EAGLE
                  heads of ours as `hf-dart convert --to vllm` writes them
    dflash        `pip install dflash==0.1.0 torch transformers`: z-lab's DFlash and DFlash2
    jetspec       hao-ai-lab/JetSpec, whose clone is on PYTHONPATH, with torch and transformers: its draft head
    eagle         SafeAILab/EAGLE, whose clone is on PYTHONPATH; `pip install torch transformers`: its EAGLE-1, 2 and 3
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TOLERANCE = 1e-4
DEPTH = 4
WRITTEN: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3, "draft_vocabulary": list(range(1, 48, 2))},
}
"""Heads of ours that `hf-dart convert --to vllm` writes."""


@torch.no_grad()
def write(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
    from support.eagle3 import JOINED, PEAGLE, VARIANTS, variant
    from support.heads import peagle_head
    from support.tiny import prompts, tiny_target

    from hf_dart import load_drafter
    from hf_dart.interop.vllm import write_vllm
    from hf_dart.models.verify import features_request, gather_features

    target = tiny_target("llama", dtype=torch.float32, num_hidden_layers=8)
    target.save_pretrained(folder / "target")
    write_relatives(folder, target)
    write_mtp(folder / "mtp" / "Qwen3")
    tokens = prompts([16], vocabulary=40)["input_ids"]
    for name in (*VARIANTS, *PEAGLE, *WRITTEN, *JOINED):
        kind = "written" if name in WRITTEN else "peagle" if name in PEAGLE else "eagle3"
        kind = "joined" if name in JOINED else kind
        place = folder / kind / name
        if name in WRITTEN:
            drafter: Any = peagle_head(target, **WRITTEN[name])
            write_vllm(drafter, place, target=target, verifier=str(folder / "target"))
        else:
            drafter = load_drafter(variant(place, target, name, dtype=torch.float32), target=target)
            drafter.beam = 1
        config = json.loads((place / "config.json").read_text())
        taps = config.get("eagle_aux_hidden_state_layer_ids") or drafter.feature_layers
        outputs = target(tokens[:, :-1], **features_request(list(range(9))))
        features = gather_features(outputs, drafter.feature_layers, tokens[:, :-1])
        allowed = torch.arange(48) if drafter.draft_vocabulary is None else drafter.draft_vocabulary
        drafts = [after(drafter, features, tokens[0], text, allowed) for text in range(1, tokens.shape[1] - DEPTH)]
        keep(place, target, gather_features(outputs, taps, tokens[:, :-1])[0], tokens[0, 1:], drafts)


def keep(place: Path, target: Any, features: Tensor, tokens: Tensor, drafts: list[Tensor]) -> None:
    """Write what an original is given of a target, and what hf_dart computes of it."""
    given = {
        "features": features,
        "tokens": tokens,
        "embeddings": target.get_input_embeddings().weight,
        "lm_head": target.lm_head.weight,
        "logits": torch.stack(drafts),
    }
    save_file({name: one.detach().clone().contiguous() for name, one in given.items()}, place / "reference.safetensors")


def write_relatives(folder: Path, target: Any) -> None:
    from support.relatives import VARIANTS, relative
    from support.tiny import prompts

    from hf_dart import load_drafter
    from hf_dart.models.verify import features_request, gather_features

    tokens = prompts([16], vocabulary=40)["input_ids"]
    for name in VARIANTS:
        place = folder / "relatives" / name
        drafter = load_drafter(relative(place, target, name, dtype=torch.float32), target=target)
        outputs = target(tokens, **features_request(drafter.feature_layers))
        features = gather_features(outputs, drafter.feature_layers, tokens)
        drafts = [pairs_after(drafter, features, tokens[0], text) for text in range(1, tokens.shape[1] - 5)]
        keep(place, target, features[0], tokens[0], drafts)


def write_mtp(place: Path) -> None:
    """A head that its code saves as `mtp_layers.0.*`, and the first token that it drafts after every text."""
    from support.tiny import prompts, tiny_target

    from hf_dart import load_drafter

    target = tiny_target("qwen3", dtype=torch.float32)
    width, layer = target.config.hidden_size, target.model.layers[0].state_dict()
    shapes = {name: tuple(one.shape) for name, one in layer.items()}
    shapes |= dict.fromkeys((f"{part}_layernorm.weight" for part in ("hidden", "token", "final")), (width,))
    shapes["input_proj.weight"] = (width, 2 * width)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"mtp_layers.0.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "someone/target"},
        },
        "transformer_layer_config": target.config.to_diff_dict(),
    }
    (place / "config.json").write_text(json.dumps(config, default=str))
    drafter = load_drafter(str(place), target=target)
    tokens = prompts([16], vocabulary=40)["input_ids"]
    states = target(tokens, output_hidden_states=True).hidden_states[-1]
    drafts = []
    for text in range(1, tokens.shape[1] - 1):
        last = (states[:, :text], tokens[:, 1 : text + 1], torch.tensor([text]))
        drafts.append(drafter.log_chances(drafter.read_last(drafter.begin(1, 4), *last))[0])
    keep(place, target, states[0], tokens[0], drafts)


def pairs_after(drafter: Any, features: Tensor, tokens: Tensor, text: int) -> Tensor:
    """Log-probabilities [d, M] after `text` positions, each after the token of the text in front of it.

    Nan where the draft vocabulary lacks that token.
    """
    last = (features[:, :text], tokens[None, 1 : text + 1], torch.tensor([text]))
    proposal = drafter.propose(drafter.begin(1, 4), *last)
    depth, width = proposal.logits.shape[1:]
    everything = torch.arange(width) if proposal.vocabulary is None else proposal.vocabulary
    scores = proposal.logits.log_softmax(-1)
    table = drafter.transitions(proposal, tokens[text, None], everything.expand(1, depth, -1), scores)
    if table is None:
        return scores[0]
    rows = [table[0, 0, 0]]
    for level in range(1, depth):
        place = (everything == tokens[text + level]).nonzero()
        rows.append(table[0, level, int(place[0])] if len(place) else torch.full((width,), torch.nan))
    return torch.stack(rows)


def after(drafter: Any, features: Tensor, tokens: Tensor, text: int, allowed: Tensor) -> Tensor:
    """Log-probabilities [DEPTH, M] after `text` positions, drafted along the tokens that follow in the text."""
    path = tokens[text + 1 : text + DEPTH]

    def along(level: int, logits: Tensor) -> Tensor:
        return logits if level >= len(path) else logits.index_fill(-1, path[level], 1e4)

    last = (features[:, :text], tokens[None, 1 : text + 1], torch.tensor([text]))
    proposal = drafter.propose_ranked(drafter.begin(1, 4), *last, DEPTH, along)
    if not hasattr(proposal, "conditional"):
        return proposal.logits[0].log_softmax(-1)
    following = [proposal.logits[0, 0], *proposal.conditional[0, :, 0]]
    return torch.stack(following)[:, allowed]


# ---- the originals -----------------------------------------------------------------------------------------


def speculators_model(folder: Path, reference: dict[str, Tensor]) -> Any:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(folder.parents[1] / "target")
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    # Its own load_verifier_weights leaves embeddings alone that from_pretrained has filled in for the missing ones.
    if "embed_tokens.weight" not in load_file(folder / "model.safetensors"):
        model.embed_tokens.load_state_dict({"weight": reference["embeddings"]})
    return model


def speculators_eagle3(folder: Path, reference: dict[str, Tensor]) -> Tensor:
    model = speculators_model(folder, reference)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    length = len(reference["tokens"])
    model(
        hidden_states=reference["features"][None],
        input_ids=reference["tokens"][None],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        ttt_steps=DEPTH,
    )
    return torch.stack(seen, dim=1)  # [T, DEPTH, M]


def speculators_peagle(folder: Path, reference: dict[str, Tensor]) -> Tensor:
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    model = speculators_model(folder, reference)
    # Its forward draws by chance which drafts it looks at, and keeps their logits to itself.
    drawn: list[tuple[Tensor, Tensor]] = []
    seen: list[Tensor] = []
    draw = core.generate_cod_sample_indices

    def drawing(**options: Any) -> tuple[Tensor, Tensor]:
        drawn.append(draw(**options))
        return drawn[-1]

    core.generate_cod_sample_indices = drawing
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    length = len(reference["tokens"])
    try:
        model(
            hidden_states=reference["features"][None],
            input_ids=reference["tokens"][None],
            document_ids=torch.zeros(1, length, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, length, model.config.transformer_layer_config.hidden_size),
            loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=DEPTH,
            down_sample_ratio=1.0,
            down_sample_ratio_min=1.0,
        )
    finally:
        core.generate_cod_sample_indices = draw
    anchors, depth = drawn[0]
    found = torch.full((length, DEPTH, seen[0].shape[-1]), torch.nan)  # of what was not drawn
    inside = anchors >= 0  # it also draws drafts in front of the text, which see nothing
    found[anchors[inside], depth[inside]] = seen[0][inside]
    return found


def safeailab(folder: Path, reference: dict[str, Tensor]) -> Tensor:
    joined = folder.parent.name == "joined"
    kind = import_module("eagle.model.cnets1" if joined else "eagle.model.cnets").Model
    defaults = {"pretraining_tp": 1, "rope_scaling": None, "pad_token_id": 0}
    config = SimpleNamespace(**{**defaults, **json.loads((folder / "config.json").read_text())})
    pickle = folder / "pytorch_model.bin"
    weights = torch.load(pickle, weights_only=True) if pickle.exists() else load_file(folder / "model.safetensors")
    model = (kind(config, bias="fc.bias" in weights) if joined else kind(config)).eval()
    weights = {"embed_tokens.weight": reference["embeddings"], **weights}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown, unknown
    assert set(missing) <= {"d2t", "t2d"}, missing
    model.float()
    tokens, drafts = reference["tokens"], []
    for text in range(1, len(reference["logits"]) + 1):
        model.reset()
        hidden, cache = model(reference["features"][None, :text], input_ids=tokens[None, :text], use_cache=True)
        hidden = hidden[:, -1:]
        following = [hidden]
        for step in range(1, DEPTH):
            # One drafted token alone, as its own code does with several, under a mask of the tree.
            model.tree_mask = torch.ones(1, 1, 1, step)
            at = torch.tensor([text + step - 1])
            hidden, cache = model(
                hidden, input_ids=tokens[None, text + step - 1, None], past_key_values=cache,
                position_ids=at, use_cache=True,
            )  # fmt: skip
            following.append(hidden)
        states = torch.cat(following, dim=1)
        drafts.append((states @ reference["lm_head"].T if joined else model.lm_head(model.norm(states)))[0])
    return torch.stack(drafts)


def speculators_relative(folder: Path, reference: dict[str, Tensor]) -> Tensor:
    from speculators.models.dflash2.core import DFlash2DraftModel
    from speculators.models.dspark.core import DSparkDraftModel

    model = speculators_model(folder, reference)
    tokens, features = reference["tokens"], reference["features"]
    if not model.use_draft_vocab:
        model.lm_head.load_state_dict({"weight": reference["lm_head"]})
    size, anchors = model.block_size, len(tokens) - model.block_size
    hidden, logits, _, _, indices = model._backbone_forward(
        features[None],
        tokens[None],
        torch.ones(1, len(tokens)),
        torch.zeros(1, len(tokens), model.hidden_size),
        torch.zeros(1, len(tokens), dtype=torch.long),
        max_anchors=anchors,
    )
    logits, hidden = logits.view(anchors, size, -1), hidden.view(anchors, size, -1)
    block = tokens[indices].view(anchors, size)
    if isinstance(model, DFlash2DraftModel):
        before = model._predecessor_ids(tokens[None], indices)
        everything = torch.arange(logits.shape[-1]).expand(*logits.shape)
        logits = model.candidate_selector.score_candidates(logits, hidden, before, everything)
    if isinstance(model, DSparkDraftModel):
        logits = logits + model.markov_head.block_bias(prev_token_ids=block, hidden_states=hidden)
    first = 0 if model.config.sample_from_anchor else 1
    return logits[1:, first:]  # the first block has no text in front of it


def speculators_mtp(folder: Path, reference: dict[str, Tensor]) -> Tensor:
    model = speculators_model(folder, reference)
    model.lm_head.load_state_dict({"weight": reference["lm_head"]})
    logits, _, _ = model(reference["tokens"][None], reference["features"][None])
    return logits[0][0][:, None]


def zlab(folder: Path, reference: dict[str, Tensor]) -> Tensor:
    from dflash import model as code
    from transformers import Qwen3Config

    content = json.loads((folder / "config.json").read_text())
    tokens = reference["tokens"]
    kind = code.DFlash2DraftModel if content["architectures"] == ["DFlash2DraftModel"] else code.DFlashDraftModel
    # Its selector looks at the best candidates only; here at all.
    inner = content["dflash_config"]
    (inner if "selector_top_k" in inner else content)["selector_top_k"] = content["vocab_size"]
    model = kind.from_pretrained(folder, config=Qwen3Config(**content), dtype=torch.float32).eval()
    head = torch.nn.Linear(*reference["lm_head"].shape[::-1], bias=False)
    head.load_state_dict({"weight": reference["lm_head"]})
    drafts = []
    for text in range(1, len(reference["logits"]) + 1):
        hidden = block_states(model, reference, text, model.block_size, model.mask_token_id)[:, 1:]
        if kind is code.DFlashDraftModel:
            drafts.append(model.compute_logits(hidden, head)[0].log_softmax(-1))
            continue
        seen: list[Tensor] = []
        path = iter(tokens[text + 1 :].tolist())
        unary = model.compute_logits(hidden, head)
        order = torch.topk(unary, unary.shape[-1], dim=-1, sorted=False).indices[0]

        def along(
            chances: Tensor, seen: list[Tensor] = seen, path: Iterator[int] = path, order: Tensor = order
        ) -> Tensor:
            """In place of drawing: the token of the text."""
            seen.append(chances)
            return (order[len(seen) - 1] == next(path)).nonzero()[:, 0]

        code._sample_probs, draw = along, code._sample_probs
        try:
            model.propose(hidden, tokens[text, None], head, 1.0)
        finally:
            code._sample_probs = draw
        rows = torch.zeros(len(seen), unary.shape[-1])
        drafts.append(rows.scatter(1, order, torch.cat(seen)).log())
    return torch.stack(drafts)


def jetspec(folder: Path, reference: dict[str, Tensor]) -> Tensor:
    from jetspec.models.draft_head import load_draft_head

    model = load_draft_head(str(folder), device="cpu", dtype=torch.float32)
    drafts = []
    for text in range(1, len(reference["logits"]) + 1):
        hidden = block_states(model, reference, text, model.block_size, model.mask_token_id)[:, 1:]
        drafts.append((hidden @ reference["lm_head"].T)[0])
    return torch.stack(drafts)


def block_states(model: Any, reference: dict[str, Tensor], text: int, size: int, mask: int) -> Tensor:
    """[1, size, H] of a block after `text` positions, as both projects call their model."""
    block = torch.cat([reference["tokens"][text, None], torch.full((size - 1,), mask)])
    return model(
        target_hidden=reference["features"][None, :text],
        noise_embedding=reference["embeddings"][block][None],
        position_ids=torch.arange(text + size)[None],
    )


Original = tuple[str, Callable[[str], bool], Callable[[Path, dict[str, Tensor]], Tensor]]
# That of SafeAILab knows neither names of other projects nor scaled rotations other than linear ones.
_SAFEAILAB = ("original", "original, draft vocabulary", "original, linear", "original, a table of its own")
ORIGINALS: dict[str, list[Original]] = {
    "speculators": [
        ("eagle3", lambda name: name.startswith("speculators"), speculators_eagle3),
        ("peagle", lambda name: True, speculators_peagle),
        ("written", lambda name: True, speculators_peagle),
        ("relatives", lambda name: name.startswith("speculators"), speculators_relative),
        ("mtp", lambda name: True, speculators_mtp),
    ],
    "dflash": [("relatives", lambda name: name.startswith("DFlash"), zlab)],
    "jetspec": [("relatives", lambda name: name == "JetSpec", jetspec)],
    "eagle": [
        ("eagle3", lambda name: name in _SAFEAILAB, safeailab),
        ("joined", lambda name: True, safeailab),
    ],
}


@torch.no_grad()
def compare(folder: Path, name: str) -> Iterator[float]:
    cases = [
        (place, compute)
        for kind, takes, compute in ORIGINALS[name]
        for place in sorted((folder / kind).iterdir())
        if takes(place.name)
    ]
    for place, compute in cases:
        reference = load_file(place / "reference.safetensors")
        ours = reference["logits"]
        theirs = compute(place, reference)[: len(ours)].log_softmax(-1)
        drawn = ~(theirs + ours).isnan().any(-1)
        difference = float((ours - theirs)[drawn].abs().max())
        count = f"{int(drawn.sum())} distributions"
        print(f"{place.parent.name}, {place.name}: {count}, largest difference {difference:.1e}")
        yield difference


if __name__ == "__main__":
    step, where = sys.argv[1], Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    if step == "write":
        write(where)
    else:
        sys.exit(int(max(compare(where, sys.argv[3])) > TOLERANCE))
