"""A directory appears complete or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from moepack.errors import MoePackError
from moepack.staging import staged


def test_new_directory_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with staged(target, replace=False) as stage:
        (stage / "a").write_text("1", encoding="utf-8")
        (stage / "a").chmod(0o600)
        assert not target.exists()
    assert (target / "a").read_text(encoding="utf-8") == "1"
    assert list(target.parent.iterdir()) == [target]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE((target / "a").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("replace", [False, True])
def test_failure_leaves_everything_as_it_was(tmp_path: Path, replace: bool) -> None:
    target = tmp_path / "out"
    if replace:
        target.mkdir()
        (target / "old").touch()
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        _interrupted(target, replace)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_existing_directory_is_refused_or_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(MoePackError, match="exists"), staged(target, replace=False):
        pytest.fail("the work must not begin")
    with staged(target, replace=True) as stage:
        (stage / "new").touch()
    assert [p.name for p in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(MoePackError, match="exists"):
        _overtaken(target)
    assert [p.name for p in target.iterdir()] == ["theirs"]


def test_failed_exchange_brings_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def fail_for_the_new(self: Path, to: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError("disk full")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(OSError, match="disk full"), staged(target, replace=True):
        pass
    assert [p.name for p in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.touch()
    with pytest.raises(MoePackError, match="is a file"), staged(target, replace=True):
        pytest.fail("the work must not begin")


def _interrupted(target: Path, replace: bool) -> None:
    with staged(target, replace) as stage:
        (stage / "half").touch()
        raise KeyboardInterrupt


def _overtaken(target: Path) -> None:
    with staged(target, replace=False):
        target.mkdir()
        (target / "theirs").touch()
