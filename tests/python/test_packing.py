"""Packed blobs against an independent decoder, and against bytes written out by hand."""

import struct
import zlib
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack import packing
from moepack.errors import PackedFormatError
from moepack.quantizer import QuantizedMatrix
from moepack.schemes import SCHEMES, scheme

RowOrder = Literal["plain", "gate_up"]


def decode(blob: bytes) -> tuple[dict[str, int], npt.NDArray[Any], npt.NDArray[Any]]:
    """Header, codes and scales of a blob, number by number, from packed-format.md alone."""
    names = ("version", "cell", "rows", "cols", "group", "exponent", "crc", "order")
    assert blob[:4] == b"MOEP"
    header = dict(zip(names, struct.unpack("<HHIIIiIH", blob[4:30]), strict=True))
    assert blob[30:64] == bytes(34)
    assert header["crc"] == zlib.crc32(blob[64:])
    rows, cols, group = header["rows"], header["cols"], header["group"]
    groups = -(-cols // group)
    k_per_cell = {1: 8, 2: 4, 3: 8, 4: 4}[header["cell"]]
    scale_type = np.dtype({1: "f2", 2: "f2", 3: "u1", 4: "f4"}[header["cell"]])
    group_bytes = group // k_per_cell * 64 + 16 * scale_type.itemsize
    codes = np.zeros((rows, cols), np.int64)
    scales = np.zeros((rows, groups), scale_type)
    half = rows // 2
    panels = -(-rows // 16) if header["order"] == 0 else 2 * -(-half // 16)
    assert len(blob) == 64 + panels * groups * group_bytes
    for panel in range(panels):
        for column in range(16):
            if header["order"] == 0:
                row, last = panel * 16 + column, rows
            else:
                row = panel // 2 * 16 + column + (panel % 2) * half
                last = half * (1 + panel % 2)
            for g in range(groups):
                base = 64 + (panel * groups + g) * group_bytes
                scale = base + group_bytes - (16 - column) * scale_type.itemsize
                value = np.frombuffer(blob, scale_type, 1, scale)[0]
                if row < last:
                    scales[row, g] = value
                else:
                    assert value == 0
                for k in range(group):
                    cell, place = divmod(k, k_per_cell)
                    byte = blob[base + cell * 64 + column * 4 + place % 4]
                    if header["cell"] == 4:
                        byte = blob[base + k * 16 + column]
                    if k_per_cell == 8:
                        zero = 8 if header["cell"] == 1 else 0
                        code = (byte >> 4 if place >= 4 else byte & 15) - zero
                    else:
                        code = byte - 256 if byte > 127 else byte
                    if row < last and g * group + k < cols:
                        codes[row, g * group + k] = code
                    else:
                        assert code == 0
    return header, codes, scales


def matrix(name: str, rows: int, cols: int, seed: int, exponent: int = 0) -> QuantizedMatrix:
    random = torch.Generator().manual_seed(seed)
    found = scheme(name)
    if found.cell == "mxfp4":
        codes = torch.randint(0, 16, (rows, cols), generator=random, dtype=torch.int8)
        scales = torch.randint(
            1, 255, (rows, found.groups(cols)), generator=random, dtype=torch.uint8
        )
        return QuantizedMatrix(found, codes, scales, exponent)
    if found.cell == "fp8":
        codes = torch.randint(-128, 127, (rows, cols), generator=random, dtype=torch.int8)
        codes[codes == -1] = 0  # one of the two NaNs; 127 is the other
        scales = torch.randn(rows, found.groups(cols), generator=random)
        return QuantizedMatrix(found, codes, scales, exponent)
    low = -128 if found.cell == "int8" else found.code_min
    codes = torch.randint(low, found.code_max + 1, (rows, cols), generator=random)
    scales = torch.randn(rows, found.groups(cols), generator=random)
    return QuantizedMatrix(found, codes.to(torch.int8), scales.to(torch.float16), exponent)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


shapes = st.tuples(st.integers(1, 70), st.integers(1, 300))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCHEMES)),
    shapes,
    st.sampled_from(["plain", "gate_up"]),
    st.integers(-64, 64),
    st.integers(0, 2**30),
)
def test_unpack_gives_back_what_was_packed(
    name: str, shape: tuple[int, int], order: RowOrder, exponent: int, seed: int
) -> None:
    rows = shape[0] * (2 if order == "gate_up" else 1)
    given_matrix = matrix(name, rows, shape[1], seed, exponent)
    blob = packing.pack(given_matrix, order)
    packing.verify(blob)
    found = packing.unpack(blob)
    assert found.scheme == given_matrix.scheme
    assert found.exponent == exponent
    assert torch.equal(found.codes, given_matrix.codes)
    assert same_bits(found.scales, given_matrix.scales)
    header = packing.read_header(blob)
    assert (header.version, header.rows, header.cols) == (1, rows, shape[1])
    assert header.row_order == order
    assert len(blob) == packing.packed_bytes(name, rows, shape[1], order)


