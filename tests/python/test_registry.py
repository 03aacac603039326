"""Families of other packages: registered by a call, or found because they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import moepack
from moepack.errors import MoePackError, UnsupportedError, VerificationError
from moepack.families import find_blocks, registry
from moepack.modules import QuantizedMoEFFN
from plugin_package import factored_family
from plugin_package.factored_family import FactoredMixture

PACKAGE = Path(factored_family.__file__).parent


@pytest.fixture
def block() -> FactoredMixture:
    torch.manual_seed(0)
    return FactoredMixture(6, 64, 40, 2)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", [])


def test_a_family_of_another_package_packs_its_blocks(block: FactoredMixture) -> None:
    model = nn.ModuleDict({"layer": block})
    assert not find_blocks(model)
    moepack.register_family(factored_family)
    moepack.register_family(factored_family)  # again: nothing happens
    x = torch.randn(1, 9, 64)
    with torch.no_grad():
        expected = block(x)
        report = moepack.quantize_(model, "int8-g32")
        found = report.model.get_submodule("layer")(x)
    assert isinstance(model["layer"], QuantizedMoEFFN)
    assert report.plan.blocks[0].family == "factored"
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_router_that_cannot_stay_is_refused(block: FactoredMixture) -> None:
    moepack.register_family(factored_family)
    with pytest.raises(UnsupportedError, match=r"one piece of code .* asked for"):
        moepack.quantize_(block, router="outside")


def test_a_mistake_in_a_family_is_caught(block: FactoredMixture) -> None:
    def read(module: nn.Module) -> object:
        with torch.no_grad():
            temperature = block.temperature.clone()
            block.temperature.fill_(1.0)
            spec = factored_family.read(module)
            block.temperature.copy_(temperature)
        return spec

    wrong = SimpleNamespace(NAME="wrong", is_candidate=factored_family.is_candidate, read=read)
    moepack.register_family(wrong)
    with pytest.raises(VerificationError, match="the router"):
        moepack.quantize_(block)


def test_what_is_no_family_is_refused() -> None:
    with pytest.raises(MoePackError, match="no family: it has no NAME, is_candidate"):
        moepack.register_family(SimpleNamespace(read=None))
    twin = ModuleType("twin")
    vars(twin).update(vars(factored_family), NAME="huggingface")
    with pytest.raises(MoePackError, match="'huggingface' is known already"):
        moepack.register_family(twin)


FIND = """
import torch, moepack
from factored_family import FactoredMixture
from moepack.families import find_blocks
print([(b.family, b.spec is not None) for b in find_blocks(FactoredMixture(3, 32, 32, 1))])
"""


def installed(folder: Path, points: str) -> subprocess.CompletedProcess[str]:
    """Runs FIND where the package is installed with these entry points."""
    info = folder / "factored_family-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: factored-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[moepack.families]\n{points}\n")
    (folder / "factored_family.py").write_text((PACKAGE / "factored_family.py").read_text())
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", FIND], env=environment, capture_output=True, text=True, check=False
    )


def test_an_installed_family_needs_no_call(tmp_path: Path) -> None:
    result = installed(tmp_path, "factored = factored_family")
    assert result.stdout.strip() == "[('factored', True)]", result.stderr


def test_an_installed_family_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    result = installed(tmp_path, "broken = factored_family:gone")
    assert "MoePackError: entry point broken = factored_family:gone" in result.stderr
