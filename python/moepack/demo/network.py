"""The demo model for training: Qwen3-MoE in plain torch, its parameters named as in transformers.

Every expert runs on every token and the routing weights, zero for experts not selected, pick the
result. With 16 small experts this is two large matrix products, faster to train than gathering
tokens per expert, and the function computed is the same.

Shapes: B batch, S sequence, T = B*S tokens, D hidden, H heads, E experts, F expert width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    vocab: int = 2048
    hidden: int = 192
    layers: int = 5
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 96
    context: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


def fake_quantize(weight: Tensor, bits: int, group: int = 32) -> Tensor:
    """`weight` rounded to signed integers with one symmetric scale per `group` along the last dim.

    scale = amax / 7.5 for 4 bits, where the code -8 is worth having, and amax / 127 for 8 bits.
    """
    divisor, lowest, highest = {4: (7.5, -8, 7), 8: (127.0, -127, 127)}[bits]
    groups = weight.reshape(*weight.shape[:-1], -1, group)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / divisor
    return ((groups / scale).round().clamp(lowest, highest) * scale).reshape(weight.shape)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Experts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        e, d, f = shape.experts, shape.hidden, shape.expert_width
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))

    def forward(self, x_TD: Tensor, weights_TE: Tensor) -> Tensor:
        h = functional.linear(x_TD, self.gate_up_proj.flatten(0, 1))
        gate, up = h.view(len(x_TD), *self.gate_up_proj.shape[:2]).chunk(2, dim=-1)
        h_TEF = functional.silu(gate) * up * weights_TE.unsqueeze(-1).to(up.dtype)
        return functional.linear(h_TEF.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


class SparseBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape)
        self.top_k = shape.experts_per_token

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        x_TD = x_BSD.flatten(0, 1)
        probs_TE = self.gate(x_TD).float().softmax(-1)
        top, ids = probs_TE.topk(self.top_k, dim=-1)
        top = top / top.sum(-1, keepdim=True)
        weights_TE = torch.zeros_like(probs_TE).scatter(1, ids, top)
        share = (weights_TE > 0).float().mean(0) / self.top_k
        balance = share.dot(probs_TE.mean(0)) * probs_TE.shape[1]  # 1 when all are used alike
        return self.experts(x_TD, weights_TE).view_as(x_BSD), balance


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, h = shape.hidden, shape.head_dim
        self.q_proj = nn.Linear(d, shape.heads * h, bias=False)
        self.k_proj = nn.Linear(d, shape.kv_heads * h, bias=False)
        self.v_proj = nn.Linear(d, shape.kv_heads * h, bias=False)
        self.o_proj = nn.Linear(shape.heads * h, d, bias=False)
        self.q_norm = Norm(h, shape.norm_eps)
        self.k_norm = Norm(h, shape.norm_eps)
        self.head_dim = h

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x_BSD.shape[:2], -1, self.head_dim)
        q, k, v = (
            proj(x_BSD).view(heads).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(x, cos, sin) for x in (self.q_norm(q), self.k_norm(k)))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = SparseBlock(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + self.dropout(y), balance


class Decoder(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)


class Network(nn.Module):
    """Returns logits and the mean load-balancing loss of the layers (1 is perfect balance)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Decoder(shape, dropout)
        self.dropout = nn.Dropout(dropout)
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(shape.context), shape.rope_theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(shape)

    def _initialise(self, shape: Shape) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # what is added to the residual stream starts smaller the more layers add to it
                added = name.endswith(("o_proj.weight", "down_proj"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if added else 0.02)

    def forward(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[: ids_BS.shape[1]], self.sin[: ids_BS.shape[1]]
        x = self.dropout(self.model.embed_tokens(ids_BS))
        balances = []
        for layer in self.model.layers:
            x, balance = layer(x, cos, sin)
            balances.append(balance)
        logits = functional.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return logits, torch.stack(balances).mean()
