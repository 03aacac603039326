"""Weight schemes: how the numbers of a matrix are coded.

The table is the C++ core's (`cpp/src/scheme.cpp`); Python reads it, so that there is one.
"""

from dataclasses import dataclass

from moepack import _core
from moepack.errors import UnsupportedError


@dataclass(frozen=True)
class Scheme:
    """`group` weights along K share one scale.

    `scale` is the scales' type: "fp16", "e8m0" (powers of two, exponent + 127 in a byte) or "fp32".
    Codes lie in `code_min .. code_max`: integers, or the bits of e2m1 (mxfp4) or e4m3 (fp8).
    """

    name: str
    cell: str
    bits: int
    scale: str
    group: int
    code_min: int
    code_max: int

    @property
    def is_integer(self) -> bool:
        """Whether codes are the weights in units of their scale."""
        return self.cell in ("int4", "int8")

    def groups(self, cols: int) -> int:
        """Groups, and so scales, of a row of `cols` weights: K is padded to whole groups."""
        return -(-cols // self.group)


SCHEMES: dict[str, Scheme] = {row[0]: Scheme(*row) for row in _core.schemes()}


def scheme(name: str | Scheme) -> Scheme:
    """The scheme of that name. Raises UnsupportedError, naming the supported ones."""
    if isinstance(name, Scheme):
        return name
    found = SCHEMES.get(name)
    if found is None:
        raise UnsupportedError(
            f"scheme {name!r} is not supported by this version; supported: {', '.join(SCHEMES)}"
        )
    return found
