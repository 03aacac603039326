"""The operators against the plain reference, to the bit, and what they refuse."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from moepack import _core, ops, packing, reference
from moepack.errors import MoePackError, UnsupportedError
from moepack.quantizer import quantize
from moepack.schemes import SCHEMES

ISAS = [name for name, supported, _ in _core.isa_table() if supported]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Layer:
    """Packed experts of one layer and the tensors around them."""

    scheme: str
    D: int
    F: int
    gate_weight: Tensor
    packed_w13: Tensor
    packed_w2: Tensor
    gate_bias: Tensor | None = None
    expert_bias: Tensor | None = None
    bias13: Tensor | None = None
    bias2: Tensor | None = None

    @property
    def experts(self) -> int:
        return len(self.gate_weight)

    def x(self, tokens: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, self.D, generator=random).to(dtype)


def layer(scheme: str = "int4-g32", E: int = 6, D: int = 96, F: int = 40, seed: int = 0) -> Layer:
    random = torch.Generator().manual_seed(seed)

    def packed(rows: int, cols: int, order: Any) -> Tensor:
        weights = (torch.randn(rows, cols, generator=random) * cols**-0.5 for _ in range(E))
        return packing.pack_experts((quantize(w, scheme) for w in weights), order)

    gate = torch.randn(E, D, generator=random)
    return Layer(scheme, D, F, gate, packed(2 * F, D, "gate_up"), packed(D, F, "plain"))


def with_biases(base: Layer, seed: int = 9) -> Layer:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    E = base.experts
    return replace(
        base,
        gate_bias=normal(E),
        expert_bias=normal(E),
        bias13=normal(E, 2 * base.F),
        bias2=normal(E, base.D),
    )


def ffn_arguments(
    case: Layer, x: Tensor, K: int = 2, router_x: Tensor | None = None, **attributes: Any
) -> list[Any]:
    values: dict[str, Any] = {
        "layout": "moepack",
        "score_func": "softmax",
        "norm_topk": False,
        "norm_eps": 0.0,
        "norm_clamp": False,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "group_score": "top2sum",
        "router_dtype": "float32",
        "activation": "silu",
        "act_alpha": 1.0,
        "act_limit": 0.0,
        "gate_softcap": 0.0,
        "up_softcap": 0.0,
        "limit_after_act": False,
        "weight_on_input": False,
    }
    scheme = attributes.pop("scheme", case.scheme)
    hidden_dim = attributes.pop("hidden_dim", case.F)
    assert attributes.keys() <= values.keys()
    values.update(attributes)
    tensors = [x, router_x, case.gate_weight, case.gate_bias, case.expert_bias]
    tensors += [case.packed_w13, case.packed_w2, case.bias13, case.bias2]
    return [*tensors, K, hidden_dim, scheme, *values.values()]


def experts_arguments(
    case: Layer, x: Tensor, ids: Tensor, weights: Tensor, **attributes: Any
) -> list[Any]:
    ffn = ffn_arguments(case, x, **attributes)
    return [x, ids, weights, *ffn[5:9], *ffn[10:13], *ffn[22:]]


def ffn(case: Layer, x: Tensor, **keywords: Any) -> Tensor:
    result: Tensor = torch.ops.moepack.quantized_moe_ffn(*ffn_arguments(case, x, **keywords))
    return result


def experts(case: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = torch.ops.moepack.quantized_experts(*experts_arguments(case, x, ids, weights))
    return result


def same(a: Tensor, b: Tensor) -> bool:
    """Bit-equal, any NaN equal to any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def assert_matches_reference(case: Layer, x: Tensor, **keywords: Any) -> Tensor:
    arguments = ffn_arguments(case, x, **keywords)
    found: Tensor = torch.ops.moepack.quantized_moe_ffn(*arguments)
    assert same(found, reference.quantized_moe_ffn(*arguments))
    return found


