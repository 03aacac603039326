"""Sizes and settings of tiny models: every MoE family of transformers, and some variants."""

from __future__ import annotations

from typing import Any

VOCAB, WIDTH, INNER, EXPERTS, TOP_K = 96, 64, 32, 8, 2

# Every name that some family's config uses for these sizes; others ignore it.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "dense_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": None,
    "index_n_heads": 16,  # with few, keys often tie at a score of 0
    "index_head_dim": 16,
    "index_topk": 8,
}
_EXPERT_SIZE_IS_INTERMEDIATE = {"intermediate_size": INNER}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LINEAR_LATENT = {
    "q_lora_rank": None,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_nextn_predict_layers": 0,
}
_DENSE_SPARSE = {"mlp_layer_types": ["dense", "sparse"], "layer_types": None}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}

_HY_V4 = {
    **_LATENT_ATTENTION,
    **_DENSE_SPARSE,
    "indexer_types": ["full", "full"],
    "hc_mult": 2,
    "head_dim": 8,
}
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 16,
    "d_rel": 4,
    "sliding_window_size": 8,
    "unpadded_vocab_size": VOCAB,
    "model_max_length": 64,
}
_NEMOTRON = {
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "moe", "attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "moe_shared_expert_intermediate_size": 48,
    "use_mamba_kernels": False,
}
_GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "top_k_experts": TOP_K,
}

