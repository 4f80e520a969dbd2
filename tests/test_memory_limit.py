"""What needs more memory than is allowed is refused before it is made, in the same words by a check and a run."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.traffic import ConstantLength
from disagg_sim.memory import LEAST, VARIABLE, allowed_memory, require_memory
from disagg_sim.units import GB
from disagg_sim.workload.synthetic import session_trace

SCENARIO = {
    "name": "trial",
    "model": "llama_3_1_8b",
    "system": "h100_sxm",
    "precision": "fp8",
    "trace": {"kind": "synthetic", "lengths": {"isl": 256, "osl": 16}, "rate_per_s": 4.0, "requests": 30},
    "slo": {"ttft_s": 0.5, "tpot_s": 0.05},
    "deployments": {"two": {"gpus": 4, "colocated": {"instances": 2}}},
    "policies": ["vllm"],
}
SESSIONS = {"kind": "sessions", "traffic": "coding_agent", "sessions_per_s": 1.0}


def written(path: Path, **keys: object) -> str:
    path.write_text(yaml.safe_dump(SCENARIO | keys))
    return str(path)


def test_the_limit_is_that_of_the_variable_and_else_that_of_the_machine(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert LEAST < allowed_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setenv(VARIABLE, "1.5 GB")
    require_memory("a trace", 1.4 * GB)
    with pytest.raises(InputError, match=r"a trace needs about 1.6 GB of memory; allowed: up to 1.5 GB \(--memory\)"):
        require_memory("a trace", 1.6 * GB)


@pytest.mark.parametrize("text", ["1 MB", "nan", "16"])
def test_a_limit_that_is_none_is_refused(text, capsys):
    assert run(["--memory", text, "specs", "list"]) == 2
    assert "allowed: from 1 GB, such as 16 GB" in capsys.readouterr().err


def test_turns_are_counted_before_they_are_drawn():
    law = load_traffic("coding_agent")
    many = replace(law, session=replace(law.session, turns=ConstantLength(tokens=10**9)))
    with pytest.raises(InputError, match="turns of 10 sessions: 10,000,000,000 requests are too many"):
        session_trace(many, rate=1.0, sessions=10)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"trace": SESSIONS | {"sessions": 30_000}}, "a trace of 30,000 sessions needs about 1.4 GB of memory"),
        ({"trace": SCENARIO["trace"] | {"requests": 2_000_000}}, "a run of it needs about 1.4 GB of memory"),
        ({"run": {"failures": {"gpu_mtbf_s": 1e-9, "restart_s": 1.0}}}, "gpu_mtbf_s: 1e-09 is out of range; allowed"),
    ],
    ids=["sessions", "requests", "failures"],
)
def test_a_check_refuses_what_a_run_could_not_hold_or_end(tmp_path, capsys, keys, said):
    path = written(tmp_path / "s.yaml", **keys)
    for words in (["specs", "check", path], ["simulate", path, "--out", str(tmp_path / "out")]):
        assert run(["--memory", "1 GB", *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert VARIABLE not in os.environ, "a limit is of one command"


def test_a_check_says_what_a_large_run_needs(tmp_path, capsys):
    path = written(tmp_path / "s.yaml", trace=SCENARIO["trace"] | {"requests": 4_000_000})
    assert run(["--memory", "8GB", "specs", "check", path]) == 0
    assert "each process of a run on synthetic needs about 2.4 GB of memory" in capsys.readouterr().out


def test_a_table_that_would_not_fit_is_refused_before_it_is_parsed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("disagg_sim.reading.TABLE_BYTES", 1e9)
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    monkeypatch.setattr("disagg_sim.workload.readers.columns.TABLE_BYTES", 1e9)
    assert run(["--memory", "2GB", "trace", "stats", str(tmp_path / "t.csv")]) == 2
    assert "needs about 43 GB of memory" in capsys.readouterr().err
