"""``disagg-sim mcp``: an agent's client gets the JSON of the commands, and one line for what it can mend."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from disagg_sim.cli.main import run
from disagg_sim.cli.mcp import server
from disagg_sim.cli.mcp_tools import TOOLS
from disagg_sim.report.schemas import json_schema

CASE = {"model": "llama_3_1_8b", "system": "h100_sxm", "isl": 1024, "osl": 128}


def asked(talk: Callable[[Any], Awaitable[Any]], to: Any = None) -> Any:
    """What a client of the SDK gets, of a server in this process unless said."""
    mcp = pytest.importorskip("mcp")

    async def talked() -> Any:
        async with mcp.Client(to or server()) as client:
            return await talk(client)

    return asyncio.run(talked())


def called(tool: str, **arguments: Any) -> Any:
    return asked(lambda client: client.call_tool(tool, arguments))


def test_every_tool_says_what_it_does_and_takes() -> None:
    found = asked(lambda client: client.list_tools()).tools
    assert [tool.name for tool in found] == [tool.__name__ for tool in TOOLS]
    assert all(tool.description and tool.output_schema for tool in found)


def test_a_plan_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = called("plan", **CASE, rate_per_s=40.0).structured_content
    jsonschema.validate(found, json_schema("plan"))
    options = [text for name, value in CASE.items() for text in (f"--{name}", str(value))]
    assert run(["plan", *options, "--rate", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_infeasible_limits_are_an_answer_and_bad_input_is_a_line() -> None:
    assert called("plan", **CASE, rate_per_s=40.0, tpot="1 ms").structured_content["status"] == "infeasible"
    wrong = called("plan", **{**CASE, "system": "h100"}, rate_per_s=40.0)
    assert wrong.is_error
    assert "did you mean 'h100_sxm'" in wrong.content[0].text
    assert called("list_names", kind="gpu").is_error


def test_an_instance_is_explained_and_results_are_read(tmp_path: Path) -> None:
    shape = {"tp": 2, "batch": 16, "isl": 1024, "osl": 128}
    found = called("explain", model="llama_3_1_8b", system="h100_sxm", precision="fp8", **shape).structured_content
    jsonschema.validate(found, json_schema("explain"))
    assert sum(part["seconds"] for part in found["operators"]) == pytest.approx(found["points"][0]["ttl_s"])
    missing = called("sweep_summary", results=str(tmp_path / "none"))
    assert "no such file or directory" in missing.content[0].text


def test_a_small_deployment_is_simulated() -> None:
    pytest.importorskip("numba")
    shape = {"precision": "fp8", "rate_per_s": 5.0, "requests": 200}
    (row,) = called("simulate", **CASE, **shape, colocated=1).structured_content["runs"]
    assert row["completed"] == 200
    assert called("simulate", **CASE, **shape, prefill=1).is_error


def test_standard_output_carries_nothing_else() -> None:
    """A client that starts the command reads it line by line: whatever else is printed there breaks the connection."""
    mcp = pytest.importorskip("mcp")
    code = "from disagg_sim.cli.main import main; main()"
    command = mcp.StdioServerParameters(command=sys.executable, args=["-c", code, "mcp"])
    found = asked(lambda client: client.call_tool("list_names", {"kind": "hardware"}), to=command)
    assert "h100_sxm" in found.structured_content["names"]


def test_a_closed_stream_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mcp")
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["mcp"]) == 2
    assert capsys.readouterr().err.startswith("error: a client talks over standard input and output")


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert run(["mcp"]) == 2
    assert capsys.readouterr().err == ("error: a server of tools for agents needs mcp: pip install 'disagg-sim[mcp]'\n")
