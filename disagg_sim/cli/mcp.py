"""``disagg-sim mcp``: serve the tools of ``cli.mcp_tools`` to agents, over standard input and output."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from disagg_sim.cli.aliases import own_name
from disagg_sim.cli.confined import confined
from disagg_sim.cli.mcp_tools import GUIDE, TOOLS
from disagg_sim.cli.workers import Offline
from disagg_sim.errors import DisaggSimError, InputError, nearest, quoted
from disagg_sim.extras import extra
from disagg_sim.facts.yaml_files import shown

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer


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
