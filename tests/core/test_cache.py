"""The cache of compiled code: what others could have put there is refused, what is not whole is written again."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emssd.native import CacheError, Entry, cache_dir, entry
from tests.support.full_disk import room
from tests.support.tiers import looped

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are those of POSIX")
STRANGER = 54321


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is not there yet, in a folder that only this user can write."""
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path / "one" / "cache"))
    return tmp_path / "one" / "cache"


def files(**contents: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name).write_text(content)

    return write


def never(folder: Path) -> None:
    raise AssertionError("it is written")


def make(content: str = "code") -> Entry:
    return entry("kind", "key", files(library=content, names="[]"))


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` somebody else's, or this process somebody else."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def test_an_entry_is_written_once_and_found_as_it_was_written(root: Path) -> None:
    first = make()
    assert first.new
    found = entry("kind", "key", never)
    assert not found.new
    assert found.files == first.files == {"library": b"code", "names": b"[]"}
    assert found.folder == first.folder == root / "kind" / "key"
    assert {path.name for path in found.folder.iterdir()} == {"library", "names", "manifest.json"}
    assert entry("kind", "key", files(library="new"), replace=True).files == {"library": b"new"}
    assert entry("kind", "key", never).files == {"library": b"new"}


def test_what_is_made_is_this_users_alone(root: Path) -> None:
    before = os.umask(0)
    try:
        made = make()
    finally:
        os.umask(before)
    for path in (root.parent, root, root / "kind", made.folder, *made.folder.iterdir(), root / "kind" / "key.lock"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize("name", ["library", "names", "manifest.json"])
@pytest.mark.parametrize("content", [b"", b"cod", b"none", None])
def test_what_is_not_as_it_was_written_is_written_again(
    root: Path, name: str, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = make().folder / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert make().new
    assert f"{path.parent} is not as it was written, and is made again" in caplog.text
    assert entry("kind", "key", never).files == {"library": b"code", "names": b"[]"}


@looped("manifest", ["[]", "{}", '{"files": 1}', '{"files": {"/etc/hostname": ""}}', "\x00"])
def test_a_manifest_of_another_form_is_not_believed(root: Path, manifest: str) -> None:
    (make().folder / "manifest.json").write_text(manifest)
    assert make().new


def test_a_file_that_was_added_or_an_entry_in_the_place_of_another_is_not_believed(root: Path) -> None:
    (make().folder / "more").write_text("")
    assert make().new
    (make().folder / "folder").mkdir()
    assert make().new
    make().folder.rename(root / "kind" / "another")
    assert entry("kind", "another", files(library="right")).files == {"library": b"right"}


@pytest.mark.parametrize("place", [".", "kind", "kind/key", "kind/key/library", "kind/key/manifest.json"])
@pytest.mark.parametrize("how", ["owner", "mode", "group"])
def test_what_another_user_could_have_written_is_refused(
    root: Path, place: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    path = root / place
    if how == "owner":
        give_away(path, monkeypatch)
        said = "belongs to .*"
    elif how == "mode":
        path.chmod(0o1777 if path.is_dir() else 0o666)
        said = r"can be changed by other users \(mode \d+\)"
    else:
        monkeypatch.setattr("emssd.native.cache._is_private", lambda group: False)
        path.chmod(0o770 if path.is_dir() else 0o660)
        said = r"can be changed by other users \(mode \d+\)"
    with pytest.raises(
        CacheError, match=rf"{said}, and what lies there would run as .*set EMSSD_CACHE to a folder of "
    ):
        make()


def test_a_folder_above_that_others_can_write_is_refused_unless_it_is_sticky(root: Path) -> None:
    make()
    root.parent.chmod(0o777)
    with pytest.raises(CacheError, match=rf"^{root.parent} can be changed by other users \(mode 0777\), "):
        make()
    root.parent.chmod(0o1777)
    assert not make().new


def test_a_link_leads_to_where_it_is_checked(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()
    root.parent.mkdir()
    root.symlink_to(target)
    assert make().folder == target / "kind" / "key"
    target.chmod(0o777)
    with pytest.raises(CacheError, match=f"^{target} can be changed"):
        make()


def test_a_link_within_the_cache_is_refused(root: Path, tmp_path: Path) -> None:
    make().folder.rename(tmp_path / "elsewhere")
    (root / "kind" / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="kind/key is no folder; set EMSSD_CACHE"):
        make()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
def test_a_cache_that_cannot_be_written_is_named_with_a_way_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.parent.mkdir()
    root.write_text("")
    with pytest.raises(CacheError, match=f"^{root} is no folder; set EMSSD_CACHE to one that can be written"):
        make()
    monkeypatch.setenv("EMSSD_CACHE", "/proc/emssd")
    with pytest.raises(CacheError, match=r"^/proc/emssd: .+; set EMSSD_CACHE to a folder that can be written$"):
        make()


def test_who_has_no_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EMSSD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(CacheError, match="set EMSSD_CACHE"):
        cache_dir()


def no_home(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_disk_that_is_full_leaves_nothing_and_is_named(root: Path) -> None:
    make("whole")
    with room(4096), pytest.raises(CacheError, match="File too large; set EMSSD_CACHE"):
        entry("kind", "key", files(library="x" * 9999), replace=True)
    assert entry("kind", "key", never).files["library"] == b"whole"
    assert {path.name for path in (root / "kind").iterdir()} == {"key", "key.lock"}


def test_what_writing_raises_passes_through_and_nothing_stays(root: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyError("no compiler")

    with pytest.raises(KeyError):
        entry("kind", "key", broken)
    assert [path.name for path in (root / "kind").iterdir()] == ["key.lock"]


WRITER = """
import sys, time
from pathlib import Path
from emssd.native import entry

def write(folder):
    (folder / "library").write_text("code")
    print("writing", flush=True)
    time.sleep(float(sys.argv[1]))

print("new" if entry("kind", "key", write).new else "found", flush=True)
"""


def writer(seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(seconds)], stdout=subprocess.PIPE, text=True)


@pytest.mark.costly("starts processes")
def test_processes_wait_for_each_other_and_a_killed_ones_turn_ends(root: Path) -> None:
    killed = writer(600)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "writing\n"
    waiting = [writer(0.1), writer(0.1)]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert sorted(process.communicate()[0] for process in waiting) == ["found\n", "writing\nnew\n"]
    assert {path.name for path in (root / "kind").iterdir()} == {"key", "key.lock"}
