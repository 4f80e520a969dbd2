"""``disagg-sim simulate``: files of a run, resuming, and one line for what a user can mend."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numba
import pandas as pd
import pytest
import yaml

from disagg_sim.cli.main import run
from disagg_sim.parquet import read_parquet
from disagg_sim.report.lines import not_completed
from disagg_sim.scenario import run as scenario_run
from disagg_sim.simulation.kernel.compiled import COMPILING, CodeHome
from disagg_sim.simulation.metrics import COLUMNS, MEASURED
from disagg_sim.simulation.policy import POLICIES

TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(
    f"{i / 4},{200 + 37 * i % 500},{5 + 11 * i % 40}\n" for i in range(60)
)
SCENARIO = {
    "name": "trial",
    "model": "llama_3_1_8b",
    "system": "h100_sxm",
    "precision": "fp8",
    "trace": {"path": "short.csv", "rate_scale": [1.0, 2.0]},
    "slo": {"ttft_s": 0.5, "tpot_s": 0.05},
    "deployments": {"two": {"prefill": {}, "decode": {}, "colocated": {"instances": 2}}},
    "policies": ["vllm", "disaggregated"],
}


@pytest.fixture
def scenario(tmp_path):
    """Writes the scenario with some keys changed, beside its trace."""
    (tmp_path / "short.csv").write_text(TRACE)

    def write(**changes) -> str:
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump({**SCENARIO, **changes}))
        return str(path)

    return write


def simulated(*arguments: str) -> int:
    return run(["simulate", *arguments, "--jobs", "1"])


def contents(root: Path) -> dict[str, bytes]:
    """All that does not depend on the machine."""
    tables = ("requests", "samples", "decisions", "runs")
    found = {str(path.relative_to(root)): path.read_bytes() for name in tables for path in (root / name).glob("*/*")}
    summary = pd.read_csv(root / "summary.csv").drop(columns=list(MEASURED))
    return found | {"summary.csv": summary.to_csv().encode(), "log": (root / "decisions.csv").read_bytes()}


def test_a_scenario_leaves_its_tables_and_traces(scenario, tmp_path, capsys):
    out = tmp_path / "out"
    path = scenario(capacity={"criterion": "attainment", "share": 0.9})
    assert simulated(path, "--out", str(out), "--perfetto") == 0
    said = capsys.readouterr()
    assert "trial: 4 runs; read" in said.out
    assert "capacity of vllm on two under short:" in said.out
    summary = pd.read_csv(out / "summary.csv")
    assert tuple(summary.columns) == COLUMNS
    assert summary["policy"].tolist() == ["vllm", "disaggregated"] * 2
    assert (summary["requests"] == 60).all()
    assert (summary["completed"] == 60).all()
    assert summary["rate_scale"].tolist() == [1.0, 1.0, 2.0, 2.0]
    requests = read_parquet(out / "requests" / "two" / "disaggregated-short-x1.parquet")
    assert len(requests) == 60
    assert (requests["prefill_instance"] != requests["decode_instance"]).all()
    capacity = pd.read_csv(out / "capacity.csv")
    assert capacity["policy"].tolist() == ["vllm", "disaggregated"]
    assert (capacity["met_again_rate_scale"] == 0).all()
    assert capacity["requests_per_s"].tolist() == pytest.approx(2 * capacity["requests_per_s_per_gpu"], rel=0.05)
    events = json.loads((out / "perfetto" / "two" / "disaggregated-short-x1.json").read_text())["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tracks == {0: "cluster", 1: "instance 0: prefill, 1 GPUs", 2: "instance 1: decode, 1 GPUs"}
    assert sum(event["ph"] == "b" for event in events) == sum(event["ph"] == "e" for event in events) == 120


def test_requests_that_were_not_completed_stand_beside_attainment_which_counts_them(scenario, tmp_path, capsys):
    cut = scenario(run={"until_s": 4.0})
    assert simulated(cut, "--out", str(tmp_path / "cut")) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("not completed")
    assert lines[4] == "attainment counts requests that were not completed as misses; TTFT and TPOT leave them out"
    for (_, row), line in zip(pd.read_csv(tmp_path / "cut" / "summary.csv").iterrows(), lines, strict=False):
        assert row["completed"] < row["requests"] == 60
        assert round(60 * row["slo_attainment"]) <= row["completed"]
        lost = not_completed(*(int(row[name]) for name in ("rejected", "failed", "unfinished")))
        assert line.endswith(f"  {lost} of 60")
    assert simulated(scenario(), "--out", str(tmp_path / "whole")) == 0
    assert "completed" not in capsys.readouterr().out


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(scenario, tmp_path, monkeypatch, capsys):
    path, whole, stopped = scenario(), tmp_path / "whole", tmp_path / "stopped"
    assert simulated(path, "--out", str(whole)) == 0
    compute, calls = scenario_run.compute_run, []

    def interrupted(task):
        calls.append(task.run.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(task)

    monkeypatch.setattr(scenario_run, "compute_run", interrupted)
    assert simulated(path, "--out", str(stopped)) == 130
    assert "the same command goes on" in capsys.readouterr().err
    (stopped / "perfetto" / "two").mkdir(parents=True)
    for left in (".summary.csv.12.tmp", "perfetto/two/.gone.json.12.tmp", "requests/two/.vllm-short-x2.parquet.1.tmp"):
        (stopped / left).write_text("half")
    monkeypatch.setattr(scenario_run, "compute_run", compute)
    assert simulated(path, "--out", str(stopped)) == 0
    assert "2 of 4 runs already stored" in capsys.readouterr().err
    assert contents(stopped) == contents(whole)
    assert not list(stopped.rglob("*.tmp"))
    assert simulated(path, "--out", str(stopped)) == 0
    assert "4 of 4 runs already stored" in capsys.readouterr().err


def test_damaged_tables_are_simulated_again_with_a_line(scenario, tmp_path, capsys):
    path, out = scenario(), tmp_path / "out"
    assert simulated(path, "--out", str(out)) == 0
    before = contents(out)
    dice = random.Random(11)
    stored = sorted(out.glob("*/two/*.parquet"))
    for at, hurt in enumerate(dice.sample(stored, 4)):
        data = bytearray(hurt.read_bytes())
        data[dice.randrange(4, len(data) - 4)] ^= 1 << dice.randrange(8)
        hurt.write_bytes(data)
        capsys.readouterr()
        assert simulated(path, "--out", str(out)) == 0, at
        said = capsys.readouterr().err
        assert "corrupt block, computing it again" in said
        assert "3 of 4 runs already stored" in said
        assert contents(out) == before


def test_durations_stand_in_the_log_alone_and_are_none_without_it(scenario, tmp_path):
    out = tmp_path / "out"
    path = scenario(capacity={"criterion": "attainment", "share": 0.9})
    assert simulated(path, "--out", str(out)) == 0
    for table in out.glob("*/two/*.parquet"):
        assert not {*MEASURED} & {*read_parquet(table).columns}
    first = {name: pd.read_csv(out / name) for name in ("summary.csv", "capacity_runs.csv")}
    for found in first.values():
        assert (found[list(MEASURED)] > 0).all().all()
    with (out / "timing.jsonl").open("a") as log:
        log.write('{"block": "runs/')  # a line of a process that was killed
    assert simulated(path, "--out", str(out)) == 0
    for name, found in first.items():
        pd.testing.assert_frame_equal(pd.read_csv(out / name), found)
    (out / "timing.jsonl").unlink()
    assert simulated(path, "--out", str(out)) == 0
    for name, found in first.items():
        again = pd.read_csv(out / name)
        assert again[list(MEASURED)].isna().all().all()
        columns = [column for column in found if column not in MEASURED]
        pd.testing.assert_frame_equal(again[columns], found[columns])


@pytest.mark.long
def test_killed_runs_go_on_and_leave_nothing_half_written(scenario, tmp_path):
    """Killed in the first run, in the second, and while pictures are drawn."""
    path, whole, killed = scenario(trace={"path": "short.csv"}), tmp_path / "whole", tmp_path / "killed"
    assert simulated(path, "--out", str(whole)) == 0
    script = "from disagg_sim.cli.main import main; main()"
    command = [sys.executable, "-c", script, "simulate", path, "--out", str(killed), "--jobs", "1"]
    for place in ("requests/two/*.parquet", "runs/two/disaggregated-*", "perfetto/two/.*.tmp"):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            while run.poll() is None and not list(killed.glob(place)):
                time.sleep(0.0005)
            run.kill()
    assert simulated(path, "--out", str(killed)) == 0
    assert contents(killed) == contents(whole)
    files = {str(found.relative_to(killed)) for found in killed.rglob("*") if found.is_file()}
    assert files == {str(found.relative_to(whole)) for found in whole.rglob("*") if found.is_file()}


def test_what_is_compiled_is_told_before_anything_is_counted(scenario, tmp_path, monkeypatch, capsys):
    """The simulation of a policy whose code is compiled at its first request."""
    calls = []
    simulate = scenario_run.simulate

    def compiling(trace, *arguments, **options):
        if len(trace) == scenario_run.WARM_UP_REQUESTS:
            calls.append(arguments)
            numba.njit(lambda: 1)()
        return simulate(trace, *arguments, **options)

    monkeypatch.setattr(scenario_run, "simulate", compiling)
    monkeypatch.setattr(scenario_run, "code_home", lambda: CodeHome(None, "every process compiles"))
    assert simulated(scenario(), "--out", str(tmp_path / "out")) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(calls) == 2  # policies
    assert said[:3] == ["0 of 4 runs already stored", "every process compiles", COMPILING]
    assert simulated(scenario(), "--out", str(tmp_path / "out")) == 0
    assert len(calls) == 2, "nothing is missing, so nothing is compiled"


def test_another_trace_takes_the_place_of_the_scenarios(scenario, tmp_path, capsys):
    other = tmp_path / "other.csv"
    other.write_text("\n".join(TRACE.splitlines()[:21]))
    assert simulated(scenario(), "--out", str(tmp_path / "out"), "--trace", str(other)) == 0
    summary = pd.read_csv(tmp_path / "out" / "summary.csv")
    assert set(summary["trace"]) == {"other"}
    assert set(summary["requests"]) == {20}
    assert simulated(scenario(), "--out", str(tmp_path / "out")) == 2
    assert "and none of 'trial'; give another --out, or --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slo": {"ttft_s": 0.0001, "tpot_s": 1.0}}, "the least TTFT on deployment 'two' with no other request is"),
        ({"deployments": {"two": {"gpus": 1, "prefill": {}, "decode": {}, "colocated": {}}}}, "1 more than its 1"),
        ({"model": "llama_3_1_405b"}, "GB too few"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(scenario, tmp_path, capsys, changes, said):
    assert simulated(scenario(**changes), "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert len(error.splitlines()) == 1


def test_steps_that_leave_no_memory_stop_their_own_runs_alone(scenario, tmp_path, capsys):
    """A pass of ten million tokens has activations of hundreds of GB."""
    deployments = {"two": {"colocated": {"instances": 2}}, "vast": {"colocated": {"token_budget": 10_000_000}}}
    path, out = scenario(policies=["vllm"], trace={"path": "short.csv"}, deployments=deployments), tmp_path / "out"
    assert simulated(path, "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert "error: vast/vllm-short-x1: llama_3_1_8b on h100_sxm leaves no memory for a KV cache" in error
    assert "rows so far" not in error
    assert pd.read_csv(out / "summary.csv")["deployment"].tolist() == ["two"]


OWN = """
import sys
from dataclasses import dataclass
from disagg_sim.simulation.policies.fixed import Vllm
from disagg_sim.simulation.policy import register
from disagg_sim.simulation.wishes import Leg
{top}

