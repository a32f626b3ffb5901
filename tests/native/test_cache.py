"""The cache of compiled code: it is refused where others can change it, and what is cut off is never read."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from emssd.native import CacheError, Entry, cache_dir, entry, is_kept
from tests.support.full_disk import room

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are those of POSIX")
STRANGER = 54321


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is not there yet."""
    monkeypatch.setenv("EMSSD_CACHE", str(tmp_path / "one" / "cache"))
    return tmp_path / "one" / "cache"


def files(**contents: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name).write_text(content)

    return write


never = Mock(side_effect=AssertionError("it is written"))


def make(content: str = "code", *, replace: bool = False) -> Entry:
    return entry("kind", "key", files(library=content), replace=replace)


def test_an_entry_is_written_once_and_replaced_on_request(root: Path) -> None:
    assert not is_kept("kind", "key")
    assert not root.exists()
    assert make() == Entry(root / "kind" / "key", new=True)
    assert is_kept("kind", "key")
    assert entry("kind", "key", never) == Entry(root / "kind" / "key", new=False)
    assert make("other", replace=True).new
    assert [(path.name, path.read_text()) for path in (root / "kind" / "key").iterdir()] == [("library", "other")]


def test_what_is_made_is_this_users_alone(root: Path) -> None:
    before = os.umask(0)
    try:
        made = make()
    finally:
        os.umask(before)
    for path in (root, root / "kind", made.folder, root / "kind" / "key.lock"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize("how", ["owner", "all", "group"])
def test_a_cache_that_another_user_could_change_is_refused(
    root: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    if how != "owner":
        root.chmod(0o1777 if how == "all" else 0o770)
    elif os.geteuid() == 0:
        os.chown(root, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    refusal = rf"^{root} belongs to user \d+ and has mode \d+, so others than user \d+ can change the code in it; chmod"
    with pytest.raises(CacheError, match=refusal):
        make()


def test_a_link_leads_to_where_it_is_checked(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    root.parent.mkdir()
    root.symlink_to(target)
    assert make().folder == target / "kind" / "key"
    target.chmod(0o777)
    with pytest.raises(CacheError, match=f"^{target} belongs to"):
        make()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
@pytest.mark.parametrize("folder", ["/proc/emssd", "/proc/version"])
def test_a_cache_that_cannot_be_written_is_named_with_a_way_out(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMSSD_CACHE", folder)
    with pytest.raises(CacheError, match=rf"^{folder}: .+; set EMSSD_CACHE to a folder that can be written$"):
        make()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("EMSSD_CACHE", "~/here")
    assert cache_dir() == tmp_path / "here"
    monkeypatch.setenv("EMSSD_CACHE", "")
    assert cache_dir() == Path("/caches/emssd")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "emssd"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # of a user without a home folder
    with pytest.raises(CacheError, match="this user has no home folder; set EMSSD_CACHE"):
        cache_dir()


def test_a_disk_that_is_full_leaves_what_was_there_and_is_named(root: Path) -> None:
    make("whole")
    with room(4096), pytest.raises(CacheError, match="File too large; set EMSSD_CACHE"):
        make("x" * 9999, replace=True)
    assert (entry("kind", "key", never).folder / "library").read_text() == "whole"
    assert {path.name for path in (root / "kind").iterdir()} == {"key", "key.lock"}


def test_what_writing_raises_passes_through_and_nothing_stays(root: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyError("no compiler")

    with pytest.raises(KeyError):
        entry("kind", "key", broken)
    assert [path.name for path in (root / "kind").iterdir()] == ["key.lock"]


WRITER = """
import logging, sys, time
from emssd.native import entry

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

def write(folder):
    (folder / sys.argv[2]).write_text("code")
    print("writing", flush=True)
    time.sleep(float(sys.argv[1]))

print("new" if entry("kind", "key", write).new else "found", flush=True)
"""


def writer(seconds: float, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(seconds), name], stdout=subprocess.PIPE, text=True)


@pytest.mark.costly("starts processes")
def test_processes_write_an_entry_once_and_nothing_of_a_killed_one_is_read(root: Path) -> None:
    killed = writer(600, "half")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "writing\n"
    assert not is_kept("kind", "key")
    waiting = [writer(0.1, "library"), writer(0.1, "library")]
    for process in waiting:
        assert process.stdout is not None
        assert process.stdout.readline() == f"another process makes {root}/kind/key; waiting for it …\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert sorted(process.communicate()[0] for process in waiting) == ["found\n", "writing\nnew\n"]
    assert {path.name for path in (root / "kind").iterdir()} == {"key", "key.lock"}
    assert [path.name for path in (root / "kind" / "key").iterdir()] == ["library"]
