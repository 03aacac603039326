"""A directory appears complete or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from made_programs import checkpoint
from moepack.errors import MoePackError
from moepack.manifest import PACKED_FILE
from moepack.online import quantize_checkpoint
from moepack.staging import require_output, staged


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
        _own(target)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        _interrupted(target, replace)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_existing_directory_is_refused_or_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    _own(target)
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
    _own(target)
    rename = Path.rename

    def fail_for_the_new(self: Path, to: Path) -> Path:
        if self.suffix == ".tmp":
            raise OSError("disk full")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(OSError, match="disk full"), staged(target, replace=True):
        pass
    assert [p.name for p in target.iterdir()] == [PACKED_FILE]
    assert list(tmp_path.iterdir()) == [target]


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.touch()
    with pytest.raises(MoePackError, match="is a file"), staged(target, replace=True):
        pytest.fail("the work must not begin")


@pytest.mark.parametrize("content", ["foreign", "subdirectory", "link", "marker of another"])
def test_only_own_output_is_replaced(tmp_path: Path, content: str) -> None:
    target = tmp_path / "out"
    _own(target)
    if content == "foreign":
        (target / "notes.txt").touch()
    elif content == "subdirectory":
        (target / "config.json").mkdir()
    elif content == "link":
        (target / "model.pte").symlink_to(tmp_path)
    else:
        (target / PACKED_FILE).write_text("{}", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MoePackError, match="is not replaced"), staged(target, replace=True):
        pytest.fail("the work must not begin")
    assert sorted(tmp_path.rglob("*")) == before


def test_foreign_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    _own(target)
    with pytest.raises(MoePackError, match=r"notes\.txt"), staged(target, replace=True):
        (target / "notes.txt").touch()
    assert (target / "notes.txt").is_file()
    assert list(tmp_path.iterdir()) == [target]


def test_empty_directory_and_own_output_are_replaced(tmp_path: Path) -> None:
    contents: tuple[dict[str, str], ...] = (
        {},
        {PACKED_FILE: '{"blocks": {}}'},
        {"manifest.json": '{"program_structure_sha256": ""}', "README.md": "", "model.pte": ""},
        {"config.json": '{"quantization_config": {"quant_method": "moepack"}}'},
    )
    for number, files in enumerate(contents):
        target = tmp_path / str(number)
        target.mkdir()
        for name, text in files.items():
            (target / name).write_text(text, encoding="utf-8")
        with staged(target, replace=True) as stage:
            (stage / "new").touch()
        assert [p.name for p in target.iterdir()] == ["new"]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("out", "how"),
    [("a/b", "is"), ("a/../a/b", "is"), ("a", "contains"), ("a/b/c/d", "lies inside")],
)
def test_source_is_never_the_output(tmp_path: Path, out: str, how: str, replace: bool) -> None:
    source = tmp_path / "a" / "b"
    source.mkdir(parents=True)
    with (
        pytest.raises(MoePackError, match=f"{how} the source"),
        staged(tmp_path / out, replace, [source]),
    ):
        pytest.fail("the work must not begin")
    assert list(source.iterdir()) == []


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("link", "symbolic link"),
        ("dangling", "symbolic link"),
        ("file/out", "is a file"),
        ("file/deep/out", "is a file"),
        ("x" * 250, "name has 250 bytes"),
        ("x" * 300 + "/out", "cannot be written"),
        ("nul\0", "cannot be written"),
        ("..", "no directory of its own"),
    ],
)
def test_impossible_outputs_are_refused_first(
    tmp_path: Path, out: str, expected: str, replace: bool
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MoePackError, match=expected), staged(tmp_path / out, replace):
        pytest.fail("the work must not begin")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_source_that_leads_to_itself_is_left_to_its_reader(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    require_output(tmp_path / "out", replace=False, sources=[loop])
    with pytest.raises(MoePackError, match=r"loop: no config\.json"):
        quantize_checkpoint(loop, tmp_path / "out")


def test_where_no_directory_can_be_made_is_named() -> None:
    with pytest.raises(MoePackError, match=r"^/proc/x: "):
        quantize_checkpoint(checkpoint("mixtral"), "/proc/x")


def test_unwritable_parent_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(MoePackError, match="no permission"), staged(tmp_path / "out", False):
        pytest.fail("the work must not begin")


def test_failure_removes_the_directories_that_were_made(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted(tmp_path / "deep" / "er" / "out", False)
    assert list(tmp_path.iterdir()) == []


def _own(target: Path) -> None:
    target.mkdir()
    (target / PACKED_FILE).write_text('{"blocks": {}}', encoding="utf-8")


def _interrupted(target: Path, replace: bool) -> None:
    with staged(target, replace) as stage:
        (stage / "half").touch()
        raise KeyboardInterrupt


def _overtaken(target: Path) -> None:
    with staged(target, replace=False):
        target.mkdir()
        (target / "theirs").touch()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(MoePackError, match=r"out: cannot be written: No space left on device"),
        staged(tmp_path / "out", replace=False),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not any(tmp_path.iterdir())