@pytest.fixture(autouse=True)
def _default_isa_and_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    ops.force_isa(None)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small() -> Layer:
    return layer()


@pytest.fixture(scope="module")
def eight() -> Layer:
    return layer(E=8, D=64, F=32)


def test_the_probe_and_the_schema() -> None:
    assert ops.is_active()
    schema = str(torch.ops.moepack.quantized_moe_ffn.default._schema)
    assert "Tensor? router_x, Tensor gate_weight" in schema
    assert str(torch.ops.moepack.quantized_experts.out._schema).endswith(
        "bool weight_on_input, *, Tensor(a!) out) -> Tensor(a!)"
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize(("D", "F"), [(32, 16), (40, 33), (200, 70), (130, 257)])
def test_every_scheme_and_isa_is_the_reference(isa: str, scheme: str, D: int, F: int) -> None:
    ops.force_isa(isa)
    case = layer(scheme, E=3, D=D, F=F)
    for tokens in (1, 7):
        assert_matches_reference(case, case.x(tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_dtype_is_the_reference(small: Layer, dtype: torch.dtype, isa: str) -> None:
    ops.force_isa(isa)
    case = with_biases(small)
    result = assert_matches_reference(case, case.x(9, dtype))
    assert result.dtype == dtype
    assert result.shape == (9, case.D)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["softmax", "softmax_all", "sigmoid"]),
    st.booleans(),
    st.sampled_from([0.0, 1e-20, 0.3]),
    st.booleans(),
    st.sampled_from([1.0, 2.5]),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 3), (4, 4)]),
    st.sampled_from(["top2sum", "max"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(1, 4),
    st.sampled_from(ISAS),
    st.integers(0, 1000),
)
def test_every_router_is_the_reference(
    score_func: str,
    norm_topk: bool,
    norm_eps: float,
    norm_clamp: bool,
    route_scale: float,
    groups: tuple[int, int],
    group_score: str,
    router_dtype: str,
    K: int,
    isa: str,
    seed: int,
) -> None:
    n_group, topk_group = groups
    case = with_biases(layer(E=8, D=64, F=32), seed)
    K = min(K, topk_group * (8 // n_group))
    ops.force_isa(isa)
    assert_matches_reference(
        case,
        case.x(5, seed=seed),
        K=K,
        router_x=case.x(5, seed=seed + 1) if seed % 2 else None,
        score_func=score_func,
        norm_topk=norm_topk,
        norm_eps=norm_eps,
        norm_clamp=norm_clamp,
        route_scale=route_scale,
        n_group=n_group,
        topk_group=topk_group,
        group_score=group_score,
        router_dtype=router_dtype,
    )


def test_the_experts_alone_are_the_reference(small: Layer) -> None:
    case = with_biases(small)
    for dtype in DTYPES:
        x = case.x(5, dtype)
        ids = torch.randint(0, case.experts, (5, 3), generator=torch.Generator().manual_seed(2))
        arguments = experts_arguments(case, x, ids, torch.randn(5, 3))
        found = torch.ops.moepack.quantized_experts(*arguments)
        assert same(found, reference.quantized_experts(*arguments))


def test_no_tokens(small: Layer) -> None:
    for dtype in DTYPES:
        result = ffn(small, small.x(0, dtype))
        assert result.shape == (0, small.D)
        assert result.dtype == dtype
    none = torch.empty(0, 2)
    assert experts(small, small.x(0), none.long(), none).shape == (0, small.D)


def test_all_experts_and_one_expert(small: Layer) -> None:
    assert_matches_reference(small, small.x(4), K=small.experts)
    one = layer(E=1)
    assert_matches_reference(one, one.x(1), K=1)
    assert_matches_reference(one, one.x(3), K=1)


def test_every_token_to_one_expert(small: Layer) -> None:
    x = small.x(40)
    ids = torch.full((40, 1), 3)
    found = experts(small, x, ids, torch.ones(40, 1))
    for t in (0, 17, 39):
        alone = experts(small, x[t : t + 1], ids[:1], torch.ones(1, 1))
        assert torch.equal(found[t : t + 1], alone)


def test_nan_and_infinite_rows_leave_the_others_alone(small: Layer) -> None:
    x = small.x(6)
    clean = ffn(small, x)
    for bad in (math.nan, math.inf, -math.inf):
        dirty = x.clone()
        dirty[2, 7] = bad
        found = assert_matches_reference(small, dirty)
        assert found[2].isnan().all()
        others = [0, 1, 3, 4, 5]
        assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("score_func", ["softmax", "softmax_all", "sigmoid"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [[0], [1, 3], list(range(6))])
def test_logits_that_are_not_finite(
    small: Layer, score_func: str, bad: float, columns: list[int]
) -> None:
    gate_bias = torch.zeros(small.experts)
    gate_bias[columns] = bad
    case = replace(small, gate_bias=gate_bias)
    assert_matches_reference(case, case.x(4), score_func=score_func)


def test_ties_go_to_the_lowest_ids(eight: Layer) -> None:
    case = replace(eight, gate_weight=torch.zeros_like(eight.gate_weight))
    x = case.x(3)
    ids = torch.arange(4).expand(3, 4)
    expected = experts(case, x, ids, torch.full((3, 4), 0.25))
    for isa in ISAS:
        ops.force_isa(isa)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(ffn(case, x, K=4), expected)


def test_a_repeated_id_counts_twice(small: Layer) -> None:
    x = small.x(1)
    once = experts(small, x, torch.tensor([[4]]), torch.tensor([[1.0]]))
    twice = experts(small, x, torch.tensor([[4, 4]]), torch.tensor([[0.25, 0.5]]))
    torch.testing.assert_close(twice, 0.75 * once)


@pytest.mark.parametrize("bad", [-1, 6, 2**40, -(2**62)])
def test_ids_out_of_range_are_refused(small: Layer, bad: int) -> None:
    ids = torch.tensor([[0, 1], [2, bad]])
    with pytest.raises(RuntimeError, match=str(bad)):
        experts(small, small.x(2), ids, torch.ones(2, 2))


def test_strided_arguments_equal_contiguous_ones(small: Layer) -> None:
    case = with_biases(small)
    x = case.x(5)
    expected = ffn(case, x)

    def strided(tensor: Tensor) -> Tensor:
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]

    names = [
        "gate_weight",
        "packed_w13",
        "packed_w2",
        "gate_bias",
        "expert_bias",
        "bias13",
        "bias2",
    ]
    changes: dict[str, Any] = {name: strided(getattr(case, name)) for name in names}
    spread = replace(case, **changes)
    assert not spread.packed_w13.is_contiguous()
    assert torch.equal(ffn(spread, strided(x)), expected)
    assert torch.equal(ffn(case, x.T.contiguous().T), expected)
    assert torch.equal(ffn(case, x, router_x=strided(x)), expected)


def test_an_expanded_blob_serves_every_expert() -> None:
    one = layer(E=1)
    many = replace(
        one,
        gate_weight=torch.randn(4, one.D),
        packed_w13=one.packed_w13.expand(4, -1),
        packed_w2=one.packed_w2.expand(4, -1),
    )
    x = one.x(3)
    ids = torch.tensor([[0], [2], [3]])
    expected = experts(one, x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert torch.equal(experts(many, x, ids, torch.ones(3, 1)), expected)


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g128", "int8-g64"])
def test_a_token_alone_equals_its_row_in_a_batch(scheme: str) -> None:
    case = layer(scheme, E=4, D=264, F=72)
    x = case.x(64)
    batch = ffn(case, x)
    for t in range(0, 64, 7):
        assert torch.equal(ffn(case, x[t : t + 1]), batch[t : t + 1])


def test_threads_do_not_change_a_bit(small: Layer) -> None:
    x = small.x(33)
    torch.set_num_threads(1)
    expected = ffn(small, x)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(ffn(small, x), expected)


def test_the_last_expert_beyond_2_gib_is_right() -> None:
    base = layer(E=1, D=2048, F=1024)
    size = base.packed_w13.shape[1]
    count = 2**31 // size + 2
    # Pages that nobody touches cost nothing.
    packed_w13 = torch.zeros(count, size, dtype=torch.uint8)
    packed_w2 = torch.zeros(count, base.packed_w2.shape[1], dtype=torch.uint8)
    packed_w13[-1], packed_w2[-1] = base.packed_w13[0], base.packed_w2[0]
    case = replace(base, packed_w13=packed_w13, packed_w2=packed_w2)
    x = base.x(1)
    last = experts(case, x, torch.tensor([[count - 1]]), torch.ones(1, 1))
    assert torch.equal(last, experts(base, x, torch.tensor([[0]]), torch.ones(1, 1)))


def test_out_variants_write_what_the_functions_return(small: Layer) -> None:
    x = small.x(4)
    arguments = ffn_arguments(small, x)
    expected = torch.ops.moepack.quantized_moe_ffn(*arguments)
    out = torch.empty_like(x)
    assert torch.ops.moepack.quantized_moe_ffn.out(*arguments, out=out) is out
    assert torch.equal(out, expected)
    strided = torch.empty(small.D, 4).T
    torch.ops.moepack.quantized_moe_ffn.out(*arguments, out=strided)
    assert torch.equal(strided, expected)
    torch.ops.moepack.quantized_moe_ffn.out(*arguments, out=x)
    assert torch.equal(x, expected)


def test_nothing_is_written_to_out_on_an_error(small: Layer) -> None:
    foreign = small.packed_w13.clone()
    foreign[:, 0] = 0
    out = torch.full((2, small.D), 7.0)
    arguments = ffn_arguments(replace(small, packed_w13=foreign), small.x(2))
    with pytest.raises(RuntimeError):
        torch.ops.moepack.quantized_moe_ffn.out(*arguments, out=out)
    assert out.eq(7.0).all()


Edit = Callable[[Layer], tuple[Layer, dict[str, Any]]]

BAD_ARGUMENTS: dict[str, Edit] = {
    "x of rank 3": lambda c: (c, {"x": torch.zeros(1, 2, c.D)}),
    "x of rank 1": lambda c: (c, {"x": torch.zeros(c.D)}),
    "x of int": lambda c: (c, {"x": torch.zeros(2, c.D, dtype=torch.int32)}),
    "x of fp64": lambda c: (c, {"x": torch.zeros(2, c.D, dtype=torch.float64)}),
    "x of another width": lambda c: (c, {"x": torch.zeros(2, c.D + 1)}),
    "router_x of other tokens": lambda c: (c, {"router_x": torch.zeros(3, c.D)}),
    "router_x of another dtype": lambda c: (
        c,
        {"router_x": torch.zeros(2, c.D, dtype=torch.bfloat16)},
    ),
    "gate of bf16": lambda c: (replace(c, gate_weight=c.gate_weight.bfloat16()), {}),
    "gate of other experts": lambda c: (replace(c, gate_weight=torch.zeros(5, c.D)), {}),
    "gate without experts": lambda c: (replace(c, gate_weight=torch.zeros(0, c.D)), {}),
    "gate bias of another length": lambda c: (replace(c, gate_bias=torch.zeros(5)), {}),
    "expert bias of rank 2": lambda c: (replace(c, expert_bias=torch.zeros(1, 6)), {}),
    "blob of int8": lambda c: (replace(c, packed_w13=c.packed_w13.view(torch.int8)), {}),
    "short blob": lambda c: (replace(c, packed_w13=c.packed_w13[:, :-32].contiguous()), {}),
    "long blob": lambda c: (replace(c, packed_w2=torch.cat([c.packed_w2] * 2, 1)), {}),
    "blobs of other experts": lambda c: (replace(c, packed_w2=c.packed_w2[:4]), {}),
    "blob of rank 1": lambda c: (replace(c, packed_w2=c.packed_w2[0]), {}),
    "bias13 of another width": lambda c: (replace(c, bias13=torch.zeros(6, c.F)), {}),
    "bias2 of another width": lambda c: (replace(c, bias2=torch.zeros(6, c.D + 1)), {}),
    "bias2 of fp16": lambda c: (replace(c, bias2=torch.zeros(6, c.D).half()), {}),
    "more activated than experts": lambda c: (c, {"K": 7}),
    "none activated": lambda c: (c, {"K": 0}),
    "negative activated": lambda c: (c, {"K": -3}),
    "hidden_dim 0": lambda c: (c, {"hidden_dim": 0}),
    "hidden_dim of others": lambda c: (c, {"hidden_dim": 400}),
    "hidden_dim beyond all": lambda c: (c, {"hidden_dim": 2**62}),
    "unknown scheme": lambda c: (c, {"scheme": "int3-g32"}),
    "scheme to come": lambda c: (c, {"scheme": "mxfp4"}),
    "another scheme": lambda c: (c, {"scheme": "int8-g32"}),
    "unknown layout": lambda c: (c, {"layout": "gguf"}),
    "unknown activation": lambda c: (c, {"activation": "tanh"}),
    "unknown score": lambda c: (c, {"score_func": "tanh"}),
    "unknown group score": lambda c: (c, {"group_score": "mean"}),
    "unknown router dtype": lambda c: (c, {"router_dtype": "float64"}),
    "groups that do not divide": lambda c: (c, {"n_group": 4}),
    "no groups": lambda c: (c, {"n_group": 0}),
    "more groups kept than there are": lambda c: (c, {"n_group": 2, "topk_group": 3}),
    "groups too few for K": lambda c: (c, {"n_group": 3, "topk_group": 1, "K": 3}),
    "negative act_limit": lambda c: (c, {"act_limit": -7.0}),
    "act_limit without a gate": lambda c: (c, {"activation": "relu2", "act_limit": 7.0}),
    "act_limit nan": lambda c: (c, {"act_limit": math.nan}),
    "act_alpha of silu": lambda c: (c, {"act_alpha": 1.702}),
    "softcap of gelu": lambda c: (c, {"activation": "gelu_tanh", "gate_softcap": 30.0}),
    "limit_after_act without a limit": lambda c: (c, {"limit_after_act": True}),
    "gated blobs without a gate": lambda c: (c, {"activation": "relu"}),
    "weight_on_input and bias13": lambda c: (
        replace(c, bias13=torch.zeros(6, 2 * c.F)),
        {"weight_on_input": True},
    ),
    "norm_eps nan": lambda c: (c, {"norm_eps": math.nan}),
    "route_scale inf": lambda c: (c, {"route_scale": math.inf}),
}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(BAD_ARGUMENTS))
def test_eager_and_meta_refuse_alike(small: Layer, name: str) -> None:
    case, keywords = BAD_ARGUMENTS[name](small)
    arguments = ffn_arguments(case, keywords.pop("x", small.x(2)), **keywords)
    op = torch.ops.moepack.quantized_moe_ffn
    message = refusal(lambda: op(*arguments))
    assert message.startswith("moepack::quantized_moe_ffn: ")
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    assert refusal(lambda: op(*meta)) == message
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        assert refusal(lambda: op(*fake)) == message
    assert refusal(lambda: op.out(*arguments, out=torch.empty(2, small.D))) == message


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        (torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)),
        (torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 3)),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.float64)),
        (torch.zeros(4, dtype=torch.int64), torch.ones(4)),
        (torch.zeros(2, 0, dtype=torch.int64), torch.ones(2, 0)),
    ],
)
def test_routing_tensors_are_refused_alike(small: Layer, ids: Tensor, weights: Tensor) -> None:
    arguments = experts_arguments(small, small.x(2), ids, weights)
    op = torch.ops.moepack.quantized_experts
    message = refusal(lambda: op(*arguments))
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    assert refusal(lambda: op(*meta)) == message


