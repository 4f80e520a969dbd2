"""Availability as an axis of sweeps: spares among the GPUs of a frontier, and nothing where it is off."""

import pandas as pd
import pytest

from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_failures, load_system
from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.serving_options import ServedKeys
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.techniques.availability.law import Need, blast_of, spares_for
from disagg_sim.techniques.availability.law_columns import SpareRules

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
