"""At constant lengths and a full queue the simulation meets the analytic model within 2 %, in all modes.

The analytic side is that of the public tables: ``serving.colocated``, ``serving.piggyback`` and the grids of a
disaggregated pair. The simulated instance keeps its queue full: a request comes where one ends. Residents start as old
as the steady state has them: evenly spread, or, where several may end in the same step, at ages of their own.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Sharding, Slo
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.physics.setup import setup
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.colocation import Colocation
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import CLOSES, NOTIFY, Mode
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.run import run
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.trace import Trace

BOUND = 0.02
HEARD = NOTIFY | CLOSES
DEPLOYMENTS = {
    "llama_tp4": ("llama_3_1_70b", "h100_sxm", "fp8", {"tp_attn": 4, "tp_ffn": 4}, 1024, 257, 32),
    "llama_8b": ("llama_3_1_8b", "h100_sxm", "bf16", {"tp_attn": 1, "tp_ffn": 1}, 2000, 321, 16),
    "gpt_oss_ep4": ("gpt_oss_120b", "h100_sxm", "bf16", {"tp_attn": 4, "ep": 4}, 1536, 385, 48),
    "deepseek_tep8": ("deepseek_r1", "h200_sxm", "fp8", {"tp_attn": 8, "ep": 8}, 2048, 513, 32),
    "llama_pp2": ("llama_3_1_70b", "h100_sxm", "fp8", {"tp_attn": 2, "tp_ffn": 2, "pp": 2}, 1024, 257, 32),
    "mixtral_dep4": ("mixtral_8x7b", "h100_sxm", "bf16", {"dp_attn": 4, "ep": 4}, 1024, 257, 32),
    "deepseek_dep8": ("deepseek_r1", "h200_sxm", "fp8", {"dp_attn": 8, "ep": 8}, 2048, 513, 64),
}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def deployment(request):
    model, system, precision, mapping, isl, osl, batch = DEPLOYMENTS[request.param]
    names = {"model": model, "system": system, "precision": precision}
    at, cut = setup(model, system, precision), Sharding(**{k: float(v) for k, v in mapping.items()})
    return names, Sharding(**mapping), isl, osl, batch, at, cut, StepTable.build(at, cut)


def full_queue(spec, lengths, *, residents, requests, waiting, ages=None, cached=0):
    """Keep ``residents + waiting`` requests in an instance; the first ones are of the given or evenly spread ages.

    Of each prompt that comes so many tokens are ``cached``.
    """
    context, prompt, generate = lengths
    fleet = Fleet([spec])
    for request in range(residents):
        age = generate * request // residents if ages is None else int(ages[request])
        rest = (context + prompt + age, 0, max(generate - age, 1))
        fleet.submit(0, request, rest, 0.0, flags=HEARD, last_token_s=0.0)
    for request in range(waiting):
        last = 0.0 if context else math.nan
        fleet.submit(0, request, lengths, 0.0, flags=HEARD, last_token_s=last, cached=cached)
    for _ in range(requests):
        _, now = fleet.run_until(math.inf)
        number = len(fleet.segments)
        last = now if context else math.nan
        fleet.submit(0, number, lengths, now, flags=HEARD, last_token_s=last, cached=cached)
    return fleet


def steady(fleet, residents):
    """Rows of the requests that began and ended while the queue was full, after the first generation."""
    segments = fleet.segments
    done = np.flatnonzero(~np.isnan(segments.finish_s) & (segments.generate == segments.generate[-1]))
    return segments, done[done >= 3 * residents]


def rate(times):
    """Events a second between the first and the last of many. [1/s]"""
    times = np.sort(times)
    return (times.size - 1) / (times[-1] - times[0])


def assert_meets(fleet, residents, osl, gpus, ttl, throughput):
    """Mean time a token [s] and tokens a second and GPU of the steady state are those of the analytic model."""
    segments, rows = steady(fleet, residents)
    per_token = (segments.finish_s[rows] - segments.first_token_s[rows]) / (osl - 1)
    assert np.mean(per_token) == pytest.approx(ttl, rel=BOUND)
    assert rate(segments.finish_s[rows]) * osl / gpus == pytest.approx(throughput, rel=BOUND)


def test_a_decode_pool(deployment):
    _, _, isl, osl, batch, at, cut, table = deployment
    exact = decode_step(at, cut, batch=float(batch), context=isl + osl / 2).ttl
    spec = InstanceSpec(table=table, blocks=10**6, max_sequences=batch)
    fleet = full_queue(spec, (isl, 0, osl - 1), residents=batch, requests=8 * batch, waiting=batch)
    segments, rows = steady(fleet, batch)
    step = (segments.finish_s[rows] - segments.start_s[rows]) / (osl - 1)
    assert np.mean(step) == pytest.approx(float(exact), rel=BOUND)
    assert rate(segments.finish_s[rows]) == pytest.approx(batch / (float(exact) * (osl - 1)), rel=BOUND)


@pytest.mark.parametrize(
    ("deployment", "together", "past"),
    [
        *((name, together, 0) for name in DEPLOYMENTS for together in (1, 4)),
        *((name, 2, 912) for name in ("llama_tp4", "deepseek_tep8")),
    ],
    indirect=["deployment"],
)
def test_a_prefill_pool(deployment, together, past):
    """So many prompts a pass, of each of which so many tokens are cached."""
    _, _, isl, _, _, at, cut, table = deployment
    exact = prompt_pass(at, cut, batch=float(together), isl=isl, past=past, chunk_tokens=0)
    spec = InstanceSpec(table=table, blocks=10**6, mode=Mode.PREFILL_FIRST, token_budget=10**6, max_prompts=together)
    fleet = full_queue(spec, (0, isl, 1), residents=0, requests=40 * together, waiting=8 * together, cached=past)
    segments, rows = steady(fleet, together)
    ends = np.unique(segments.finish_s[rows])
    if together == 1 or cut.pp == 1:
        latency = segments.finish_s[rows] - segments.start_s[rows]
        assert np.mean(latency) == pytest.approx(float(exact.ftl), rel=BOUND)
    assert rate(ends) * together == pytest.approx(together / float(exact.busy), rel=BOUND)


@pytest.mark.parametrize(("stages", "together"), [(2, 1), (2, 16), (4, 20)])
def test_a_prefill_pool_that_cuts_prompts_into_chunks(stages, together):
    """CPP: chunks of 512 tokens of each prompt of a pass follow each other through the stages."""
    at, isl = setup("llama_3_1_70b", "h100_sxm", "fp8"), 1024
    cut = Sharding(tp_attn=2.0, tp_ffn=2.0, pp=float(stages))
    exact = chunked_prefill_pass(at, cut, batch=float(together), isl=isl, chunk_tokens=np.array(512.0))
    table = StepTable.build(at, replace(cut, chunk_tokens=512))
    limits = {"token_budget": together * isl, "max_prompts": together}
    spec = InstanceSpec(table=table, blocks=10**6, mode=Mode.PREFILL_FIRST, **limits)
    fleet = full_queue(spec, (0, isl, 1), residents=0, requests=40 * together, waiting=8 * together)
    segments, rows = steady(fleet, together)
    latency = segments.finish_s[rows] - segments.start_s[rows]
    assert np.mean(latency) == pytest.approx(float(exact.ftl), rel=BOUND)
    assert rate(np.unique(segments.finish_s[rows])) == pytest.approx(1 / float(exact.busy), rel=BOUND)


@pytest.mark.parametrize(
    ("deployment", "first_token"),
    [("llama_8b", "decode"), ("llama_pp2", "prefill"), ("mixtral_dep4", "prefill")],
    indirect=["deployment"],
)
def test_a_pair_of_pools_that_pulls_its_caches(deployment, first_token):
    """A decode instance whose batch is full serves B/(TTL*steps) requests a second although each cache waits for its
    blocks and then moves: the next ones are there when sequences end. A first token of its own is a step more.
    """
    _, mapping, isl, osl, batch, at, cut, _ = deployment
    exact = decode_step(at, cut, batch=float(batch), context=isl + osl / 2).ttl
    busy = prefill_pass(at, cut, batch=1.0, isl=isl).busy
    steps = osl - (first_token == "prefill")
    senders = 1 + math.ceil(float(busy) * batch / (float(exact) * steps))
    parts = {"prefill": senders, "decode": 1}
    pools = {
        name: (Replicas(mapping=mapping, instances=count, batch=batch if name == "decode" else None),)
        for name, count in parts.items()
    }
    served = ServedDeployment(name="pools", gpus=(senders + 1) * mapping.gpus, **pools)
    requests = 12 * batch
    trace = Trace(arrival=np.zeros(requests), input_tokens=np.full(requests, isl), output_tokens=np.full(requests, osl))
    options = RunOptions(concurrency=2 * batch + 8 * senders, transfer="pull", first_token=first_token)
    found = run(trace, served, "disaggregated", at=at, slo=Slo(ttft=10.0, tpot=1.0), options=options).requests
    generations = np.sort(found.finish_s)[batch - 1 :: batch][2:-2]
    throughput = batch * (generations.size - 1) / (generations[-1] - generations[0])
    assert throughput == pytest.approx(batch / (float(exact) * steps), rel=BOUND)
    assert found.exposed_transfer_s.mean() > 0.001


def whole_prompts(deployment, lengths_of, batch, together, seeds=1):
    """Analytic row, and mean time a token [s], latency of a pass [s] and throughput [token/s] of simulated instances.

    Residents start at ages of their own: what ends in the same step is as likely as in any steady state.
    """
    _, mapping, _, _, _, at, cut, _ = deployment
    isl, osl = lengths_of
    options = Colocation(batch=(batch,), prefill_batch=(together,))
    exact = colocated(at, mapping, lengths(isl, osl), ftl_limit=math.inf, options=options).iloc[0]
    table = StepTable.build(at, replace(cut, chunk_tokens=int(exact.prefill_chunk_tokens)))
    limits = {"token_budget": 10**8, "max_prompts": together, "max_sequences": batch}
    spec = InstanceSpec(table=table, blocks=10**7, mode=Mode.PREFILL_FIRST, **limits)
    found = []
    for seed in range(seeds):
        ages = np.random.default_rng(seed).integers(0, osl - 1, batch)
        fleet = full_queue(spec, (0, isl, osl), residents=batch, requests=8 * batch, waiting=batch, ages=ages)
        segments, rows = steady(fleet, batch)
        per_token = (segments.finish_s[rows] - segments.first_token_s[rows]) / (osl - 1)
        latency = segments.first_token_s[rows] - segments.start_s[rows]
        generations = np.sort(segments.finish_s[rows])[batch - 1 :: batch]
        served = batch * osl * (generations.size - 1) / (generations[-1] - generations[0])
        found.append((np.mean(per_token), np.mean(latency), served / mapping.gpus))
    return exact, np.mean(found, axis=0)


@pytest.mark.parametrize(
    ("deployment", "most"),
    [*((name, 1) for name in DEPLOYMENTS), *((name, 8) for name in ("llama_tp4", "mixtral_dep4", "deepseek_dep8"))],
    indirect=["deployment"],
)
def test_in_flight_batching(deployment, most):
    """Free seats are filled as they come, whatever a pass may take; few passes have several prompts, so that the mean
    latency of one run is less sure."""
    *_, isl, osl, batch, _, _, _ = deployment
    exact, (per_token, latency, throughput) = whole_prompts(deployment, (isl, osl), batch, most)
    assert per_token == pytest.approx(exact.ttl_s, rel=BOUND)
    assert latency == pytest.approx(exact.ftl_s, rel=BOUND if most == 1 else 0.07)
    assert throughput == pytest.approx(exact.tokens_per_s_per_gpu, rel=BOUND)


@pytest.mark.parametrize(
    ("deployment", "isl", "osl", "batch", "hold"),
    [("deepseek_dep8", 8192, 1024, 64, 128), ("mixtral_dep4", 1024, 257, 32, 16)],
    indirect=["deployment"],
)
def test_prompts_that_wait_for_all_ranks(deployment, isl, osl, batch, hold):
    """Answers of a random length, each token as likely to be the last: of one length, those that start together would
    end together, and soon no prompt would wait."""
    _, mapping, _, _, _, at, _, table = deployment
    rows = colocated(
        at, mapping, lengths(isl, osl), ftl_limit=math.inf, options=Colocation(batch=(batch,), hold_steps=(hold,))
    )
    exact = rows[rows.hold_steps == hold].iloc[0]
    limits = {"token_budget": 10**8, "max_prompts": mapping.dp_attn, "max_sequences": batch, "hold_steps": hold}
    spec = InstanceSpec(table=table, blocks=10**7, mode=Mode.PREFILL_FIRST, **limits)
    found = []
    for seed in range(4):
        generate = np.random.default_rng(seed).geometric(1 / (osl - 1), 40 * batch) + 1
        found.append(random_answers(spec, isl, generate, batch))
    decoding, gaps, tokens, seconds = np.sum(found, axis=0)
    assert decoding / gaps == pytest.approx(exact.ttl_s, rel=BOUND)
    assert tokens / seconds / mapping.gpus == pytest.approx(exact.tokens_per_s_per_gpu, rel=BOUND)


def random_answers(spec, isl, generate, batch):
    """Time in decode [s] and gaps between tokens of requests; tokens and seconds, all after the first five batches."""

    def emitted():
        fleet.refresh(now)
        return int(fleet.views.decode_tokens.sum() + fleet.views.first_tokens.sum())

    fleet, tokens, start = Fleet([spec]), 0, 0.0
    for request, count in enumerate(generate.tolist()):
        now = fleet.run_until(math.inf)[1] if request >= 2 * batch else 0.0
        fleet.submit(0, request, (0, isl, count), now, flags=HEARD)
        if request == 5 * batch:
            tokens, start = emitted(), now
    tokens, seconds = emitted() - tokens, now - start
    segments = fleet.segments
    rows = np.flatnonzero((segments.start_s > start) & (segments.start_s < start + 0.6 * seconds))
    decoding = segments.finish_s[rows] - segments.first_token_s[rows]
    return np.nansum(decoding), (segments.generate[rows] - 1)[~np.isnan(decoding)].sum(), tokens, seconds


def test_unlike_prompts_of_a_pipelined_pass_have_their_own_scores():
    """A long and a short prompt together take as long as one after the other, where GEMMs are as efficient.

    Two prompts of their mean length would have 57 % of their query-key pairs."""
    at, cut = setup("llama_3_1_8b", "h100_sxm", "fp8"), Sharding(tp_attn=2, tp_ffn=2, pp=2, chunk_tokens=2048)
    table, busy = StepTable.build(at, cut), []
    for together in (1, 2):
        spec = InstanceSpec(
            table=table, blocks=10**7, mode=Mode.PREFILL_FIRST, token_budget=10**7, max_prompts=together, watermark=0.0
        )
        fleet = Fleet([spec])
        for request in range(40):
            fleet.submit(0, request, (0, (4096, 61_440)[request % 2], 1), 0.0)
        while fleet.next_time() < math.inf:
            fleet.run_until(math.inf)
        busy.append(fleet.segments.finish_s.max() / 20)
    assert busy[1] == pytest.approx(busy[0], rel=BOUND)


def chunks_beside_decode(deployment, chunk, slots):
    """Mean time a token and first-token latency [s], throughput [token/s] of a simulated instance."""
    _, _, isl, osl, batch, _, _, table = deployment
    spec = InstanceSpec(table=table, blocks=10**6, token_budget=slots + chunk, max_sequences=slots)
    fleet = full_queue(spec, (0, isl, osl), residents=batch, requests=8 * batch, waiting=batch)
    segments, rows = steady(fleet, batch)
    per_token = (segments.finish_s[rows] - segments.first_token_s[rows]) / (osl - 1)
    latency = segments.first_token_s[rows] - segments.start_s[rows]
    return float(np.mean(per_token)), float(np.mean(latency)), float(rate(segments.finish_s[rows])) * osl


def test_piggyback_with_a_chunk_in_every_step(deployment):
    """The balance ISL*B/(OSL-1) is a whole number that divides ISL; a prompt a rank is in prefill beside B decodes."""
    _, mapping, isl, osl, batch, at, *_ = deployment
    exact = piggyback(
        at, mapping, lengths(isl, osl), ftl_limit=math.inf, options=Colocation(batch=(batch,), every_step_mixed=True)
    ).iloc[0]
    ranks = mapping.dp_attn
    per_token, latency, throughput = chunks_beside_decode(deployment, isl * batch // (osl - 1), batch + ranks)
    assert per_token == pytest.approx(exact.ttl_mean_s, rel=BOUND)
    assert latency == pytest.approx(exact.ftl_s, rel=BOUND)
    assert throughput / mapping.gpus == pytest.approx(exact.tokens_per_s_per_gpu, rel=BOUND)


@pytest.mark.parametrize("deployment", ["llama_tp4"], indirect=True)
def test_a_request_meets_the_prompts_of_others_alone(deployment):
    """Of four residents, that is of three: with its own a token would take 5 % longer."""
    _, mapping, _, _, _, at, _, table = deployment
    isl, osl, batch = 2048, 256, 4
    options = Colocation(batch=(batch,), rank_chunk_tokens=(isl,))
    exact = piggyback(at, mapping, lengths(isl, osl), ftl_limit=math.inf, options=options).iloc[0]
    assert exact.mixed_chunk_tokens == isl
    spec = InstanceSpec(table=table, blocks=10**7, token_budget=batch + isl, max_sequences=batch)
    found = []
    for seed in range(4):
        generate = np.random.default_rng(seed).geometric(1 / (osl - 1), 60 * batch) + 1
        found.append(random_answers(spec, isl, generate, batch))
    decoding, gaps, tokens, seconds = np.sum(found, axis=0)
    assert decoding / gaps == pytest.approx(exact.ttl_s, rel=BOUND)
    assert tokens / seconds / mapping.gpus == pytest.approx(exact.tokens_per_s_per_gpu, rel=BOUND)


@pytest.mark.parametrize("deployment", ["deepseek_dep8"], indirect=True)
def test_ranks_take_pieces_in_steps_of_their_own(deployment):
    """Of 8 ranks each has 2048 tokens of a prompt in one step of 128, but one step of 16 has those of some rank."""
    _, mapping, _, _, _, at, _, table = deployment
    isl, osl, batch, piece = 8192, 1024, 16, 2048
    options = Colocation(batch=(batch,), rank_chunk_tokens=(piece,), ttl_measure="p99")
    rows = piggyback(at, mapping, lengths(isl, osl), ftl_limit=math.inf, options=options)
    exact = rows[rows.mixed_chunk_tokens == 8 * piece].iloc[0]
    spec = InstanceSpec(table=table, blocks=10**7, token_budget=batch + 8 * (piece + 1), max_sequences=batch + 1)
    found = []
    for seed in range(4):
        ages = np.random.default_rng(seed).integers(0, osl - 1, batch)
        fleet = full_queue(spec, (0, isl, osl), residents=batch, requests=8 * batch, waiting=batch, ages=ages)
        segments, rows = steady(fleet, batch)
        found.append(np.mean(segments.finish_s[rows] - segments.first_token_s[rows]) / (osl - 1))
    assert np.mean(found) == pytest.approx(exact.ttl_mean_s, rel=0.05)