@pytest.mark.parametrize("out", [torch.empty(3, 96), torch.empty(2, 96, dtype=torch.float16)])
def test_outputs_that_do_not_fit_are_refused_alike(small: Layer, out: Tensor) -> None:
    arguments = ffn_arguments(small, small.x(2))
    op = torch.ops.moepack.quantized_moe_ffn.out
    message = refusal(lambda: op(*arguments, out=out))
    assert "out: got" in message
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    assert refusal(lambda: op(*meta, out=out.to("meta"))) == message


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, 0), (4, 2), (6, 2), (6, 9), (8, 79), (12, 97), (16, 64), (28, 0), (28, 7)],
)
def test_foreign_contents_are_refused_by_eager(small: Layer, offset: int, value: int) -> None:
    foreign = small.packed_w13.clone()
    foreign[2, offset] = value
    case = replace(small, packed_w13=foreign)
    one = torch.ones(1, 1)
    message = refusal(lambda: experts(case, case.x(1), torch.tensor([[2]]), one))
    assert "packed_w13" in message or "expert 2" in message
    # An expert that no token reaches is not looked at; Meta looks at no contents.
    experts(case, case.x(1), torch.tensor([[1]]), one)
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in ffn_arguments(case, case.x(1))]
    assert torch.ops.moepack.quantized_moe_ffn(*meta).device.type == "meta"


