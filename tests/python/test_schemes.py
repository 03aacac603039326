"""The scheme table, as Python reads it from the core."""

import pytest

from moepack.errors import UnsupportedError
from moepack.schemes import SCHEMES, Scheme, scheme


def test_the_table() -> None:
    assert list(SCHEMES) == [
        "int4-g32",
        "int4-g64",
        "int4-g128",
        "int8-g32",
        "int8-g64",
        "int8-g128",
        "mxfp4",
        "fp8-b128",
    ]
    assert SCHEMES["int4-g64"] == Scheme("int4-g64", "int4", 4, "fp16", 64, -8, 7)
    assert SCHEMES["int8-g128"] == Scheme("int8-g128", "int8", 8, "fp16", 128, -127, 127)
    assert SCHEMES["mxfp4"] == Scheme("mxfp4", "mxfp4", 4, "e8m0", 32, 0, 15)
    assert SCHEMES["fp8-b128"] == Scheme("fp8-b128", "fp8", 8, "fp32", 128, -128, 127)


def test_names_say_what_the_rows_say() -> None:
    for name, row in SCHEMES.items():
        assert name == row.name
        assert name.startswith(row.cell)
        if row.is_integer:
            assert name == f"int{row.bits}-g{row.group}"


def test_scheme_takes_a_name_or_a_scheme() -> None:
    row = SCHEMES["int4-g32"]
    assert scheme("int4-g32") is row
    assert scheme(row) is row


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'nf4'.*int4-g32.*fp8-b128"):
        scheme("nf4")


@pytest.mark.parametrize(("cols", "groups"), [(1, 1), (32, 1), (33, 2), (704, 22)])
def test_columns_are_padded_to_whole_groups(cols: int, groups: int) -> None:
    assert scheme("int4-g32").groups(cols) == groups
