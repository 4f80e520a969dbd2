"""Side tables of a sweep: what its frontiers rest on, error bars, and elasticities."""

import numpy as np
import pandas as pd
import pytest

from disagg_sim.certainty.trust import Trust, shares_of_text
from disagg_sim.cli.main import run
from disagg_sim.sweep.run import POINTS, POOLS, PREFILL
from disagg_sim.sweep.store import WRITTEN

SWEEP = """
name: tiny
models: [llama_3_1_8b]
systems: {gh200: fp8}
traffic: [{isl: 1024, osl: 128}]
modes: [disaggregated, colocated]
limits: {ftl_s: 5.0, gpu_cap: 4, max_gpus: 2}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    root = tmp_path_factory.mktemp("fidelity")
    (root / "tiny.yaml").write_text(SWEEP)
    assert run(["sweep", str(root / "tiny.yaml"), "--out", str(root / "out"), "--jobs", "1"]) == 0
    plain = {path.name: path.read_bytes() for path in (root / "out").glob("*.csv")}
    asked = ["sweep", str(root / "tiny.yaml"), "--out", str(root / "out"), "--jobs", "1", "--uncertainty"]
    assert run(asked) == 0
    return root, plain


def test_error_bars_leave_the_frontier_as_it_is(swept):
    root, plain = swept
    assert (root / "out" / "frontier.csv").read_bytes() == plain["frontier.csv"]
    assert "uncertainty.csv" not in plain
    assert "outside_calibration.csv" in plain


def test_every_frontier_point_has_its_band(swept):
    root, _ = swept
    front, bands = (pd.read_csv(root / "out" / f"{name}.csv") for name in ("frontier", "uncertainty"))
    assert len(bands) == len(front)
    for name in ("tokens_per_s_per_gpu", "tokens_per_s_per_user"):
        assert (bands[f"{name}_p10"] < bands[name]).all()
        assert (bands[name] < bands[f"{name}_p90"]).all()
    assert (bands["frontier_p10"] <= bands["frontier_p90"]).all()
    assert (bands["ttl_p10_s"] < bands["ttl_p90_s"]).all()


def test_every_point_of_a_frontier_says_what_it_rests_on(swept):
    """All kernels are those of another system: most of the time of any design is inherited."""
    root, _ = swept
    front = pd.read_csv(root / "out" / "frontier.csv")
    shares = front["rests_on"].map(shares_of_text)
    assert (shares.map(lambda each: each[Trust.INHERITED]) > 0.5).all()
    assert shares.map(lambda each: sum(each.values())).between(0.95, 1.02).all()
    summary = (root / "out" / "summary.md").read_text()
    assert any(f"| {words} |" in summary for words in front["rests_on"])


def test_elasticities_of_a_sweep(swept, capsys):
    root, _ = swept
    assert run(["sensitivity", str(root / "tiny.yaml"), "--out", str(root / "out"), "--jobs", "1"]) == 0
    assert "hbm_bandwidth" in capsys.readouterr().out
    table = pd.read_csv(root / "out" / "sensitivity.csv")
    assert set(table["parameter"]) >= {"flops", "hbm_bandwidth", "hbm_capacity"}
    capacity = table[table["parameter"] == "hbm_capacity"]
    assert (capacity["throughput"] == 0).all()
    assert capacity["frontier"].notna().any()
    assert (capacity["frontier"].dropna() > -0.05).all()
    assert np.isfinite(table["ttl"]).all()
    left = {path.name for path in (root / "out").iterdir()}
    assert left <= {*WRITTEN, PREFILL, POINTS, POOLS, ".lock"}  # none of these takes the place of somebody else's
