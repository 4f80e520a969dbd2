"""Read files whole, once, and within bounds: a device without an end, a pipe that nobody feeds and a line of
gigabytes are refused, and what a pipe gave is kept, because it gives it once.

Whatever is read below is read here or, where it comes in windows, through ``bounded``. What is refused is an
``OSError`` with its reason in ``strerror``, or a ``ValueError``.
"""

from __future__ import annotations

import atexit
import errno
import gzip
import io
import json
import os
import select
import shutil
import stat
import sys
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from disagg_sim.memory import require_memory
from disagg_sim.units import MB, MOST

if TYPE_CHECKING:
    import pandas as pd

#: Largest file, unpacked. [B]
MOST_BYTES = 10**9
#: Longest line of a table. [B]
LONGEST_LINE = 16 * 10**6
#: Until a pipe that nobody has opened for writing is given up. [s]
WAIT_S = 10.0
#: Memory that a table takes for each byte of its file, at its peak: texts of 60 B for cells of 6 to 10. [1]
TABLE_BYTES = 6.0
#: First bytes of a gzip file.
GZIP_MAGIC = b"\x1f\x8b"
_AT_ONCE = 2**20
#: What pipes gave, by device and number.
_KEPT: dict[tuple[int, int], bytes] = {}
#: Files of those that workers read.
_FILES: dict[tuple[int, int], Path] = {}
#: The file that was opened last, of those that a user named.
_LAST: list[str] = []


