"""Tiny random MoE models: Hugging Face families by name, and ExecuTorch's MOEFeedForward."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import Tensor, nn

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
    "index_n_heads": 2,
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

_TEXT_MODELS = {"qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel"}

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
}

# Families whose experts are packed while their own code routes.
OUTSIDE: dict[str, dict[str, Any]] = {
    "phimoe": _EXPERT_SIZE_IS_INTERMEDIATE,
    "kolibri1": {"layer_types": ["sliding_attention", "full_attention"]},
    "axk1": {**_LATENT_ATTENTION, "mlp_layer_types": ["dense", "sparse"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": None},
}

# Families that this version refuses, with a word of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("activation", {"intermediate_size": INNER, "layer_types": None}),
    "llama4_text": (
        "interface",
        {
            "intermediate_size": INNER,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "layer_types": None,
            "interleave_moe_layer_step": 1,
            "moe_layers": None,
            "attention_chunk_size": 16,
            "no_rope_layers": None,
        },
    ),
    "nemotron_h": (
        "no gate projection",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "moe", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 48,
            "use_mamba_kernels": False,
        },
    ),
    "doge": (
        "named like",
        {"is_moe": True, "num_experts": 16, "layer_types": None},
    ),
}


def build(family: str, device: str = "cpu", seed: int = 0, **changes: Any) -> nn.Module:
    """A model of `family` in eval mode; experts and routers are drawn so that they matter."""
    import transformers

    transformers.logging.set_verbosity_error()
    refused = {name: overrides for name, (_, overrides) in REFUSED.items()}
    overrides = {**FUSED, **OUTSIDE, **refused}[family]
    settings = SIZES | copy.deepcopy(overrides) | changes
    if settings["head_dim"] is None:
        del settings["head_dim"]
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    with torch.device(device):
        model = _from_config(transformers, config)
    if device != "meta":
        _strengthen(model, seed)
    return model.eval()


def _from_config(transformers: Any, config: Any) -> nn.Module:
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        try:
            model: nn.Module = auto.from_config(config)
        except ValueError:
            continue
        return model
    # A text model that is only ever a part of another: it is named after its config.
    module = type(config).__module__.replace("configuration_", "modeling_")
    name = _TEXT_MODELS.get(config.model_type, type(config).__name__.replace("Config", "Model"))
    model_class: type[nn.Module] = getattr(importlib.import_module(module), name)
    return model_class(config)


@torch.no_grad()
def _strengthen(model: nn.Module, seed: int) -> None:
    """The library's init leaves experts and routers so faint that no mistake in them would show."""
    generator = torch.Generator().manual_seed(seed + 1)

    def draw(tensor: Tensor, spread: float) -> None:
        tensor.copy_(spread * torch.randn(tensor.shape, generator=generator))

    for owner in model.modules():
        children = dict(owner.named_children())
        if "experts" not in children:
            continue
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            if "bias" in name.rpartition(".")[2] and tensor.is_floating_point():
                draw(tensor, 0.3)
            elif tensor.dim() >= 2 and tensor.is_floating_point():
                is_stacked = getattr(children["experts"], "is_transposed", False)
                fan_in = tensor.shape[-2 if is_stacked and tensor.dim() == 3 else -1]
                draw(tensor, fan_in**-0.5)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            draw(tensor, 0.02)


def tokens(count: int = 24, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (1, count), generator=generator)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(input_ids=tokens(), use_cache=False)[0]
    return output


def executorch_block(
    score_func: str = "softmax",
    *,
    route_scale: float = 1.0,
    expert_bias: bool = False,
    shared: bool = False,
    seed: int = 0,
) -> nn.Module:
    """ExecuTorch's own MOEFeedForward."""
    from executorch.examples.models.llama.llama_transformer import MOEFeedForward
    from executorch.examples.models.llama.model_args import ModelArgs

    torch.manual_seed(seed)
    arguments = ModelArgs(
        dim=WIDTH,
        moe=True,
        num_experts=EXPERTS,
        num_activated_experts=TOP_K,
        moe_hidden_dim=INNER,
        moe_score_func=score_func,
        moe_route_scale=route_scale,
        moe_use_expert_bias=expert_bias,
        moe_shared_expert_hidden_dim=48 if shared else None,
    )
    block: nn.Module = MOEFeedForward(arguments)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.startswith("cond_ffn"):
                parameter.mul_((INNER if name.endswith("w2") else WIDTH) ** -0.5)
        if expert_bias:
            block.get_buffer("expert_bias").copy_(0.3 * torch.randn(EXPERTS))
    return block.eval()
