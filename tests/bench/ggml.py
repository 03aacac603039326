"""The few functions of ggml that a layer needs, from the libraries of `llama-cpp-python`."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import llama_cpp

TYPE_F32, TYPE_Q4_0, TYPE_I32 = 0, 2, 26
USAGE_WEIGHTS = 1
_P, _I64 = c_void_p, c_int64


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# name: (result, arguments)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ggml_init": (_P, [InitParams]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_nbytes": (c_size_t, [_P]),
    "ggml_new_tensor_2d": (_P, [_P, c_int, _I64, _I64]),
    "ggml_new_tensor_3d": (_P, [_P, c_int, _I64, _I64, _I64]),
    "ggml_reshape_3d": (_P, [_P, _P, _I64, _I64, _I64]),
    "ggml_view_2d": (_P, [_P, _P, _I64, _I64, c_size_t, c_size_t]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_swiglu_split": (_P, [_P, _P, _P]),
    "ggml_mul": (_P, [_P, _P, _P]),
    "ggml_add": (_P, [_P, _P, _P]),
    "ggml_set_input": (None, [_P]),
    "ggml_set_output": (None, [_P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_gallocr_new": (_P, [_P]),
    "ggml_gallocr_alloc_graph": (c_bool, [_P, _P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_buffer_set_usage": (None, [_P, c_int]),
    "ggml_backend_buft_name": (c_char_p, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [_P, _P, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [_P, _P]),
    "ggml_backend_reg_dev_get": (_P, [_P, c_size_t]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, c_char_p]),
    "ggml_backend_cpu_buffer_type": (_P, []),
    "ggml_backend_cpu_reg": (_P, []),
    "ggml_backend_cpu_init": (_P, []),
    "ggml_backend_cpu_set_n_threads": (None, [_P, c_int]),
}


class Ggml:
    """Each function as an attribute without its prefix: `ggml.mul_mat_id(...)`."""

    def __init__(self) -> None:
        folder = Path(llama_cpp.__file__).parent / "lib"
        libraries = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu", "ggml")
        ]
        self._functions = {}
        for name, (result, arguments) in _SIGNATURES.items():
            library = next(lib for lib in libraries if hasattr(lib, name))
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            self._functions[name.removeprefix("ggml_")] = function

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        return self._functions[name]

    def default_weight_buffer(self) -> int:
        """Where llama.cpp puts such weights when it loads a model: repacked, if it can."""
        registry = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        extra_buffers = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)
        types = extra_buffers(self.backend_reg_dev_get(registry, 0))
        index = 0
        while types and types[index]:
            if self.backend_buft_name(types[index]) == b"CPU_REPACK":
                return int(types[index])
            index += 1
        raise RuntimeError("this build of ggml has no CPU_REPACK buffers, llama.cpp's default")
