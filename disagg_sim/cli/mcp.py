"""``disagg-sim mcp``: serve the tools of ``cli.mcp_tools`` to agents, over standard input and output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from disagg_sim.cli.mcp_tools import GUIDE, TOOLS
from disagg_sim.errors import DisaggSimError, InputError
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

    made = MCPServer("disagg-sim", instructions=GUIDE, log_level="WARNING")
    for tool in TOOLS:
        made.add_tool(in_one_line(tool))
    return made