@pytest.mark.parametrize("name", sorted(SCHEMES))
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 128), (17, 40), (38, 130)])
@pytest.mark.parametrize("order", ["plain", "gate_up"])
def test_an_independent_decoder_reads_it(name: str, rows: int, cols: int, order: RowOrder) -> None:
    rows *= 2 if order == "gate_up" else 1
    given_matrix = matrix(name, rows, cols, seed=rows + cols, exponent=-7)
    blob = packing.pack(given_matrix, order)
    header, codes, scales = decode(blob.numpy().tobytes())
    assert header["exponent"] == -7
    assert np.array_equal(codes, given_matrix.codes.numpy())
    assert scales.tobytes() == given_matrix.scales.numpy().tobytes()


def test_golden_bytes_int4() -> None:
    # Row 0: codes 1 2 3 4 -1 -2 -3 -8 and zeros, scale 1.0; row 1: 7 at k = 31, scale -0.5.
    codes = torch.zeros(2, 32, dtype=torch.int8)
    codes[0, :8] = torch.tensor([1, 2, 3, 4, -1, -2, -3, -8])
    codes[1, 31] = 7
    scales = torch.tensor([[1.0], [-0.5]], dtype=torch.float16)
    blob = packing.pack(QuantizedMatrix(scheme("int4-g32"), codes, scales, -3)).numpy().tobytes()

    first_cell = bytes([0x79, 0x6A, 0x5B, 0x0C]) + b"\x88" * 60
    last_cell = b"\x88" * 7 + b"\xf8" + b"\x88" * 56
    payload = first_cell + b"\x88" * 128 + last_cell
    payload += bytes([0x00, 0x3C, 0x00, 0xB8]) + bytes(28)
    header = b"MOEP" + bytes([1, 0, 1, 0]) + bytes([2, 0, 0, 0, 32, 0, 0, 0, 32, 0, 0, 0])
    header += b"\xfd\xff\xff\xff" + zlib.crc32(payload).to_bytes(4, "little") + bytes(36)
    assert blob == header + payload
    assert len(blob) == 64 + 288


def test_golden_bytes_int8_gate_up() -> None:
    # Gate row: 1 -1 127 -127 5; up row: -128 and zeros. Panel 0 is gate, panel 1 up.
    codes = torch.zeros(2, 5, dtype=torch.int8)
    codes[0] = torch.tensor([1, -1, 127, -127, 5])
    codes[1, 0] = -128
    scales = torch.tensor([[2.0], [4.0]], dtype=torch.float16)
    matrix_ = QuantizedMatrix(scheme("int8-g32"), codes, scales, 0)
    blob = packing.pack(matrix_, "gate_up").numpy().tobytes()

    gate = bytes([0x01, 0xFF, 0x7F, 0x81]) + bytes(60) + bytes([5]) + bytes(63) + bytes(6 * 64)
    gate += bytes([0x00, 0x40]) + bytes(30)
    up = bytes([0x80]) + bytes(511) + bytes([0x00, 0x44]) + bytes(30)
    payload = gate + up
    header = b"MOEP" + bytes([1, 0, 2, 0]) + bytes([2, 0, 0, 0, 5, 0, 0, 0, 32, 0, 0, 0])
    header += bytes(4) + zlib.crc32(payload).to_bytes(4, "little") + bytes([1, 0]) + bytes(34)
    assert blob == header + payload
    assert len(blob) == 64 + 2 * 544


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int4-g32", 4.5), ("int4-g64", 4.25), ("int4-g128", 4.125), ("int8-g32", 8.5)],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    rows, cols = 256, 512
    assert (packing.packed_bytes(name, rows, cols) - 64) * 8 / (rows * cols) == bits


