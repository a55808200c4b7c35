"""A head for a multimodal target, trained on what that writes about images: tokens per forward before and after.

    python examples/image_head.py runs/image_head --max-steps 100

The target is a tiny LLaVA of random weights and the images are noise, so that nothing is downloaded and a minute on one
CPU core is enough. For a model of your own take it, its processor and your images: a row is what the processor gives
for one text, with the target's reply (`hf_dart.training.image_row`); the rest stays as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_dart import DartHead, attach
from hf_dart.training import DartTrainer, DartTrainingArguments, image_row

WORDS, IMAGE = 60, 60  # ids below are words; an image is 4 tokens of this one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=64, help="to learn from")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each reply")
    arguments = parser.parse_args()

    target = attach(small_target())
    head = DartHead.from_target(target, feature_layers=[0, 2, 4], draft_length=4)
    reply: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": arguments.new_tokens,
        "suppress_tokens": [IMAGE],
    }

    def rows(seeds: range) -> list[dict[str, Any]]:
        return [image_row(inputs, target.generate(**inputs, **reply)) for inputs in map(prompt, seeds)]

    trainer = DartTrainer(
        head,
        target,
        DartTrainingArguments(
            output_dir=str(arguments.output),
            max_steps=arguments.max_steps,
            per_device_train_batch_size=8,
            anchors_per_row=16,
            learning_rate=1e-2,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows(range(arguments.rows)),
        eval_dataset=rows(range(1000, 1016)),
    )
    before = trainer.evaluate()["eval_tau"]
    trainer.train()
    after = trainer.evaluate()["eval_tau"]
    trainer.save_model(str(arguments.output / "head"))
    print(f"\ntau on images that it has not seen: {before:.2f} -> {after:.2f}")

    inputs = prompt(2000)
    drafted = target.generate(**inputs, **reply, assistant=head)
    same = torch.equal(target.generate(**inputs, **reply), drafted)
    print(f"a new image: tau {head.last_stats.tau:.2f}; the same tokens as stock: {same}")


def small_target() -> LlavaForConditionalGeneration:
    """A LLaVA of random weights that repeats itself enough to be drafted."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "initializer_range": 0.08}
    text = LlamaConfig(vocab_size=WORDS + 1, num_hidden_layers=4, eos_token_id=None, pad_token_id=0, **size)
    eyes = CLIPVisionConfig(num_hidden_layers=2, image_size=8, patch_size=4, **size)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=eyes, text_config=text, image_token_index=IMAGE)
    ).eval()


def prompt(seed: int) -> dict[str, Tensor]:
    """What a processor would give: a few words, an image, a few words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, WORDS, (6,), generator=generator)
    ids = torch.cat([words[:2], torch.full((4,), IMAGE), words[2:]])[None]
    pixels = torch.randn(1, 3, 8, 8, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


if __name__ == "__main__":
    main()
