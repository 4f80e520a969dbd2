"""Accounts of a plan, counted again from its pools: caches over NICs, prices and joules."""

import json
import math

import pytest
from typer.testing import CliRunner

import disagg_sim as ds
from disagg_sim.cli.main import app
from disagg_sim.domain import ServingMode
from disagg_sim.planning.energy import drawn, planned_prices
from disagg_sim.planning.prove import deployed
from disagg_sim.planning.question import PlanOptions
from disagg_sim.planning.replayed import policy_of, requests_of, run_options
from disagg_sim.planning.sizing import cost_of
from disagg_sim.report.plan import design_json

#: Cache of a token: layers, K and V of all heads, width; of MLA one latent with its rope. One byte each. [B]
KV = {
    "llama_3_1_8b": 32 * 2 * 8 * 128,
    "llama_3_1_70b": 80 * 2 * 8 * 128,
    "qwen3_30b_a3b": 48 * 2 * 4 * 128,
    "deepseek_r1": 61 * (512 + 64),
}
HEADS = {"llama_3_1_8b": 8, "llama_3_1_70b": 8, "qwen3_30b_a3b": 4, "deepseek_r1": 1}
#: Prices of two systems. [USD/h]
PRICES = {"h100_sxm": 2.0, "h200_sxm": 3.5}


def shown(found):
    return [each for each in (found.best, found.other, *found.runners_up) if each is not None]


def of_mode(found, mode):
    return next(each for each in shown(found) if each.mode == mode)


def counted(design):
    """GPUs of each system."""
    gpus = {}
    for pool in design.pools:
        degrees = pool.mapping
        one = int(degrees.tp_attn) * int(degrees.dp_attn) * int(degrees.pp) * int(degrees.pcp)
        gpus[pool.setup.system.name] = gpus.get(pool.setup.system.name, 0) + one * (pool.instances + pool.spares)
    return gpus


def with_parts_of_their_own(pool, model):
    """GPUs of an instance that hold parts of a cache which no other does: ranks beyond the KV heads hold copies."""
    degrees = pool.mapping
    return min(int(degrees.tp_attn), HEADS[model]) * int(degrees.dp_attn) * int(degrees.pp)


# KV caches over NICs.


@pytest.mark.parametrize(
    ("model", "system", "isl", "rate"),
    [
        ("llama_3_1_8b", "h100_sxm", 2048, 40.0),
        ("qwen3_30b_a3b", "h100_sxm", 2048, 100.0),
        ("deepseek_r1", "h200_sxm", 4096, 10.0),
    ],
)
def test_the_promised_nic_rate_is_that_of_the_mapping(model, system, isl, rate):
    found = ds.plan(model, system, ds.lengths(isl, 256), rate=rate)
    designs = [each for each in shown(found) if each.mode == ServingMode.DISAGGREGATED]
    assert designs
    for design in designs:
        moved = rate * isl * KV[model]
        busiest = max(moved / (pool.instances * with_parts_of_their_own(pool, model)) for pool in design.pools)
        assert design.kv_rate == pytest.approx(busiest, rel=1e-9)


@pytest.mark.usefixtures("without_changes")
@pytest.mark.parametrize("limit", [0.25, 0.5, 2.0])
def test_a_nic_limit_is_in_gigabytes_a_second(limit):
    """A prompt of 2,048 tokens has 134.2 MB: each pool of one-GPU instances needs 44 * 0.1342 / limit of them."""
    command = "plan --model llama_3_1_8b --system h100_sxm --isl 2048 --osl 256 --rate 44 --tpot 20ms --json --max-nic"
    told = json.loads(CliRunner().invoke(app, [*command.split(), str(limit)]).stdout)
    fewest_gpus = math.ceil(44 * 2048 * KV["llama_3_1_8b"] / (limit * 1e9))
    designs = [each for each in (told["best"], *told["runners_up"]) if each["mode"] == "disaggregated"]
    for design in designs:
        assert design["kv_bytes_per_s_per_gpu"] <= limit * 1e9
        assert all(pool["gpus"] >= fewest_gpus for pool in design["pools"])
    if limit < 2.0:  # NICs bind, nothing else
        assert min(design["gpus"] for design in designs) == 2 * fewest_gpus


