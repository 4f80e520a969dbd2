"""Prices of a million tokens: new, cached and output ones."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.certainty.token_prices import PRICE_COLUMNS, token_prices, with_token_prices
from disagg_sim.errors import InputError
from disagg_sim.planning.energy import planned_prices

PRICE = {"h200_sxm": 3.6}  # a thousandth of a USD a second
ONE = ds.Sharding()


@pytest.fixture(scope="module")
def at():
    return ds.setup("llama_3_1_8b", "h200_sxm", "fp8")


def tables(at, lengths):
    options = ds.Colocation(batch=(32,), prefill_batch=(1,))
    pools = ds.prefill_grid(at, ONE, lengths), ds.decode_grid(at, ONE, lengths, batch=[32])
    yield ds.colocated(at, ONE, lengths, options=options)
    yield ds.piggyback(at, ONE, lengths, options=ds.Colocation(batch=(32,)))
    yield ds.disaggregated(*pools, gpu_cap=16)


def test_the_worked_example_of_two_pools(at):
    # 2 USD/h: 2/(3600*12,000) USD a prompt token and 2/(3600*900) an output token
    lengths = ds.lengths(1000, 100)
    grids = ds.prefill_grid(at, ONE, lengths), ds.decode_grid(at, ONE, lengths, batch=[8])
    (designs,) = designs_of(ds.disaggregated(*grids))
    prices = token_prices(designs, np.array([2.0]), np.array([2.0 * 12 * 100 / 900]), np.array([12.0]))
    assert prices.new == pytest.approx(0.0463, abs=5e-5)
    assert prices.output == pytest.approx(0.617, abs=5e-4)


def test_tokens_pay_for_spares(at):
    """All GPUs of a site of copies, spares among them, over its tokens; each pool pays for its own."""
    lengths = ds.lengths(2048, 256)
    often = replace(ds.SpareRules(target=0.0).failing, gpu_mtbf=3.6e5)
    for points in tables(at, lengths):
        plain = with_token_prices(points, PRICE, origin=Origin(lengths=lengths))
        spared = ds.with_spares(points, ds.SpareRules(target=0.999, failing=often, gpu_cap=32))
        row = with_token_prices(spared, PRICE, origin=Origin(lengths=lengths)).iloc[0]
        spent = 2048 * row["usd_per_million_input_tokens"] + 256 * row["usd_per_million_output_tokens"]
        site = 3.6 * row["gpus_with_spares"] / 3600
        assert spent / 1e6 == pytest.approx(site / (row["copies"] * row["request_rate_per_s"]))
        assert row["usd_per_hour"] == plain["usd_per_hour"][0] < 3.6 * row["gpus_with_spares"] / row["copies"]
        waived = with_token_prices(ds.with_spares(points, ds.SpareRules(target=0.0, gpu_cap=32)), PRICE)
        assert waived[plain.columns].equals(plain)


def test_each_pool_of_a_table_has_the_price_of_its_system(at):
    """Prompts pay for the GPUs of prefill, output tokens for those of decode."""
    lengths = ds.lengths(2048, 256)
    prefill = ds.prefill_grid(ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), ONE, lengths)
    points = ds.disaggregated(prefill, ds.decode_grid(at, ONE, lengths, batch=[32]), gpu_cap=16)
    found = with_token_prices(points, PRICE | {"h100_sxm": 1.8}, origin=Origin(lengths=lengths))
    million = 1e6 / 3600 / found["request_rate_per_s"]
    assert np.allclose(found["usd_per_million_input_tokens"], 1.8 * found["prefill_instances"] * million / 2048)
    assert np.allclose(found["usd_per_million_output_tokens"], 3.6 * found["decode_instances"] * million / 256)


@pytest.mark.parametrize("cached", [None, 0.5, 0.96])
def test_tokens_of_a_request_cost_what_the_deployment_costs(at, cached):
    lengths = ds.lengths(8192, 256, cached=cached)
    past = 8192 - lengths.mean_new  # whole blocks
    for points in tables(at, lengths):
        row = with_token_prices(points, PRICE, origin=Origin(lengths=lengths)).iloc[0]
        spent = (8192 - past) * row["usd_per_million_input_tokens"] + 256 * row["usd_per_million_output_tokens"]
        spent += past * np.nan_to_num(row["usd_per_million_cached_tokens"])
        assert row["usd_per_hour"] == pytest.approx(3.6 * row["total_gpus"])
        assert spent / 1e6 == pytest.approx(row["usd_per_hour"] / 3600 / row["request_rate_per_s"])


def test_the_other_columns_stay(at):
    points = next(tables(at, ds.lengths(2048, 256)))
    priced = with_token_prices(points, PRICE)
    assert priced.drop(columns=[column.name for column in PRICE_COLUMNS]).equals(points)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_utilisation_out_of_range_is_told(at, share):
    with pytest.raises(InputError, match="utilisation must be above 0 and at most 1, got"):
        with_token_prices(next(tables(at, ds.lengths(2048, 256))), PRICE, utilisation=share)


def test_cached_tokens_of_a_plan_pay_for_the_time_that_prefill_takes_longer_by_them():
    """A pass of the prefill pool with the past, less one of the new tokens alone."""
    lengths = ds.lengths(32768, 256, cached=0.9)
    plan = ds.plan("llama_3_1_70b", "h200_sxm", lengths, rate=4)
    (design,) = (each for each in (plan.best, plan.other) if len(each.pools) == 2)
    prefill, new = design.pools[0], round(lengths.mean_new)
    grids = [
        ds.prefill_grid(prefill.setup, prefill.mapping, law, batch=[prefill.batch])
        for law in (lengths, ds.lengths(new, 256))
    ]
    whole, alone = (
        1.0 / grid.request_rate[grid.mappings.chunk_tokens == prefill.mapping.chunk_tokens, 0].item() for grid in grids
    )
    spent = prefill.gpus * 3.6 / 3600 / 4 * (1 - alone / whole)
    assert planned_prices(design, PRICE, 1.0).cached == pytest.approx(1e6 * spent / (32768 - new))
