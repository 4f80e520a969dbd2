"""Studies of serving policies: what their benches read off a run, by hand; their workloads; claims; the command."""

import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from disagg_sim.cli.main import run
from disagg_sim.simulation.records import Decision
from disagg_sim.workload.statistics import per_minute
from lab.studies.arrow import claims_times as arrow
from lab.studies.arrow import experiments as arrow_experiments
from lab.studies.arrow import setup as arrow_setup
from lab.studies.arrow.setup import ALL, CASES, SHAPES, ArrowBench, fewest_instances, loads, workloads
from lab.studies.claims import BOTH_COLUMNS, COLUMNS
from lab.studies.dopd import TEXT
from lab.studies.dopd import claims as dopd
from lab.studies.dopd import setup as dopd_setup
from lab.studies.dopd.setup import DopdBench
from lab.studies.dynaserve import claims_equal as dynaserve
from lab.studies.dynaserve import experiments as dynaserve_experiments
from lab.studies.dynaserve import setup as dynaserve_setup
from lab.studies.dynaserve.setup import DynaServeBench
from lab.studies.papers import paper


def result(**columns):
    """A run of which these columns of requests are known."""
    return SimpleNamespace(requests=SimpleNamespace(**{name: np.array(each) for name, each in columns.items()}))


def flips(*instances):
    return SimpleNamespace(decisions=[Decision(0.0, "flip", each, "", "") for each in instances])


def test_fewest_instances_follow_the_flips_one_by_one():
    """4 + 4: instances 4 and 5 go to prefill, then 4, 0 and 1 to decode: decode 2 at least, prefill 3."""
    assert fewest_instances(flips(), CASES["arrow"].deployment) == (4, 4)
    assert fewest_instances(flips(4, 5, 4, 0, 1), CASES["arrow"].deployment) == (3, 2)


def test_loads_count_requests_between_arrival_first_token_and_finish():
    run = result(arrival_s=[0.0, 0.9], first_token_s=[1.5, 2.5], finish_s=[3.5, 3.6])
    run.duration_s = 4.0
    prefill, decode = loads(run, 1.0)
    assert prefill[:5].tolist() == [1, 2, 1, 0, 0]
    assert decode[:5].tolist() == [0, 0, 1, 2, 0]


def test_the_recursion_of_ttft_by_hand():
    """Ends at 2, 3 and 6; the last waits for nobody."""
    found = arrow.ttft_in_turn(np.array([0.0, 1.0, 5.0]), np.array([2.0, 1.0, 1.0]))
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
    monkeypatch.setattr(arrow, "FIFO_REQUESTS", 200)
    finding = arrow.a4_predictor(ArrowBench(workloads=workloads(None, quick=True)))
    assert not finding.holds
    identity = re.search(r"identity, off by ([0-9.e-]+)", finding.note)
    assert float(identity[1]) < 1e-9


@pytest.fixture(scope="module")
def bench():
    return DopdBench(None, quick=True)


def test_ratios_of_table_one_by_hand(bench):
    """230.76 * 166 ms/(54.0 ms * 150) at the first shape: t_d = 18 + 27.88 + 7.86 ms."""
    assert dopd.ratios(bench, own=False)[0] == pytest.approx(230.76 * 0.166 / (0.053740 * 150), rel=1e-3)


@pytest.mark.parametrize("name", ["D1", "D2", "D3", "D6", "D7", "D8", "D11", "D16"])
def test_what_follows_from_equations_holds(bench, name):
    finding = next(claim for claim in TEXT.claims if claim.id == name)(bench)
    assert finding.holds, finding


def test_the_second_pass_by_hand():
    """Requests 2 and 3 of four: TTFT 1 and 3 s, gaps of 0.05 and 0.1 s; both ends inside [4, 8] but one."""
    ends = {"first_token_s": [1.0, 1.0, 5.0, 11.0], "finish_s": [4.0, 5.0, 6.0, 12.0], "output_tokens": [2, 2, 21, 11]}
    found = dopd_setup._second_pass(result(arrival_s=[0.0, 0.0, 4.0, 8.0], **ends), 2)
    assert found == pytest.approx((0.5, 0.5 * 2 / 4, 2.8, 0.095))


