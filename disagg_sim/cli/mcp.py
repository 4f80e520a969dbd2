"""``disagg-sim mcp``: serve the tools of ``cli.mcp_tools`` to agents, over standard input and output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from disagg_sim.cli.aliases import own_name
from disagg_sim.cli.mcp_tools import GUIDE, TOOLS
from disagg_sim.errors import DisaggSimError, InputError, nearest, quoted
from disagg_sim.extras import extra

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer


def mcp() -> None:
    """Serve agents over the Model Context Protocol: plan, explain, sweep summaries, comparisons, small simulations.

    A client starts it, and talks to it over standard input and output.
    """
    made = server()
    try:
        for stream in (sys.stdin, sys.stdout):
            stream.fileno()
    except (AttributeError, OSError):
        raise InputError("a client talks over standard input and output, one of which is closed here") from None
    made.run("stdio")


def server() -> MCPServer:
    """Make the server, with each of ``TOOLS``."""
    with extra("mcp"):
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError

    def in_one_line(tool: Callable[..., Any]) -> Callable[..., Any]:
        """The tool, whose answer to bad input is the line that the command line prints."""

        @wraps(tool)
        def told(*given: Any, **named: Any) -> Any:
            try:
                return tool(*given, **named)
            except DisaggSimError as error:
                raise ToolError(str(error)) from None

        return told

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


def _fault(found: Any) -> str:
    """A fault of an argument in a line, from what pydantic found."""
    place = ".".join(map(str, found["loc"]))
    said = str(found["msg"])
    if said.startswith(own := "Value error, "):
        return f"{place}: {said.removeprefix(own)}"
    return f"{place} {quoted(found['input'])}: {said}"
