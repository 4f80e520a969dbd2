"""Prices of tokens and energy as columns of a frontier that asks for them."""

import pandas as pd
import pytest

from disagg_sim.certainty.energy import ENERGY_COLUMNS
from disagg_sim.certainty.token_prices import PRICE_COLUMNS
from disagg_sim.cli.main import run

SWEEP = """
name: {name}
models: [llama_3_1_8b]
systems: {{h200_sxm: fp8}}
traffic: [{{isl: 1024, osl: 128, cached: 0.5}}]
modes: [disaggregated, colocated]
limits: {{max_gpus: 2, gpu_cap: 16}}
{more}
"""
ASKED = "columns: [token_prices, energy]\nprices: {h200_sxm: 3.6}\nutilisation: 0.5"


@pytest.fixture(scope="module")
def fronts(swept, tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    outs = [
        swept(SWEEP.format(name=name, more=more), folder / name) for name, more in (("plain", ""), ("asked", ASKED))
    ]
    assert run(["report", str(folder / "asked"), "--no-breakdowns"]) == 0  # whose points lack these columns
    return {out.name: pd.read_csv(out / "frontier.csv") for out in outs}


def test_columns_are_added_and_nothing_else_changes(fronts):
    plain, asked = fronts["plain"], fronts["asked"]
    assert asked[plain.columns].equals(plain)
    added = [name for name in asked if name not in plain]
    assert added == [column.name for column in (*PRICE_COLUMNS, *ENERGY_COLUMNS)]


def test_prices_of_a_request_add_up_to_its_share_of_the_bill(fronts):
    """512 new and 512 cached tokens in, 128 out; GPUs at 3.6 USD/h, used half of the time: 2 mUSD a GPU and second."""
    front = fronts["asked"]
    millions = {"input": 512, "cached": 512, "output": 128}
    request = sum(count * front[f"usd_per_million_{name}_tokens"] for name, count in millions.items()) / 1e6
    by_hand = 2e-3 * front["total_gpus"] / front["request_rate_per_s"]
    assert request.to_numpy() == pytest.approx(by_hand.to_numpy(), rel=1e-6)
