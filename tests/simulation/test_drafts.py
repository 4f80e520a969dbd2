"""A decode step that verifies drafts emits a random number of tokens, and takes the time that the physics says.

At constant lengths and a full queue throughput and time a token are those of the public tables, in all modes.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from reference_instance import uniform
from test_analytic_agreement import assert_meets, full_queue, rate

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.colocation import Colocation
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.physical_site import kv_blocks
from disagg_sim.simulation.run_options import RunOptions

BOUND = 0.02


def fleet(accepted, blocks=1000, **limits):
    """An instance whose steps take a second each."""
    return Fleet([InstanceSpec(table=StepTable.affine(step=1.0, accepted=accepted), blocks=blocks, **limits)], stream=5)


@pytest.mark.parametrize(("accepted", "output", "steps"), [(1.0, 10, 3), (0.0, 10, 9), (1.0, 11, 4)])
def test_a_step_emits_its_token_and_what_is_accepted_of_two_drafts(accepted, output, steps):
    """The prompt's pass emits one, steps of three or of one the rest; what goes beyond the last token is dropped.
    Gaps are those between deliveries, a second each."""
    one = fleet((accepted, accepted))
    one.submit(0, 0, (0, 100, output), 0.0)
    one.run_until(math.inf)
    assert one.segments.finish_s.tolist() == [1.0 + steps]
    assert (one.views.decode_steps[0], one.views.decode_tokens[0]) == (steps, output - 1)
    assert one.segments.cached[0] == 100 + output - 1
    (place,) = np.flatnonzero(one.itl_counts)
    assert one.itl_counts[place] == steps
    assert one.itl_edges[place] <= 1.0 < one.itl_edges[place + 1]


def test_a_position_is_accepted_as_often_as_its_marginal_share_says():
    """20,000 steps: AL = 1 + 0.8 + 0.6 + 0.45, and the share of steps that emit i + 1 tokens at least is m_i."""
    draws = np.array([uniform(7, request, place) for request in range(200) for place in range(100)])
    assert [np.mean(draws < share) for share in (0.8, 0.6, 0.45)] == pytest.approx([0.8, 0.6, 0.45], abs=0.01)
    assert np.corrcoef(draws[:-1], draws[1:])[0, 1] == pytest.approx(0.0, abs=0.02)
    assert np.corrcoef(draws[:-100], draws[100:])[0, 1] == pytest.approx(0.0, abs=0.02)


def test_what_is_accepted_belongs_to_the_request_alone():
    """Served alone, beside others, or preempted: a request takes the same steps."""
    alone, beside = fleet((0.7, 0.4)), fleet((0.7, 0.4), max_sequences=3)
    alone.submit(0, 7, (0, 50, 200), 0.0)
    for request in range(9):
        beside.submit(0, request, (0, 50, 200), 0.0)
    alone.run_until(math.inf)
    beside.run_until(math.inf)
    own, other = alone.segments[0], beside.segments[7]
    assert other.finish_s - other.first_token_s == own.finish_s - own.first_token_s


def test_drafts_need_places_behind_the_last_token():
    """32 tokens fill two blocks; two drafts of the last step need a third."""
    assert fleet((), blocks=2).submit(0, 0, (0, 30, 3), 0.0) == 0
    with pytest.raises(InputError, match="cannot be served"):
        fleet((0.5, 0.5), blocks=2).submit(0, 0, (0, 30, 3), 0.0)
    some = fleet((0.5, 0.5), blocks=3)
    some.submit(0, 0, (0, 30, 3), 0.0)
    some.run_until(1.5)
    assert some.views.free_blocks[0] == 1  # taken when the step ends
    some.run_until(math.inf)
    assert some.views.free_blocks[0] == 3


def test_a_drafter_takes_memory_and_rows_of_the_largest_step():
    """Its weights, its cache, and k logits a sequence more: fewer blocks, the fewer the more drafts."""
    at = [ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation=said) for said in (None, "mtp 0.8 0.6")]
    cut = Sharding(tp_attn=8, ep=8)
    found = [kv_blocks(at[0], cut), *(kv_blocks(at[1], replace(cut, draft_tokens=k)) for k in (0, 1, 2))]
    assert found == sorted(found, reverse=True)
    assert found[1] < 61 / 62 * found[0]
    few, many = (kv_blocks(at[1], replace(cut, draft_tokens=2), max_tokens=each) for each in (1, 768))
    assert few == many  # 256 sequences verify 768 tokens in any case


# --- as the physics says ---------------------------------------------------------------------------------------

#: Model, system, recipe, drafter, mapping with drafts, prompt, output, batch. A chunk of 200 tokens a step keeps up.
CASES = {
    "deepseek": ("deepseek_r1", "h200_sxm", "fp8", "mtp 0.8", {"tp_attn": 8, "ep": 8}, 2000, 577, 32),
    "draft_model": (
        *("llama_3_1_70b", "h200_sxm", "fp8", "draft_model llama_3_1_8b 0.8 0.6"),
        *({"tp_attn": 4, "tp_ffn": 4}, 2000, 769, 32),
    ),
    "ranks": ("mixtral_8x7b", "h100_sxm", "bf16", "mtp 0.8 0.6 0.45", {"dp_attn": 4, "ep": 4}, 1000, 457, 32),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    model, system, precision, drafter, degrees, isl, osl, batch = CASES[request.param]
    curve = ds.load_speculation(drafter)
    drafts = len(curve.acceptance)
    at = ds.setup(model, system, precision, speculation=curve.trying((drafts,)))
    cut = Sharding(**degrees, draft_tokens=drafts)
    return at, cut, isl, osl, batch, StepTable.build(at, cut, max_sequences=64, max_context=8192, max_tokens=4096)


def test_steps_are_those_of_the_physics(case):
    """Of decodes alone, of chunks beside them, and of prompts, whose pass has the layers of the drafter."""
    at, cut, isl, _, _, table = case
    close = 0.01 if at.speculation.method == "draft_model" else 0.004  # tables are coarser for two models' steps
    for batch in (4, 16, 60):
        alone = decode_step(at, cut, batch=float(batch), context=900.0).time
        assert table.step_time(batch, 900.0) == pytest.approx(float(alone), rel=0.001)
        for tokens in (64, 512, 2048):
            chunk = Chunk(float(tokens), float(isl), past=0.0)
            past = max((isl - tokens / cut.dp_attn) / 2, 0.0)
            pieces = max(tokens // isl, cut.dp_attn)
            mixed = mixed_step(at, cut, batch=float(batch), context=900.0, chunk=chunk).time
            assert table.step_time(batch, 900.0, tokens, past, pieces) == pytest.approx(float(mixed), rel=close)
    whole = prefill_pass(at, cut, batch=float(cut.dp_attn), isl=isl).ftl
    assert table.pass_time(isl, prompts=cut.dp_attn)[0] == pytest.approx(float(whole), rel=0.01)


def test_without_drafts_a_table_is_that_of_the_model_with_a_drafter_in_its_prompts():
    """k = 0: decode steps are those without speculation, to the last bit; prompts pass a layer more."""
    mapping = Sharding(tp_attn=8, ep=8)
    plain, idle = (
        StepTable.build(ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation=said), mapping, max_sequences=16)
        for said in (None, "deepseek_r1_mtp")
    )
    assert idle.token_time(9, 777.0) == plain.step_time(9, 777.0)
    assert 1.0 < idle.pass_time(2048)[0] / plain.pass_time(2048)[0] < 1.03


def test_a_pair_of_pools(case):
    """B*AL/t_step tokens a second, although every cache, with that of the drafter, waits for its blocks and moves."""
    at, cut, isl, osl, batch, _ = case
    exact = decode_step(at, cut, batch=float(batch), context=isl + osl / 2).ttl
    busy = prefill_pass(at, cut, batch=1.0, isl=isl).busy
    senders = 1 + math.ceil(float(busy) * batch / (float(exact) * (osl - 1)))
    pools = {
        "prefill": (ds.Replicas(mapping=replace(cut, draft_tokens=0), instances=senders),),
        "decode": (ds.Replicas(mapping=cut, instances=1, batch=batch),),
    }
    served = ds.ServedDeployment(name="pools", gpus=(senders + 1) * int(cut.gpus), setup=at, **pools)
    many = 12 * batch
    trace = ds.Trace(arrival=np.zeros(many), input_tokens=np.full(many, isl), output_tokens=np.full(many, osl))
    options = RunOptions(concurrency=2 * batch + 8 * senders)
    found = ds.simulate(served, trace, "disaggregated", slo=ds.Slo(ttft=10.0, tpot=1.0), options=options).records
    generations = np.sort(found.requests.finish_s)[batch - 1 :: batch][2:-2]
    assert batch * rate(generations) == pytest.approx(batch / (float(exact) * (osl - 1)), rel=1.25 * BOUND)


def test_in_flight_batching(case):
    at, cut, isl, osl, batch, table = case
    options = Colocation(batch=(batch,), prefill_batch=(1,), ttl_measure="tpot")
    plain = replace(cut, draft_tokens=0)
    exact = colocated(at, plain, ds.lengths(isl, osl), ftl_limit=math.inf, options=options).iloc[0]
    assert exact.decode_draft_tokens == cut.draft_tokens
    limits = {"mode": Mode.PREFILL_FIRST, "token_budget": 10**6, "max_prompts": 1, "max_sequences": batch}
    spec = InstanceSpec(table=table, blocks=10**6, **limits)
    found = full_queue(spec, (0, isl, osl), residents=batch, requests=8 * batch, waiting=batch)
    assert_meets(found, batch, osl, cut.gpus, exact.ttl_s, exact.tokens_per_s_per_gpu)


def test_piggyback_with_a_chunk_in_every_step(case):
    """A step of AL tokens a sequence takes AL times the chunk; the budget holds the drafts, too.

    How many decode at a time is random now, around the batch of the table: there are slots for a few more.
    """
    at, cut, isl, osl, batch, table = case
    options = Colocation(batch=(batch,), every_step_mixed=True)
    plain = replace(cut, draft_tokens=0)
    exact = piggyback(at, plain, ds.lengths(isl, osl), ftl_limit=math.inf, options=options).iloc[0]
    chunk = isl * batch * exact.accepted_tokens_per_step / (osl - 1)
    assert chunk == pytest.approx(200)
    budget = batch * (1 + cut.draft_tokens) + 200
    spec = InstanceSpec(table=table, blocks=10**6, token_budget=budget, max_sequences=batch + 4 * cut.dp_attn)
    found = full_queue(spec, (0, isl, osl), residents=batch, requests=10 * batch, waiting=batch)
    assert_meets(found, batch, osl, cut.gpus, exact.ttl_mean_s, exact.tokens_per_s_per_gpu)


# --- whole runs ------------------------------------------------------------------------------------------------

EIGHTS = Sharding(tp_attn=8, ep=8)


def served(at, drafts=0, prefill=None):
    """Two instances of eight GPUs, apart and together."""
    cut = replace(EIGHTS, draft_tokens=drafts)
    one = (ds.Replicas(mapping=cut, instances=1),)
    first = one if prefill is None else (ds.Replicas(mapping=EIGHTS, instances=1, setup=prefill),)
    second = one if prefill is None else (ds.Replicas(mapping=cut, instances=1, setup=at),)
    both = () if prefill is not None else (ds.Replicas(mapping=cut, instances=2),)
    pools = {"prefill": first, "decode": second, "colocated": both}
    return ds.ServedDeployment(name="two", gpus=16, setup=at if prefill is None else None, **pools)


PLAIN, DRAFTED = (ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation=said) for said in (None, "deepseek_r1_mtp"))
TRACE = ds.synthetic_trace(rate=2.0, lengths=(1000, 200), requests=60, seed=3)


@pytest.mark.parametrize("policy", ["vllm", "arrow", "dopd"])
def test_policies_serve_with_drafts(policy):
    """Every request gets all its tokens; where decode has a first token of its own, that is one more."""
    found = ds.simulate(served(DRAFTED, 1), TRACE, policy).records
    assert np.isfinite(found.requests.finish_s).all()
    own_first = 0 if policy == "vllm" else len(TRACE)
    assert found.instances.decode_tokens.sum() == (TRACE.output_tokens - 1).sum() + own_first


def test_the_cache_of_a_drafter_moves_with_that_of_the_model():
    """A module of one layer beside 61, although nothing is drafted, and 14 kB of hidden state."""
    moved = [
        ds.simulate(served(at), TRACE, "disaggregated").records.requests.transfer_s.mean() for at in (PLAIN, DRAFTED)
    ]
    assert moved[1] / moved[0] == pytest.approx(62 / 61, rel=0.01)


def test_drafts_need_a_drafter_and_pools_the_same():
    with pytest.raises(InputError, match="1 draft tokens and its setup no speculation"):
        ds.simulate(served(PLAIN, 1), TRACE, "vllm")
    with pytest.raises(InputError, match=r"speculation is none in prefill, deepseek_r1_mtp in decode"):
        ds.simulate(served(DRAFTED, 1, prefill=PLAIN), TRACE, "disaggregated")


def test_dynaserve_splits_requests_with_drafts():
    """Every request gets all its tokens, in AL times fewer steps, and steps may take AL times the limit of a token."""
    pairs = {k: (ds.Replicas(mapping=replace(EIGHTS, draft_tokens=k), instances=2),) for k in (0, 1)}
    found = {}
    for at, k in ((PLAIN, 0), (DRAFTED, 1)):
        two = ds.ServedDeployment(name="two", gpus=16, setup=at, pairs=pairs[k])
        found[k] = ds.simulate(two, TRACE, "dynaserve", slo=ds.Slo(ttft=2.0, tpot=0.03)).records
        assert np.isfinite(found[k].requests.finish_s).all()
        moved = found[k].requests.segments > 1
        assert (
            found[k].instances.decode_tokens.sum()
            == (TRACE.output_tokens - 1).sum()
            + (found[k].requests.transferred_tokens[moved] == TRACE.input_tokens[moved]).sum()
        )
    mixed = (pairs[0][0], pairs[1][0])
    with pytest.raises(InputError, match="with 0 and 1 draft tokens"):
        ds.simulate(ds.ServedDeployment(name="four", gpus=32, setup=DRAFTED, pairs=mixed), TRACE, "dynaserve")
