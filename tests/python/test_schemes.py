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
    ]
    assert SCHEMES["int4-g64"] == Scheme("int4-g64", "int4", 4, 64, -8, 7)
    assert SCHEMES["int8-g128"] == Scheme("int8-g128", "int8", 8, 128, -127, 127)


def test_names_say_what_the_rows_say() -> None:
    for name, row in SCHEMES.items():
        assert name == row.name == f"int{row.bits}-g{row.group}"
        assert row.cell == f"int{row.bits}"


def test_scheme_takes_a_name_or_a_scheme() -> None:
    row = SCHEMES["int4-g32"]
    assert scheme("int4-g32") is row
    assert scheme(row) is row


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'mxfp4'.*int4-g32.*int8-g128"):
        scheme("mxfp4")


@pytest.mark.parametrize(("cols", "groups"), [(1, 1), (32, 1), (33, 2), (704, 22)])
def test_columns_are_padded_to_whole_groups(cols: int, groups: int) -> None:
    assert scheme("int4-g32").groups(cols) == groups