@pytest.mark.parametrize("name", ["quantized_moe_ffn", "quantized_experts"])
def test_one_tensor_on_meta_among_real_ones_is_refused(small: Layer, name: str) -> None:
    op, x = getattr(torch.ops.moepack, name), small.x(2)
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    case = with_biases(small)
    arguments = (
        ffn_arguments(case, x)
        if name == "quantized_moe_ffn"
        else experts_arguments(case, x, ids, weights)
    )
    names = [argument.name for argument in op.default._schema.arguments]
    for i, value in enumerate(arguments):
        if i == 0 or not isinstance(value, Tensor):
            continue
        mixed = [*arguments[:i], value.to("meta"), *arguments[i + 1 :]]
        expected = f"moepack::{name}: {names[i]}: is on meta, x is on cpu"
        assert refusal(partial(op, *mixed)).startswith(expected)
        into = partial(op.out, *mixed, out=torch.empty_like(x))
        assert expected.split(": ", 1)[1] in refusal(into)
    assert "out: is on meta" in refusal(lambda: op.out(*arguments, out=x.to("meta")))
    assert "is on cpu, x is on meta" in refusal(lambda: op(x.to("meta"), *arguments[1:]))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_blobs_change_numbers_or_are_refused(data: st.DataObject) -> None:
    case = layer(E=2, D=40, F=24)
    which = data.draw(st.sampled_from(["packed_w13", "packed_w2"]))
    blob = getattr(case, which).clone()
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, blob.numel() - 1))
        blob.view(-1)[place] = data.draw(st.integers(0, 255))
    damaged = replace(case, **{which: blob})
    try:
        found = ffn(damaged, case.x(3))
    except RuntimeError:
        return
    assert found.shape == (3, 40)
    for isa in ISAS:
        ops.force_isa(isa)
        assert same(ffn(damaged, case.x(3)), found)
    ops.force_isa(None)


