"""What moepack raises. Every message names the place, what was found and what is supported."""

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

_LONGEST = 400


class MoePackError(Exception):
    """Base of every error that moepack raises."""


class UnsupportedError(MoePackError, ValueError):
    """A scheme, layout, module or attribute that moepack does not handle."""


class BadWeights(MoePackError, ValueError):
    """Weights that cannot be quantized: NaN, infinite, on the meta device."""


class NoMoEBlock(MoePackError, ValueError):
    """The model holds no Mixture-of-Experts block."""


class VerificationError(MoePackError):
    """A replacement differs from what it replaces by more than is allowed."""


class PackedFormatError(MoePackError, ValueError):
    """Bytes that are not a packed blob, or are one of another version, or are damaged."""


@contextmanager
def reported(place: object) -> Iterator[None]:
    """What libraries raise on damaged files becomes a MoePackError that names the place."""
    try:
        yield
    except MoePackError:
        raise
    except Exception as error:  # they raise what they like
        said, _, _ = str(error).partition("\nException raised from")  # frames of C++
        text = shorten(said, _LONGEST, placeholder=" ...") or type(error).__name__
        if isinstance(error, LookupError | TypeError | AttributeError):
            text = f"{type(error).__name__}: {text}"
        raise MoePackError(f"{place}: cannot be loaded: {text}") from error
