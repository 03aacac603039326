"""doctor: what is right here, and what it says where something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import moepack
from moepack import doctor, ops
from moepack.errors import MoePackError


def test_this_machine_is_described() -> None:
    found = doctor.diagnose()
    assert found.versions["moepack"] == moepack.__version__
    assert found.isa_in_use in {isa["name"] for isa in found.isas if isa["supported"]}
    assert "scalar" in {isa["name"] for isa in found.isas}
    checks = {check.name: check for check in found.checks}
    for name in ("core", "torch operators", "ExecuTorch kernels"):
        assert checks[name].ok, checks[name]
    assert found.threads["executorch"] >= 1
    json.dumps(found.to_json())


def test_missing_library_is_a_finding_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise MoePackError("libmoepack_executorch.so is nowhere")

    monkeypatch.setattr(ops, "load_executorch", broken)
    found = doctor.diagnose()
    (check,) = (check for check in found.checks if check.name == "ExecuTorch kernels")
    assert not check.ok
    assert "nowhere" in check.found
    assert check.fix
    assert not found.healthy


def test_missing_package_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("moepack", "no-such-package"))
    (check,) = (c for c in doctor.diagnose().checks if c.name == "package no-such-package")
    assert not check.ok
    assert "pip install" in check.fix


@pytest.mark.parametrize(("isa", "ok"), [("scalar", True), ("mmx", False)])
def test_forced_instruction_set_is_explained(isa: str, ok: bool) -> None:
    code = (
        "import json; from moepack.doctor import diagnose; print(json.dumps(diagnose().to_json()))"
    )
    environment = {**os.environ, "MOEPACK_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    (check,) = (check for check in found["checks"] if check["name"] == "instruction set")
    assert check["ok"] is ok
    if ok:
        assert found["isa_in_use"] == "scalar"
        assert "MOEPACK_ISA" in found["isa_reason"]
    else:
        assert "scalar" in check["fix"]
