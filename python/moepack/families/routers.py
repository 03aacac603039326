"""Which Hugging Face routers the operator computes: one row of a table each.

A router that no row describes is no error: it stays a PyTorch module and its ids and weights go to
`quantized_experts`. Do not add a row before a test has compared it with the original.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moepack.attributes import RoutingAttributes
from moepack.families.spec import RouterSpec


@dataclass(frozen=True)
class RouterRule:
    """Where the numbers of a router are found. Strings are paths of attributes, `router.` or
    `block.`.

    `requires` lists attributes and the values that they must have for the row to hold.
    """

    routers: tuple[str, ...]
    score_func: str
    norm: bool | str = False
    norm_eps: float | str = 0.0
    norm_clamp: bool = False
    scale: str = ""
    bias: str = ""
    groups: str = ""  # group_score, or "" for none
    in_fp32: bool = False  # logits in fp32, whatever the model's dtype
    weight: str = "router.weight"
    weight_factors: tuple[str, ...] = ()  # [D] or scalars that the weight's rows are multiplied by
    gate_bias: str = ""
    before: str = ""  # a module through which the router's input goes first
    output_scale: str = ""  # [E]: multiplies the weight of each expert
    top_k: tuple[str, ...] = ("router.top_k", "block.top_k")
    in_place: bool = False  # what the block does with the routed sum is left to its own code
    requires: tuple[tuple[str, object], ...] = ()


def _names(pattern: str, models: str) -> tuple[str, ...]:
    return tuple(pattern.format(model) for model in models.split())


_SCALE = "router.routed_scaling_factor"
_BIAS = "router.e_score_correction_bias"
_DEEPSEEK_V2 = _names("{}TopkRouter", "DeepseekV2 DeepseekOcr2Text UnlimitedOcrText")

RULES: tuple[RouterRule, ...] = (
    RouterRule(_names("{}TopKRouter", "Mixtral MiniMax"), "softmax_all", norm=True),
    RouterRule(
        _names(
            "{}TopKRouter",
            "Qwen2Moe Qwen3Moe Qwen3Next Qwen4ExpText Olmoe FlexOlmo Mellum "
            "Qwen3OmniMoeThinkerText Qwen3OmniMoeTalkerText",
        ),
        "softmax_all",
        norm="router.norm_topk_prob",
    ),
    RouterRule(_names("{}TopKRouter", "Qwen3_5Moe Qwen3VLMoeText"), "softmax_all", norm=True),
    RouterRule(("LaraMiniTopKRouter",), "softmax_all", norm="router.norm_topk_prob", in_fp32=True),
    RouterRule(("JambaTopKRouter",), "softmax_all"),
    RouterRule(("HunYuanMoEV1Gate",), "softmax_all", norm=True, weight="router.wg.weight"),
    RouterRule(
        _DEEPSEEK_V2,
        "softmax_all",
        scale=_SCALE,
        in_fp32=True,
        requires=(("router.topk_method", "greedy"),),
    ),
    RouterRule(
        _DEEPSEEK_V2,
        "softmax_all",
        scale=_SCALE,
        groups="max",
        in_fp32=True,
        requires=(("router.topk_method", "group_limited_greedy"),),
    ),
    RouterRule(
        _names(
            "{}TopkRouter",
            "DeepseekV3 DeepseekV32 Dots1 Dots3NoteText ExaoneMoe Glm4Moe Glm4MoeLite Glm4vMoeText "
            "Glm5NextText GlmMoeDsa HYV4 HYV4VL KimiLinear BailingHybrid MiMoV2Flash NemotronH "
            "SolarOpen AXK1 AXK2",
        ),
        "sigmoid",
        norm="router.norm_topk_prob",
        norm_eps=1e-20,
        scale=_SCALE,
        bias=_BIAS,
        groups="top2sum",
        in_fp32=True,
    ),
    RouterRule(
        ("BeamTopKRouter",),
        "sigmoid",
        norm="router.norm_topk_prob",
        norm_eps=1e-20,
        scale="block.routed_scaling_factor",
        bias=_BIAS,
        groups="top2sum",
        in_fp32=True,
    ),
    RouterRule(
        ("Mistral4TopkRouter",),
        "softmax_all",
        norm="router.norm_topk_prob",
        norm_eps=1e-20,
        scale=_SCALE,
        groups="top2sum",
    ),
    RouterRule(
        ("MistralLarge4TextTopkRouter",),
        "softmax_all",
        norm=True,
        norm_eps=1e-20,
        scale=_SCALE,
        groups="top2sum",
        in_fp32=True,
    ),
    RouterRule(
        ("HYV3TopKRouter",),
        "sigmoid",
        norm=True,
        norm_eps=1e-20,
        scale="router.router_scaling_factor",
        bias="block.e_score_correction_bias",
        in_fp32=True,
    ),
    RouterRule(
        ("MiniMaxM2TopKRouter",), "sigmoid", norm=True, bias="block.e_score_correction_bias"
    ),
    RouterRule(
        ("LagunaTopKRouter",),
        "sigmoid",
        norm=True,
        scale="block.routed_scaling_factor",
        bias=_BIAS,
        requires=(("router.router_logit_softcapping", 0.0),),
    ),
    RouterRule(
        ("AfmoeTokenChoiceRouter",),
        "sigmoid",
        norm=True,
        norm_eps=1e-20,
        scale="router.route_scale",
        bias="block.expert_bias",
        weight="router.gate.weight",
    ),
    RouterRule(("FlintTopKRouter",), "sigmoid", norm="router.norm_topk_prob", in_fp32=True),
    RouterRule(
        ("Lfm2MoeTopKRouter",),
        "sigmoid",
        norm="router.norm_topk_prob",
        norm_eps=1e-6,
        scale=_SCALE,
        bias="block.expert_bias",
        requires=(("block.use_expert_bias", True),),
    ),
    RouterRule(
        ("Lfm2MoeTopKRouter",),
        "sigmoid",
        norm="router.norm_topk_prob",
        norm_eps=1e-6,
        scale=_SCALE,
        requires=(("block.use_expert_bias", False),),
    ),
    RouterRule(
        ("Ernie4_5_MoeTopKRouter",),
        "softmax_all",
        norm=True,
        norm_eps="router.norm_min",
        norm_clamp=True,
        bias="router.moe_statics.e_score_correction_bias",
        in_fp32=True,
    ),
    RouterRule(
        ("Cohere2MoeTopKRouter",),
        "softmax",
        requires=(
            ("router.expert_selection_fn", "softmax"),
            ("block.shared_expert_combination_strategy", "sum"),
        ),
    ),
    RouterRule(
        (*_names("GraniteMoe{}TopKRouter", "SWA Shared Hybrid"), "GraniteMoeTopKRouter"), "softmax"
    ),
    RouterRule(("AriaTextTopKRouter",), "softmax"),
    RouterRule(("JetMoeTopKGating",), "softmax", weight="router.layer.weight"),
    RouterRule(("GptOssTopKRouter",), "softmax", gate_bias="router.bias", in_place=True),
    RouterRule(
        ("OpenAIPrivacyFilterTopKRouter",),
        "softmax",
        gate_bias="router.bias",
        scale="1/router.top_k",
        in_fp32=True,
        in_place=True,
    ),
    RouterRule(
        _names("{}TopKRouter", "MiniMaxM3VL Step3p7"),
        "sigmoid",
        norm=True,
        scale="block.routed_scaling_factor",
        bias=_BIAS,
    ),
    RouterRule(
        _names("{}TopKRouter", "Inkling2 Inkling2Loop"),
        "sigmoid",
        norm=True,
        norm_eps=1e-20,
        scale=_SCALE,
        bias=_BIAS,
        in_fp32=True,
    ),
    RouterRule(
        _names("{}TextRouter", "Gemma4 DiffusionGemma"),
        "softmax_all",
        norm=True,
        weight="router.proj.weight",
        weight_factors=("router.scale", "router.scalar_root_size"),
        before="router.norm",
        output_scale="router.per_expert_scale",
        top_k=("router.config.top_k_experts",),
    ),
    *(
        RouterRule(
            ("DbrxRouter",),
            "softmax_all",
            norm=norm is not None,
            weight="router.layer.weight",
            requires=(("block.moe_normalize_expert_weights", norm),),
        )
        for norm in (None, 1)
    ),
)


def read_router(
    block: nn.Module, router: nn.Module, num_experts: int
) -> tuple[RouterSpec | None, bool, str]:
    """The router as the operator sees it, and whether the block has to keep its own code around it;
    or None and the reason why it stays outside.
    """
    name = type(router).__name__
    rules = [rule for rule in RULES if name in rule.routers]
    if not rules:
        return None, False, f"router {name} is not one that the operator is known to compute"
    find = _finder(block, router)
    for rule in rules:
        if all(find(path) == value for path, value in rule.requires):
            spec, outside = _apply(rule, find, num_experts)
            return spec, rule.in_place, outside
    found = {path: find(path) for rule in rules for path, _ in rule.requires}
    settings = ", ".join(f"{path} = {value!r}" for path, value in found.items())
    return None, False, f"router {name} with {settings} is not one that the operator computes"


def _finder(block: nn.Module, router: nn.Module) -> Callable[[str], Any]:
    def find(path: str) -> Any:
        root, *names = path.split(".")
        value: Any = router if root == "router" else block
        for name in names:
            value = getattr(value, name)
        return value

    return find


def _apply(
    rule: RouterRule, find: Callable[[str], Any], num_experts: int
) -> tuple[RouterSpec | None, str]:
    weight: Tensor = find(rule.weight)
    top_k = _top_k(find, rule)
    n_group, topk_group = 1, 1
    if rule.groups:
        n_group, topk_group = find("router.num_group") or 1, find("router.topk_group") or 1
    if n_group > 1 and topk_group * (num_experts // n_group) < top_k:
        return None, (
            f"{topk_group} groups of {num_experts // n_group} experts are too few for "
            f"{top_k} activated experts: the original then selects masked experts"
        )
    attributes = RoutingAttributes(
        num_activated_experts=top_k,
        score_func=rule.score_func,
        norm_topk=bool(find(rule.norm)) if isinstance(rule.norm, str) else rule.norm,
        norm_eps=float(find(rule.norm_eps)) if isinstance(rule.norm_eps, str) else rule.norm_eps,
        norm_clamp=rule.norm_clamp,
        route_scale=_scale(find, rule.scale) if rule.scale else 1.0,
        n_group=n_group,
        topk_group=topk_group,
        group_score=rule.groups or "top2sum",
        router_dtype="float32" if rule.in_fp32 else str(weight.dtype).removeprefix("torch."),
    )
    for factor in rule.weight_factors:
        weight = weight.detach().float() * find(factor)
    spec = RouterSpec(
        weight,
        find(rule.gate_bias) if rule.gate_bias else None,
        find(rule.bias).reshape(-1) if rule.bias else None,
        attributes,
        find(rule.before) if rule.before else None,
        find(rule.output_scale) if rule.output_scale else None,
    )
    return spec, ""


def _scale(find: Callable[[str], Any], path: str) -> float:
    value = float(find(path.removeprefix("1/")))
    return 1.0 / value if path.startswith("1/") else value


def _top_k(find: Callable[[str], Any], rule: RouterRule) -> int:
    for path in rule.top_k:
        try:
            return int(find(path))
        except AttributeError:
            continue
    raise AttributeError("neither the router nor the block has an attribute top_k")
