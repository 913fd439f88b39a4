"""Tiny models of random weights, of every class of transformers' causal and image-text models."""

import shutil
from pathlib import Path

import image_text_models
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

BUNDLED = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "model"
CAUSAL = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = tuple(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
LARGEST = 30_000_000  # parameters

# What a size is called in configurations, and what it becomes.
SIZES = {
    32: """hidden_size n_embd d_model embed_dim emb_dim word_embed_proj_dim dim embedding_size lru_width
           out_hidden_size""",
    48: """intermediate_size ffn_dim n_inner d_ff intermediate_size_mlp encoder_ffn_dim decoder_ffn_dim ffn_hidden_size
           feed_forward_hidden_size block_ff_dim projection_intermediate_size""",
    4: """num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads num_experts
          num_local_experts n_routed_experts moe_num_experts conv_kernel time_step_rank mamba_dt_rank
          linear_num_value_heads linear_num_heads""",
    2: """num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_blocks num_experts_per_tok
          num_experts_per_token experts_per_token moe_topk moe_k num_selected_experts top_k_experts
          linear_num_key_heads""",
    8: """head_dim global_head_dim attention_head_dim kv_channels d_kv hidden_size_per_layer_input qk_rope_head_dim
          qk_nope_head_dim v_head_dim state_size mamba_d_state mamba_d_head mamba_n_heads mamba_chunk_size
          mamba_head_dim
          mamba_num_heads mamba_state_dim ssm_state_size chunk_size linear_key_head_dim linear_value_head_dim
          linear_head_dim index_head_dim block_size rotary_dim""",
    # the scores of an indexer are sums over its heads of what is above 0; of few they tie at 0
    16: """index_n_heads moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size q_lora_rank
          kv_lora_rank moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size qk_head_dim
          sliding_window
           index_topk attention_window_size""",
    1: """n_group topk_group num_expert_group moe_layer_start_index first_k_dense_replace num_dense_layers
          mamba_n_groups
          n_groups""",
    64: "mamba_d_ssm attention_chunk_size",
    # more than the bundled tokenizer's 512 tokens: a tokenizer class of a model's own adds some
    544: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_sequence_length",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KEY_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads")
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "no_rope_layers")

# What the rules above do not find, as arguments of the configuration class or of its part of that name.
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
SPECIAL = {
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32}},
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "gemma3n_text": {
        "intermediate_size": [48, 48],
        "activation_sparsity_pattern": [0.0, 0.0],
        "num_kv_shared_layers": 0,
    },
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "xlnet": {"d_head": 8},
    "xlstm": {"qk_dim_factor": 0.5, "v_dim_factor": 1.0, "hidden_size": 128, "embedding_dim": 128},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": MROPE, "full_attention": None},
    },
    "mistral_large4_text": {"kv_source_layers": [0, 1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note_text": {"head_dim": 16},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "chameleon": {"vocabulary_map": {"<image>": 511}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "hrm_text": {"num_layers_per_stack": None},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 512,
    },
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {"hybrid_layer_ids": [1], "mamba_headdim": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 16],
    },
    "emu3": {"vocabulary_map": {"<image>": 511}, "vq_config": {"base_channels": 32, "codebook_size": 64}},
    "janus": {
        "vision_config": {"projection_dim": 32},
        "vq_config": {
            "num_embeddings": 64,
            "base_channels": 32,
            "latent_channels": 32,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
            "num_patches": 4,
        },
    },
    "muse_glimmer": {"out_hidden_size": 32, "projector_hidden_size": 32},
    "muse_spark": {
        "out_hidden_size": 32,
        "projector_hidden_size": 32,
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 32], "out_hidden_size": 32},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1], "text_hidden_size": 32}},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    },
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1, 1, 1, 1],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": MROPE | {"mrope_section": [1, 1, 1, 1]}}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 509, "text_config": {"rope_parameters": MROPE}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 509},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "glm46v": {"text_config": {"rope_parameters": MROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": MROPE}},
    "glm_ocr": {"text_config": {"rope_parameters": MROPE}},
    "glmga": {"text_config": {"rope_parameters": MROPE}},
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
}