# Families whose router the operator computes.
FUSED: dict[str, dict[str, Any]] = {
    "mixtral": _EXPERT_SIZE_IS_INTERMEDIATE,
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_vl_moe_text": {"rope_parameters": _SECTIONS},
    "qwen3_omni_moe_text": {"rope_parameters": _SECTIONS},
    "qwen4_exp_text": {
        **_HYBRID,
        "ple_layer_ids": [],
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "olmoe": _EXPERT_SIZE_IS_INTERMEDIATE,
    "flex_olmo": _EXPERT_SIZE_IS_INTERMEDIATE,
    "deepseek_v2": {**_LATENT_ATTENTION, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT_ATTENTION,
    "deepseek_v32": {**_LATENT_ATTENTION, **_DENSE_SPARSE},
    "glm4_moe": {},
    "glm4_moe_lite": {**_LATENT_ATTENTION, **_DENSE_SPARSE, "head_dim": 8},
    "glm_moe_dsa": {**_LATENT_ATTENTION, **_DENSE_SPARSE, "indexer_types": None},
    "dots1": {"layer_types": None},
    "exaone_moe": {**_DENSE_SPARSE, "layer_types": ["sliding_attention", "full_attention"]},
    "solar_open": {},
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 16,
    },
    "minimax": {
        "intermediate_size": INNER,
        "layer_types": ["full_attention", "linear_attention"],
        "block_size": 8,
    },
    "minimax_m2": {"intermediate_size": INNER, "rotary_dim": 8},
    "granitemoe": _EXPERT_SIZE_IS_INTERMEDIATE,
    "granitemoeshared": _EXPERT_SIZE_IS_INTERMEDIATE,
    "jamba": {
        "intermediate_size": INNER,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "hunyuan_v1_moe": _EXPERT_SIZE_IS_INTERMEDIATE,
    "hy_v3": _DENSE_SPARSE,
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "afmoe": {"num_dense_layers": 1, "layer_types": None, "global_attn_every_n_layers": 2},
    "flint": {"layer_types": ["full_attention", "sliding_attention"], "mlp_only_layers": [0]},
    "mistral4": {**_LATENT_ATTENTION, "rope_parameters": None},
    "beam": {**_DENSE_SPARSE, "layer_types": ["sliding_attention", "full_attention"]},
    "aria_text": _EXPERT_SIZE_IS_INTERMEDIATE,
    "axk2": {**_LATENT_ATTENTION, **_DENSE_SPARSE},
    "bailing_hybrid": {**_LATENT_ATTENTION, **_LINEAR_LATENT},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_text": {
        **_LATENT_ATTENTION,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["indexed_attention"] * 2,
        "per_layer_config": {},
    },
    "glm4v_moe_text": {
        "rope_parameters": {**_SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    },
    "granitemoe_swa": {**_EXPERT_SIZE_IS_INTERMEDIATE, "layer_types": None},
    "granitemoehybrid": {
        **_EXPERT_SIZE_IS_INTERMEDIATE,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_chunk_size": 8,
    },
    "kimi_linear": {**_LATENT_ATTENTION, **_LINEAR_LATENT},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "moe_router_logit_softcapping": 0.0,
        "num_attention_heads_per_layer": [4, 4],
    },
    "lara_mini": _HYBRID,
    "mellum": {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse"] * 2},
    "mistral_large4_text": {**_LATENT_ATTENTION, **_DENSE_SPARSE},
    "unlimited_ocr_text": _DENSE_SPARSE,
    "cohere2_moe": {
        "intermediate_size": INNER,
        "expert_selection_fn": "softmax",
        "shared_expert_combination_strategy": "sum",
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "axk1": {**_LATENT_ATTENTION, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2_greedy": {
        **_LATENT_ATTENTION,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
    },
    "sarvam_moe": {},
    "sarvam_mla": _LATENT_ATTENTION,
    "qwen3_omni_moe_talker_text": {"rope_parameters": _SECTIONS},
    "gpt_oss": {**_EXPERT_SIZE_IS_INTERMEDIATE, "layer_types": None},
    "openai_privacy_filter": _EXPERT_SIZE_IS_INTERMEDIATE,
    "glm5_next_text": {
        **_LATENT_ATTENTION,
        **_HYBRID,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "qk_rope_head_dim": 0,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full"],
        "hc_mult": 2,
        "index_kpool": 4,
    },
    "hy_v4": {**_HY_V4},
    "hy_v4_vl_text": {
        **_HY_V4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
    "minimax_m3_vl_text": {
        **_EXPERT_SIZE_IS_INTERMEDIATE,
        **_DENSE_SPARSE,
        "rotary_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "inkling2_text": _INKLING,
    "inkling2_loop_text": {
        **_INKLING,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
        "n_layers_per_attn_res_block": 1,
    },
    "nemotron_h": _NEMOTRON,
    "gemma4_text": {
        **_GEMMA,
        "enable_moe_block": True,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 0,
    },
    "diffusion_gemma_text": _GEMMA,
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_attention_heads_per_layer": None,
        "swiglu_limits": [0, 7.0],
        "swiglu_limits_shared": [0, 16.0],
        "num_nextn_predict_layers": 0,
        "share_expert_dim": 48,
    },
    "dbrx": {
        "d_model": WIDTH,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "ffn_hidden_size": INNER,
            "hidden_size": WIDTH,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    },
    "jetmoe": {**_EXPERT_SIZE_IS_INTERMEDIATE, "kv_channels": 16, "head_dim": None},
}

# Families whose experts are packed while their own code routes.
OUTSIDE: dict[str, dict[str, Any]] = {
    "phimoe": _EXPERT_SIZE_IS_INTERMEDIATE,
    "kolibri1": {"layer_types": ["sliding_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": None},
    "cohere2_moe_sigmoid": {
        "intermediate_size": INNER,
        "expert_selection_fn": "sigmoid",
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "laguna_softcapped": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "moe_router_logit_softcapping": 5.0,
        "num_attention_heads_per_layer": [4, 4],
    },
    "inkling_text": {
        **_INKLING,
        "mlp_layer_types": ["dense", "sparse"],
        "n_shared_experts": 2,
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [INNER, 16],
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]},
    },
    "nemotron_h_latent": {**_NEMOTRON, "moe_latent_size": 32},
    "muse_spark_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "moe_hidden_size": 48,
        "layer_rope_theta": [5e5, 0],
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention"] * 3,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
        "q_lora_rank": 32,
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 8,
        },
        "num_nextn_predict_layers": 0,
        "qk_rope_head_dim": None,
        "partial_rotary_factor": 0.5,
    },
    "llama4_text": {
        "intermediate_size": INNER,
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "layer_types": None,
        "interleave_moe_layer_step": 1,
        "moe_layers": None,
        "attention_chunk_size": 8,
        "no_rope_layers": None,
    },
    "longcat_flash": {
        **_LATENT_ATTENTION,
        "zero_expert_num": 4,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": INNER,
        "moe_topk": 3,
        "head_dim": 8,
    },
    "switch_transformers": {
        "d_model": WIDTH,
        "d_kv": 16,
        "d_ff": INNER,
        "num_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 4,
    },
    "nllb-moe": {
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": INNER,
        "decoder_ffn_dim": INNER,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "decoder_start_token_id": 2,
    },
}

# Families that cannot be packed, with a word of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "doge": (
        "named like",
        {"is_moe": True, "num_experts": 16, "layer_types": None},
    ),
}

# Entries that are a second configuration of a family, or known to transformers under another name.
MODEL_TYPES = {
    "deepseek_v2_greedy": "deepseek_v2",
    "cohere2_moe_sigmoid": "cohere2_moe",
    "laguna_softcapped": "laguna",
    "nemotron_h_latent": "nemotron_h",
}
TEXT_MODELS = {
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "qwen3_omni_moe_talker_text": "Qwen3OmniMoeTalkerModel",
    "diffusion_gemma_text": "DiffusionGemmaEncoderTextModel",
}
# Sizes that have to follow when the width becomes 80.
ODD_TOO = {"olmoe": {"head_dim": 20}, "granitemoehybrid": {"mamba_d_head": 20}}
ENCODER_DECODER = ("switch_transformers", "nllb-moe")
TAKES_EMBEDDINGS = ("qwen3_omni_moe_talker_text",)
SETTINGS_AS_GIVEN = ("dbrx",)  # its config has names of its own for all sizes
