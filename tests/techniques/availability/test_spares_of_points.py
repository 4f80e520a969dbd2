"""Spares of many points at once: as those of one deployment, of a site, and as an axis of sweeps."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_failures, load_power, load_system
from disagg_sim.serving.points import THROUGHPUT
from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.serving_options import ServedKeys
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.techniques.availability.law import Need, blast_of, spares_for
from disagg_sim.techniques.availability.law_columns import SpareRules, with_spares

LLAMA, H100 = load_failures("llama_3_405b"), load_system("h100_sxm")
OFTEN = replace(LLAMA, gpu_mtbf=3.6e5, node_mtbf=3.6e6)
SYSTEMS = {"h100_sxm": H100}


def points(*pools):
    """A table of (G_p, n_p, G_d, n_d), of 10 tokens/s a GPU each; G_p = 0 stands for a co-located instance."""
    columns = ["prefill_gpus", "prefill_instances", "decode_gpus", "decode_instances"]
    table = pd.DataFrame(pools, columns=columns)
    shared = table["prefill_gpus"] == 0
    table["total_gpus"] = (table["prefill_gpus"] * table["prefill_instances"]) + table["decode_gpus"] * table[
        "decode_instances"
    ]
    table.loc[shared, "prefill_gpus"] = table["decode_gpus"]
    return table.assign(
        mode=np.where(shared, "colocated", "disaggregated"), system="h100_sxm", prefill_system="h100_sxm"
    ).assign(**{THROUGHPUT: 10.0})


@settings(max_examples=30)
@given(st.sampled_from([1, 2, 8]), st.integers(1, 9), st.sampled_from([1, 4, 16]), st.integers(1, 9), st.just(0.999))
@example(8, 30, 16, 3, 0.9)  # two of 8 GPUs, and none of 16, cost less than one of each
def test_a_deployment_that_fills_the_cap_has_the_spares_of_a_plan(sender, first, taker, second, target):
    total = sender * first + taker * second
    row = with_spares(
        points((sender, first, taker, second)), SpareRules(target=target, failing=OFTEN, gpu_cap=total), SYSTEMS
    )
    needs = [
        Need(instances=count, cost=gpus, blast=blast_of(OFTEN, H100, gpus, links=total > 8))
        for gpus, count in ((sender, first), (taker, second))
    ]
    found = spares_for(needs, target)
    assert (row["prefill_spares"][0], row["decode_spares"][0]) == found.counts
    assert row["availability"][0] == pytest.approx(found.availability)
    assert row["gpus_with_spares"][0] == total + sender * found.counts[0] + taker * found.counts[1]


def test_spares_of_points_per_joule_wait():
    """Two spares of 8 GPUs, each at the 70 W or so of a H100 that waits, beside 20 instances that draw 80 kW."""
    failing = replace(LLAMA, gpu_mtbf=8 * 3600.0 * 0.98 / 0.02, node_mtbf=None, link_mtbf=None, restart=3600.0)
    table = points((0, 0, 8, 10)).assign(drawn_watts=40_000.0, tokens_per_drawn_joule=0.02)
    row = with_spares(table, SpareRules(target=0.99, failing=failing, gpu_cap=160, per="joule"), SYSTEMS).iloc[0]
    idle = load_power("h100_sxm").idle * H100.tdp
    assert (row["copies"], row["decode_spares"]) == (2, 2)
    assert row["tokens_per_drawn_joule_with_spares"] == pytest.approx(0.02 * 80_000 / (80_000 + 2 * 8 * idle))


def test_a_co_located_point_by_hand():
    """Ten instances of 8 GPUs that serve 98 % of the time each: two spares for 99 %, so 96 GPUs in place of 80.

    Beside a point of one instance: for 97 % it needs no spare, ten need one (0.98^11 + 11*0.02*0.98^10 = 0.980).
    """
    failing = replace(LLAMA, gpu_mtbf=8 * 3600.0 * 0.98 / 0.02, node_mtbf=None, link_mtbf=None, restart=3600.0)
    row = with_spares(points((0, 0, 8, 10)), SpareRules(target=0.99, failing=failing, gpu_cap=80), SYSTEMS).iloc[0]
    assert (row["copies"], row["prefill_spares"], row["decode_spares"]) == (1, 0, 2)
    assert row[f"{THROUGHPUT}_with_spares"] == pytest.approx(10.0 * 80 / 96)
    assert row["availability"] == pytest.approx(1 - 0.00152, abs=1e-4)
    both = with_spares(
        points((0, 0, 8, 10), (0, 0, 8, 1)), SpareRules(target=0.97, failing=failing, gpu_cap=8), SYSTEMS
    )
    assert both["decode_spares"].tolist() == [1, 0]


def test_a_site_shares_its_spares():
    """Pairs of GPUs, each of which needs spares of its own: 32 of them together need fewer than 32 times as many."""
    alone, site = (
        with_spares(points((1, 1, 1, 1)), SpareRules(target=0.99999, failing=OFTEN, gpu_cap=cap), SYSTEMS).iloc[0]
        for cap in (2, 64)
    )
    assert (alone["copies"], site["copies"]) == (1, 32)
    assert site["gpus_with_spares"] == 64 + site["prefill_spares"] + site["decode_spares"]
    assert alone[f"{THROUGHPUT}_with_spares"] < site[f"{THROUGHPUT}_with_spares"] < 10.0


@pytest.mark.parametrize("change", [{"gpu_mtbf": None, "node_mtbf": None, "link_mtbf": None}, {"restart": 0.0}])
def test_without_failures_nothing_changes(change):
    table, failing = points((1, 3, 4, 2), (0, 0, 8, 1)), replace(LLAMA, **change)
    found = with_spares(table, SpareRules(target=0.999999, failing=failing, gpu_cap=64), SYSTEMS)
    assert found[f"{THROUGHPUT}_with_spares"].tolist() == table[THROUGHPUT].tolist()
    assert found["gpus_with_spares"].tolist() == (found["copies"] * table["total_gpus"]).tolist()
    counts = found[["copies", "prefill_spares", "decode_spares", "availability"]]
    assert counts.to_numpy().tolist() == [[64 // 11, 0, 0, 1], [8, 0, 0, 1]]


def test_no_target_means_no_spares():
    found = with_spares(points((1, 3, 4, 2)), SpareRules(target=0.0, failing=OFTEN, gpu_cap=64), SYSTEMS).iloc[0]
    assert (found["prefill_spares"], found["decode_spares"], found["availability"]) == (0, 0, 1.0)
    assert found[f"{THROUGHPUT}_with_spares"] == 10.0


def test_spares_are_paid_at_the_price_of_their_system():
    """A spare of 8 GPUs beside two instances of 8: two thirds of the tokens per USD."""
    table = points((0, 0, 8, 2)).assign(tokens_per_usd=900.0)
    failing = replace(LLAMA, gpu_mtbf=1e6, node_mtbf=None, link_mtbf=None)
    wanted = SpareRules(target=0.999, failing=failing, gpu_cap=16, per={"h100_sxm": 3.0})
    row = with_spares(table, wanted, SYSTEMS).iloc[0]
    assert row["decode_spares"] == 1
    assert row["tokens_per_usd_with_spares"] == pytest.approx(600.0)


def test_what_is_out_of_reach_is_told():
    one_domain = replace(LLAMA, domain_mtbf=1.0, restart=1e9)
    with pytest.raises(InputError, match=r"availability 0\.9 is out of reach with 1,000 spare instances of a pool"):
        with_spares(points((0, 0, 8, 1)), SpareRules(target=0.9, failing=one_domain, gpu_cap=8), SYSTEMS)
    with pytest.raises(InputError, match=r"availability 1\.0 is out of range"):
        SpareRules(target=1.0, failing=LLAMA, gpu_cap=8)


SWEEP = """
name: {name}
models: [llama_3_1_8b]
systems: {{h200_sxm: fp8}}
traffic: [{{isl: 1024, osl: 128}}]
modes: [disaggregated, colocated]
limits: {{max_gpus: 2, gpu_cap: 64}}
{more}
"""


@pytest.fixture(scope="module")
def results(swept, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spares")
    asked = {"plain": "", "both": "availability: [none, 0.9999999]"}
    return {name: swept(SWEEP.format(name=name, more=more), folder / name) for name, more in asked.items()}


def test_without_a_target_there_are_no_spares(results):
    both = pd.read_csv(results["both"] / "frontier.csv")
    off = both[both["availability_target"] == 0.0]
    assert not both.isna().any().any()
    assert (off["tokens_per_s_per_gpu_with_spares"] == off["tokens_per_s_per_gpu"]).all()
    assert off[["prefill_spares", "decode_spares"]].to_numpy().sum() == 0


def test_spares_are_those_that_a_plan_takes(results):
    table = pd.read_csv(results["both"] / "frontier.csv")
    failing, system = load_failures("llama_3_405b"), load_system("h200_sxm")
    spared = table[table["availability_target"] > 0.0]
    for mode, rows in spared.groupby("mode"):
        assert rows["tokens_per_s_per_gpu_with_spares"].is_monotonic_decreasing
        row = rows.iloc[0]
        pools = ["prefill", "decode"] if mode == "disaggregated" else ["decode"]
        served = int(row["copies"] * row["total_gpus"])
        assert 64 - row["total_gpus"] < served <= 64
        needs = [
            Need(
                instances=int(row["copies"] * row[f"{pool}_instances"]),
                cost=int(row[f"{pool}_gpus"]),
                blast=blast_of(failing, system, int(row[f"{pool}_gpus"]), links=len(pools) > 1 and served > 8),
            )
            for pool in pools
        ]
        found = spares_for(needs, 0.9999999)
        assert [row[f"{pool}_spares"] for pool in pools] == list(found.counts)
        assert row["availability"] == pytest.approx(found.availability)
        each = row["tokens_per_s_per_gpu"] * served / row["gpus_with_spares"]
        assert row["tokens_per_s_per_gpu_with_spares"] == pytest.approx(each, rel=1e-9)
        assert row["gpus_with_spares"] > served


def test_the_summary_and_the_page_count_spares(results, capsys):
    both, plain = ((results[name] / "summary.md").read_text() for name in ("both", "plain"))
    assert "Throughput [tokens/s/GPU, spares among the GPUs]" in both
    assert "spares" not in plain
    capsys.readouterr()
    assert run(["explain", str(results["both"]), "--row", "0"]) == 0
    assert "rests on" in capsys.readouterr().out


def test_names_say_the_failures_where_these_are_others(tmp_path):
    more = "availability: [none, 0.999]\nfailures: [llama_3_405b, rsc_1]"
    (tmp_path / "rates.yaml").write_text(SWEEP.format(name="rates", more=more))
    names = [case.name.partition("instance2-")[2] for case in cases_of(load_sweep(str(tmp_path / "rates.yaml")))]
    assert names == ["no_spares", "availability0.999", "availability0.999_rsc_1"]


def test_sites_too_large_for_the_law_are_refused():
    """Shares of time are kept for each pair of counts, a table that grows by the square."""
    with pytest.raises(InputError, match="gpu_cap: 60000 with an availability; allowed: 1 to 4,096"):
        SpareRules(target=0.999, gpu_cap=60_000)
    keys = ServedKeys.model_validate({"availability": 0.999})
    assert [*keys.faults("gpu", 4096)] == []
    (line,) = keys.faults("gpu", 60_000)
    assert line == "availability: counts spares up to 'limits.gpu_cap: 4096'; it is 60000"
