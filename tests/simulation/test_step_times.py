"""Interpolated step times stay within 1 % of the physics, 1.5 % at worst."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_engine
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.layers import attention_cost
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import Tokens
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.step_physics import StepPhysics
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.physical_site import kv_blocks
from disagg_sim.simulation.site import ExpectedTraffic, prefill_rate
from disagg_sim.simulation.wishes import Limits

BOUND = 0.01
CASES = {
    "llama_tp4": ("llama_3_1_70b", "h100_sxm", "fp8", Sharding(tp_attn=4.0, tp_ffn=4.0)),
    "llama_tp2_pp2": ("llama_3_1_70b", "h100_sxm", "fp8", Sharding(tp_attn=2.0, tp_ffn=2.0, pp=2.0)),
    "windows_ep4": ("gpt_oss_120b", "h100_sxm", "bf16", Sharding(tp_attn=4.0, ep=4.0)),
    "mla_tep8": ("deepseek_r1", "h200_sxm", "fp8", Sharding(tp_attn=8.0, ep=8.0)),
    "mla_dep16": ("deepseek_r1", "h200_sxm", "fp8", Sharding(dp_attn=16.0, ep=16.0)),
}


#: Every mapping, and the overheads of every engine.
PAIRS = [*((name, None) for name in CASES), ("llama_tp2_pp2", "trtllm"), ("mla_dep16", "vllm_v0")]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def case(request):
    name, engine = request.param
    model, system, precision, mapping = CASES[name]
    at = setup(model, system, precision)
    at = at.changed(overheads=load_engine(engine)) if engine else at
    return at, mapping, StepTable.build(at, mapping)


@pytest.fixture
def rng():
    """Of each test its own: which tests run before, in the same process, changes no draw."""
    return np.random.default_rng(7)


def geometric(rng, low, high):
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))


def test_decode_steps(case, rng):
    at, mapping, table = case
    drawn = [(geometric(rng, 1, 257), geometric(rng, 16, 131_072)) for _ in range(150)]
    batch, context = np.array(drawn, dtype=float).T
    exact = decode_step(at, mapping, batch=batch, context=context).ttl
    assert [table.step_time(*each) for each in drawn] == pytest.approx(exact, rel=BOUND), drawn


def test_mixed_steps_of_one_piece_a_rank(case, rng):
    at, mapping, table = case
    ranks = int(mapping.dp_attn)
    drawn = [
        (batch, geometric(rng, 16, 32_768), geometric(rng, 1, 16_384 / ranks), past * geometric(rng, 16, 65_536))
        for batch, past in zip(rng.integers(1, 257, 150).tolist(), rng.integers(0, 2, 150).tolist(), strict=True)
    ]
    drawn_alone = [(0, 16, *rest) for _, _, *rest in drawn[:10]]  # without decodes
    for rows in (drawn, drawn_alone):
        batch, context, piece, past = np.array(rows, dtype=float).T
        step = mixed_step(at, mapping, batch=batch, context=context, chunk=Chunk(piece * ranks, piece + 2 * past))
        found = np.array([table.step_time(b, c, p * ranks, q, ranks) for b, c, p, q in rows])
        error = abs(found / step.time - 1.0)
        assert max(error) < 1.5 * BOUND, rows[int(np.argmax(error))]
        assert (error < BOUND).mean() > 0.98


def test_mixed_steps_of_several_prompts(case, rng):
    at, mapping, table = case
    ranks = int(mapping.dp_attn)
    drawn = []
    for batch, prompts in zip(rng.integers(1, 257, 100).tolist(), rng.integers(1, 17, 100).tolist(), strict=True):
        isl = geometric(rng, 16, 1024)
        drawn.append((batch, geometric(rng, 16, 32_768), max(min(prompts, 32_768 // (isl * ranks)), 1) * ranks, isl))
    batch, context, prompts, isl = np.array(drawn, dtype=float).T
    step = mixed_step(at, mapping, batch=batch, context=context, chunk=Chunk(prompts * isl, isl))
    found = [table.step_time(b, c, n * s, 0.0, n) for b, c, n, s in drawn]
    assert found == pytest.approx(step.time, rel=BOUND), drawn


def test_passes_of_whole_prompts(case, rng):
    at, mapping, table = case
    ranks = int(mapping.dp_attn)
    for _ in range(60):
        isl = geometric(rng, 16, 32_768 / ranks)
        exact = prefill_pass(at, mapping, batch=float(ranks), isl=isl)
        whole = (table.step_time(0, 0.0, isl * ranks, 0.0, ranks),) * 2
        found = whole if mapping.pp == 1 else table.pass_time(isl)
        assert found == pytest.approx((float(exact.ftl), float(exact.busy)), rel=BOUND), isl


def test_passes_cut_into_chunks():
    model, system, precision, mapping = CASES["llama_tp2_pp2"]
    at = setup(model, system, precision)
    table = StepTable.build(at, replace(mapping, chunk_tokens=1024))
    for isl in (500, 1024, 3000, 16_384, 50_000):
        exact = chunked_prefill_pass(at, mapping, batch=1.0, isl=isl, chunk_tokens=np.array(1024.0))
        assert table.pass_time(isl) == pytest.approx((float(exact.ftl), float(exact.busy)), rel=BOUND), isl


@pytest.mark.parametrize("chunk", [0, 2048])
def test_experts_of_a_pipeline_work_on_the_prompts_that_there_are(chunk):
    """Two attention ranks, four stages: one prompt takes less than two, as the experts have half of the tokens.

    Within 2.5 %: which stage is the slowest may depend on how many tokens its experts have, which a table cannot say.
    """
    at, mapping = setup("deepseek_r1", "h200_sxm", "fp8"), Sharding(dp_attn=2, ep=2, pp=4, chunk_tokens=chunk)
    table = StepTable.build(at, mapping, max_sequences=16)
    found = {}
    for prompts in (1, 2, 6):
        plain = {"batch": prompts, "isl": 4096}
        exact = (
            chunked_prefill_pass(at, mapping, chunk_tokens=chunk, **plain)
            if chunk
            else prefill_pass(at, mapping, **plain)
        )
        found[prompts] = table.pass_time(4096, prompts=prompts)
        assert found[prompts] == pytest.approx((float(exact.ftl), float(exact.busy)), rel=0.025), prompts
    assert found[1][1] < 0.9 * found[2][1]


def test_the_largest_prefill_keeps_the_limit_and_one_more_does_not(case, rng):
    """Of an equal piece on every rank."""
    *_, table = case
    ranks = table.ranks
    for _ in range(50):
        batch, context, past = int(rng.integers(0, 200)), geometric(rng, 16, 8192), geometric(rng, 16, 8192)
        limit = table.step_time(batch, context, geometric(rng, 64, 8192) // ranks * ranks, past, ranks) * 1.0001
        most = table.largest_prefill(batch, context, past, limit, most=32_768)
        assert table.step_time(batch, context, most, past, ranks) <= limit
        if most < 32_768:
            assert table.step_time(batch, context, most + ranks, past, ranks) > limit * 0.999


def test_a_table_is_built_in_half_a_second():
    """A fifth on a quiet core; two processes that share one take up to 1.7 times as long."""
    *named, mapping = CASES["mla_dep16"]
    at, start = setup(*named), time.process_time()
    StepTable.build(at, mapping)
    assert time.process_time() - start < 0.5


def test_an_instance_prefills_at_the_mean_past_of_its_chunks():
    """A step takes longer in line with its past: 16 chunks of 4096 take as long as 16 times the mean one."""
    model, system, precision, mapping = CASES["llama_tp2_pp2"]
    table = StepTable.build(setup(model, system, precision), mapping)
    chunks = [table.pass_time(4096, past, 1, packed=True)[1] for past in range(0, 65_536, 4096)]
    found = prefill_rate(table, Limits(token_budget=4096), ExpectedTraffic(prompt=65_536.0, output=100.0, tpot=1.0))
    assert 1.0 / found == pytest.approx(sum(chunks), rel=0.01)


def test_a_sequence_in_decode_holds_its_prompt_and_half_its_answer():
    assert ExpectedTraffic(prompt=1000.0, output=200.0, tpot=1.0).context == 1100.0


def test_an_affine_table_is_its_formula():
    table = StepTable.affine(step=0.5, per_sequence=0.25, per_context=1e-3, per_token=2e-3, max_sequences=64)
    for decodes, context, prefill in ((0, 0, 7), (3, 100, 0), (64, 5000, 5000), (10, 200_000, 40_000), (17, 33, 600)):
        exact = 0.5 + 0.25 * decodes + 1e-3 * decodes * context + 2e-3 * prefill
        assert table.step_time(decodes, context, prefill) == pytest.approx(exact, rel=1e-12)


def test_work_of_a_prompt_is_two_flop_a_weight_and_token():
    """70.6e9 weights, 1.05e9 of them the embedding, 1.05e9 the head; 4*8192*80 FLOP a query-key pair."""
    work = StepTable.build(setup("llama_3_1_70b", "h100_sxm", "fp8"), CASES["llama_tp4"][3]).work
    assert work.per_token == pytest.approx(2 * (70.55e9 - 2 * 1.05e9), rel=0.005)
    assert work.per_pair == pytest.approx(4 * 8192 * 80, rel=1e-6)
    assert work.per_emitted == pytest.approx(2 * 8192 * 128_256, rel=1e-6)


def test_prefill_in_halves_is_in_the_table():
    """SGLang over two nodes of H200: scores hide no exchange in the table and are started once: 2.1 %."""
    at, mapping = setup("deepseek_r1", "h200_sxm", "fp8", engine="sglang"), Sharding(dp_attn=16.0, ep=16.0)
    table, whole = StepTable.build(at, mapping), StepTable.build(at.changed(overheads=no_overlap(at)), mapping)
    for isl in (256, 1024, 4096, 16_384):
        exact = float(prefill_pass(at, mapping, batch=16.0, isl=isl).ftl)
        found = table.step_time(0, 0.0, 16 * isl, 0.0, 16)
        assert exact * (1 - 2.5 * BOUND) <= found <= exact * (1 + BOUND) + scores(at, isl)
        faster = found < whole.step_time(0, 0.0, 16 * isl, 0.0, 16)
        assert faster == (isl >= 1024), "halves read the weights twice"


def no_overlap(at):
    return replace(at.overheads, two_batch_overlap=False)


def scores(at, isl):
    tokens = Tokens(prompts=1.0, new=float(isl))
    return sum(
        n * float(attention_cost(kind.attention, at, 1.0, tokens, "auto").time) for kind, n in layers_of(at.model)
    )


def step_of(table, pieces, blocks=100_000):
    """Time of one step of pieces (new, past), as an instance takes it; all are queued at time 0. [s]"""
    fleet = Fleet([InstanceSpec(table=table, blocks=blocks, token_budget=sum(new for new, _ in pieces))])
    for new, past in pieces:
        fleet.submit(0, 0, (past, new, 1), 0.0)
    fleet.run_until(math.inf)
    return float(fleet.segments.finish_s.max())


def test_pieces_of_a_step_count_with_their_own_past():
    """1,900 new tokens and 148 after 100,000: not two pieces of 1,024 after the mean past of 7,900.

    The physics of each: its scores and values in a batch of its kind with the query-key pairs of both, over the
    number of that batch; and one launch of all cannot end before the longer of them alone.
    """
    at, mapping = setup("llama_3_1_70b", "h100_sxm", "fp8", engine="kernels"), Sharding(tp_attn=2.0, tp_ffn=2.0)
    table, physics = StepTable.build(at, mapping), StepPhysics(at, mapping)
    pieces = [(1900, 0), (148, 100_000)]
    pairs = [new * (past + new / 2) for new, past in pieces]

    def scores(prompts, new, past):
        each = physics.attention(np.array([float(new)]), np.array([float(past)]), np.array([prompts]))
        return float(each[0, 0, 0, 0]) * new

    together = sum(scores(sum(pairs) / own, *piece) for own, piece in zip(pairs, pieces, strict=True))
    alone = [scores(1.0, *piece) for piece in pieces]
    linear = float(physics.linear("prefill", np.zeros(1), np.array([2048.0]))[0])
    found = step_of(table, pieces)
    assert found == pytest.approx(linear + max(together, *alone), rel=0.02)
    assert linear + max(alone) <= found * 1.01 <= (linear + sum(alone)) * 1.02
    counted_as_equal = table.step_time(0, 0.0, 2048, sum(pairs) / 2048 - 512, 2)
    assert counted_as_equal < 0.8 * found


def test_equal_pieces_are_one_batch(case):
    _, mapping, table = case
    ranks = int(mapping.dp_attn)
    for count, new, past in ((1, 700, 0), (3, 512, 4096), (16, 100, 0)):
        found = step_of(table, [(new, past)] * (count * ranks))
        assert found == pytest.approx(table.step_time(0, 0.0, count * ranks * new, past, count * ranks), rel=1e-12)


R1, LLAMA = setup("deepseek_r1", "h200_sxm", "fp8", engine="sglang"), setup("llama_3_1_70b", "h200_sxm", "fp8")
ALONE, SHARED = (Sharding(tp_attn=8, tp_ffn=8, dcp=dcp) for dcp in (1, 8))


def test_steps_over_a_shared_cache_are_those_of_the_grid():
    batch, contexts = np.array([1.0, 16.0, 64.0]), np.array([8192.0, 131_072.0])
    played, alone = (StepPhysics(R1, each).decode(batch, contexts) for each in (SHARED, ALONE))
    for place, context in enumerate(contexts.tolist()):
        np.testing.assert_allclose(
            played[:, place], decode_step(R1, SHARED, batch=batch, context=context).ttl, rtol=1e-12
        )
    assert played[-1, -1] < 0.7 * alone[-1, -1]
    assert kv_blocks(R1, SHARED) / kv_blocks(R1, ALONE) == pytest.approx(8.0, rel=1e-3)


def test_a_prompt_that_gpus_share_adds_up_to_the_pass_of_the_grid():
    mapping, tokens = Sharding(tp_attn=4, tp_ffn=8, pcp=2), np.array([8192.0])
    physics = StepPhysics(LLAMA, mapping)
    linear = physics.linear("prefill", np.zeros(1), tokens)[0]
    scores = physics.attention(tokens, np.zeros(1), np.ones(1)).ravel()[0] * 8192.0
    assert linear + scores == pytest.approx(prefill_pass(LLAMA, mapping, batch=1, isl=8192.0).ftl, rel=0.02)
