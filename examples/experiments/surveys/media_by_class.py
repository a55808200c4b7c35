"""What a class needs that shows itself by no name: fields of a small config, and the images or sounds that go with it.

For `multimodal_classes.py`, which finds the shapes of all other classes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Media:
    """Small fields of a class, and two rows' images or sounds.

    Attributes:
        own: fields of its config in place of those that `small_fields` finds; of its parts, as dicts.
        given: inputs of the model besides text: tensors, or sizes of random ones.
        count: tokens of each row; None if the encoder is to be asked.
        token: their id, if its field has a name of its own.
        by_slot: what has an entry for each slot of the text, by its name: the size of an entry, all of them 1; or None
            for a mark of the tokens of images.
        attention: the kind of it; the others are not built by transformers.
    """

    own: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Tensor | list[int]] = field(default_factory=dict)
    count: int | None = None
    token: int | None = None
    by_slot: dict[str, list[int] | None] = field(default_factory=dict)
    attention: str | dict[str, str] = "sdpa"


IMAGE = 95  # the largest id that small models know
GRIDS = torch.tensor([[1, 4, 4]] * 2)
SIZES = torch.tensor([[16, 16]] * 2)
PLACES = torch.tensor([[x, y] for y in range(4) for x in range(4)]).expand(2, -1, -1)
TILES = torch.tensor([[32, 32]] * 2)
LETTERS = [f"IMGIMG{chr(65 + code // 10)}{chr(65 + code % 10)}Z" for code in range(32)]
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VQ = {"num_embeddings": 32, "channel_multiplier": [1, 1], "base_channels": 32, "hidden_size": 32, "embed_dim": 32}

_qwen = Media({"vision_config": {"window_size": 64}}, {"pixel_values": [32, 1536], "image_grid_thw": GRIDS})
_tiled = Media(
    {"image_grid_pinpoints": [[32, 32]]},
    {"pixel_values": [2, 5, 3, 16, 16], "image_sizes": TILES},
)
_cpm = Media(
    {"image_token_id": IMAGE, "image_size": 32, "vision_config": {"image_size": 32, "insert_layer_id": 0}},
    {"pixel_values": [1, 3, 8, 8 * 32], "target_sizes": torch.tensor([[4, 4]] * 2)},
)

MEDIA: dict[str, Media] = {
    "Qwen2_5_VLForConditionalGeneration": _qwen,
    "Exaone4_5_ForConditionalGeneration": _qwen,
    "HyperCLOVAXVisionV2ForConditionalGeneration": _qwen,
    "Gemma3ForConditionalGeneration": Media({"mm_tokens_per_image": 4}, {"pixel_values": [2, 3, 16, 16]}),
    "Gemma4ForConditionalGeneration": Media(
        {"audio_config": None, "vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 16}},
        {"pixel_values": [2, 16, 192], "image_position_ids": PLACES},
    ),
    "Gemma4UnifiedForConditionalGeneration": Media({}, {"pixel_values": [2, 16, 1728], "image_position_ids": PLACES}),
    "Gemma3nForConditionalGeneration": Media(
        {
            "vision_config": {"architecture": "resnet18", "hidden_size": 512},
            "vision_soft_tokens_per_image": 4,
            "text_config": {"activation_sparsity_pattern": None, "intermediate_size": 64, "num_kv_shared_layers": 0},
        },
        {"pixel_values": [2, 3, 64, 64]},
    ),
    "Llama4ForConditionalGeneration": Media(
        {"vision_config": {"intermediate_size": 128}}, {"pixel_values": [2, 3, 16, 16]}
    ),
    "LlavaNextForConditionalGeneration": _tiled,
    "LlavaNextVideoForConditionalGeneration": _tiled,
    "LlavaOnevisionForConditionalGeneration": _tiled,
    "Granite4VisionForConditionalGeneration": Media(_tiled.own, _tiled.given, count=7),
    "MllamaForConditionalGeneration": Media(
        {
            "vision_config": {"vision_output_dim": 64},
            "text_config": {"cross_attention_layers": [1], "num_hidden_layers": 3},
        },
        {
            "pixel_values": [2, 1, 4, 3, 16, 16],
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long),
        },
        count=1,
        by_slot={"cross_attention_mask": [1, 4]},
    ),
    "Qwen2AudioForConditionalGeneration": Media(
        {}, {"input_features": [2, 16, 64], "feature_attention_mask": torch.ones(2, 64, dtype=torch.long)}, count=16
    ),
    "VoxtralForConditionalGeneration": Media({"audio_token_id": IMAGE}, {"input_features": [2, 16, 64]}),
    "Phi4MultimodalForCausalLM": Media(
        {"vision_config": {"crop_size": 16, "image_token_id": IMAGE}, "audio_config": {"audio_token_id": 94}},
        {
            "image_pixel_values": [2, 2, 3, 16, 16],
            "image_sizes": SIZES,
            "image_attention_mask": torch.ones(2, 2, 2, 2, dtype=torch.long),
        },
        count=5,
        token=IMAGE,
    ),
    "AriaForConditionalGeneration": Media({"projector_patch_to_query_dict": {4: 4}}, {"pixel_values": [2, 3, 16, 16]}),
    "ChameleonForConditionalGeneration": Media(
        {
            "vocabulary_map": {"<image>": 48} | {word: 49 + code for code, word in enumerate(LETTERS)},
            "vq_config": VQ,
        },
        {"pixel_values": [2, 3, 16, 16]},
    ),
    "Emu3ForConditionalGeneration": Media(
        {
            "vocabulary_map": {"<image>": 48, "<|extra_200|>": 47}
            | {f"<|visual token {code:06d}|>": 49 + code for code in range(32)},
            "vq_config": {**VQ, "codebook_size": 32},
        },
        {"pixel_values": [2, 3, 16, 16], "image_sizes": SIZES},
    ),
    "DeepseekVLHybridForConditionalGeneration": Media(
        {}, {"pixel_values": [2, 3, 16, 16], "high_res_pixel_values": [2, 3, 16, 16]}
    ),
    "FuyuForCausalLM": Media({}, {"image_patches": [2, 4, 192]}, count=4),
    "Lfm2VlForConditionalGeneration": Media(
        {},
        {
            "pixel_values": [2, 16, 192],
            "spatial_shapes": torch.tensor([[4, 4]] * 2),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        },
    ),
    "Lfm3VlForConditionalGeneration": Media(
        {"vision_config": {"conv_kernel_size": 3}}, {"pixel_values": [32, 1536], "image_grid_thw": GRIDS}
    ),
    "MiniCPMOcrForConditionalGeneration": _cpm,
    "MiniCPMV4_6ForConditionalGeneration": _cpm,
    "MiniCPMV4_7ForConditionalGeneration": _cpm,
    "Molmo2ForConditionalGeneration": Media(
        {"adapter_config": {"vision_feature_layer": [-1]}, "vision_config": {"num_position_embeddings": 4}},
        {
            "pixel_values": [2, 4, 192],
            "image_token_pooling": torch.arange(8)[:, None],
            "image_grids": torch.tensor([[2, 2, 0, 0]] * 2),
            "image_num_crops": torch.tensor([1, 1]),
        },
    ),
    "PaddleOCRVLForConditionalGeneration": Media(
        {"text_config": {"rope_parameters": ROPE}}, {"pixel_values": [32, 3, 8, 8], "image_grid_thw": GRIDS}
    ),
    "Kimi_K25ForConditionalGeneration": Media({}, {"pixel_values": [32, 3, 8, 8], "image_grid_thw": GRIDS}),
    "MuseGlimmerForConditionalGeneration": Media(
        {"out_hidden_size": 128}, {"pixel_values": [32, 384], "image_grid_thw": GRIDS}
    ),
    "MuseSparkForConditionalGeneration": Media(
        {"out_hidden_size": 128}, {"pixel_values": [32, 384], "image_grid_thw": GRIDS}
    ),
    "VideoLlama3ForConditionalGeneration": Media(
        {},
        {"pixel_values": [32, 192], "image_grid_thw": GRIDS, "image_merge_sizes": torch.tensor([2, 2])},
    ),
    "Qwen3ASRForConditionalGeneration": Media(
        {},
        {"input_features": [2, 16, 100], "input_features_mask": torch.ones(2, 100, dtype=torch.long)},
    ),
    "FunAsrNanoForConditionalGeneration": Media(
        {}, {"input_features": [2, 64, 112], "input_features_mask": torch.ones(2, 64, dtype=torch.long)}
    ),
    "MossTranscribeDiarizeForConditionalGeneration": Media(
        {},
        {
            "input_features": [2, 16, 64],
            "input_features_mask": torch.ones(2, 64, dtype=torch.long),
            "padding_mask": torch.ones(2, 64, dtype=torch.long),
        },
    ),
    "GraniteDoclingForConditionalGeneration": Media(
        {},
        {"pixel_values": [2, 1, 3, 16, 16], "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool)},
    ),
    "GotOcr2ForConditionalGeneration": Media(
        {"vision_config": {"image_size": 64}},
        {"pixel_values": [2, 3, 64, 64]},
        attention={"text_config": "sdpa", "vision_config": "eager"},
    ),
    "GitForCausalLM": Media({}, {"pixel_values": [2, 3, 16, 16]}, count=0, attention="eager"),
    "BlipForConditionalGeneration": Media({}, {"pixel_values": [2, 3, 16, 16]}, count=0, attention="eager"),
    "Blip2ForConditionalGeneration": Media({"image_token_index": IMAGE}, {"pixel_values": [2, 3, 16, 16]}),
    "InstructBlipForConditionalGeneration": Media(
        {"image_token_index": IMAGE},
        {"pixel_values": [2, 3, 16, 16], "qformer_input_ids": torch.full((2, 4), 5)},
        count=4,
    ),
    "Kosmos2ForConditionalGeneration": Media(
        {"latent_query_num": 4},
        {"pixel_values": [2, 3, 16, 16]},
        count=4,
        token=IMAGE,
        by_slot={"image_embeds_position_mask": None},
    ),
    "IdeficsForVisionText2Text": Media(
        {}, {"pixel_values": [2, 1, 3, 16, 16]}, count=0, by_slot={"image_attention_mask": [1]}
    ),
    "FastVlmForConditionalGeneration": Media(
        {"vision_config": {"architecture": "resnet18", "hidden_size": 512}}, {"pixel_values": [2, 3, 64, 64]}
    ),
    "PerceptionLMForConditionalGeneration": Media(
        {"vision_config": {"architecture": "vit_pe_core_tiny_patch16_384"}}, {"pixel_values": [2, 1, 3, 64, 64]}
    ),
    "NemotronH_Omni_Reasoning_V3": Media(
        {"image_token_id": IMAGE}, {"pixel_values": [8, 192], "image_grid_hw": torch.tensor([[2, 2]] * 2)}
    ),
    "DeepseekOcr2ForConditionalGeneration": Media({}, {"pixel_values": [2, 3, 64, 64]}),
    "UnlimitedOcrForConditionalGeneration": Media({}, {"pixel_values": [2, 3, 64, 64]}),
    "InklingForConditionalGeneration": Media({}, {"pixel_values": [2, 1, 3, 16, 16]}, attention="eager"),
    "Inkling2ForConditionalGeneration": Media({}, {"pixel_values": [2, 1, 3, 16, 16]}, attention="eager"),
    "T5Gemma2ForConditionalGeneration": Media({}, {"pixel_values": [2, 3, 16, 16]}, count=4),
    "UdopForConditionalGeneration": Media({}, {"pixel_values": [2, 3, 16, 16]}, count=0),
    "VisionEncoderDecoderModel": Media({}, {"pixel_values": [2, 3, 16, 16]}, count=0),
    "Pix2StructForConditionalGeneration": Media({}, {"flattened_patches": [2, 4, 194]}, count=0),
    "PPFormulaNetForConditionalGeneration": Media({}, {"pixel_values": [2, 3, 16, 16]}, count=0),
    "VoxtralRealtimeForConditionalGeneration": Media({}, {"input_features": [2, 16, 512]}, count=0),
}
