"""Tiny random MoE models: Hugging Face families by name, and ExecuTorch's MOEFeedForward."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tiny_families import (
    ENCODER_DECODER,
    EXPERTS,
    FUSED,
    INNER,
    MODEL_TYPES,
    ODD_TOO,
    OUTSIDE,
    REFUSED,
    SETTINGS_AS_GIVEN,
    SIZES,
    TAKES_EMBEDDINGS,
    TEXT_MODELS,
    TOP_K,
    VOCAB,
    WIDTH,
)

__all__ = ["EXPERTS", "FUSED", "INNER", "OUTSIDE", "REFUSED", "TOP_K", "VOCAB", "WIDTH"]


def build(
    family: str,
    device: str = "cpu",
    seed: int = 0,
    gain: float = 1.0,
    odd: bool = False,
    **changes: Any,
) -> nn.Module:
    """A model of `family` in eval mode; experts and routers are drawn so that they matter.

    `gain` multiplies what the experts' activations see. `odd`: width 80, inner size 40 and 10
    experts, which divide by nothing that kernels like.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    config = make_config(transformers, family, odd, changes)
    torch.manual_seed(seed)
    with torch.device(device):
        model = _from_config(transformers, family, config)
    if device != "meta":
        _strengthen(model, seed, gain)
    return model.eval()


def make_config(transformers: Any, family: str, odd: bool, changes: dict[str, Any]) -> Any:
    refused = {name: overrides for name, (_, overrides) in REFUSED.items()}
    settings = copy.deepcopy({**FUSED, **OUTSIDE, **refused}[family]) | changes
    if family not in SETTINGS_AS_GIVEN:
        settings = SIZES | settings
    if settings.get("head_dim", 0) is None:
        del settings["head_dim"]
    settings = _with_odd_sizes(settings) | ODD_TOO.get(family, {}) if odd else settings
    return transformers.AutoConfig.for_model(MODEL_TYPES.get(family, family), **settings)


def _with_odd_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    def odd(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _with_odd_sizes(value)
        if value == WIDTH and ("hidden" in name or name == "d_model"):
            return 80
        if value == INNER and any(word in name for word in ("intermediate", "ffn", "d_ff")):
            return 40
        return 10 if value == EXPERTS and "experts" in name else value

    return {name: odd(name, value) for name, value in settings.items()}


def _from_config(transformers: Any, family: str, config: Any) -> nn.Module:
    autos = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    if family in ENCODER_DECODER:
        autos = [transformers.AutoModelForSeq2SeqLM]
    for auto in () if family in TEXT_MODELS else autos:
        try:
            model: nn.Module = auto.from_config(config)
        except ValueError:
            continue
        return model
    # A text model that is only ever a part of another: it is named after its config.
    module = type(config).__module__.replace("configuration_", "modeling_")
    name = TEXT_MODELS.get(family, type(config).__name__.replace("Config", "Model"))
    model_class: type[nn.Module] = getattr(importlib.import_module(module), name)
    return model_class(config)


@torch.no_grad()
def _strengthen(model: nn.Module, seed: int, gain: float) -> None:
    """The library's init leaves experts and routers so faint that no mistake in them would show."""
    generator = torch.Generator().manual_seed(seed + 1)

    def draw(tensor: Tensor, spread: float, mean: float = 0.0) -> None:
        tensor.copy_(mean + spread * torch.randn(tensor.shape, generator=generator))

    for owner in _routed_parts(model):
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            leaf = name.rpartition(".")[2]
            if not tensor.is_floating_point():
                if tensor.dim() == 2:  # a table from tokens to experts
                    tensor.copy_(torch.rand(tensor.shape, generator=generator).argsort(-1))
            elif "bias" in leaf:
                draw(tensor, 0.3)
            elif tensor.dim() >= 2:
                size = gain if _feeds_activation(name) else 1.0
                draw(tensor, size * _fan_in(owner, tensor) ** -0.5)
            elif "per_expert_scale" in leaf or "post_expert_norm" in name:
                draw(tensor, 0.3, float(tensor.mean()))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            draw(tensor, 0.02)


def _routed_parts(model: nn.Module) -> list[nn.Module]:
    """Blocks with experts; of whole decoder layers that have some, their router and experts."""
    parts: list[nn.Module] = []
    for owner in model.modules():
        children = dict(owner.named_children())
        if "experts" in children and "self_attn" in children:
            parts += [children["router"], children["experts"]]
        elif "experts" in children or "input_linear" in children:
            parts.append(owner)
    return parts


def _feeds_activation(name: str) -> bool:
    parts = name.split(".")
    names = ("gate_up_proj", "up_proj", "w1", "v1", "wi", "fc1", "input_linear", "gate_proj")
    return ("experts" in parts or len(parts) <= 2) and any(n in parts for n in names)


def _fan_in(owner: nn.Module, tensor: Tensor) -> int:
    is_stacked = any(
        getattr(module, "is_transposed", type(module).__name__ == "Llama4TextExperts")
        and any(p is tensor for p in module.parameters(recurse=False))
        for module in owner.modules()
    )
    return int(tensor.shape[-2 if is_stacked and tensor.dim() == 3 else -1])


def inputs(family: str, count: int = 24, seed: int = 1, width: int = WIDTH) -> dict[str, Tensor]:
    """What the family's forward takes."""
    if family in TAKES_EMBEDDINGS:
        generator = torch.Generator().manual_seed(seed)
        return {"inputs_embeds": torch.randn(1, count, width, generator=generator)}
    if family in ENCODER_DECODER:
        return {"input_ids": tokens(count), "decoder_input_ids": tokens(count, 2)[:, : count // 2]}
    return {"input_ids": tokens(count, seed)}


def tokens(count: int = 24, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (1, count), generator=generator)


def logits(model: nn.Module, family: str = "") -> Tensor:
    with torch.no_grad():
        width = getattr(model.config, "hidden_size", WIDTH) if family in TAKES_EMBEDDINGS else WIDTH
        output: Tensor = model(**inputs(family, width=width), use_cache=False)[0]
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
