"""What moepack raises. Every message names the place, what was found and what is supported."""


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
