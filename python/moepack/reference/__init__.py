"""moepack in plain torch: what the operators compute, to the bit, and the same blocks in float.

`quantized_moe_ffn` and `quantized_experts` take the operators' arguments in the operators' order
and return the same bits as every kernel. They are for tests and for reading; they are slow.
"""

from moepack.reference.exact import quantized_experts, quantized_moe_ffn

__all__ = ["quantized_experts", "quantized_moe_ffn"]
