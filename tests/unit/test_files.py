"""Only regular files are read and written: nothing blocks, nothing is endless, no node is lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from autotune.dfg.build import DfgBuilder
from autotune.dfg.chrome_trace import write_chrome_trace
from autotune.dfg.graph import Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.files import open_regular, read_bytes, read_text, whole_file, write_whole

ZERO, NULL = Path("/dev/zero"), Path("/dev/null")


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_fifo_a_device_and_links_to_them_are_refused_before_they_are_opened(tmp_path, fifo):
    link = tmp_path / "link"
    link.symlink_to(ZERO)
    for path, kind in ((fifo, "a FIFO"), (ZERO, "a device"), (link, "a device"), (tmp_path, "dir")):
        with pytest.raises(InvalidInput, match=f"{path} must be a regular file, but is .*{kind}"):
            read_bytes(path, 100)


def test_a_file_that_becomes_a_fifo_after_the_check_does_not_block(tmp_path, fifo, monkeypatch):
    path = tmp_path / "file"
    path.write_text("")
    opened = os.open

    def swapped(name, flags):
        assert flags & os.O_NONBLOCK  # without it this test would wait for a writer
        return opened(fifo, flags)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(InvalidInput, match="must be a regular file, but is a FIFO"):
        open_regular(path)


def test_a_file_is_read_up_to_its_bound_also_if_its_size_says_less(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 11)
    assert read_bytes(path, 11) == b"x" * 11
    with pytest.raises(InvalidInput, match="may hold at most 10 bytes, but has 11"):
        read_bytes(path, 10)
    # Files of /proc have size 0 and content, as a file that grows after the check.
    assert Path("/proc/self/stat").stat().st_size == 0
    with pytest.raises(InvalidInput, match="may hold at most 10 bytes, but has more"):
        read_bytes(Path("/proc/self/stat"), 10)


@pytest.mark.parametrize("name", ["absent", "a" * 5000, "nul\0", "file/below"])
def test_a_path_that_cannot_be_opened_is_one_message(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"cannot read .*; check the path and its permissions"):
        read_text(tmp_path / name)
    if name != "absent":
        with pytest.raises(InvalidInput, match=r"cannot write it to .*; choose another path"):
            write_whole(tmp_path / name, "", "it")


@pytest.fixture
def closed(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "file").write_text("")
    folder.chmod(0)
    return folder


def test_a_folder_without_search_permission_is_one_message(closed, without_privileges):
    with pytest.raises(InvalidInput, match=r"Permission denied; check the path"):
        read_text(closed / "file")
    with pytest.raises(InvalidInput, match=r"cannot write it to .*Permission denied"):
        write_whole(closed / "new", "", "it")


def write_timeline(path, *_):
    graph = DfgBuilder()
    graph.op("op", graph.queue("stream"), 1.0, Kind.OTHER)
    write_chrome_trace(replay(graph.build()), path)


@pytest.mark.parametrize("write", [write_whole, write_timeline])
def test_writing_never_replaces_a_device_or_waits_for_a_reader(tmp_path, fifo, write):
    (tmp_path / "link").symlink_to(NULL)
    before = NULL.stat()
    for path in (NULL, tmp_path / "link", fifo, tmp_path):
        with pytest.raises(InvalidInput, match=f"{path} must be a regular file"):
            write(path, "text", "it")
    assert stat.S_ISCHR(NULL.stat().st_mode) and NULL.stat().st_ino == before.st_ino
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert not list(Path("/dev").glob(".null.*"))


def test_a_link_is_followed_to_its_file_and_stays_a_link(tmp_path):
    target, link, dangling = tmp_path / "a" / "file", tmp_path / "link", tmp_path / "dangling"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "b" / "new")
    write_whole(link, "new", "it")
    write_whole(dangling, "made", "it")
    assert link.is_symlink() and target.read_text() == "new"
    assert (tmp_path / "b" / "new").read_text() == "made"
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(InvalidInput, match="cannot write it to"):
        write_whole(link, "", "it")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - closed below
    space = pytest.raises(InvalidInput, match="No space left on device")
    with full, space, whole_file(path, "it") as file:
        file.write(b"new")
        full.write(b"x")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["file"]