def test_an_unknown_isa_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedError, match=r"sse9.*scalar"):
        ops.force_isa("sse9")


def test_gradients_are_refused(small: Layer) -> None:
    x = small.x(2).requires_grad_()
    result = ffn(small, x)
    with pytest.raises(MoePackError, match=r"quantized_moe_ffn has no gradient.*no_grad"):
        result.sum().backward()
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, requires_grad=True)
    with pytest.raises(MoePackError, match="quantized_experts has no gradient"):
        experts(small, small.x(2), ids, weights).sum().backward()
    with torch.no_grad():
        assert not ffn(small, x).requires_grad


@pytest.mark.parametrize("is_grad_on", [True, False])
def test_tangents_are_refused(small: Layer, is_grad_on: bool) -> None:
    x, ids, weights = small.x(2), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    expected = ffn(small, x)
    with torch.set_grad_enabled(is_grad_on), forward_ad.dual_level():
        assert torch.equal(ffn(small, x), expected)
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(MoePackError, match="quantized_moe_ffn has no gradient"):
            ffn(small, dual)
        dual = forward_ad.make_dual(weights, torch.ones_like(weights))
        with pytest.raises(MoePackError, match="quantized_experts has no gradient"):
            experts(small, x, ids, dual)
    with pytest.raises(MoePackError, match="has no gradient"):
        torch.func.jvp(lambda v: ffn(small, v), (x,), (x,))