def read_file(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Read a file, a pipe or ``/dev/stdin`` up to ``most`` B; ``OSError`` says in ``strerror`` why not."""
    told = os.stat(heard(path))
    _LAST[:] = [str(path)]
    if stat.S_ISREG(told.st_mode) and told.st_size > most:
        raise _too_large(path, most)
    if stat.S_ISFIFO(told.st_mode):
        key = told.st_dev, told.st_ino
        content = _piped(path, most, again=key in _KEPT)
        _KEPT[key] = content or _KEPT.get(key, b"")
        return _KEPT[key]
    with open(path, "rb") as file:
        if stat.S_ISREG(told.st_mode) and told.st_size:
            content = file.read(told.st_size + 1)
            if len(content) <= told.st_size:
                return content
            return content + _drained(file, most - len(content), path)
        return _drained(file, most, path)


def heard(path: str | Path) -> str:
    """Tell hooks of a path as Python tells of files that it opens: who may not open it does not learn if it is
    there.
    """
    sys.audit("open", os.fspath(path), "rb", os.O_RDONLY)
    return os.fspath(path)


def last_read() -> str:
    """Name the file that was read last, for a message; empty of one that came with the package.

    >>> content = read_file(__file__)
    >>> last_read()
    ''
    """
    shipped = Path(__file__).parents[1]
    return next((path for path in _LAST if not Path(path).absolute().is_relative_to(shipped)), "")


def as_file(path: str | Path) -> str:
    """Give what a pipe holds a file, which worker processes can read, too; it is removed when this process ends."""
    if not Path(path).is_fifo():
        return str(path)
    told = os.stat(path)
    key = told.st_dev, told.st_ino
    if key not in _FILES:
        content = read_file(path)
        folder = tempfile.mkdtemp(prefix="disagg-sim-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _FILES[key] = Path(folder, Path(path).name)
        _FILES[key].write_bytes(content)
    return str(_FILES[key])


def is_readable(path: str | Path) -> bool:
    """Tell whether something that can be read is there: a file, a pipe or a device, and no directory.

    >>> [is_readable(path) for path in (__file__, "/dev/stdin", "/", "no such file")]
    [True, True, False, False]
    """
    heard(path)
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def unpacked(content: bytes, most: int = MOST_BYTES) -> bytes:
    """Unpack the content of a gzip file; any other stays as it is."""
    if not content.startswith(GZIP_MAGIC):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            return _drained(file, most, "")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EINVAL, f"not a whole gzip file: {error}") from None


def read_table(path: str | Path, **options: Any) -> pd.DataFrame:
    """Read a CSV file, gzipped or not.

    Returns ``OSError`` as of ``read_file``; ``ValueError`` where it is no table; ``InputError`` where memory would
    lack.
    """
    return table_of(unpacked(read_file(path)), path, **options)


def table_of(content: bytes, path: str | Path, **options: Any) -> pd.DataFrame:
    """Take the content of a file as a CSV table.

    Returns the table as ``read_table`` does.

    >>> table_of(b"x" * 20_000_000, "a.csv")
    Traceback (most recent call last):
    ValueError: line 1 is longer than 16 MB
    """
    import pandas as pd

    require_lines(content)
    require_memory(str(path), TABLE_BYTES * len(content))
    try:
        table: pd.DataFrame = pd.read_csv(io.BytesIO(content), **options)
    except (OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"a value that cannot be read: {error}") from None
    for name in (each for each in table if pd.api.types.is_object_dtype(table[each])):  # texts are of another type
        for row, value in enumerate(table[name].tolist(), 1):
            if isinstance(value, int) and not abs(value) < MOST:
                raise ValueError(f"row {row}: column {str(name)!r} holds a number of {len(str(value))} digits")
        with suppress(TypeError, ValueError):
            table[name] = table[name].astype(float)
    return table


def require_lines(content: bytes) -> None:
    """Refuse a text with a line longer than ``LONGEST_LINE``, before anything is made of it.

    >>> require_lines(b"a,b\\n1,2\\n")
    """
    begin = 0
    while len(content) - begin > LONGEST_LINE:
        end = content.rfind(b"\n", begin, begin + LONGEST_LINE)
        if end < 0:
            raise _too_long(content.count(b"\n", 0, begin) + 1)
        begin = end + 1


def read_json(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Read a JSON file."""
    return json_of(read_file(path, most).decode("utf-8"))


def json_of(text: str | bytes) -> Any:
    """Take a text as JSON; ``ValueError`` with one line where it is none.

    >>> json_of("[1]")
    [1]
    """
    try:
        return json.loads(text)
    except (RecursionError, MemoryError):
        raise ValueError("nested too deeply") from None


def bounded(path: str | Path) -> BinaryIO:
    """Open a file that is read in parts: a regular one, none of whose lines is longer than ``LONGEST_LINE``."""
    told = os.stat(heard(path))
    if not stat.S_ISREG(told.st_mode):
        said = "not a file that can be read several times; save it as one"
        raise OSError(errno.EISDIR if stat.S_ISDIR(told.st_mode) else errno.ESPIPE, said, str(path))
    return io.BufferedReader(_Lines(open(path, "rb", buffering=0)), _AT_ONCE)


class _Lines(io.RawIOBase):
    """A file whose lines are counted as it is read."""

    def __init__(self, file: Any) -> None:
        self._file, self._line, self._run = file, 1, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, into: Any) -> int:
        """See ``RawIOBase``."""
        count: int = self._file.readinto(into)
        part = bytes(into[:count])
        first, last = part.find(b"\n"), part.rfind(b"\n")
        if self._run + (count if first < 0 else first) > LONGEST_LINE:
            raise _too_long(self._line)
        self._run = self._run + count if first < 0 else count - last - 1
        self._line += part.count(b"\n")
        return count

    def close(self) -> None:
        """Close the file, too."""
        self._file.close()
        super().close()


def _piped(path: str | Path, most: int, *, again: bool) -> bytes:
    """What comes out of a pipe up to its end."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(number, "rb", buffering=0) as file:
        waiting = select.poll()
        waiting.register(number, select.POLLIN)
        begun: bytes | None = b""
        if not waiting.poll(0 if again else 1000 * WAIT_S):
            begun = file.read(_AT_ONCE)  # None: somebody holds the other end open, and has not written yet
            if begun == b"" and again:
                return b""
            if begun == b"":
                raise OSError(errno.ETIMEDOUT, f"nobody has written into this pipe for {WAIT_S:g} s", str(path))
        os.set_blocking(number, True)
        return (begun or b"") + _drained(file, most, path)


def _drained(file: Any, most: int, path: str | Path) -> bytes:
    """All that is left of a file."""
    parts, size = [], 0
    while part := file.read(_AT_ONCE):
        parts.append(part)
        if (size := size + len(part)) > most:
            raise _too_large(path, most)
    return b"".join(parts)


def _too_large(path: str | Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {most / MB:,.0f} MB, the largest file read", str(path))


def _too_long(line: int) -> ValueError:
    return ValueError(f"line {line} is longer than {LONGEST_LINE / MB:,.0f} MB")