# Classes that are not trained on rows of text, and why; they are not tried.
_IMAGES, _ENCODER = "it needs an image with each row", "an encoder-decoder that reads images"
OUT_OF_SCOPE = (
    dict.fromkeys("blip blip-2 git idefics instructblip instructblipvideo kosmos-2".split(), _IMAGES)
    | dict.fromkeys("florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder".split(), _ENCODER)
    | dict.fromkeys("musicgen musicgen_melody".split(), "it writes the codes of sounds")
    | dict.fromkeys("gemma4_assistant gemma4_unified_assistant".split(), "it drafts tokens for another model's layers")
    | {
        "diffusion_gemma": "a diffusion model",
        "evolla": "it reads proteins, and AutoModelForImageTextToText does not know it",
        "pi0": "it writes the actions of a robot",
    }
)


def small(config) -> dict:
    """Return the arguments of a configuration, its sizes made small."""
    found = config.to_dict()
    heads = next((found[name] for name in HEADS if isinstance(found.get(name), int)), None)
    for name, value in found.items():
        if isinstance(value, bool):
            continue
        if name in KEY_HEADS and isinstance(value, int):
            found[name] = 4 if value == heads else min(value, 2)
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            found[name] = 0.0  # losses are compared
        elif name in SIZE_OF and isinstance(value, int):
            found[name] = SIZE_OF[name]
        elif name in KINDS_OF_LAYERS and isinstance(value, (list, tuple)) and len(value) > 2:
            found[name] = (list(dict.fromkeys(value)) + list(value))[:2]
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            found[name] = small_rope(value)
    if limits := found.get("time_step_limit"):
        found["time_step_limit"] = [float(one["__float__"]) if isinstance(one, dict) else one for one in limits]
    if layers := found.get("per_layer_config"):
        found["per_layer_config"] = None
        if all(set(own) == {"head_dim"} for own in layers.values()):  # Gemma-4 makes it of this
            del found["per_layer_config"]
            found["global_head_dim"] = 16
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    return found | {name: number for name, number in ids.items() if name in found}


def small_rope(found: dict) -> dict:
    """Return rotary settings for heads of 8 numbers: all of a head rotates, in sections of 1, 1 and 2 pairs."""
    sizes = {"mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    own = {name: small_rope(value) if isinstance(value, dict) else value for name, value in found.items()}
    return own | {name: size for name, size in sizes.items() if name in found}


def config_of(kind: str):
    """Return the configuration of a tiny model of a model type. Raises: whatever its class does."""
    if kind in image_text_models.KINDS:
        return image_text_models.config_of(kind)
    config = AutoConfig.for_model(kind)
    return type(config).from_dict(tiny(config, SPECIAL.get(kind, {})))


def tiny(config, special: dict) -> dict:
    """Return the small arguments of a configuration and of its parts; `special` stands above the rules."""
    found = small(config)
    for name in getattr(type(config), "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is None and name in special:
            part = type(config).sub_configs[name]()
        if hasattr(part, "to_dict"):
            found[name] = tiny(part, SPECIAL.get(part.model_type, {}) | special.get(name, {}))
    return found | {name: value for name, value in special.items() if not name.endswith("_config")}


def loader_of(kind: str):
    """Return the Auto class of a model type."""
    return AutoModelForImageTextToText if kind in IMAGE_TEXT else AutoModelForCausalLM


def checkpoint(kind: str, folder: Path) -> None:
    """Save a tiny model of random weights with the bundled tokenizer. Raises: whatever its class does; ValueError."""
    torch.manual_seed(0)
    loader = loader_of(kind)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in loader.from_config(config_of(kind)).parameters())
    if parameters > LARGEST:
        raise ValueError(f"its smallest configuration here has {parameters:,} parameters")
    model = loader.from_config(config_of(kind), dtype=torch.float32)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / file, folder)