class Router:
    def place(self, view, request):
        if request == 5:
            {fails}
        return Leg(0)

    def proceed(self, view, request, origin):
        return Leg(origin)

@register("{name}")
@dataclass(frozen=True, slots=True, kw_only=True)
class Mine(Vllm):
    def __post_init__(self):
        {made}

    def build(self, site):
        from dataclasses import replace
        return replace(Vllm.build(self, site), routing=Router())
"""
FAILS = {
    "raises": ("1 // 0", "policy 'own_raises' at 1.274 s: ZeroDivisionError: integer division or modulo by zero"),
    "errs": ("return Leg(0.5)", "policy 'own_errs' at 1.274 s: request 5 on instance 0.5 is impossible"),
}


@pytest.fixture
def own(tmp_path):
    """Writes a policy file of the user's own; the systems are forgotten afterwards."""

    def write(name: str, *, fails: str = "pass", top: str = "", made: str = "pass") -> str:
        text = OWN.format(name=name, fails=fails, top=top, made=made)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in [name for name in POLICIES if name.startswith("own_")]:
        del POLICIES[name]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_policy_that_fails_stops_its_runs_alone(scenario, tmp_path, capsys, own, jobs):
    """Two policies fail, each in its own way; each has its line with run and place, and the third has its row."""
    names = [own(f"own_{case}", fails=code) for case, (code, _) in FAILS.items()]
    path_of_scenario = scenario(
        policies=[*names, "vllm"], trace={"path": "short.csv"}, policy_file=[f"{name}.py" for name in names]
    )
    out = tmp_path / "out"
    assert run(["simulate", path_of_scenario, "--out", str(out), "--jobs", jobs]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = error[error.index("error: ") :].removeprefix("error: ").splitlines()
    assert len(lines) == len(FAILS)
    for case, (_, said) in FAILS.items():
        (line,) = [line for line in lines if f"'own_{case}'" in line]
        assert line.startswith(f"two/own_{case}-short-x1: {said}")
        assert f"own_{case}.py:" in line
        path = out / "requests" / "two" / f"own_{case}-short-x1.parquet"
        assert f"; its rows so far are in {path}" in line
        kept = read_parquet(path)
        assert len(kept) == 60
        assert set(kept["status"]) <= {"completed", "unfinished"}
    assert pd.read_csv(out / "summary.csv")["policy"].tolist() == ["vllm"]
    assert run(["simulate", path_of_scenario, "--out", str(out), "--jobs", jobs]) == 2
    assert f"1 of {1 + len(FAILS)} runs already stored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top": "sys.exit()"}, "it called sys.exit() ("),
        ({"top": "import nonsense_that_is_not_there"}, "ModuleNotFoundError: No module named 'nonsense_that_is_not_"),
        ({"made": "raise ValueError('not like\\nthat')"}, "policy 'own_import': ValueError: not like that ("),
    ],
)
def test_a_policy_file_that_fails_at_its_import_is_one_line(scenario, tmp_path, capsys, own, changes, said):
    path = scenario(policies=[own("own_import", **changes), "vllm"], policy_file="own_import.py")
    assert simulated(path, "--out", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "own_import.py:" in error
    assert len(error.splitlines()) == 1
