"""Files are read once and within bounds: what has no end is refused, what comes once is kept."""

import gzip
import os
import threading
from pathlib import Path

import pytest

from disagg_sim import reading
from disagg_sim.cli.main import run
from disagg_sim.reading import LONGEST_LINE, as_file, bounded, read_file, read_json, read_table, unpacked

TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},200,20\n" for i in range(50))


def fed(path: Path, content: bytes) -> threading.Thread:
    """A pipe that somebody writes into."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    return writer


def test_what_a_pipe_gave_is_given_again(tmp_path):
    writer = fed(tmp_path / "pipe", b"once")
    assert [read_file(tmp_path / "pipe") for _ in range(3)] == [b"once"] * 3
    writer.join()


def test_a_pipe_that_is_written_again_gives_the_new_content(tmp_path):
    fed(path := tmp_path / "pipe", b"first").join(timeout=0.1)
    assert read_file(path) == b"first"
    writer = threading.Thread(target=path.write_bytes, args=(b"second",))
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0):  # lets the writer begin
        writer.start()
        writer.join()
        assert read_file(path) == b"second"


def test_a_pipe_that_nobody_writes_into_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "WAIT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"nobody has written into this pipe for 0\.05 s"):
        read_file(tmp_path / "pipe")


def test_a_writer_who_takes_long_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "WAIT_S", 0.05)
    os.mkfifo(path := tmp_path / "pipe")

    def slowly() -> None:
        with path.open("wb", buffering=0) as file:
            held.wait()
            file.write(b"late")

    held, writer = threading.Event(), threading.Thread(target=slowly)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer.start()
    threading.Timer(0.3, held.set).start()
    while not writer.is_alive():
        pass
    assert read_file(path) == b"late"
    writer.join()
    os.close(reader)


def test_workers_get_a_file_of_what_a_pipe_gave(tmp_path):
    writer = fed(tmp_path / "trace", b"once")
    found = as_file(tmp_path / "trace")
    writer.join()
    assert (Path(found).name, Path(found).read_bytes(), as_file(tmp_path / "trace")) == ("trace", b"once", found)
    with pytest.raises(OSError, match="save it as one"):
        bounded(tmp_path / "trace")


def test_a_line_without_an_end_is_refused_whole_and_in_parts(tmp_path):
    (path := tmp_path / "a.csv").write_bytes(b"a,b\n1," + b"2" * (LONGEST_LINE + 1))
    for read in (read_table, lambda path: bounded(path).read()):
        with pytest.raises(ValueError, match="line 2 is longer than 16 MB"):
            read(path)
    path.write_bytes((b"3" * (LONGEST_LINE // 2) + b"\n") * 4)
    assert len(bounded(path).read()) == path.stat().st_size
    assert len(read_table(path)) == 3


def test_a_packed_file_is_bounded_unpacked(tmp_path):
    with pytest.raises(OSError, match="larger than 1 MB"):
        unpacked(gzip.compress(bytes(10**7)), most=10**6)
    with pytest.raises(OSError, match="not a whole gzip file"):
        unpacked(gzip.compress(b"ttl_s" * 99)[:20])


def test_json_that_is_nested_too_deeply_is_a_fault_of_the_file(tmp_path):
    (tmp_path / "a.json").write_text('{"a":' * 20_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_comes_out_of_a_pipe(tmp_path, capsys, packed):
    content = TRACE.encode()
    writer = fed(tmp_path / "trace", gzip.compress(content) if packed else content)
    assert run(["trace", "stats", str(tmp_path / "trace")]) == 0
    writer.join()
    assert "50 requests" in " ".join(capsys.readouterr().out.split())
