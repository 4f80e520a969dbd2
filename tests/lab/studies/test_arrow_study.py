"""The study of Arrow: what its bench reads off a run, by hand; its claims on small traces; the command."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from reproducing import reproduced

from disagg_sim.cli.main import run
from disagg_sim.simulation.records import Decision
from disagg_sim.workload.statistics import per_minute
from lab.studies.arrow import claims
from lab.studies.arrow import experiments as arrow
from lab.studies.arrow import setup as arrow_setup
from lab.studies.arrow.setup import ALL, CASES, SHAPES, ArrowBench, fewest_instances, loads, workloads


def flips(*instances):
    return SimpleNamespace(decisions=[Decision(0.0, "flip", each, "", "") for each in instances])


def test_fewest_instances_follow_the_flips_one_by_one():
    """4 + 4: instances 4 and 5 go to prefill, then 4, 0 and 1 to decode: decode 2 at least, prefill 3."""
    assert fewest_instances(flips(), CASES["arrow"].deployment) == (4, 4)
    assert fewest_instances(flips(4, 5, 4, 0, 1), CASES["arrow"].deployment) == (3, 2)


def test_loads_count_requests_between_arrival_first_token_and_finish():
    requests = SimpleNamespace(
        arrival_s=np.array([0.0, 0.9]), first_token_s=np.array([1.5, 2.5]), finish_s=np.array([3.5, 3.6])
    )
    prefill, decode = loads(SimpleNamespace(requests=requests, duration_s=4.0), 1.0)
    assert prefill[:5].tolist() == [1, 2, 1, 0, 0]
    assert decode[:5].tolist() == [0, 0, 1, 2, 0]


def test_the_recursion_of_ttft_by_hand():
    """Ends at 2, 3 and 6; the last waits for nobody."""
    found = claims.ttft_in_turn(np.array([0.0, 1.0, 5.0]), np.array([2.0, 1.0, 1.0]))
    assert found.tolist() == [2.0, 2.0, 1.0]


def test_stand_ins_have_the_numbers_of_the_published_traces():
    found = workloads(None)
    for name, shape in SHAPES.items():
        trace = found[name].trace
        assert len(trace) == shape.requests
        assert trace.duration == pytest.approx(shape.duration, rel=0.15)
        assert trace.input_tokens.mean() == pytest.approx(shape.inputs[0], rel=0.1)
        assert trace.output_tokens.mean() == pytest.approx(shape.outputs[0], rel=0.15)
        assert found[name].stand_in
    minutes = {name: per_minute(found[name].trace.arrival, found[name].trace.input_tokens) for name in ALL}
    spread = {name: each.std() / each.mean() for name, each in minutes.items()}
    assert spread["code"] > spread["conversation"] > spread["mooncake"]


def test_a_quadratic_misses_ttft_although_the_recursion_is_exact(monkeypatch):
    monkeypatch.setattr(claims, "FIFO_REQUESTS", 200)
    finding = claims.a4_predictor(ArrowBench(workloads=workloads(None, quick=True)))
    assert not finding.holds
    identity = re.search(r"identity, off by ([0-9.e-]+)", finding.note)
    assert float(identity[1]) < 1e-9


def small(_traces, *, quick=False):
    found = workloads(None, quick=True)
    return {name: each._replace(trace=each.trace.head(80)) for name, each in found.items()}


@pytest.mark.rare
def test_the_command_writes_every_claim_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arrow, "workloads", small)
    monkeypatch.setattr(arrow_setup, "TOLERANCE", 1.0)
    claims = reproduced("arrow", tmp_path)
    assert claims.loc[["A4", "A9"], "verdict"].tolist() == ["fails", "by construction"]
    assert claims["without"].notna().sum() == 10
    assert claims["note"].str.startswith("stand-in: ").sum() >= 8
    assert "claims hold; not: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["arow"], "did you mean 'arrow'?"),
        (["behind-the-buzz"], "beyond-the-buzz"),
        (["beyond-the-buzz", "--figure", "2"], "figure 'fig02' is unknown"),
        (["beyond-the-buzz", "--figure", "9", "--profile", "measurd"], "'measurd' is unknown, did you mean 'measured'"),
        (["arrow", "--traces", "nowhere"], "nowhere: no such directory"),
        (["arrow", "--jobs", "2"], "--jobs does not go with arrow"),
        (["beyond-the-buzz", "--quick"], "--quick does not go with beyond-the-buzz"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, named, tmp_path, capsys):
    assert run(["reproduce", *arguments, "--out", str(tmp_path)]) == 2
    assert named in capsys.readouterr().err


def test_a_directory_without_the_trace_is_named(tmp_path, capsys):
    assert run(["reproduce", "arrow", "--traces", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "AzureLLMInferenceTrace_code.csv" in capsys.readouterr().err
