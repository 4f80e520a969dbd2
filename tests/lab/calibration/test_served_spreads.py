"""Spreads of served runs: those of made-up errors come back by kind of evidence, and what nobody fitted is wider."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_loads import LINE

from disagg_sim.certainty.evidence import served_sigma
from disagg_sim.facts.uncertainty import ServedSpread
from lab.calibration.served.bands import doubt, evidence_of, served_spreads

KERNELS = 0.06
SAME = LINE | {"kernel_sigma": KERNELS, "ttft_engine_s": 0.4, "ttft_poll_s": 0.0, "ttft_step_s": 0.0}


def runs(sigma, count, seed, quantity="tpot", name="", **columns):
    """Lines whose errors are normal, one configuration every four points."""
    errors = sigma * np.random.default_rng(seed).standard_normal(count)
    table = pd.DataFrame({**SAME, **columns, "quantity": quantity, "measured": np.exp(errors)})
    names = [f"{name}{quantity}{columns.get('layout', '')}{n // 4}" for n in range(count)]
    points = [f"{name}{each}-{n}" for n, each in enumerate(names)]
    error = 1.0 / table["measured"] - 1.0
    return table.assign(configuration=names, model=names, point=points, relative_error=error)


def others(count=80):
    """What the other fields need: first tokens with few and many requests, throughput."""
    few = runs(0.3, count, 1, "ttft", name="few", concurrency=4.0)
    return pd.concat([few, runs(0.5, count, 2, "ttft"), runs(0.1, 80, 3, "throughput")])


def beyond(spread, **told):
    return float(served_sigma(spread, {kind: [level] for kind, level in told.items()})[0])


def total(spread, **told):
    return float(np.hypot(KERNELS, beyond(spread, **told)))


@pytest.fixture(scope="module")
def fitted():
    """TP with errors of 0.10 in all, DP-EP with 0.30, many configurations of each."""
    lines = [runs(0.10, 1200, 4), runs(0.30, 1200, 5, layout="DP-EP"), others(1200)]
    return pd.concat(lines, ignore_index=True), served_spreads(pd.concat(lines, ignore_index=True))[1]


def test_the_spread_of_each_layout_comes_back(fitted):
    """0.10^2 = 0.06^2 + 0.08^2: of TP's errors kernels explain 0.06."""
    spread = fitted[1]["step"]
    assert beyond(spread, engine="vllm", layout="TP") == pytest.approx(0.08, abs=0.015)
    assert total(spread, engine="vllm", layout="DP-EP") == pytest.approx(0.30, abs=0.03)
    assert spread.rows == 2400


def test_errors_of_first_tokens_are_of_their_causes_in_seconds(fitted):
    """Of 1 s the engine has 0.4 s; 0.3 s of error where nothing waits, 0.5 s where 0.6 s are passes and queues."""
    lines, spreads = fitted
    steps = total(spreads["step"], engine="vllm", load="closed_loop", family="dense", layout="TP", mode="aggregated")
    engine = 0.4 * beyond(spreads["first_token"], engine="vllm", mode="aggregated")
    assert engine == pytest.approx(np.sqrt(0.3**2 - (0.6 * steps) ** 2), rel=0.15)
    passes = 0.6 * beyond(spreads["first_token_loaded"], engine="vllm")
    assert passes == pytest.approx(np.sqrt(0.5**2 - engine**2 - (0.6 * KERNELS) ** 2), rel=0.15)
    polled = lines[lines["quantity"] == "ttft"].assign(ttft_poll_s=0.3, field="first_token", layout="TP")
    other, share = doubt(polled, "first_token", spreads)
    assert share == pytest.approx(0.4)
    known = (0.3 * steps) ** 2 + (0.3 * np.sqrt(steps**2 - KERNELS**2)) ** 2
    assert other**2 == pytest.approx(0.6**2 / 12 + known, rel=1e-3), "a wait between 0 and 0.6 s is uniform"


def test_what_nobody_fitted_is_at_least_as_wide_as_the_widest(fitted):
    spread = fitted[1]["step"]
    assert beyond(spread, layout="DP-PP") >= beyond(spread, layout="DP-EP")
    assert beyond(spread, engine="other", layout="TP") >= beyond(spread, engine="vllm", layout="TP")
    assert beyond(spread, layout="") == spread.base  # not stated


def test_rows_that_are_held_out_are_not_used(fitted):
    lines, spreads = fitted
    unseen = runs(3.0, 400, 6, name="h").assign(held_out=True, part="held-out")
    assert served_spreads(pd.concat([lines, unseen], ignore_index=True))[1] == spreads


def test_first_tokens_are_told_apart_by_load_and_belong_to_the_layout_that_prefills():
    lines = pd.concat([runs(0.1, 4, 1), others()], ignore_index=True).assign(layout="DP-EP", version="0.18")
    found = evidence_of(lines)
    by = found.groupby("field")["layout"].agg(["first", "size"])
    assert by["size"].to_dict() == {"step": 4, "first_token": 80, "first_token_loaded": 80, "throughput": 80}
    assert by["first"].to_dict() == {
        "step": "DP-EP",
        "first_token": "TP",
        "first_token_loaded": "TP",
        "throughput": "DP-EP",
    }
    assert set(found["version"]) == {"vllm 0.18"}


def test_factors_multiply():
    spread = ServedSpread(
        base=0.1, rows=1, levels={"layout": {"TP": 0.5}, "family": {"dense": 2.0}}, unseen={"layout": 3.0}
    )
    assert beyond(spread, layout="TP", family="dense") == pytest.approx(0.1)
    assert beyond(spread, layout="DP") == pytest.approx(0.3)
    assert beyond(spread, family="other_moe") == pytest.approx(0.1)  # no word on what is unseen
    assert beyond(replace(spread, base=0.2), layout="TP") == pytest.approx(0.1)