def test_served_by_hand():
    """From 4 s to 10 s: all of a request of 6 to 8 s, a quarter of one of 2 to 10 s is before, half of 7 to 13 s."""
    ends = {"first_token_s": [2.0, 6.0, 7.0], "finish_s": [10.0, 8.0, 13.0]}
    found = dynaserve_setup._served(result(arrival_s=[1.0, 6.0, 10.0], **ends))
    assert found * 6.0 == pytest.approx([0.75, 1.0, 0.5])


def test_servers_hold_what_the_profile_assumes_and_a_split_moves_so_many_times_the_cache():
    """Start-up logs are known of vLLM 0.19, the paper's is 0.7.2."""
    bench = DynaServeBench(workloads=dynaserve_setup.workloads(None, quick=True))
    at = bench.setting("qwen2_5_14b")
    assert (at.engine, at.server_memory) == ("vllm", None)
    finding = dynaserve.y14_more_cache(bench)
    assert finding.holds
    assert finding.value.startswith("ratios 2, 3, 5 ")


def of_arrow(patch):
    def small(_traces, *, quick=False):
        found = workloads(None, quick=True)
        return {name: each._replace(trace=each.trace.head(80)) for name, each in found.items()}

    patch(arrow_experiments, "workloads", small)
    patch(arrow_setup, "TOLERANCE", 1.0)


def of_dynaserve(patch):
    def once(met, *, start):
        met(start)
        return start, np.inf

    patch(dynaserve_setup, "bracket", once)
    patch(dynaserve_setup, "QUICK_REQUESTS", 30)
    patch(dynaserve, "QUICK", 30)
    patch(dynaserve, "COUNTED", 30)
    patch(dynaserve, "PERCENTS", (50, 60, 70, 90))
    patch(dynaserve_experiments, "OTHERS", ())


#: Paper, what makes it small, verdicts, claims that come with a second one, least notes on stand-ins, what is printed.
STUDIES = [
    (
        "arrow",
        of_arrow,
        {"A4": "fails", "A9": "by construction"},
        "A1 A3 A5 A6 A7 A8 A12 A13 A15 A16",
        8,
        "claims hold; not: ",
    ),
    (
        "dopd",
        lambda _: None,
        dict.fromkeys(("D1", "D2", "D3", "D6", "D11"), "holds") | dict.fromkeys(("D7", "D8", "D16"), "by construction"),
        "D4 D5 D9 D10 D14 D15",
        3,
        "of 15 claims hold",
    ),
    (
        "dynaserve",
        of_dynaserve,
        {"Y14": "by construction"},
        "Y5 Y6 Y7 Y8 Y9 Y11 Y12 Y13 Y15 Y18 Y19",
        6,
        "of 20 claims hold",
    ),
]


@pytest.mark.rare
@pytest.mark.parametrize(("name", "small", "verdicts", "twice", "stand_ins", "printed"), STUDIES)
def test_the_command_writes_every_claim_and_table(
    name, small, verdicts, twice, stand_ins, printed, tmp_path, monkeypatch, capsys
):
    small(monkeypatch.setattr)
    assert run(["reproduce", name, "--quick", "--out", str(tmp_path)]) == 0
    study = paper(name)
    tables = {table: pd.read_csv(tmp_path / f"{table}.csv") for table in ("claims", "as_authors", *study.tables)}
    claims = tables["claims"]
    assert (tuple(claims), tuple(tables["as_authors"])) == (COLUMNS, BOTH_COLUMNS)
    assert claims["id"].tolist() == [each.id for each in study.text.claims]
    assert all(map(len, tables.values()))
    assert claims.set_index("id").loc[list(verdicts), "verdict"].to_dict() == verdicts
    assert " ".join(claims.loc[claims["without"].notna(), "id"]) == twice
    assert claims["note"].str.startswith("stand-in: ").sum() >= stand_ins
    assert printed in capsys.readouterr().out
