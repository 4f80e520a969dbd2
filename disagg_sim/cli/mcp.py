"""``disagg-sim mcp``: serve the tools of ``cli.mcp_tools`` to agents, over standard input and output.

What runs for an agent is kept inside one directory: files outside it are neither read nor written. Python tells a hook
of each file before it is opened, made, renamed or removed (https://peps.python.org/pep-0578); ``parquet`` tells it of
those that DuckDB opens.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from pydantic import ValidationError

from disagg_sim.cli.aliases import own_name
from disagg_sim.cli.mcp_tools import GUIDE, TOOLS
from disagg_sim.cli.workers import Offline
from disagg_sim.errors import DisaggSimError, InputError, nearest, quoted
from disagg_sim.extras import extra
from disagg_sim.facts.hub.files import FETCHED
from disagg_sim.facts.yaml_files import PATH_VARIABLE, shipped_root, shown

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

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


#: How long a call may take unless said: the first simulation compiles for a minute. [s]
LIMIT_S = 300.0


def mcp(
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory whose files tools read and write, and no others.")
    ] = Path(),
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="Longest time of a call.")] = LIMIT_S,
    offline: Offline = False,  # noqa: ARG001 - its callback answers it
) -> None:
    """Serve agents over the Model Context Protocol: plan, explain, sweep summaries, comparisons, small simulations.

    A client starts it, and talks to it over standard input and output. Relative paths are those in the root.
    """
    try:
        os.chdir(root)
    except OSError as error:
        raise InputError(f"--root {shown(root)}: {error.strerror}") from None
    made = server(root=Path.cwd(), limit_s=timeout)
    try:
        for stream in (sys.stdin, sys.stdout):
            stream.fileno()
    except (AttributeError, OSError):
        raise InputError("a client talks over standard input and output, one of which is closed here") from None
    made.run("stdio")


class _TooLong(BaseException):
    """Ends a call; no ``except Exception`` of a tool takes it for its own."""


def server(root: Path = Path("/"), limit_s: float = LIMIT_S) -> MCPServer:
    """Make the server, with each of ``TOOLS``."""
    with extra("mcp"):
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError

    def in_one_line(tool: Callable[..., Any]) -> Callable[..., Any]:
        """The tool, in a thread of its own, whose answer to bad input is the line that the command line prints."""

        def alone(threads: list[int], named: dict[str, Any]) -> Any:
            threads.append(get_ident())
            try:
                with confined(root):
                    return tool(**named)
            except DisaggSimError as error:
                raise ToolError(str(error)) from None
            except PermissionError as error:
                raise ToolError(f"{error.filename}: {error.strerror}") from None
            except _TooLong:
                return None  # nobody waits for it
            finally:
                threads.clear()

        @wraps(tool)
        async def answered(**named: Any) -> Any:
            threads: list[int] = []
            try:
                return await asyncio.wait_for(asyncio.to_thread(alone, threads, named), limit_s)
            except TimeoutError:
                raise ToolError(f"{tool.__name__}: not done within {limit_s:g} s (--timeout)") from None
            finally:  # the client gave up, too
                for thread in threads:
                    _end(thread)

        return answered

    taken = {tool.__name__: tuple(signature(tool).parameters) for tool in TOOLS}

    class Server(MCPServer):
        """Refuses arguments that a tool does not have, which the library drops, and says in a line what is wrong."""

        async def call_tool(self, name: str, arguments: dict[str, Any], *more: Any, **settings: Any) -> Any:
            """Call a tool; see ``MCPServer``."""
            for each in arguments:
                if each not in (known := taken.get(name, (each,))):
                    meant = own_name(each, known)
                    near = f", did you mean {meant!r}?" if meant in known else nearest(each, known)
                    raise ToolError(f"{name} has no argument {quoted(each)}{near}; allowed: {', '.join(known)}")
            try:
                return await super().call_tool(name, arguments, *more, **settings)
            except ToolError as error:
                if isinstance(error.__cause__, ValidationError):
                    raise ToolError("; ".join(map(_fault, error.__cause__.errors()))) from None
                raise

    made = Server("disagg-sim", instructions=GUIDE, log_level="WARNING")
    for tool in TOOLS:
        made.add_tool(in_one_line(tool))
    return made


def _end(thread: int) -> None:
    """Raise ``_TooLong`` in a thread, as soon as it runs Python again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLong))


def _fault(found: Any) -> str:
    """A fault of an argument in a line, from what pydantic found."""
    place = ".".join(map(str, found["loc"]))
    said = str(found["msg"])
    if said.startswith(own := "Value error, "):
        return f"{place}: {said.removeprefix(own)}"
    return f"{place} {quoted(found['input'])}: {said}"
