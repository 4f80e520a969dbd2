"""Keep what runs for an agent inside one directory: files outside it are neither read nor written.

Python tells a hook of each file before it is opened, made, renamed or removed (https://peps.python.org/pep-0578);
``parquet`` tells it of those that DuckDB opens.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, cast

from disagg_sim.facts.hub.files import FETCHED
from disagg_sim.facts.yaml_files import PATH_VARIABLE, shipped_root

#: Arguments of an event that are paths, besides the first; each is written.
_WRITTEN = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}
_READ = ("os.listdir", "os.scandir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Of the system, and without a secret of anybody.
_SYSTEM = ("/proc/cpuinfo", "/proc/meminfo", "/sys/devices", "/sys/fs/cgroup", "/dev/null", "/dev/urandom")
#: Modules that keep machine code.
_CODE = ("numba", "disagg_sim.simulation.kernel.compiled")
#: Asks for its cache, for certificates and for what its own imports read.
_HUB = "huggingface_hub"
_root: ContextVar[Path | None] = ContextVar("root", default=None)


@contextmanager
def confined(root: Path) -> Iterator[None]:
    """Open files of a directory alone, and read those of the installation, until the block ends."""
    _hook()
    _installation(), _caches()  # which ask for files themselves
    before = _root.set(root.resolve())
    try:
        yield
    finally:
        _root.reset(before)


@cache
def _hook() -> None:
    """Hear of files from now on; a hook stays until the process ends."""
    sys.addaudithook(_heard)


def _heard(event: str, told: tuple[Any, ...]) -> None:
    root = _root.get()
    if root is None:
        return
    if event == "open":
        mode, flags = str(told[1] or ""), told[2] if isinstance(told[2], int) else 0
        paths, written = told[:1], bool(flags & _WRITING or set(mode) & {*"wax+"})
    elif event in _READ:
        paths, written = told[:1], False
    elif event in _WRITTEN:
        paths, written = told[: _WRITTEN[event]], True
    else:
        return
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike) and not _allowed(os.fsdecode(path), root, written=written):
            said = "outside of the directory of the server (--root)"
            raise PermissionError(errno.EACCES, said, os.fsdecode(path))


def _allowed(path: str, root: Path, *, written: bool) -> bool:
    place = Path(os.path.realpath(path))
    inside = place.is_relative_to(root)
    for kept, modules in _caches().items():
        if place.is_relative_to(kept) and not (inside and root.is_relative_to(kept)):
            return _by(*modules, _HUB) or (not written and Path(os.path.abspath(path)).parent in FETCHED)
    if inside or (not written and any(place.is_relative_to(each) for each in _installation())):
        return True
    return _by(_HUB) or ("__pycache__" in place.parts and _by(*_CODE, "importlib", "_frozen_importlib"))


def _by(*modules: str) -> bool:
    """Whether one of the modules, or of packages, asks: a path in an argument is opened by none of them."""
    frame = sys._getframe()
    while frame and not f"{frame.f_globals.get('__name__')}.".startswith(tuple(f"{each}." for each in modules)):
        frame = cast(FrameType, frame.f_back)
    return bool(frame)


@cache
def _installation() -> tuple[Path, ...]:
    """Where Python, its packages and specs lie."""
    own = [part for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    places: list[str | Path] = [
        sys.prefix,
        sys.base_prefix,
        *filter(os.path.isabs, sys.path),
        *own,
        *_SYSTEM,
        shipped_root(),
    ]
    return tuple(Path(os.path.realpath(place)) for place in places)


@cache
def _caches() -> dict[Path, tuple[str, ...]]:
    """Where compiled code and the hub's files are kept, beside the token, and by which modules."""
    home, told = Path.home() / ".cache", os.environ.get
    hub = told("HF_HOME") or Path(told("XDG_CACHE_HOME") or home, "huggingface")
    passing = Path(tempfile.gettempdir(), f"disagg_sim-{os.getuid()}")  # see ``simulation.kernel.compiled``
    places = {
        **dict.fromkeys([hub, told("HF_HUB_CACHE"), told("HF_TOKEN_PATH")], (_HUB,)),
        **dict.fromkeys([home / "disagg_sim", passing, told("NUMBA_CACHE_DIR")], _CODE),
    }
    return {Path(os.path.realpath(place)): modules for place, modules in places.items() if place}
