"""``disagg-sim mcp``: an agent's client gets the JSON of the commands, and one line for what it can mend."""

import asyncio
import inspect
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from command_lines import arguments, json_of

from disagg_sim.cli import mcp as mcp_room
from disagg_sim.cli.main import run
from disagg_sim.cli.mcp import server
from disagg_sim.question import EvaluateQuestion, ExplainQuestion, PlanQuestion
from disagg_sim.report.schemas import json_schema

CASE = {"model": "llama_3_1_8b", "system": "h100_sxm", "isl": 1024, "osl": 128}


@cache
def _everywhere() -> Any:
    """The server with all files, which takes longer to make than most calls."""
    return server()


def asked(talk: Callable[[Any], Awaitable[Any]], to: Any = None) -> Any:
    """What a client of the SDK gets, of a server in this process with all files unless said."""
    mcp = pytest.importorskip("mcp")

    async def talked() -> Any:
        async with mcp.Client(to or _everywhere()) as client:
            return await talk(client)

    return asyncio.run(talked())


def called(tool: str, of: Any = None, **arguments: Any) -> Any:
    return asked(lambda client: client.call_tool(tool, arguments), of)


def test_names_come_with_their_titles():
    names = called("list_names", kind="model").structured_content["names"]
    assert names["llama_3_1_70b"] == "Llama 3.1 70B"


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("plan", "--model llama_3_1_8b --system h100_sxm --isl 1024 --osl 128 --rate 40"),
        pytest.param(
            "plan",
            "--model llama_3_1_8b --system h200_sxm --traffic coding_agent --tiers 'hbm=20 GB' --rate 2",
            marks=pytest.mark.rare,
        ),
        (
            "plan",  # all of it at once: what is not passed on moves the plan, or drops its part of the JSON
            "--model llama_3_1_8b --system h200_sxm --isl 1024 --osl 32 --rate 10 --speculate 2"
            " --acceptance 'mtp 0.8 0.6' --cached 0.5 --tiers hbm=0.5,dram=0.5 --availability 0.999 "
            "--rank-imbalance round_robin --price h200_sxm=3 --utilisation 0.5 --energy --objective usd",
        ),
        (
            "plan",
            "--model qwen3_5_35b_a3b --system h200_sxm --isl 4096 --osl 256 --gpus 4 --pools encode,prefill,decode"
            " --images 2x1120x1120 --tpot '30 ms'",
        ),
        (
            "evaluate",
            "--model llama_3_1_8b --system h200_sxm --isl 1024 --osl 128 --rate 20 --cached 0.5 --speculate 2"
            " --acceptance 'mtp 0.8 0.6' --pool prefill:instances=2,batch=4 --pool decode:tp=2,batch=64 --max-nic 20",
        ),
        (
            "explain",
            "--model llama_3_1_8b --system h200_sxm --precision fp8 --tp 2 --batch 16 --isl 1024 --osl 128 --cached 0.5"
            " --tiers dram --availability 0.999 --energy --speculate 2 --acceptance 'mtp 0.8 0.6' --phase colocated",
        ),
    ],
)
@pytest.mark.usefixtures("without_changes")
def test_a_tool_answers_as_its_command(tool, said):
    question = {"explain": ExplainQuestion, "evaluate": EvaluateQuestion}.get(tool, PlanQuestion)
    found = called(tool, **arguments(question, said)).structured_content
    jsonschema.validate(found, json_schema(tool))
    assert json_of(tool, said) == found


