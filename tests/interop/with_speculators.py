"""What `hf-dart convert --to vllm` writes, held against vLLM's `speculators` package, which has its own requirements.

    python tests/interop/with_speculators.py write FOLDER      # in hf_dart's environment
    python tests/interop/with_speculators.py compare FOLDER    # in one with `pip install speculators==0.9.0`

The first makes a tiny target, two heads and their drafts after every beginning of a text, the second loads the heads
as that package does, runs its P-EAGLE over the text and prints the largest difference of the logits; it exits with 1 if
that is above 1e-4 (float32).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HEADS: dict[str, dict[str, Any]] = {
    "one-layer": {},
    "three-layers": {"num_layers": 3, "draft_vocabulary": list(range(1, 48, 2))},
}
TOLERANCE = 1e-4


@torch.no_grad()
def write(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.heads import peagle_head
    from support.tiny import prompts, tiny_target

    from hf_dart.drafters.dart.export import write_vllm
    from hf_dart.target.features import features_request, gather_features

    target = tiny_target("llama", dtype=torch.float32, num_hidden_layers=8)
    target.save_pretrained(folder / "target")
    tokens = prompts([16], vocabulary=40)["input_ids"]
    for name, config in HEADS.items():
        head = peagle_head(target, **config)
        write_vllm(head, folder / name, target=target, verifier=str(folder / "target"))
        states = target(tokens[:, :-1], **features_request(head.feature_layers))
        features = gather_features(states, head.feature_layers, tokens[:, :-1])
        drafts = []
        for text in range(1, tokens.shape[1]):
            proposal = head.propose(head.begin(1, 4), features[:, :text], tokens[:, 1 : text + 1], torch.tensor([text]))
            drafts.append(proposal.logits[0].contiguous())
        reference = {"features": features[0], "tokens": tokens[0, 1:].clone(), "logits": torch.stack(drafts)}
        save_file(reference, folder / f"{name}.reference")


@torch.no_grad()
def compare(folder: Path, name: str) -> float:
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    config = SpeculatorModelConfig.from_pretrained(folder / name)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder / name, config=config).float().eval()
    # Its own load_verifier_weights leaves embeddings alone that from_pretrained has filled in for the missing ones.
    model._load_verifier_weights(overwrite_embed_tokens=True)
    reference = load_file(folder / f"{name}.reference")
    length, depths = reference["logits"].shape[:2]
    # Its forward draws by chance which drafts it looks at, and keeps their logits to itself.
    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen: list[torch.Tensor] = []
    draw = core.generate_cod_sample_indices

    def drawing(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        drawn.append(draw(**options))
        return drawn[-1]

    core.generate_cod_sample_indices = drawing
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    try:
        model(
            hidden_states=reference["features"][None],
            input_ids=reference["tokens"][None],
            document_ids=torch.zeros(1, length, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, length, config.transformer_layer_config.hidden_size),
            loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=depths,
            down_sample_ratio=1.0,
            down_sample_ratio_min=1.0,
        )
    finally:
        core.generate_cod_sample_indices = draw
    anchors, depth = drawn[0]
    behind = anchors >= 0  # it also draws drafts in front of the text, which see nothing
    anchors, depth, logits = anchors[behind], depth[behind], seen[0][behind]
    difference = float((logits - reference["logits"][anchors, depth]).abs().max())
    drafts = f"{len(anchors)} distributions up to depth {int(depth.max()) + 1}"
    print(f"{name}: {drafts}, logits up to {float(logits.abs().max()):.1f}, largest difference {difference:.1e}")
    return difference


if __name__ == "__main__":
    step, place = sys.argv[1], Path(sys.argv[2])
    place.mkdir(parents=True, exist_ok=True)
    if step == "write":
        write(place)
    else:
        sys.exit(int(max(compare(place, name) for name in HEADS) > TOLERANCE))
