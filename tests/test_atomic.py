"""A file is there whole or not at all, whatever happens to its writer; what a killed one leaves is removed."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from disagg_sim.atomic import remove_leftovers, require_own, write_text, written
from disagg_sim.errors import StoreError

#: Writes half a file, says so, and waits to be killed.
HANGING = """
import sys, time
from pathlib import Path
from disagg_sim.atomic import written
with written(Path(sys.argv[1])) as handle:
    handle.write(b"half")
    handle.flush()
    print("half", flush=True)
    time.sleep(60)
"""


def hanging(path: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen([sys.executable, "-c", HANGING, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    return writer


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_writer_that_is_killed_leaves_the_old_file_and_the_next_one_cleans_up(tmp_path):
    path = tmp_path / "table.csv"
    write_text(path, "old")
    with hanging(path) as writer:
        assert len(names(tmp_path)) == 2
        assert remove_leftovers(tmp_path) == 0, "its writer lives"
        writer.kill()
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 2
    write_text(path, "new")
    assert names(tmp_path) == {"table.csv"}
    assert path.read_text() == "new"


def test_leftovers_are_found_in_the_folders_of_a_run_and_nothing_else_is_touched(tmp_path):
    folders = [tmp_path, tmp_path / "figures", tmp_path / "figures" / "case"]
    folders[-1].mkdir(parents=True)
    for folder in folders:
        (folder / ".pareto.png.4711.tmp").write_text("half")
        (folder / "mine.tmp").write_text("")
        (folder / ".mine.tmp").write_text("")
    assert remove_leftovers(tmp_path) == 3
    for folder in folders:
        assert {"mine.tmp", ".mine.tmp"} <= names(folder)
        assert ".pareto.png.4711.tmp" not in names(folder)


def test_a_full_disk_is_one_line_and_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"table\.csv: cannot write: No space left on device$"):
        write_text(path, "new")
    assert names(tmp_path) == {"table.csv"}
    assert path.read_text() == "old"


def test_a_file_in_the_place_of_the_directory_is_one_line(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match="cannot write: "):
        write_text(tmp_path / "out" / "table.csv", "")


def test_an_exception_while_writing_leaves_nothing(tmp_path):
    def fail() -> None:
        with written(tmp_path / "table.csv") as handle:
            handle.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == set()


def test_a_pipe_a_device_and_a_stream_are_written_in_place(tmp_path):
    """A file renamed over ``/dev/stdout`` would take it from the whole machine."""
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    with log.open("wb") as handle:
        stream = tmp_path / "stream"
        stream.symlink_to(f"/proc/self/fd/{handle.fileno()}")
        write_text(stream, "told")
        write_text(Path(f"/proc/self/fd/{handle.fileno()}"), "told again")
    assert (stream.is_symlink(), log.read_text()) == (True, "told again")


def test_nothing_is_written_through_a_link_in_the_place_of_a_temporary_file(tmp_path):
    """A name of one can be guessed, and a directory of results may come from somebody else."""
    foreign, missing, results = tmp_path / "foreign", tmp_path / "missing", tmp_path / "out"
    foreign.write_text("precious")
    results.mkdir()
    for place in (foreign, missing):
        (results / f".table.csv.{os.getpid()}.tmp").symlink_to(place)
        write_text(results / "table.csv", "new")
        assert names(results) == {"table.csv"}
        assert (results / "table.csv").read_text() == "new"
    assert foreign.read_text() == "precious"
    assert not missing.exists()


def test_a_full_device_is_one_line():
    with pytest.raises(StoreError, match="/dev/full: cannot write: No space left on device"):
        write_text(Path("/dev/full"), "words")
    assert Path("/dev/full").is_char_device()


def test_files_of_others_and_links_are_not_replaced(tmp_path):
    mine = {"a.sh": "by us, edited", "b.sh": "my own", "c.sh": "by us"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.sh").symlink_to("c.sh")
    (tmp_path / "away").symlink_to("elsewhere")
    (tmp_path / "root").symlink_to(tmp_path)
    require_own(tmp_path / "root", ["a.sh", "c.sh", "new.sh"], "by us")
    require_own(tmp_path, ["b.sh"], "by us", by="c.sh")
    for name, said in {"b.sh": "did not write it", "link.sh": "is a link", "away": "is a link"}.items():
        with pytest.raises(StoreError, match=rf"{name}: .*{said}"):
            require_own(tmp_path, ["new.sh", name], "by us")