def test_infeasible_limits_are_an_answer_and_bad_input_is_a_line():
    assert called("plan", **CASE, rate_per_s=40.0, tpot="1 ms").structured_content["status"] == "infeasible"
    wrong = called("plan", **{**CASE, "system": "h100"}, rate_per_s=40.0)
    assert wrong.is_error
    assert "did you mean 'h100_sxm'" in wrong.content[0].text
    assert called("list_names", kind="gpu").is_error


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"backend": "vllm"}, "plan has no argument 'backend', did you mean 'engine'?; allowed: model, system, "),
        ({"max_nic": 50}, "plan has no argument 'max_nic', did you mean 'max_nic_gb_per_s'?"),
        ({"ttft": 500}, "ttft 500 has no unit, and nobody means 500s; say 500ms or 500s"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_in_a_line(arguments, line):
    found = called("plan", **CASE, rate_per_s=10.0, **arguments)
    assert found.is_error
    assert line in found.content[0].text
    assert len(found.content[0].text.splitlines()) == 1


def test_an_instance_is_explained_and_results_are_read(tmp_path):
    shape = {"tp": 2, "batch": 16, "isl": 1024, "osl": 128}
    found = called("explain", model="llama_3_1_8b", system="h100_sxm", precision="fp8", **shape).structured_content
    jsonschema.validate(found, json_schema("explain"))
    assert sum(part["seconds"] for part in found["operators"]) == pytest.approx(found["points"][0]["ttl_s"])
    pools = called("explain", **CASE, precision="fp8", phase="attention_ffn")  # which is printed, and has no JSON
    assert "--phase attention_ffn is printed by disagg-sim explain alone" in pools.content[0].text
    missing = called("sweep_summary", results=str(tmp_path / "none"))
    assert "no such file or directory" in missing.content[0].text


def test_a_small_sweep_is_computed_with_its_axes(tmp_path, monkeypatch):
    file = tmp_path / "links.yaml"
    file.write_text(
        "name: links\nmodels: llama_3_1_8b\nsystems: {h100_sxm: fp8}\ntraffic: [{isl: 1024, osl: 128}]\n"
        "limits: {max_gpus: 1, gpu_cap: 4}\nmodes: [disaggregated]\nkv_link: [none, {path: rail}]\n"
    )
    out = tmp_path / "results"
    found = called("sweep", file=str(file), out=str(out)).structured_content
    jsonschema.validate(found, json_schema("sweep"))
    assert len(found["cases"]) == 2
    assert called("sweep_summary", results=str(out)).structured_content == found
    row = called("explain", results=str(out), case=found["cases"][0]["case"], best=True).structured_content
    jsonschema.validate(row, json_schema("explain"))
    assert called("sweep", file=str(file), out="").is_error
    monkeypatch.setattr("disagg_sim.cli.mcp_tools.MOST_POINTS", 1_000_000)
    large = called("sweep", file="demo", out=str(tmp_path / "demo"))
    assert large.is_error
    assert "run disagg-sim sweep in a shell" in large.content[0].text
    assert not (tmp_path / "demo").exists()


def test_a_small_deployment_is_simulated():
    pytest.importorskip("numba")
    shape = {"precision": "fp8", "rate_per_s": 5.0, "requests": 200}
    (row,) = called("simulate", **CASE, **shape, colocated=1).structured_content["runs"]
    assert row["completed"] == 200
    (same,) = called("simulate", **CASE, **shape | {"rate_per_s": "300/min"}, colocated=1).structured_content["runs"]
    assert same["ttft_p90_s"] == row["ttft_p90_s"]
    assert called("simulate", **CASE, **shape, prefill=1).is_error


def test_standard_output_carries_nothing_else():
    """A client that starts the command reads it line by line: whatever else is printed there breaks the connection."""
    mcp = pytest.importorskip("mcp")
    code = "from disagg_sim.cli.main import main; main()"
    command = mcp.StdioServerParameters(command=sys.executable, args=["-c", code, "mcp"])
    started = mcp.stdio_client(command, errlog=sys.__stderr__)  # of its own, that of the import may be captured
    found = asked(lambda client: client.call_tool("list_names", {"kind": "hardware"}), to=started)
    assert "h100_sxm" in found.structured_content["names"]


def test_a_closed_stream_is_one_line(monkeypatch, capsys):
    pytest.importorskip("mcp")
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["mcp"]) == 2
    assert capsys.readouterr().err.startswith("error: a client talks over standard input and output")


