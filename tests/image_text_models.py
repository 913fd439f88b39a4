"""Tiny image-text checkpoints of random weights, by transformers' configuration classes."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from conftest import TINY
from transformers import AutoModelForImageTextToText

TEXT = {"vocab_size": 544, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 1}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8}  # fmt: skip
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 8}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
HEADS = {"head_dim": 8}
IDS = {"image_token_id": 511, "video_token_id": 510}

# Class of the configuration, and its arguments.
KINDS = {
    "gemma3": ("Gemma3Config", {"text_config": TEXT | HEADS | {"sliding_window": 16}, "vision_config": VISION,
                                    "mm_tokens_per_image": 1, "image_token_index": 511}),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", dict(text_config=TEXT | {"rope_parameters": MROPE},
                                            vision_config=QWEN | {"fullatt_block_indexes": [0]}, **IDS)),
    "qwen3_vl": ("Qwen3VLConfig", dict(
        text_config=TEXT | HEADS | {"rope_parameters": MROPE},
        vision_config=QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4}, **IDS)),
    "mistral3": ("Mistral3Config", {"text_config": TEXT | HEADS | {"model_type": "mistral"}, "image_token_index": 511,
                                        "vision_config": VISION | HEADS | {"model_type": "pixtral"}}),
    "gemma4": ("Gemma4Config", {
        "text_config": TEXT | HEADS | {"global_head_dim": 8, "sliding_window": 16, "hidden_size_per_layer_input": 8,
                                        "vocab_size_per_layer_input": 544},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "num_key_value_heads": 2, "head_dim": 8, "patch_size": 8}, "image_token_id": 511}),
    "glm4v": ("Glm4vConfig", dict(text_config=TEXT | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
                                  vision_config=QWEN | {"image_size": 16}, **IDS)),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", dict(
        text_config=TEXT | HEADS | {"rope_parameters": MROPE, "num_experts": 4, "num_experts_per_tok": 2,
                                        "moe_intermediate_size": 24},
        vision_config=QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4}, **IDS)),
    "llama4": ("Llama4Config", {
        "text_config": TEXT | HEADS | {"intermediate_size_mlp": 48, "num_local_experts": 2},
        "vision_config": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "image_size": 16, "patch_size": 8, "vision_output_dim": 32, "projector_input_dim": 32,
                           "projector_output_dim": 32}, "image_token_index": 511}),
    "llava_next": ("LlavaNextConfig", {"text_config": TEXT | HEADS | {"model_type": "llama"}, "image_token_index": 511,
                                           "vision_config": VISION | {"model_type": "clip_vision_model"}}),
}  # fmt: skip


def config_of(kind: str, **more):
    name, arguments = KINDS[kind]
    return getattr(transformers, name)(**arguments, **more)


def checkpoint(kind: str, folder: Path, dtype=torch.bfloat16, **more) -> Path:
    """Save a tiny model of random weights, with the bundled tokenizer and a processor's settings."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(kind, **more), dtype=dtype)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "model" / file, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "OfThisModel"}))
    return folder
