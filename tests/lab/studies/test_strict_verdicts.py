"""Claims on serving policies, on benches made by hand: which baseline counts, and what a missed condition does."""

from types import SimpleNamespace

import numpy as np
import pytest

from disagg_sim.domain import Slo
from lab.studies.arrow import TEXT
from lab.studies.arrow import claims as arrow
from lab.studies.arrow.setup import ALL, HOUR
from lab.studies.claims import Verdict
from lab.studies.dopd import claims_runs as dopd
from lab.studies.dopd.setup import PLANNERS
from lab.studies.dynaserve import claims as dynaserve
from lab.studies.dynaserve.setup import COLOCATED, DynaServeBench


def overloaded(tpot, printed):
    """Runs at twice capacity with these P90 of TPOT [s], against a limit of 0.1 s; TTFT is late."""
    rows = {name: SimpleNamespace(tpot_p90_s=value, ttft_p90_s=9.0) for name, value in (("", tpot), ("_p", printed))}
    return SimpleNamespace(
        workloads={name: SimpleNamespace(slo=Slo(ttft=1.0, tpot=0.1)) for name in ALL},
        capacity=lambda *_: SimpleNamespace(rate_scale=1.0),
        seen=lambda _, case, __: SimpleNamespace(summary=rows["_p" if case == "arrow_printed" else ""]),
        stand_ins=lambda *_: "",
    )


@pytest.mark.parametrize(
    ("tpot", "printed", "verdict"),
    [(0.1, 0.1, Verdict.HOLDS), (0.1, 0.5, Verdict.ADDED_RULE), (0.5, 0.5, Verdict.FAILS)],
)
def test_a7_counts_only_if_it_holds_as_printed(tpot, printed, verdict):
    assert arrow.a7_overload.verdict(arrow.a7_overload(overloaded(tpot, printed))) == verdict


def slow_flips(with_rule=1.0, printed=1.0, lasts=3436.0):
    """Slow flips reach these rates over static instances, with requests that wait as load and without."""
    return SimpleNamespace(
        ratio=lambda _, case, __: printed if case.endswith("_printed") else with_rule,
        workloads={HOUR: SimpleNamespace(trace=SimpleNamespace(duration=lasts))},
        stand_ins=lambda *_: "",
    )


def test_a12_needs_runs_of_ten_flips():
    """Half of the flips of a run of 298 s never end, so that slow flips are static flips."""
    assert arrow.a12_slow_flips(slow_flips()).holds
    assert not arrow.a12_slow_flips(slow_flips(lasts=298.0)).holds


@pytest.mark.parametrize(
    ("with_rule", "printed", "ours", "as_authors"),
    [
        (1.0, 1.0, Verdict.HOLDS, Verdict.HOLDS),
        (0.95, 1.2, Verdict.ADDED_RULE, Verdict.READING),
        (1.2, 1.2, Verdict.FAILS, Verdict.FAILS),
    ],
)
def test_a12_is_judged_as_printed_too(with_rule, printed, ours, as_authors):
    bench = slow_flips(with_rule, printed)
    assert arrow.a12_slow_flips.verdict(arrow.a12_slow_flips(bench)) == ours
    (about,) = (each for each in TEXT.as_authors if each.claim.id == "A12")
    found = about(bench)
    assert about.verdict(found) == as_authors
    assert found.value == f"180 s {printed:.2f}, 300 s {printed:.2f}"


@pytest.mark.parametrize(("latency", "verdict"), [(0.4, Verdict.HOLDS), (0.8, Verdict.FAILS)])
def test_d14_compares_with_the_best_mode_of_each_planner(latency, verdict):
    shares = dict.fromkeys(PLANNERS, 0.7) | {"SLA-driven": 0.5, "SLA-driven, load planner in between": 0.6}
    shares |= {"load-driven": 0.3, "load-driven, estimates": 0.2, "load-driven, low thresholds": latency}
    bench = SimpleNamespace(attainments=lambda name, *_: np.array([shares[name]]), hours=range(1))
    found = dopd.d14_bursts(bench)
    assert dopd.d14_bursts.verdict(found) == verdict
    assert f"load-driven, low thresholds {latency:.1%}" in found.value


@pytest.mark.parametrize(
    ("hours", "share", "holds"), [(5.0, 0.8, True), (5.0, 0.6, False), (6.5, 0.8, False), (5.0, 0.7, True)]
)
def test_d17_asks_for_fewer_gpu_hours_at_an_attainment_that_is_not_lower(hours, share, holds):
    """The best mode of each planner holds 6 GPU-hours and has 0.7 of the requests in time."""
    bench = SimpleNamespace(
        attainments=lambda name, *_: np.array([share if name == "DOPD" else 0.7]),
        gpu_hours=lambda name: hours if name == "DOPD" else 6.0,
        hours=range(1),
    )
    assert dopd.d17_resources(bench).holds == holds


@pytest.mark.parametrize(("best", "holds"), [(2.9, True), (3.1, False)])
def test_y10_compares_with_the_best_chunk(best, holds):
    """Code: 3.0 disaggregated; 2,048 tokens serve 0.9 of it, 384 tokens the number given."""
    rates = {("code", name): 0.9 for name in COLOCATED} | {("reasoning", name): 2.5 for name in COLOCATED}
    rates |= {("code", "chunk_384"): best, ("code", "disaggregated"): 3.0, ("reasoning", "disaggregated"): 1.2}

    class ByHand(DynaServeBench):
        def __init__(self):
            self.workloads = {name: SimpleNamespace(stand_in="") for name in ("code", "reasoning")}

        def rate(self, workload, case):
            return rates[workload, case]

    assert dynaserve.y10_who_is_strong(ByHand()).holds == holds
