"""The operators against the plain reference, to the bit."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from made_layers import (
    DTYPES,
    ISAS,
    Layer,
    experts,
    experts_arguments,
    ffn,
    ffn_arguments,
    layer,
    same,
    with_biases,
)
from moepack import ops, reference
from moepack.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("default_isa_and_threads")


@pytest.fixture(scope="module")
def small() -> Layer:
    return layer()


@pytest.fixture(scope="module")
def eight() -> Layer:
    return layer(E=8, D=64, F=32)


def assert_matches_reference(case: Layer, x: Tensor, **keywords: Any) -> Tensor:
    arguments = ffn_arguments(case, x, **keywords)
    found: Tensor = torch.ops.moepack.quantized_moe_ffn(*arguments)
    assert same(found, reference.quantized_moe_ffn(*arguments))
    return found


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
