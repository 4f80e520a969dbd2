"""Help of every command, arguments of every tool for agents, and what commands print, against text in git.

``--update-baselines`` records them anew; numbers of simulations and sweeps are those of small cases.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from every_command import COMMANDS

import disagg_sim as ds
from disagg_sim.cli.main import run
from disagg_sim.cli.mcp_tools import TOOLS
from disagg_sim.facts.yaml_files import PATH_VARIABLE, find_file

BASELINES = Path(__file__).parent / "cli" / "recorded"
SWEEP = """
name: trial
models: [llama_3_1_8b]
systems: {h100_sxm: fp8}
traffic: [{isl: 1024, osl: 128}]
modes: [disaggregated, colocated]
limits: {max_gpus: 4}
"""
TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(
    f"{i / 4},{200 + 37 * i % 500},{5 + 11 * i % 40}\n" for i in range(240)
)
HASHED = "".join(
    f'{{"timestamp": {3000 * (i // 3)}, "input_length": 1100, "output_length": {4 + i % 5}, '
    f'"hash_ids": [0, {1 + i % 4}, {9 + i}]}}\n'
    for i in range(60)
)
SCENARIO = {
    "name": "trial",
    "model": "llama_3_1_8b",
    "system": "h200_sxm",
    "precision": "fp8",
    "trace": {"path": "short.csv", "rate_scale": [1.0, 8.0]},
    "slo": {"ttft_s": 0.062, "tpot_s": 0.00325},
    "deployments": {
        "two": {"prefill": {}, "decode": {}, "colocated": {"instances": 2}},
        "wide": {"prefill": {"tp": 2, "batch": 4}, "decode": {"tp": 2}, "colocated": {"tp": 4}},
    },
    "policies": ["vllm", "disaggregated"],
}
#: What is asked in one folder, in this order. Results of two sweeps and of a scenario are there then.
ASKED = {
    "sweep": "sweep old.yaml --out old --jobs 1",
    "sweep_new": "sweep old.yaml --out new --jobs 1",
    "compare": "compare old new",
    "compare_all": "compare old new --all --rtol 0.02",
    "compare_same": "compare old old",
    "check_worse": "check old --baseline new --allow-better",
    "check_better": "check new --baseline old --allow-better",
    "explain_best": "explain old --best --energy --availability 0.999",
    "explain_fast": "explain old --at-interactivity 150",
    "explain_row": "explain old/frontier.csv --row 2",
    "sensitivity": "sensitivity old.yaml --out bent --jobs 1",
    "trace": "trace stats short.csv",
    "trace_json": "trace stats short.csv --json",
    "trace_named": "trace stats named.csv --column arrival=when --column input_tokens=in --column output_tokens=out"
    " --time-unit ms",
    "trace_hashed": "trace stats hashed.jsonl --as-is",
    "trace_lengths": "trace stats lengths.csv --rate 90/min --seed 3",
    "simulate": "simulate trial.yaml --out run --jobs 1 --energy",
    "simulate_few": "simulate trial.yaml --out few --jobs 1 --json --requests 40 --seed 3",
    "specs_check": "specs check old.yaml trial.yaml",
    "specs_policy": "specs show policy vllm",
    "specs_system": "specs show hardware rtx_pro_6000",
    "specs_profile": "specs show profile measured",
    "launch": "launch old --engine vllm --best",
    "launch_which": "launch old --engine vllm",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each command prints, and how it ends."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "old.yaml").write_text(SWEEP)
    changed = re.sub(
        r"(?m)^hbm_bandwidth:.*$", "hbm_bandwidth: 3.6 TB/s", find_file("hardware", "h100_sxm").read_text()
    )
    (folder / "specs" / "hw_specs").mkdir(parents=True)
    (folder / "specs" / "hw_specs" / "h100_sxm.yaml").write_text(changed)
    (folder / "short.csv").write_text(TRACE)
    (folder / "named.csv").write_text(TRACE.replace("arrival_s,input_tokens,output_tokens", "when,in,out"))
    (folder / "hashed.jsonl").write_text(HASHED)
    (folder / "lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "5,6\n70,8\n" * 40)
    (folder / "trial.yaml").write_text(yaml.safe_dump(SCENARIO))
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        for name, words in ASKED.items():
            out, err = StringIO(), StringIO()
            with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as specs:
                if name == "sweep_new":
                    specs.setenv(PATH_VARIABLE, str(folder / "specs"))
                code = run(words.split())
            found[name] = f"{out.getvalue()}{err.getvalue()}exit code {code}\n"
    return found


def settled(text: str) -> str:
    """Without times, sizes and places of files, which differ by machine and day."""
    text = re.sub(r"(\.yaml):\d+ *", r"\1 ", text)
    text = re.sub(r".*/s, [\d,]+ s left\n", "", text)  # progress is written once a run takes seconds
    text = re.sub(r"\d+\.\d{10,}(e-\d+)?", lambda found: f"{float(found[0]):.9g}", text)
    text = re.sub(r'("(?:wall_s|requests_per_cpu_s)"): .*', r"\1", text)
    return re.sub(r"in [\d.]+ s, [\d,]+/s|[\d.]+ [kM]B|\d [a-z]+ differs?.*git.*| at 0x[0-9a-f]+", "...", text)


def tools() -> Iterator[str]:
    for tool in TOOLS:
        yield f"{tool.__name__}: {inspect.getdoc(tool)}"
        yield from (f"  {each}" for each in inspect.signature(tool).parameters.values())


def recorded(name: str, text: str, update: bool) -> None:
    path = BASELINES / f"{name}.txt"
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.skip(f"recorded {path.name}: read the diff before committing it")
    assert text.splitlines() == path.read_text().splitlines()


def test_help_is_as_recorded(update_baselines, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    for words in COMMANDS:
        print(f"$ disagg-sim {' '.join(words)} --help")
        assert run([*words, "--help"]) == 0
    recorded("help", capsys.readouterr().out, update_baselines)


def test_tools_are_as_recorded(update_baselines):
    text = "\n".join(tools()).replace("typing.Annotated", "Annotated").replace("pathlib._local", "pathlib")  # of 3.13
    recorded("tools", settled(text + "\n"), update_baselines)


def test_a_plan_in_a_notebook_is_as_recorded(update_baselines):
    """With two pools, runners-up, limits that cost, and a system that is left out."""
    asked = ds.PlanOptions(objective="usd", prices={"h100_sxm": 2.0}, headroom=0.1)
    found = ds.plan("llama_3_1_8b", "h100_sxm,l40s", ds.lengths(8192, 64), tpot="10 ms", gpus=12, options=asked)
    recorded("notebook", found._repr_html_().replace("><", ">\n<") + "\n", update_baselines)


@pytest.mark.parametrize("name", ASKED)
def test_a_command_prints_what_is_recorded(name, said, update_baselines):
    recorded(name, settled(said[name]), update_baselines)


def test_every_screen_is_recorded_and_nothing_else_is():
    assert {path.stem for path in BASELINES.glob("*")} == {"help", "tools", "notebook", *ASKED}
