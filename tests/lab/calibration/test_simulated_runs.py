"""Closed loops of measured rows, played request by request."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_loads import made_run, write_lines

from disagg_sim.certainty.rows import Origin, rescore
from disagg_sim.domain import Sharding, Slo
from disagg_sim.facts.load import load_engine
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.planning.evaluate import evaluate as evaluate_plan
from disagg_sim.planning.question import PlanOptions
from disagg_sim.serving.colocation import ColocatedCase, Colocation
from disagg_sim.serving.shared_laws import SHARED_LAWS, engine_mode
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.run import run as play_trace
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.trace import Trace
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.read import read_rows
from lab.calibration.served.rows import Measurement, WorkerGroup
from lab.calibration.served.simulate import MOST_REQUESTS, client_latencies, play, tasks_of, trace_of, value_of
from lab.calibration.served.simulated import with_simulated, write_simulated
from lab.calibration.served.steady_state import RowLengths, WorkerPool, at_rate, colocated, disaggregated, served

ENGINE = load_engine("vllm")
DRAINS = replace(ENGINE, mixed_steps=False)
ONE = WorkerGroup(mapping=Sharding())
MEASURED = (
    Measurement(name="ttft", measured=0.1),
    Measurement(name="throughput", measured=900.0, basis="total", gpus=2.0),
)
ROW = made_run(
    "a", file="small.csv", form="nvidia_gap", quantities=MEASURED, isl=256.0, osl=64.0, waves=3.0, spread=0.0
)
MIXED, WAITS = (served("llama_3_1_8b", "h100_sxm", "fp8", engine) for engine in (ENGINE, DRAINS))
SPLIT = replace(ROW, mode="disaggregated", prefill=ONE)


def test_a_client_alone_sees_the_host_its_prefill_and_its_decode_steps():
    """256 tokens are a point of every axis of the step table, and a decode step is linear in the context."""
    found = client_latencies(WAITS, ROW)
    ftl = float(prefill_pass(WAITS.at, Sharding(), batch=1, isl=256).ftl)
    assert found.ttft == pytest.approx(np.full(3, ENGINE.request_host + ftl), rel=1e-9)
    contexts = 256 + np.arange(1.0, 64)
    steps = decode_step(WAITS.at, Sharding(), batch=1, context=contexts).ttl
    assert found.tpot == pytest.approx(np.full(3, np.mean(steps)), rel=1e-3)


def test_clients_that_stay_together_send_as_many_requests_as_their_time_allows():
    """Equal requests that prefill in one pass and decode together: N clients finish N in the time of one."""
    found = client_latencies(WAITS, replace(ROW, isl=16.0, concurrency=8.0))
    assert found.latency == pytest.approx(np.full(24, found.latency[0]), rel=1e-9)
    assert found.request_rate == pytest.approx(8 / found.latency[0], rel=1e-9)
    assert found.token_rate == pytest.approx(found.request_rate * (16 + 64), rel=1e-9)


def full_instance(run, mapping, isl, osl, decoding):
    """TPOT [s] and rate [request/s] of the frontier's instance with so many sequences in decode at all times, whose
    steps take whole prompts where the engine mixes, as it does where they fit."""
    batch, ranks = (int(decoding), int(decoding) + 1), mapping.dp_attn
    options = Colocation(batch=batch, hold_steps=(), every_step_mixed=True)
    case = ColocatedCase(at=run.at, lengths=lengths(isl, osl), ftl_limit=np.inf, options=options)
    rows = SHARED_LAWS[engine_mode(run.at)].search(case, mapping).points
    if run.engine.mixed_steps:
        share = rows.mixed_chunk_tokens / (ranks * isl)
        rows = rows.assign(mixed_chunk_tokens=ranks * float(isl), mixed_step_share=share)
        rows.update(rescore(rows, lambda _: run.at, origin=Origin(exact=False)))
    rows = rows.sort_values("decode_batch")
    found = [np.interp(decoding, rows.decode_batch, rows[name]) for name in ("ttl_s", "tokens_per_s_per_gpu")]
    return found[0], found[1] * mapping.gpus / osl


@pytest.mark.parametrize(
    ("model", "mapping", "mixed"),
    [
        ("glm_4_5", Sharding(dp_attn=8, ep=8), True),
        ("qwen3_235b_a22b", Sharding(dp_attn=2, ep=2), False),
        ("llama_3_1_8b", Sharding(), True),
        ("llama_3_1_70b", Sharding(tp_attn=4, tp_ffn=4), True),
        ("mistral_small_3_1_24b", Sharding(), False),
    ],
)
def test_a_full_instance_a_closed_loop_and_the_played_run_agree(model, mapping, mixed):
    """Pieces of a prompt fall due in most steps; the first half of the run is its start, and lengths spread by 20 %, so
    that requests of the start do not stay together. Of one rank that stops decode for prefill, with a constant host
    time, steps swing: prompts that ended together come together again, and wait less than the law says.
    """
    run = served(model, "h200_sxm", "fp8", replace(ENGINE, mixed_steps=mixed))
    clients, isl, osl = max(16.0 * mapping.dp_attn, 32.0), 2048.0, 256.0
    row = replace(
        ROW, workers=WorkerGroup(mapping=mapping), concurrency=clients, isl=isl, osl=osl, waves=60.0, spread=0.2
    )
    found = client_latencies(run, row)
    late = slice(found.tpot.size // 2, -int(2 * clients))
    one = np.ones(1)
    state = colocated(run, Sharding.stack([mapping]), RowLengths(isl * one, osl * one), clients * one)
    assert state.tpot == pytest.approx(found.tpot[late].mean(), rel=0.02)
    swings = not mixed and mapping.dp_attn == 1
    assert state.ttft == pytest.approx(found.ttft[late].mean(), rel=0.25 if swings else 0.1)
    rate = clients / found.latency[late].mean()
    assert state.request_rate == pytest.approx(rate, rel=0.02)
    # not in a step of decodes: prompts in prefill; where these are drained first, what the host has
    apart = state.ttft if mixed else run.engine.request_host
    decoding = float((clients - state.request_rate * apart)[0])
    full = full_instance(run, mapping, isl, osl, decoding)
    assert full == pytest.approx((found.tpot[late].mean(), rate), rel=0.02)


def test_a_played_stream_to_several_ranks_a_plan_and_a_served_run_agree():
    """More prompts come in the longer steps and share the next: as many in every step would take 6 % longer."""
    run, mapping, isl, osl = served("qwen3_235b_a22b", "h200_sxm", "fp8", ENGINE), Sharding(dp_attn=4, ep=4), 2048, 256
    one, rate, requests = np.ones(1), 4.15, 6000
    arrival = np.cumsum(np.random.default_rng(0).exponential(1 / rate, requests))
    trace = Trace(arrival=arrival, input_tokens=np.full(requests, isl), output_tokens=np.full(requests, osl))
    instance = Replicas(mapping=mapping, instances=1, batch=512, token_budget=4 * run.engine.chunk_tokens)
    deployment = ServedDeployment(name="ranks", gpus=4, colocated=(instance,))
    found = play_trace(trace, deployment, "vllm", at=run.at, slo=Slo(ttft=10.0, tpot=1.0)).requests
    tpot = ((found.finish_s - found.first_token_s) / (osl - 1))[requests // 4 : -256].mean()
    state = at_rate(run, Sharding.stack([mapping]), RowLengths(isl * one, osl * one), rate * one)
    assert state.tpot == pytest.approx(tpot, rel=0.03)
    options = PlanOptions(precision="fp8", engine="vllm")
    planned = evaluate_plan(
        "qwen3_235b_a22b", "h200_sxm", {"colocated": instance}, lengths(isl, osl), rate=rate, options=options
    )
    assert planned.tpot["p50"] == pytest.approx(tpot, rel=0.03)


@pytest.mark.parametrize("clients", [4.0, 32.0])
def test_a_played_loop_behind_one_prefill_worker_is_its_steady_state(clients):
    """Prefill is busy for 12 to 100 % of the time: a loop does not queue as Poisson arrivals do."""
    isl, osl, one = 2048.0, 256.0, np.ones(1)
    found = client_latencies(MIXED, replace(SPLIT, concurrency=clients, isl=isl, osl=osl, waves=60.0, spread=0.2))
    late, pool = slice(found.tpot.size // 2, -int(2 * clients)), WorkerPool(Sharding.stack([Sharding()]), one)
    state = disaggregated(MIXED, pool, pool, RowLengths(isl * one, osl * one), clients * one)
    assert state.tpot == pytest.approx(found.tpot[late].mean(), rel=0.02)
    assert state.ttft == pytest.approx(found.ttft[late].mean(), rel=0.15)
    assert state.request_rate == pytest.approx(clients / found.latency[late].mean(), rel=0.02)


def test_a_load_just_above_a_power_of_two_a_rank_waits_for_slots():
    """17 requests on 16 slots: one in 17 waits for about a sixteenth of the time of an answer; 20 is no such load, but
    waits where the launch states 16.
    """
    full, over, free = (
        client_latencies(MIXED, replace(SPLIT, osl=1000.0, concurrency=float(n), waves=10.0)) for n in (16, 17, 20)
    )
    wait = over.ttft.mean() - full.ttft.mean()
    assert wait == pytest.approx(1000 * over.tpot.mean() / 16, rel=0.3)
    assert over.request_rate == pytest.approx(full.request_rate, rel=0.03)
    assert free.request_rate > 1.1 * full.request_rate
    told = client_latencies(MIXED, replace(SPLIT, osl=1000.0, concurrency=20.0, waves=10.0, slots=16))
    assert told.request_rate == pytest.approx(full.request_rate, rel=0.03)


@pytest.mark.parametrize(
    ("row", "waits"),
    [
        (replace(SPLIT, poll_steps=31), 15),
        (replace(ROW, poll_steps=31), 0),
        (replace(ROW, poll_steps=31, concurrency=2.0), 15),
        (replace(ROW, gather_steps=20, concurrency=2.0), 20),
    ],
)
def test_a_first_token_is_as_late_as_looks_and_sendings_are_apart(row, waits):
    """A client that is alone on an instance of both phases waits for nothing."""
    late, at_once = (client_latencies(MIXED, each) for each in (row, replace(row, poll_steps=1, gather_steps=0)))
    assert late.ttft.mean() - at_once.ttft.mean() == pytest.approx(waits * at_once.tpot.mean(), rel=0.2)


def test_lengths_are_drawn_as_the_source_says():
    drawn = trace_of(replace(ROW, isl=900.0, osl=90.0, spread=1 / 9, concurrency=100.0, waves=10.0), ENGINE)
    assert len(drawn) == 1000
    assert (drawn.input_tokens.min(), drawn.input_tokens.max()) == (800, 1000)
    assert drawn.output_tokens.mean() == pytest.approx(90, rel=0.01)
    assert np.ptp(trace_of(ROW, DRAINS).input_tokens) == 0
    assert np.ptp(trace_of(replace(ROW, concurrency=50.0), ENGINE).input_tokens) > 0
    assert len(trace_of(replace(ROW, concurrency=10_000.0, waves=10.0), ENGINE)) == MOST_REQUESTS


def test_an_operating_point_is_played_once_and_answers_every_re_run():
    """A version of which nothing else is known is the engine of today; one that formed no steps ahead is another."""
    again, before = (replace(ROW, row="b", version=version) for version in ("0.15", "0.12"))
    assert len(tasks_of([ROW, before])) == 2
    (task,) = tasks_of([ROW, again, replace(ROW, load="static", batch=4.0)])
    (answer,) = play(task)
    ttft, throughput = (value_of(quantity, answer) for quantity in MEASURED)
    assert ttft == pytest.approx(answer.numbers["ttft", "mean"])
    assert throughput == pytest.approx(answer.numbers["rate", "request"] * (256 + 64) / 2, rel=0.1)
    assert answer.numbers["ttft", "p99"] >= answer.numbers["ttft", "median"]


@pytest.mark.parametrize(("engine", "clients"), [("trtllm", 4), ("trtllm", 64), ("sglang", 64)])
def test_prompts_that_wait_for_other_ranks_wait_as_in_the_played_run(engine, clients):
    """Were there a prompt of every rank in the end, TTFT of 64 would be 1.3 to 1.5 times as long."""
    run, mapping = served("deepseek_r1", "b200_sxm", "nvfp4_fp8kv", load_engine(engine)), Sharding(dp_attn=8, ep=8)
    row = replace(ROW, engine=engine, workers=WorkerGroup(mapping=mapping), concurrency=float(clients), waves=30.0)
    found = client_latencies(run, replace(row, isl=1024.0, osl=1024.0, spread=0.5))
    late, shape = slice(found.tpot.size // 4, -4 * clients), RowLengths(*np.full((2, 1), 1024.0))
    state = colocated(run, Sharding.stack([mapping]), shape, np.full(1, float(clients)))
    assert state.ttft == pytest.approx(found.ttft[late].mean(), rel=0.08)
    assert state.tpot == pytest.approx(found.tpot[late].mean(), rel=0.02)


def test_what_cannot_be_played_is_a_reason_of_one_line():
    (answer,) = play(tasks_of([replace(ROW, isl=3e6)])[0])
    assert answer.reason == "a request of the run is longer than an instance's memory"
    assert np.isnan(value_of(MEASURED[0], answer))


LINE = {
    **{"row_id": "one", "hardware": "h100", "gpu_family": "H100", "model": "meta-llama/Llama-3.1-70B-Instruct"},
    **{"precision": "fp8", "framework": "vllm", "spec_decode": "none", "mode": "aggregated", "tp": 4, "ep": 1},
    **{"dp_attention": False, "gpus_total": 4, "isl": 1024, "osl": 256, "concurrency": 4, "ttft_mean_ms": 150.0},
    **{"tpot_mean_ms": 15.0, "ttft_p99_ms": 400.0, "tput_total_tok_s_gpu": 300.0, "inferencex_config_id": 1},
    **{"qa_flag": ""},
}


@pytest.fixture
def small(tmp_path):
    """A file with two runs that can be played, and one that cannot."""
    more = {"row_id": "two", "concurrency": 8}, {"row_id": "long", "isl": 1e6}
    return write_lines(tmp_path / "small.csv", LINE, *(LINE | each for each in more))


def test_tables_hold_both_ways_on_the_same_points(small, tmp_path):
    rows = read_rows(small)
    answers = [answer for task in tasks_of(rows) for answer in play(task)]
    lines = with_simulated(evaluate(rows), rows, answers)
    write_simulated(lines, rows, answers, tmp_path)
    written = pd.read_csv(tmp_path / "simulated_rows.csv", keep_default_na=False, na_values=[""])
    long = written["row"] == "long"
    assert written.loc[long, "simulated"].isna().all()
    assert (written["simulated"] / written["predicted"])[~long].between(0.7, 1.3).all()
    groups = pd.read_csv(tmp_path / "simulated.csv")
    everything = groups[groups["dimension"] == "all"].set_index("quantity")
    assert everything["points"].to_dict() == {"ttft": 2, "tpot": 2, "throughput": 2}
    tpot = lines[(lines["quantity"] == "tpot") & (lines["row"] != "long")]
    for way, error in (("steady", "relative_error"), ("simulated", "simulated_error")):
        assert everything.loc["tpot", f"median_error_{way}"] == pytest.approx(tpot[error].abs().median(), rel=1e-5)
    told = pd.read_csv(tmp_path / "simulated_statistics.csv")
    assert set(told.loc[told["quantity"] == "ttft", "statistic"]) == {"mean", "p99"}
