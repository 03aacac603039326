"""Experts that are modules in a list, as checkpoints with code of their own have them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moepack
from moepack import verification
from moepack.errors import BadWeights, UnsupportedError
from moepack.families import find_blocks
from moepack.modules import PackedExperts

WIDTH, INNER, EXPERTS = 64, 40, 6


class Gated(nn.Module):
    """gate_proj, up_proj, down_proj, in whatever order and with whatever names."""

    def __init__(self, names: tuple[str, str, str], bias: bool = False) -> None:
        super().__init__()
        self.names = names
        down = names[2]
        for name in sorted(names):
            sizes = (INNER, WIDTH) if name == down else (WIDTH, INNER)
            self.add_module(name, nn.Linear(*sizes, bias=bias))
        self.activation: Callable[[Tensor], Tensor] = F.silu

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        y: Tensor = down(self.activation(gate(x)) * up(x))
        return y


class Clamped(Gated):
    def __init__(self, names: tuple[str, str, str], bias: bool = False) -> None:
        super().__init__(names, bias)
        self.bound = 2.5

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        y: Tensor = down(
            F.silu(gate(x).clamp(max=self.bound)) * up(x).clamp(-self.bound, self.bound)
        )
        return y


class Ungated(nn.Module):
    def __init__(self, power: int) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, INNER, bias=True)
        self.first = nn.Linear(INNER, WIDTH, bias=True)  # the name lies
        self.power = power
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(self.dropout(F.relu(self.second(x)) ** self.power))
        return y


class LoopingBlock(nn.Module):
    """Goes over all experts, as blocks did before transformers 5; returns logits too."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.view(-1, WIDTH)
        logits = self.gate(x)
        weights, ids = logits.softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts.children()):
            token, slot = (ids == index).nonzero(as_tuple=True)
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y.view(hidden_states.shape), logits


class SortingBlock(LoopingBlock):
    """Sorts tokens by expert and indexes the list; experts without tokens are not called."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.view(-1, WIDTH)
        logits = self.gate(x)
        scores, ids = logits.sigmoid().topk(2, dim=-1)
        order = ids.flatten().argsort()
        outputs, first = torch.zeros(len(order), WIDTH), 0
        for index, count in enumerate(torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()):
            if count:
                rows = order[first : first + count]
                outputs[rows] = self.experts[index](x[rows // 2])  # type: ignore[index]
            first += count
        y = (outputs.view(-1, 2, WIDTH) * scores[..., None]).sum(1)
        return y.view(hidden_states.shape), logits


Make = Callable[[], nn.Module]
KINDS: dict[str, Make] = {
    "gate, up, down": lambda: Gated(("gate_proj", "up_proj", "down_proj")),
    "w1, w3, w2": lambda: Gated(("w1", "w3", "w2"), bias=True),
    "names that lie": lambda: Gated(("down_proj", "gate_proj", "up_proj")),
    "clamped": lambda: Clamped(("w1", "w3", "w2")),
    "relu": lambda: Ungated(1),
    "relu squared": lambda: Ungated(2),
}


def model_of(make: Make, block: type[LoopingBlock] = LoopingBlock) -> nn.Module:
    torch.manual_seed(0)
    experts = nn.ModuleList(make() for _ in range(EXPERTS))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.mul_(6.0)
    return nn.ModuleDict({"layer": block(experts)}).eval()


@pytest.mark.parametrize("block", [LoopingBlock, SortingBlock])
@pytest.mark.parametrize("kind", KINDS)
def test_recognised_by_shapes_and_by_what_they_compute(
    kind: str, block: type[LoopingBlock]
) -> None:
    model = model_of(KINDS[kind], block)
    x = torch.randn(2, 11, WIDTH)
    with torch.no_grad():
        expected, logits = model.get_submodule("layer")(x)
        (found,) = find_blocks(model)
        assert found.spec is not None, found.refused_because
        assert verification.check_adapter("layer", found.spec).error < 1e-5
        report = moepack.quantize_(model, "int8-g32")
        y, same_logits = model.get_submodule("layer")(x)
    assert report.plan.blocks[0].router == "outside"
    assert torch.equal(logits, same_logits)
    assert (y - expected).norm() < 0.04 * expected.norm()
    assert sum(isinstance(m, PackedExperts) for m in model.modules()) == 1
    assert not find_blocks(model)
    assert "packed already" in moepack.quantize_(model).note


def test_packed_weights_have_one_name_and_survive_copies() -> None:
    model = moepack.quantize_(model_of(KINDS["clamped"]), "int8-g32").model
    names = {name.rpartition(".")[2] for name in model.state_dict()}
    assert len(model.state_dict()) == 3
    assert names == {"weight", "packed_w13", "packed_w2"}
    x = torch.randn(1, 5, WIDTH)
    with torch.no_grad():
        expected = model.get_submodule("layer")(x)[0]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for buffer in model.get_submodule("layer.packed_experts").buffers():
                assert all(buffer.data_ptr() != b.data_ptr() for b in twin.buffers())
            assert torch.equal(twin.get_submodule("layer")(x)[0], expected)
        restored = moepack.dequantize_(model).get_submodule("layer")(x)[0]
    assert 0 < (restored - expected).norm() < 0.04 * expected.norm()


def test_experts_that_differ_are_refused() -> None:
    model = model_of(KINDS["relu"])
    experts = model.get_submodule("layer.experts")
    experts._modules["3"] = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
    with pytest.raises(UnsupportedError, match="its experts differ"):
        moepack.quantize_(model)


def test_one_expert_that_computes_something_else_is_found() -> None:
    model = model_of(KINDS["gate, up, down"])
    model.get_submodule("layer.experts.4").activation = F.gelu  # type: ignore[assignment]
    with pytest.raises(moepack.errors.VerificationError, match="the experts"):
        moepack.quantize_(model)


def test_a_nan_is_named_with_its_place() -> None:
    model = model_of(KINDS["w1, w3, w2"])
    with torch.no_grad():
        model.get_parameter("layer.experts.2.w3.weight")[7, 5] = torch.nan
    with pytest.raises(BadWeights, match=f"layer expert 2 w13: row {INNER + 7}, column 5"):
        moepack.quantize_(model)


def test_on_meta_it_is_planned_and_not_packed() -> None:
    with torch.device("meta"):
        model = model_of(KINDS["w1, w3, w2"])
    assert moepack.plan(model).replaced
    with pytest.raises(BadWeights, match="meta device"):
        moepack.quantize_(model)


def test_hooks_on_experts_are_refused_and_those_on_the_block_stay() -> None:
    model = model_of(KINDS["gate, up, down"])
    path = moepack.plan(model).blocks[0].path
    calls: list[nn.Module] = []
    model.get_submodule(path).register_forward_hook(lambda m, *_: calls.append(m))
    inner = model.get_submodule(f"{path}.experts.2.up_proj")
    hook = inner.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=rf"{path} .*hook .* on experts\.2\.up_proj; remove"):
        moepack.quantize_(model)
    hook.remove()
    moepack.quantize_(model)
    calls.clear()
    model.get_submodule(path)(torch.randn(1, 3, WIDTH))
    assert calls == [model.get_submodule(path)]