def test_opcheck(small: Layer) -> None:
    x = small.x(3)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]])
    torch.library.opcheck(
        torch.ops.moepack.quantized_moe_ffn.default, tuple(ffn_arguments(with_biases(small), x))
    )
    torch.library.opcheck(
        torch.ops.moepack.quantized_experts.default,
        tuple(experts_arguments(small, x, ids, torch.rand(3, 2))),
    )


def test_opcheck_of_out_variants(small: Layer) -> None:
    # torch functionalizes no custom operator that returns its output argument, as ExecuTorch's
    # convention for out variants wants it: only schema and fake tensors can be checked.
    x = small.x(3)
    torch.library.opcheck(
        torch.ops.moepack.quantized_moe_ffn.out,
        tuple(ffn_arguments(small, x)),
        {"out": torch.empty_like(x)},
        test_utils=("test_schema", "test_faketensor"),
    )


class Block(torch.nn.Module):
    """A layer as a module: what export and compile see."""

    packed_w13: Tensor
    packed_w2: Tensor
    gate_weight: Tensor

    def __init__(self, case: Layer) -> None:
        super().__init__()
        self.case = case
        for name in ("packed_w13", "packed_w2", "gate_weight"):
            self.register_buffer(name, getattr(case, name))

    def forward(self, x: Tensor) -> Tensor:
        routed = ops.quantized_moe_ffn(
            x,
            None,
            self.gate_weight,
            None,
            None,
            self.packed_w13,
            self.packed_w2,
            None,
            None,
            2,
            self.case.F,
            self.case.scheme,
        )
        scores = x @ self.gate_weight.T
        weights, ids = scores.topk(2)
        return routed + ops.quantized_experts(
            x,
            ids,
            weights,
            self.packed_w13,
            self.packed_w2,
            None,
            None,
            self.case.F,
            self.case.scheme,
        )


def test_export_keeps_the_token_count_dynamic(small: Layer) -> None:
    block = Block(small)
    tokens = torch.export.Dim("tokens", max=4096)
    program = torch.export.export(block, (small.x(2),), dynamic_shapes=({0: tokens},))
    assert "moepack.quantized_moe_ffn.default" in str(program.graph)
    for count in (1, 17, 300):
        assert torch.equal(program.module()(small.x(count)), block(small.x(count)))


def test_compile_with_a_dynamic_token_count(small: Layer) -> None:
    block = Block(small)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (3, 5, 17):
            torch.testing.assert_close(compiled(small.x(count)), block(small.x(count)))


def test_compile_refuses_what_eager_refuses(small: Layer) -> None:
    short = replace(small, packed_w2=small.packed_w2[:, :-32].contiguous())
    message = refusal(lambda: ffn(short, small.x(2)))
    compiled = torch.compile(lambda x: ffn(short, x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=message.split(":")[-1].strip()[:40]):
        compiled(small.x(2))