# Prices.


@pytest.fixture(scope="module", params=[PRICES, {"h100_sxm": 3.5, "h200_sxm": 2.0}], ids=["dearer", "cheaper"])
def priced(request):
    options = PlanOptions(objective="usd", prices=request.param, prefill_system="h100_sxm")
    found = ds.plan("llama_3_1_70b", "h200_sxm", ds.lengths(4096, 512), tpot="30 ms", rate=20, options=options)
    return request.param, found


def test_each_pool_has_the_price_of_its_system(priced):
    prices, found = priced
    mixed = next(each for each in shown(found) if len(counted(each)) == 2)
    for design in (mixed, *shown(found)):
        assert design.gpus == sum(counted(design).values())
        hour = sum(prices[name] * gpus for name, gpus in counted(design).items())
        assert design.cost == pytest.approx(hour)
        assert cost_of(found.case_of(design), design) == pytest.approx(hour)
        own = design_json(found, design)
        assert own["usd_per_hour"] == pytest.approx(hour)
        assert own["usd_per_million_output_tokens"] == pytest.approx(hour / 3600 / (20 * 512) * 1e6)
    assert found.best.cost == min(each.cost for each in shown(found))


def test_tokens_in_pay_for_prefill_and_tokens_out_for_decode(priced):
    prices, found = priced
    mixed = next(each for each in shown(found) if len(counted(each)) == 2)
    told = planned_prices(mixed, prices, 1.0)
    prefill, decode = (prices[pool.setup.system.name] * pool.gpus for pool in mixed.pools)
    assert [pool.role for pool in mixed.pools] == ["prefill", "decode"]
    assert float(told.new) == pytest.approx(prefill / 3600 / (20 * 4096) * 1e6)
    assert float(told.output) == pytest.approx(decode / 3600 / (20 * 512) * 1e6)


def test_a_co_located_pool_is_paid_by_the_time_of_a_prompt_and_of_the_output_of_a_request():
    """Four ranks prefill four prompts at once; a request has its share of 255 steps."""
    four, lengths = ds.Sharding(dp_attn=4, tp_ffn=4), ds.lengths(2048, 256)
    pools = {"colocated": ds.Replicas(mapping=four, instances=2, batch=128)}
    (pool,) = (design := ds.evaluate("mixtral_8x7b", "h100_sxm", pools, lengths, rate=20).design).pools
    prefill = ds.prefill_grid(pool.setup, four, lengths, batch=[4])
    decode = ds.decode_grid(pool.setup, four, lengths, batch=[round(pool.sequences)])
    prompt = float(prefill.latency[0, 0]) / 4
    output = float(decode.latency[0, 0]) * 255 / round(pool.sequences)
    told = planned_prices(design, PRICES, 1.0)
    hour = PRICES["h100_sxm"] * 8 / 3600 / 20 * 1e6
    assert float(told.new) == pytest.approx(hour * prompt / (prompt + output) / 2048, rel=0.03)
    assert float(told.output) == pytest.approx(hour * output / (prompt + output) / 256, rel=0.03)


# Energy.


@pytest.fixture(scope="module")
def at_work():
    return ds.plan("llama_3_1_8b", "h200_sxm", ds.lengths(2048, 256), tpot="20 ms", rate=60)


@pytest.mark.parametrize("mode", [ServingMode.DISAGGREGATED, ServingMode.COLOCATED])
def test_the_energy_of_a_plan_is_that_of_its_simulated_pools(at_work, mode):
    """Every instance of the run is counted by what it did, at the same rate."""
    design = of_mode(at_work, mode)
    trace, _ = requests_of(at_work, design, 0)
    result = ds.simulate(deployed(design), trace, policy_of(design), options=run_options(design, None))
    spent = ds.run_energy(result)
    assert spent["gpus"].sum() == design.gpus
    assert spent["watts"].to_numpy() == pytest.approx((spent["joules"] / spent["held_s"]).to_numpy())
    assert drawn(design).watts == pytest.approx(spent["joules"].sum() / spent["held_s"].max(), rel=0.06)
