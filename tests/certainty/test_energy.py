"""Energy of passes, requests, tokens and further pools, and prices of tokens in and out."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.certainty.energy import ENERGY_COLUMNS, _ends, energy_parts, operators_of, spent_on, with_energy
from disagg_sim.certainty.passes import passes_of
from disagg_sim.certainty.pool_parts import split_spent
from disagg_sim.certainty.rows import Origin, design_of, designs_of
from disagg_sim.certainty.token_prices import PRICE_COLUMNS, token_prices, with_token_prices
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_engine, load_power, load_system
from disagg_sim.physics import power
from disagg_sim.physics.power import facility_watts, power_at, wall_watts
from disagg_sim.planning.energy import planned_prices
from disagg_sim.techniques.split.physics import Split

LENGTHS = ds.lengths(2048, 256)


@pytest.fixture(scope="module")
def at():
    return ds.setup("llama_3_1_8b", "h200_sxm", "fp8")


@pytest.fixture(scope="module")
def pools(at):
    one = ds.Sharding()
    grids = ds.prefill_grid(at, one, LENGTHS), ds.decode_grid(at, one, LENGTHS, batch=[1, 8, 64])
    return ds.disaggregated(*grids, gpu_cap=16)


@pytest.fixture
def waiting(monkeypatch):
    """All kernels draw what a GPU draws that waits: 134 of 700 W."""
    spec = load_power("h200_sxm")
    nothing = {"base": 0.0, "compute": 0.0, "memory": 0.0}
    quiet = replace(spec, laws=tuple(replace(law, **nothing) for law in spec.laws))
    monkeypatch.setattr(power, "load_power", lambda _: quiet)
    return 700.0 * spec.idle


def colocated(at, mapping=None, batch=(16,)):
    return ds.colocated(at, mapping or ds.Sharding(), LENGTHS, options=ds.Colocation(batch=batch, prefill_batch=(1,)))


@pytest.mark.parametrize("degrees", [{}, {"tp_attn": 2, "tp_ffn": 2}, {"pp": 2}, {"tp_attn": 2, "tp_ffn": 2, "pp": 4}])
def test_gpus_whose_kernels_draw_nothing_draw_idle_power_in_every_layout(at, waiting, degrees):
    table = with_energy(colocated(at, ds.Sharding(**degrees)))
    assert table["drawn_watts"].to_numpy() == pytest.approx(waiting * table["total_gpus"].to_numpy(), rel=1e-9)


def test_pools_whose_kernels_draw_nothing_draw_idle_power(pools, waiting):
    table = with_energy(pools)
    assert table["drawn_watts"].to_numpy() == pytest.approx(waiting * table["total_gpus"].to_numpy(), rel=1e-9)


def test_the_pool_that_limits_never_waits_and_the_other_does(pools):
    row = pools.iloc[[0]]
    prefill = float((row["prefill_instances"] * row["prefill_request_rate_per_s"]).iloc[0])
    decode = float((row["decode_instances"] * row["decode_request_rate_per_s"]).iloc[0])
    rate = min(prefill, decode)
    idle = 700.0 * load_power("h200_sxm").idle
    idlers = float(
        ((1 - rate / prefill) * row["prefill_instances"] + (1 - rate / decode) * row["decode_instances"]).iloc[0]
    )
    found = with_energy(row)["waiting_joules_per_request"].iloc[0]
    assert found == pytest.approx(idlers * idle / rate, rel=1e-6)


def test_energy_of_a_pass_is_the_sum_over_its_operators_and_the_rest_at_idle_power(at):
    (designs,) = designs_of(colocated(at))
    idle = power.power_at(at).idle
    for one in passes_of(designs):
        seconds, joules = spent_on(one)
        parts = operators_of(one)
        busy, drawn = (sum(each[place] for each in parts.values()) for place in (0, 1))
        assert joules == pytest.approx(drawn + idle * (seconds - busy), rel=1e-9)
        assert all((idle * 0.999 <= each[1] / each[0]).all() for each in parts.values())
    told = energy_parts(colocated(at)).query("operator == 'waiting'")
    assert told["watts"].to_numpy() == pytest.approx(idle, rel=1e-6)


def test_gpus_of_pools_of_unlike_instances_count_by_their_own_degrees():
    """A prefill instance has two GPUs, one of decode four, and each GPU a TDP of 700 W."""
    at = ds.setup("llama_3_1_70b", "h200_sxm", "fp8")
    two, four = (ds.Sharding(tp_attn=tp, tp_ffn=tp) for tp in (2, 4))
    grids = ds.prefill_grid(at, two, LENGTHS, batch=[1]), ds.decode_grid(at, four, LENGTHS, batch=[64])
    (row,) = with_energy(ds.disaggregated(*grids, ftl_limit=10.0)).itertuples()
    assert row.tdp_watts == 700 * (2 * row.prefill_instances + 4 * row.decode_instances)


def test_the_band_of_inherited_power_is_wider_and_that_of_waiting_is_none():
    fitted, inherited = (power.power_at(ds.setup("llama_3_1_8b", name, "fp8")) for name in ("h200_sxm", "h100_sxm"))
    assert 1.2 < fitted.factor < 1.4 < inherited.factor
    assert inherited.factor == pytest.approx(np.exp(1.28155 * 0.26 / 0.67449))


def test_each_row_says_whether_its_own_power_is_inherited():
    """Of a table of two systems, whichever comes first."""
    rows = {
        name: colocated(ds.setup("llama_3_1_8b", name, "fp8"), ds.Sharding(), (8,)) for name in ("h200_sxm", "h100_sxm")
    }
    for names, words in (
        (("h200_sxm", "h100_sxm"), ["fitted", "inherited"]),
        (("h100_sxm", "h200_sxm"), ["inherited", "fitted"]),
    ):
        table = pd.concat([rows[name] for name in names], ignore_index=True)
        assert with_energy(table)["power_from"].tolist() == words


def test_a_deployment_inside_one_node_spends_nothing_on_links_between_nodes(pools):
    table = with_energy(pools)
    inside = table["total_gpus"] <= 8
    assert inside.any()
    assert (~inside).any()
    assert (table["transfer_joules_per_request"][inside] == 0.0).all()
    # 80 W of NICs and 68.625 W of switches and optics for 8 GPUs
    one = table[~inside].iloc[0]
    watts = one["total_gpus"] * (80.0 + 68.625) / 8
    assert one["transfer_joules_per_request"] == pytest.approx(watts / one["request_rate_per_s"], rel=1e-3)


def test_a_system_without_a_node_has_gpu_energy_alone():
    at = ds.setup("llama_3_1_8b", "h100_pcie", "fp8")
    table = with_energy(colocated(at))
    assert np.isnan(table["facility_watts"]).all()
    assert (table["drawn_watts"] > 0).all()
    assert set(table["power_from"]) == {"inherited"}


def test_a_node_at_the_wall_by_hand():
    # 8 x 520 + 1271.6 = 5431.6 W of heat: fans at 0.22 + 0.58*5431.6/7214 = 0.6567 of 835.31 W = 548.5 W;
    # supplies at 5980.1/13200 = 0.453 of their load: 0.9448 + 0.0192*0.253/0.3 = 0.9610
    node = load_system("h100_sxm").node_power
    wall = wall_watts(node, 520.0, across=False)
    assert wall == pytest.approx(5980.1 / 0.9610 + 405.0, rel=1e-4)
    assert facility_watts(replace(node, pue=1.0), 520.0, across=False) == pytest.approx(wall / 8)


def test_nothing_changes_but_the_columns_of_energy(pools):
    kept = with_energy(pools).drop(columns=[column.name for column in ENERGY_COLUMNS])
    assert kept.equals(pools)


@pytest.mark.parametrize("ep", [16, 32])
def test_halves_of_a_pass_that_run_at_once_spend_what_they_spend_one_after_the_other(ep):
    """Less what a GPU would draw by waiting in the time that is saved, and no more than it may draw."""
    wide = ds.Sharding(dp_attn=ep, ep=ep)

    def spent(engine):
        at = ds.setup("deepseek_r1", "h200_sxm", "fp8", engine=engine)
        grid = ds.prefill_grid(at, wide, ds.lengths(4096, 1024), batch=[2 * ep])
        return spent_on(next(iter(passes_of(design_of(grid, 0, 0)))))

    sglang = load_engine("sglang")
    seconds, joules = spent(sglang)
    serial, alone = spent(replace(sglang, two_batch_overlap=False))
    assert seconds < serial
    limit, idle = 700.0, 700.0 * load_power("h200_sxm").idle
    assert joules == pytest.approx(min(alone - idle * (serial - seconds), limit * seconds), rel=0.02)


def test_the_power_above_idle_is_off_by_the_factor_of_its_fit_either_way(at):
    """P = idle + above: 80 % of GPUs lie between above/f and above*f, none beyond the limit of its power."""
    energy = power.power_at(at)
    gpus, drawn = np.array([2.0]), np.array([2 * (energy.idle + 100.0)])
    low, high = _ends(energy, gpus, drawn)
    assert (high - 2 * energy.idle) / (drawn - 2 * energy.idle) == pytest.approx(energy.factor)
    assert (drawn - 2 * energy.idle) / (low - 2 * energy.idle) == pytest.approx(energy.factor)
    assert _ends(energy, gpus, gpus * energy.limit)[1] == pytest.approx(2 * energy.limit)


PRICE = {"h200_sxm": 3.6}  # a thousandth of a USD a second

ONE = ds.Sharding()


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


POOL_LENGTHS = ds.lengths(4096, 512)


@pytest.mark.parametrize("batch", [8, 64])
def test_halves_spend_on_their_work_what_a_whole_instance_does(batch):
    """One GPU each, one micro-batch: above waiting, the work of a step of a dense model is that of one GPU.

    The two activations of a layer are read and written in two kernels in place of one.
    """
    at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    halves = split_spent(at, at, Split(ds.Sharding(), ds.Sharding(), 1), POOL_LENGTHS, float(batch))
    parts = energy_parts(ds.decode_grid(at, ds.Sharding(), POOL_LENGTHS, batch=[batch]))
    idle = power_at(at).idle
    apart = sum(float(each.joules - idle * each.seconds) for each in halves)
    assert apart == pytest.approx(parts["joules"].sum() - idle * parts["seconds"].sum(), rel=0.005)