def test_experts_are_stacked() -> None:
    experts = [matrix("int4-g32", 20, 40, seed) for seed in range(3)]
    stacked = packing.pack_experts(iter(experts), "gate_up")
    assert stacked.shape == (3, packing.packed_bytes("int4-g32", 20, 40, "gate_up"))
    for row, expert in zip(stacked, experts, strict=True):
        assert torch.equal(row, packing.pack(expert, "gate_up"))


def test_experts_go_to_their_place_one_by_one() -> None:
    experts = [matrix("int4-g32", 20, 40, seed) for seed in range(3)]
    placed = packing.pack_experts(iter(experts), "gate_up", num_experts=3)
    assert torch.equal(placed, packing.pack_experts(experts, "gate_up"))
    for wrong in (2, 4):
        with pytest.raises(PackedFormatError, match=f"got 3 experts, expected {wrong}"):
            packing.pack_experts(iter(experts), num_experts=wrong)


def test_experts_of_different_shapes_are_refused() -> None:
    experts = [matrix("int4-g32", 20, 40, 0), matrix("int4-g32", 20, 41, 0)]
    with pytest.raises(PackedFormatError, match=r"expert 1 is int4-g32 \[20, 41\]"):
        packing.pack_experts(experts)
    with pytest.raises(PackedFormatError, match="no experts"):
        packing.pack_experts([])


def test_codes_outside_the_scheme_are_refused() -> None:
    wrong = matrix("int8-g32", 4, 8, 0)
    wrong.codes[2, 3] = 9
    as_int4 = QuantizedMatrix(scheme("int4-g32"), wrong.codes, wrong.scales, 0)
    with pytest.raises(PackedFormatError, match=r"-8 \.\. 7"):
        packing.pack(as_int4)


def test_an_odd_number_of_rows_has_no_gate_and_up() -> None:
    with pytest.raises(PackedFormatError, match="even"):
        packing.pack(matrix("int4-g32", 3, 8, 0), "gate_up")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, b"LLAMA"[:4], "magic|blob"), (4, b"\x02\x00", "version"), (6, b"\x09\x00", "cell")],
)
def test_foreign_headers_are_refused(offset: int, value: bytes, message: str) -> None:
    blob = packing.pack(matrix("int4-g32", 4, 8, 0))
    blob[offset : offset + len(value)] = torch.tensor(list(value), dtype=torch.uint8)
    for read in (packing.read_header, packing.unpack, packing.verify):
        with pytest.raises(PackedFormatError, match=message):
            read(blob)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 63), st.integers(1, 255))
def test_flipped_header_bytes_that_contradict_are_refused(position: int, flip: int) -> None:
    blob = packing.pack(matrix("int4-g32", 4, 40, 0))
    blob[position] ^= flip
    try:
        found = packing.unpack(blob)
    except PackedFormatError:
        return
    # Sizes within the same panels and groups, the scale exponent, the checksum and the reserved
    # bytes contradict nothing that a header says; everything else does.
    assert position in (8, 12) or 20 <= position < 28 or position >= 30
    assert found.codes.numel() > 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 351))
def test_truncated_blobs_are_refused(length: int) -> None:
    blob = packing.pack(matrix("int4-g32", 4, 32, 0))
    assert len(blob) == 352
    with pytest.raises(PackedFormatError):
        packing.unpack(blob[:length])


def test_a_damaged_payload_is_found_by_verify_only() -> None:
    blob = packing.pack(matrix("int4-g32", 4, 32, 0))
    blob[100] ^= 1
    packing.read_header(blob)
    with pytest.raises(PackedFormatError, match="checksum"):
        packing.verify(blob)


def test_a_stack_is_not_a_blob() -> None:
    stacked = packing.pack_experts([matrix("int4-g32", 4, 8, 0)])
    with pytest.raises(PackedFormatError, match="index a stacked"):
        packing.read_header(stacked)


def test_strided_codes_and_blobs_are_taken() -> None:
    source = matrix("int4-g32", 6, 40, 0)
    strided = QuantizedMatrix(
        source.scheme, source.codes.T.contiguous().T, source.scales.T.contiguous().T, 0
    )
    blob = packing.pack(strided)
    assert torch.equal(blob, packing.pack(source))
    spread = torch.zeros(2 * len(blob), dtype=torch.uint8)[::2]
    spread.copy_(blob)
    assert torch.equal(packing.unpack(spread).codes, source.codes)