SMALL = (
    "name: small\nmodels: llama_3_1_8b\nsystems: {h100_sxm: fp8}\ntraffic: [{isl: 1024, osl: 128}]\n"
    "limits: {max_gpus: 1, gpu_cap: 4}\nmodes: [colocated]\n"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The directory of a server, beside one with files that are none of its business."""
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "small.yaml").write_text(SMALL)
        (tmp_path / name / "frontier.csv").write_text("secret\n")
    (tmp_path / "outside" / "model.yaml").write_text("secret: 1\n")
    (tmp_path / "outside" / "config.json").write_text('{"secret": 1}')
    (tmp_path / "inside" / "link.yaml").symlink_to(tmp_path / "outside" / "small.yaml")
    (tmp_path / "inside" / "door").symlink_to(tmp_path / "outside")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "outside"))  # the library's own, not an agent's
    monkeypatch.setattr(mcp_room, "_caches", mcp_room._caches.__wrapped__)
    monkeypatch.chdir(tmp_path / "inside")
    return tmp_path / "inside"


OUTSIDE = [
    ("sweep", {"file": "small.yaml", "out": str(Path(mcp_room.__file__).parent / "__pycache__" / "out")}),
    ("sweep", {"file": "link.yaml", "out": "out"}),
    ("sweep", {"file": "small.yaml", "out": "../outside/out"}),
    ("sweep", {"file": "small.yaml", "out": "door/out"}),
    ("sweep", {"file": "../outside/missing.yaml", "out": "out"}),  # whether it is there is not told
    ("sweep_summary", {"results": "door"}),
    ("compare", {"baseline": "../outside", "results": "."}),
    ("plan", {**CASE, "model": "../outside/model.yaml", "gpus": 8}),
    ("plan", {**CASE, "model": "../missing", "gpus": 8}),
    ("plan", {**CASE, "system": "/proc/self/environ", "gpus": 8}),
    ("plan", {**CASE, "system": "h100_sxm,door/model.yaml", "gpus": 8}),
    ("plan", {**CASE, "gpus": 8, "availability": 0.999, "failures": "/etc/hostname"}),
    ("plan", {"model": "llama_3_1_8b", "system": "h100_sxm", "trace": "../outside/frontier.csv", "gpus": 8}),
    ("explain", {"results": "door/frontier.csv", "best": True}),
]


def test_nothing_outside_of_the_root_is_read_or_written(root):
    before, of = {path: path.read_bytes() for path in root.parent.glob("outside/**/*")}, server(root)
    for tool, given in OUTSIDE:
        found = called(tool, of, **given)
        assert found.is_error, (tool, given)
        assert "secret" not in found.content[0].text
        assert "outside of the directory of the server (--root)" in found.content[0].text
        assert {path: path.read_bytes() for path in root.parent.glob("outside/**/*")} == before


def test_what_lies_in_the_root_is_read_and_written_there(root):
    out = str(root / "out")
    found = called("sweep", server(root), file="small.yaml", out=out).structured_content
    assert found["cases"]
    assert called("sweep", server(root), file="small.yaml", out=out).structured_content == found  # goes on
    assert called("compare", server(root), baseline=out, results="out").structured_content


def test_a_call_ends_when_its_time_is_over(root, monkeypatch):
    """Its thread, too: nothing of it runs on beside the calls that follow."""
    ended = threading.Event()

    def endless(*_: Any) -> None:
        try:
            while True:
                with suppress(Exception):
                    time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr("disagg_sim.cli.mcp_tools.read_frontier", endless)
    found = called("sweep_summary", server(root, limit_s=0.3), results=".")
    assert found.is_error
    assert found.content[0].text.endswith("sweep_summary: not done within 0.3 s (--timeout)")
    assert ended.wait(5.0)


def test_options_of_mcp_reach_its_server(root, monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(mcp_room, "server", lambda **named: given.update(named) or Mock())
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    for said, asked_for in (([], (root, 300.0)), (["--root", "..", "--timeout", "20"], (root.parent, 20.0))):
        assert run(["mcp", *said]) == 0
        assert (given["root"], given["limit_s"]) == asked_for
    assert {"root", "timeout", "offline"} == {*inspect.signature(mcp_room.mcp).parameters}


def test_a_root_that_is_no_directory_is_one_line(root, capsys):
    assert run(["mcp", "--root", "small.yaml"]) == 2
    assert capsys.readouterr().err == "error: --root small.yaml: Not a directory\n"
