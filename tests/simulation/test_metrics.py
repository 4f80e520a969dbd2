"""Metrics of runs that were written by hand, worked out on paper."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made_requests, made_run
from sites import SIMPLE, deployment, served

from disagg_sim.domain import Slo
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import COLUMNS, histogram_percentile, summary
from disagg_sim.simulation.records import latencies
from disagg_sim.simulation.run_options import RunOptions

SLO = Slo(ttft=2.0, tpot=0.1)

# arrival, first token, finish, output: TTFT 1, 2, 3, -, 1 s; TPOT 0.1, 0.2, 0.05, -, 0 s
FIVE = made_requests(
    arrival=[10, 20, 30, 40, 50],
    first=[11, 22, 33, np.nan, 51],
    finish=[12, 24, 33.5, np.nan, 51],
    output=[11, 11, 11, 11, 1],
    status="cccrc",
    transfer=[0.0, 0.2, 0.4, 0.0, 0.0],
)


def test_latencies_are_those_of_completed_requests():
    ttft, tpot = latencies(made_run(FIVE).requests)
    assert ttft == pytest.approx([1, 2, 3, 1])
    assert tpot == pytest.approx([0.1, 0.2, 0.05, 0.0])  # one token has no gap


def test_attainment_counts_the_rejected_against_it_and_the_limits_as_inside():
    # the first and the last: the second is too slow in tokens, the third late, the fourth rejected
    assert summary(made_run(FIVE), SLO).slo_attainment == pytest.approx(2 / 5)
    assert summary(made_run(FIVE), Slo(ttft=2.0, tpot=0.3)).slo_attainment == pytest.approx(3 / 5)


def test_the_summary_of_five_requests():
    row = summary(made_run(FIVE), SLO, rate_scale=1.5)
    assert (row.policy, row.deployment, row.trace, row.rate_scale, row.seed) == ("vllm", "two", "made", 1.5, 7)
    assert (row.requests, row.completed, row.rejected, row.unfinished, row.failed) == (5, 4, 1, 0, 0)
    assert row.duration_s == pytest.approx(41)  # 10 s to 51 s
    assert row.goodput_requests_per_s == pytest.approx(2 / 41)
    assert row.goodput_tokens_per_s == pytest.approx(12 / 41)
    assert row.throughput_requests_per_s == pytest.approx(4 / 41)
    assert row.throughput_tokens_per_s == pytest.approx(34 / 41)
    assert row.ttft_p50_s == pytest.approx(1.5)
    assert row.gpu_hours == pytest.approx(400 / 3600)
    assert row.utilisation == pytest.approx(150 / 400)  # 2 GPUs for 50 s and for 25 s
    assert row.mfu == pytest.approx(8e15 / (400 * 1e14))
    assert (row.queued_mean, row.queued_max, row.kv_use_max) == (2.0, 4.0, 0.5)
    assert (row.flips, row.transfers) == (3, 2)
    assert row.transfer_mean_s == pytest.approx(0.3)
    assert row.exposed_transfer_mean_s == pytest.approx(0.15)
    assert row.requests_per_cpu_s == pytest.approx(20)


def test_nothing_completed_is_no_number():
    lost = made_requests(arrival=[0, 1], first=[np.nan] * 2, finish=[np.nan] * 2, output=[5, 5], status="ur")
    row = summary(made_run(lost), SLO)
    assert (row.completed, row.unfinished, row.rejected, row.slo_attainment) == (0, 1, 1, 0.0)
    assert all(math.isnan(value) for value in (row.ttft_p99_s, row.tpot_p50_s, row.itl_p99_s))
    assert row.goodput_requests_per_s == row.goodput_tokens_per_s == 0.0


def test_the_first_columns_are_those_that_readers_rely_on():
    assert COLUMNS[:21] == (
        *("policy", "deployment", "trace", "rate_scale", "requests", "completed", "rejected", "slo_attainment"),
        *("goodput_requests_per_s", "goodput_tokens_per_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
        *("tpot_p50_s", "tpot_p90_s", "tpot_p99_s", "itl_p99_s", "gpu_hours", "utilisation"),
        *("wall_s", "requests_per_cpu_s"),
    )


def test_a_percentile_of_a_histogram_divides_its_bin():
    edges, counts = np.array([0.0, 1.0, 2.0, 4.0]), np.array([0, 2, 2])
    assert histogram_percentile(edges, counts, 0.25) == pytest.approx(1.5)
    assert histogram_percentile(edges, counts, 0.5) == pytest.approx(2.0)
    assert histogram_percentile(edges, counts, 0.75) == pytest.approx(3.0)
    assert histogram_percentile(edges, counts, 0.0) == pytest.approx(1.0)
    assert histogram_percentile(edges, counts, 1.0) == pytest.approx(4.0)


def test_a_bin_without_an_end_gives_its_beginning():
    assert histogram_percentile(np.array([0.0, 1.0, np.inf]), np.array([1, 99]), 0.99) == 1.0


@given(gaps=st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=300), share=st.floats(0.0, 1.0))
def test_a_percentile_of_a_histogram_is_that_of_its_tokens_to_a_bin(gaps, share):
    edges = np.geomspace(1e-3, 10.0 * (1 + 1e-9), 120)
    counts, _ = np.histogram(gaps, edges)
    exact = np.sort(gaps)[max(math.ceil(share * len(gaps)) - 1, 0)]  # nearest rank
    found = histogram_percentile(edges, counts, share)
    width = edges[1] / edges[0]
    assert exact / width * (1 - 1e-9) <= found <= exact * width * (1 + 1e-9)


def test_late_gaps_of_a_request_by_hand():
    """A step takes 11 ms; the prompt that comes at 0.03 s makes one of 111 ms, which the first request alone decodes
    through; the second one is alone from its fifth token on.
    """
    options = RunOptions(gap_limit_s=0.05)
    result = served([(0.0, 100, 8), (0.03, 1000, 12)], "vllm", deployment(colocated=1), table=SIMPLE, options=options)
    assert result.requests.late_gaps.tolist() == result.frame()["late_gaps"].tolist() == [1, 0]
    # steps of 10 ms and 1 ms a cached token: behind a prompt of ten, gaps of 21 to 27 ms
    longer, options = StepTable.affine(step=0.010, per_context=0.001), RunOptions(gap_limit_s=0.0245)
    alone = served([(0.0, 10, 8)], "vllm", deployment(colocated=1), table=longer, options=options)
    assert alone.requests.late_gaps.tolist() == [3]
    assert served([(0.0, 100, 8)], "vllm", deployment(colocated=1), table=SIMPLE).requests.late_gaps is None
