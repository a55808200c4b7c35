"""Published formats, held against the code that they come from, which hf_dart does not depend on.

    python tests/interop/with_originals.py write FOLDER        # in hf_dart's environment
    python tests/interop/with_originals.py compare FOLDER NAME # in one of the original's, such as a venv

The first makes tiny random checkpoints in float32 and what hf_dart computes of them: the log-probabilities of each
draft token after every beginning of a text, along the text itself. The second loads the same checkpoints as their own
code does and prints, per checkpoint, the largest difference; it exits with 1 if one is above 1e-4. NAME is

    speculators   `pip install speculators==0.9.0`: its EAGLE-3 and P-EAGLE
    eagle         SafeAILab/EAGLE, whose clone is on PYTHONPATH; `pip install torch transformers`: its EAGLE-3
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TOLERANCE = 1e-4
DEPTH = 4


@torch.no_grad()
def write(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.eagle3 import PEAGLE, VARIANTS, variant
    from support.tiny import prompts, tiny_target

    from hf_dart.drafters.registry import load_drafter
    from hf_dart.target.features import features_request, gather_features

    target = tiny_target("llama", dtype=torch.float32, num_hidden_layers=8)
    target.save_pretrained(folder / "target")
    tokens = prompts([16], vocabulary=40)["input_ids"]
    for name in (*VARIANTS, *PEAGLE):
        place = folder / ("peagle" if name in PEAGLE else "eagle3") / name
        drafter = load_drafter(variant(place, target, name, dtype=torch.float32), target=target)
        drafter.beam = 1
        config = json.loads((place / "config.json").read_text())
        taps = config.get("eagle_aux_hidden_state_layer_ids") or drafter.feature_layers
        outputs = target(tokens[:, :-1], **features_request(list(range(9))))
        features = gather_features(outputs, drafter.feature_layers, tokens[:, :-1])
        allowed = torch.arange(48) if drafter.draft_vocabulary is None else drafter.draft_vocabulary
        drafts = [after(drafter, features, tokens[0], text, allowed) for text in range(1, tokens.shape[1] - DEPTH)]
        save_file(
            {
                "features": gather_features(outputs, taps, tokens[:, :-1])[0],
                "tokens": tokens[0, 1:].clone(),
                "embeddings": target.get_input_embeddings().weight.detach().clone(),
                "logits": torch.stack(drafts),
            },
            place / "reference.safetensors",
        )


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


def safeailab_eagle3(folder: Path, reference: dict[str, Tensor]) -> Tensor:
    from eagle.model.cnets import Model

    defaults = {"pretraining_tp": 1, "rope_scaling": None, "pad_token_id": 0}
    config = SimpleNamespace(**{**defaults, **json.loads((folder / "config.json").read_text())})
    pickle = folder / "pytorch_model.bin"
    weights = torch.load(pickle, weights_only=True) if pickle.exists() else load_file(folder / "model.safetensors")
    model = Model(config).eval()
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
                hidden, input_ids=tokens[None, text + step - 1, None], past_key_values=cache, position_ids=at,
                use_cache=True,
            )  # fmt: skip
            following.append(hidden)
        drafts.append(model.lm_head(model.norm(torch.cat(following, dim=1)))[0])
    return torch.stack(drafts)


Original = tuple[str, Callable[[str], bool], Callable[[Path, dict[str, Tensor]], Tensor]]
# That of SafeAILab knows neither names of other projects nor scaled rotations other than linear ones.
_SAFEAILAB = ("original", "original, draft vocabulary", "original, linear", "original, a table of its own")
ORIGINALS: dict[str, list[Original]] = {
    "speculators": [
        ("eagle3", lambda name: name.startswith("speculators"), speculators_eagle3),
        ("peagle", lambda name: True, speculators_peagle),
    ],
    "eagle": [("eagle3", lambda name: name in _SAFEAILAB, safeailab_eagle3)],
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
        drawn = ~theirs.isnan().any(-1)
        difference = float((ours - theirs)[drawn].abs().max())
        print(f"{place.name}: {int(drawn.sum())} distributions, largest difference {difference:.1e}")
        yield difference


if __name__ == "__main__":
    step, where = sys.argv[1], Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    if step == "write":
        write(where)
    else:
        sys.exit(int(max(compare(where, sys.argv[3])) > TOLERANCE))
