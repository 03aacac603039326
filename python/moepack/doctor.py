"""Whether everything is here that moepack needs, which kernels run, and what to do if not."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moepack.manifest import package_versions

_PACKAGES = (
    "moepack",
    "torch",
    "executorch",
    "torchao",
    "transformers",
    "tokenizers",
    "safetensors",
    "typer",
    "rich",
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `fix` says what to do where it is not ok."""

    name: str
    ok: bool
    found: str
    fix: str = ""


@dataclass
class Diagnosis:
    versions: dict[str, str]
    cpu: dict[str, Any]
    isas: list[dict[str, Any]] = field(default_factory=list)
    isa_in_use: str | None = None
    isa_reason: str = ""
    threads: dict[str, int] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


def diagnose() -> Diagnosis:
    """Looks at versions, libraries, instruction sets, threads and huge pages; never raises."""
    versions = package_versions(_PACKAGES)
    result = Diagnosis(
        versions=versions,
        cpu={
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "usable_cpus": len(os.sched_getaffinity(0)),
        },
    )
    for name, found in versions.items():
        if found == "not installed":
            result.checks.append(
                Check(f"package {name}", False, found, f"pip install {name}, or moepack again")
            )
    result.checks.append(_attempt("core", _core_library, "install moepack with `pip install .`"))
    if result.checks[-1].ok:
        _isas(result)
    result.checks.append(
        _attempt("torch operators", _torch_operators, "install moepack with `pip install .`")
    )
    result.checks.append(
        _attempt(
            "ExecuTorch kernels",
            _executorch_kernels,
            "executorch 1.5.1 and moepack's ExecuTorch library have to be installed together",
        )
    )
    result.threads = _threads(executorch=result.checks[-1].ok)
    result.checks.append(_huge_pages())
    return result


def _attempt(name: str, look: Callable[[], str], fix: str) -> Check:
    """Whatever goes wrong inside a library becomes a finding."""
    try:
        return Check(name, True, look())
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        return Check(name, False, text.splitlines()[0], fix)


def _core_library() -> str:
    from moepack import _core

    return str(getattr(_core, "__file__", "loaded"))


def _torch_operators() -> str:
    from moepack import ops

    if not ops.is_active():
        raise RuntimeError("the library is loaded, its operators are not registered")
    return "registered: " + ", ".join(f"moepack::{name}" for name in _OPERATORS)


def _executorch_kernels() -> str:
    from moepack import ops
    from moepack.runtime import executorch_runtime

    names = executorch_runtime().operator_registry.operator_names
    missing = [name for name in _OPERATORS if f"moepack::{name}.out" not in names]
    if missing:
        raise RuntimeError(f"ExecuTorch has no kernel for {', '.join(missing)}")
    return str(ops.executorch_library_path())


_OPERATORS = ("quantized_moe_ffn", "quantized_experts")


def _isas(result: Diagnosis) -> None:
    from moepack import _core

    result.isas = [
        {"name": name, "supported": supported, "by_default": by_default}
        for name, supported, by_default in _core.isa_table()
    ]
    forced = os.environ.get("MOEPACK_ISA")
    runnable = [isa["name"] for isa in result.isas if isa["supported"]]
    try:
        result.isa_in_use = _core.active_isa()
    except (ValueError, RuntimeError) as error:
        fix = f"unset MOEPACK_ISA, or set it to one of {', '.join(runnable)}"
        result.checks.append(Check("instruction set", False, str(error), fix))
        return
    result.isa_reason = (
        f"MOEPACK_ISA={forced} asks for it" if forced else "the best that this CPU supports"
    )
    is_scalar = result.isa_in_use == "scalar" and not forced
    found = f"{result.isa_in_use}: {result.isa_reason}"
    fix = "no vector kernel for this CPU: correct, but slow" if is_scalar else ""
    result.checks.append(Check("instruction set", not is_scalar, found, fix))


def _threads(*, executorch: bool) -> dict[str, int]:
    found = {"usable_cpus": len(os.sched_getaffinity(0))}
    try:
        import torch

        found["torch"] = torch.get_num_threads()
    except ImportError:
        pass
    if executorch:
        from moepack.runtime import thread_count

        found["executorch"] = thread_count()
    return found


def _huge_pages() -> Check:
    """Weights that moepack owns go on huge pages where the system allows it."""
    try:
        setting = _HUGE_PAGES.read_text(encoding="ascii").strip()
    except OSError:
        return Check("huge pages", True, "not known to this system")
    chosen = setting[setting.find("[") + 1 : setting.find("]")]
    ok = chosen in ("madvise", "always")
    fix = "" if ok else f"as root: echo madvise > {_HUGE_PAGES}"
    return Check("huge pages", ok, f"transparent huge pages: {chosen}", fix)
