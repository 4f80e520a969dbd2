"""What sharding and cutting must conserve: FLOP over ranks and chunks, and time where nothing is replicated."""

from dataclasses import replace

import numpy as np
import pytest
from cases import cached_setting, cases, mappings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.load import load_model
from disagg_sim.physics.blocks import layer_of, layers_of
from disagg_sim.physics.blocks.gqa import gqa_decode_work, gqa_prefill_work
from disagg_sim.physics.blocks.mla import MlaDims, mla_work
from disagg_sim.physics.cost import kernel_cost
from disagg_sim.physics.memory import decode_bytes
from disagg_sim.physics.passes.chunked import chunk_plan, chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.engine_time import stages_of
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.residents import decode_residents
from disagg_sim.physics.work import Tokens
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.workload.lengths import lengths

quick = settings(max_examples=60)
FORMS = ("auto", "naive", "absorbed")


def layer_flops(model, precision, tp, tokens: Tokens) -> dict[str, float]:
    """FLOP of one GPU in one layer of each kind, routed experts apart. [FLOP]"""
    found: dict[str, float] = {}
    for layer, _ in layers_of(model):
        ops = layer.attention.projections(model, precision, tp, tokens.linear)
        ops += layer.attention.decode(precision, tp, tokens, "auto")[0]
        ops += layer.ffn.local(model, precision, tp, tokens.linear)
        ops += layer.ffn.beside(model, precision, tp, tokens.linear)
        for op in ops:
            found[op.name] = found.get(op.name, 0.0) + float(op.work.flops)
    return found


@pytest.mark.parametrize("tp", [2, 8, 32])
@pytest.mark.parametrize("name", ["llama_3_1_70b", "deepseek_r1", "gpt_oss_120b", "glm_4_5"])
def test_flops_over_tp_ranks_are_the_unsharded_ones_and_the_replicated_parts(name, tp):
    """Replicated: MLA's down projections, the router, and KV heads above n_kv (each rank computes one whole)."""
    at = cached_setting(name, "h100_sxm", "ideal")
    model, precision = at.model, at.precision
    tokens = Tokens(decodes=5.0, context=700.0, emitted=5.0)
    whole, rank = (layer_flops(model, precision, n, tokens) for n in (1.0, float(tp)))
    for operator, flops in whole.items():
        copies = 0.0
        if operator in ("q_a, kv_a", "router"):
            copies = (tp - 1) * flops
        elif operator == "qkv":
            for kind in model.kinds:
                a = kind.attention
                assert isinstance(a, GqaAttention)
                copies += 2 * 5 * model.hidden * 2 * a.head_dim * max(tp - a.kv_heads, 0)
        assert tp * rank[operator] == pytest.approx(flops + copies, rel=1e-12), operator


@quick
@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.sampled_from([0, 128]))
def test_flops_over_chunks_are_those_of_the_whole_prompt(chunks, window):
    """GQA loses nothing; MLA `cached` and `absorbed` neither; `naive` adds the re-projection of every past."""
    chunks, isl = np.array(chunks, dtype=float), float(sum(chunks))
    past = np.cumsum(chunks) - chunks
    sizes = {"q_heads": 16, "kv_heads": 4, "head_dim": 64, "window": window, "cache_bytes": 1.0, "sequences": 2.0}
    cut = gqa_prefill_work(new=chunks, past=past, **sizes)
    whole = gqa_prefill_work(new=isl, past=0.0, **sizes)
    assert np.sum(cut.flops) == pytest.approx(whole.flops, rel=1e-12)
    dims = MlaDims(heads=16.0, kv_rank=512, nope=128, rope=64, value=128, cache_bytes=1.0)
    for form, extra in (("cached", 0.0), ("absorbed", 0.0), ("naive", 2 * 512 * 16 * 256 * float(np.sum(past)))):
        cut = mla_work(form, dims, sequences=1.0, new=chunks, past=past)
        whole = mla_work(form, dims, sequences=1.0, new=isl, past=0.0)
        assert np.sum(cut.flops) == pytest.approx(whole.flops + extra, rel=1e-12)


def test_naive_and_absorbed_chunks_cost_the_same_at_171_tokens():
    """640*n_q*S*C + 262,144*n_q*C against 2,176*n_q*S*C, past work alone: equal at S = 262,144/1,536."""
    dims = MlaDims(heads=128.0, kv_rank=512, nope=128, rope=64, value=128, cache_bytes=1.0)

    def past_flops(form: str, new: float) -> float:
        with_past, without = (mla_work(form, dims, sequences=1.0, new=new, past=c).flops for c in (8192.0, 0.0))
        return float(with_past - without)

    assert past_flops("naive", 170.0) > past_flops("absorbed", 170.0)
    assert past_flops("naive", 171.0) < past_flops("absorbed", 171.0)


def test_latent_and_grouped_attention_agree_when_their_products_match():
    """n_kv = n_q and d_n + d_r + d_v = 2h: the same FLOP and, up-projected, the same cache traffic.

    Absorbed without rotary part is multi-query attention of head size r_kv whose keys are its values: half the bytes.
    """
    n, h, new, past = 16, 64, 300.0, 200.0
    dims = MlaDims(heads=float(n), kv_rank=256, nope=h, rope=0, value=h, cache_bytes=2.0)
    gqa = gqa_prefill_work(
        sequences=3.0, new=new, past=past, q_heads=n, kv_heads=n, head_dim=h, window=0, cache_bytes=2.0
    )
    kept = mla_work("cached", dims, sequences=3.0, new=new, past=past)
    assert kept.flops == gqa.flops
    assert kept.hbm_bytes == gqa.hbm_bytes + 3 * new * 256 * 2  # the latent is written too
    wide = gqa_decode_work(sequences=3.0, context=past, q_heads=n, kv_heads=1, head_dim=256, window=0, cache_bytes=2.0)
    latent = mla_work("absorbed", dims, sequences=3.0, new=1.0, past=past - 1)
    assert latent.flops == wide.flops
    assert 3 * past * dims.latent * 2.0 == wide.hbm_bytes / 2


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_with_infinite_links_sharded_parts_take_one_nth(tp):
    """Ideal decode of one sequence is all bytes: T(n) = T(1)/n plus (1 - 1/n) of what every rank repeats.

    Repeated per layer: the inputs of qkv and of gate and up, the outputs of o and down, 16*d of the
    elementwise kernels; once: the head's input and the embedding's row.
    """
    at = cached_setting("llama_3_1_70b", "gb200_nvl72", "ideal")
    free = at.changed(system=replace(at.system, nvlink_bandwidth=np.inf))
    alone, shared = (
        float(decode_step(free, Sharding(tp_attn=n, tp_ffn=n), batch=1.0, context=9000.0).ttl) for n in (1.0, float(tp))
    )
    d = at.model.hidden
    repeated = 80 * d * (0.5625 + 2 + 0.5625 + 2 + 16) + d * 2 + d * 4
    expected = alone / tp + (1 - 1 / tp) * repeated / at.system.hbm_bandwidth
    assert shared == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tp", [2, 8])
def test_compute_bound_gemms_and_attention_take_one_nth(tp):
    at = cached_setting("llama_3_1_70b", "h100_sxm", "ideal")
    layer, tokens = layer_of(at.model.kinds[0]), Tokens(prompts=1.0, new=32_768.0, emitted=1.0)
    times = []
    for n in (1.0, float(tp)):
        ops = layer.attention.projections(at.model, at.precision, n, 32_768.0)
        ops += layer.attention.prefill(at.precision, n, tokens, "auto")[0]
        ops += layer.ffn.local(at.model, at.precision, n, 32_768.0)
        times.append(sum(float(kernel_cost(op, at).time) for op in ops if op.kind != "all_reduce"))
    assert times[1] == pytest.approx(times[0] / tp, rel=1e-12)


#: Models that have every kind of attention between them.
EVERY_KIND = (
    *("llama_3_1_70b", "deepseek_r1", "deepseek_v3_2", "deepseek_v4_flash", "minimax_m3", "gpt_oss_120b"),
    *("kimi_linear_48b_a3b", "qwen3_next_80b_a3b", "nemotron_3_nano_30b_a3b"),
)
PASSES = {
    "decode": lambda *given, batch, isl, past, form, chunk: decode_step(*given, batch=batch, context=isl),
    "prefill": lambda *given, chunk, form, **more: prefill_pass(*given, mla_form=form, **more),
    "chunks": lambda *given, chunk, form, **more: chunked_prefill_pass(
        *given, chunk_tokens=chunk, mla_form=form, **more
    ),
    "mixed": lambda *given, batch, isl, past, form, chunk: mixed_step(
        *given, batch=batch, context=isl, chunk=Chunk(chunk * given[1].dp_attn, isl, past=past), mla_form=form
    ),
}
work = st.tuples(*map(st.sampled_from, ([1.0, 3.0, 64.0, 500.0], [600.0, 3000.0, 20_000.0], [0.0, 500.0])))
place = st.integers(0, 10_000)


@pytest.mark.parametrize("kind", PASSES)
@quick
@given(cases(models=EVERY_KIND), place, st.tuples(work, work), st.sampled_from(FORMS), st.sampled_from([128.0, 2048.0]))
def test_points_of_unlike_work_are_timed_as_each_alone(kind, case, other, columns, form, chunk):
    """With a past and without, of one chunk and of many, of more decodes and of more prefill, on unlike mappings."""
    at, mapping = case
    table = mappings_of(at.model.name, at.system.name)
    rows = [mapping, table[other % len(table)]]

    def timed(by, *work):
        work = dict(zip(("batch", "isl", "past"), work, strict=True))
        done = PASSES[kind](at, by, **work, form=form, chunk=chunk)
        return np.array([np.broadcast_to(each, np.shape(done[0])) for each in (done[0], *done.sums)])

    found = timed(Sharding.stack(rows).for_grid(), *np.array(columns).T[:, None, :])
    alone = [[timed(row, *each) for each in columns] for row in rows]
    np.testing.assert_allclose(np.moveaxis(found, 0, -1), alone, rtol=1e-12)


@pytest.mark.parametrize(
    ("model", "system"),
    [("deepseek_r1", "gb200_nvl72"), ("gpt_oss_120b", "h100_sxm"), ("llama_3_1_70b", "a100_sxm_80gb")],
)
@pytest.mark.parametrize("profile", ["ideal", "measured"])
def test_grid_points_equal_single_calls(model, system, profile):
    """Some rows at every batch: the blocks of a grid and a call with plain numbers give the same time."""
    at = cached_setting(model, system, profile)
    table = mappings_of(model, system)
    table = table[np.arange(0, len(table), max(1, len(table) // 12))]
    batch = [1, 3, 7, 64, 500]
    args = {"batch": batch}
    decode = decode_grid(at, table, lengths(3000, 500), **args)
    prefill = prefill_grid(at, table, lengths(3000, 500), chunk_tokens=[512], mla_form="naive", **args)
    for row, mapping in enumerate(table):
        for column, b in enumerate(batch):
            one = decode_step(at, mapping, batch=float(b), context=3250.0)
            assert decode.latency[row, column] == pytest.approx(float(one.ttl), rel=1e-12)
            held = decode_bytes(at, mapping, float(b), cached=decode_residents(3000, 500))
            assert decode.memory_bytes[row, column] == pytest.approx(float(held), rel=1e-12)
    for row in range(len(prefill.mappings)):
        mapping, chunk = prefill.mappings[row], float(prefill.mappings.chunk_tokens[row])
        for column, b in enumerate(batch):
            if chunk:
                one = chunked_prefill_pass(
                    at, mapping, batch=float(b), isl=3000.0, chunk_tokens=chunk, mla_form="naive"
                )
            else:
                one = prefill_pass(at, mapping, batch=float(b), isl=3000.0, mla_form="naive")
            assert prefill.latency[row, column] == pytest.approx(float(one.ftl), rel=1e-12)
            assert prefill.request_rate[row, column] == pytest.approx(b / float(one.interval), rel=1e-12)


def test_a_prompt_shorter_than_its_chunk_is_one_chunk():
    plan = chunk_plan(300, 512)
    assert [float(x) for x in plan] == [1, 300, 300]
    assert [float(x) for x in chunk_plan(1024, 512)] == [2, 512, 512]


@pytest.mark.parametrize("profile", ["ideal", "measured"])
@pytest.mark.parametrize("chunk", [400, 1000])
def test_chunked_pipeline_is_a_flow_shop(profile, chunk):
    """Chunk i may start on stage s when stage s - 1 has handed it over and stage s has finished chunk i - 1.

    The recursion is walked by hand with the times of mixed steps of a quarter of the layers; a
    vocabulary of one word leaves the head out.
    """
    at = replace(cached_setting("llama_3_1_70b", "gb200_nvl72", profile), overheads=None)
    model = replace(at.model, vocab=1)
    quarter = replace(model, layers=model.layers[:20])
    isl, stages = 4000, 4
    chunks = isl // chunk

    def pass_of(tokens: int) -> float:
        """Busy time of one stage for the first ``tokens`` tokens, without host. [s]"""
        done = chunked_prefill_pass(
            replace(at, model=quarter), Sharding(), batch=1.0, isl=float(tokens), chunk_tokens=float(chunk)
        )
        return float(done.busy) - at.profile.host

    upto = [0.0] + [pass_of(chunk * (i + 1)) for i in range(chunks)]
    times = np.diff(upto)
    message = chunk * 8192 * 2 / at.system.nvlink_bandwidth + at.profile.p2p_latency_inside
    done = np.zeros((stages, chunks))
    for s in range(stages):
        for i in range(chunks):
            ready = done[s - 1, i] + message if s else 0.0
            free = done[s, i - 1] if i else 0.0
            done[s, i] = max(ready, free) + times[i]
    whole = chunked_prefill_pass(
        replace(at, model=model), Sharding(pp=float(stages)), batch=1.0, isl=float(isl), chunk_tokens=float(chunk)
    )
    # Small change: the one-word heads, and the embedding (measured: 20 us) that only the first stage runs.
    assert float(whole.ftl) - at.profile.host == pytest.approx(done[-1, -1], rel=2e-3)
    assert float(whole.busy) - at.profile.host == pytest.approx(times.sum(), rel=5e-4)


def test_stages_hold_all_layers_and_the_long_ones_come_first():
    """61 layers of R1 on 32 stages: 29 stages of two and 3 of one; the speed-up is at most 30.5."""
    pattern = (0,) * 3 + (1,) * 58
    worst = stages_of(pattern, 2, 32)
    assert max(sum(stage.layers) for stage in worst) == 2
    assert any(stage.first for stage in worst)
    assert [sum(stage.layers) for stage in worst if stage.last] == [1]  # the head stands on a short one
    assert all(sum(stage.layers) == 61 for stage in stages_of(pattern, 2, 1))
    assert {sum(stage.layers) for stage in stages_of((0,) * 80, 1, 4)} == {20}


@pytest.mark.parametrize(("longer", "most"), [("first", (15, 13)), ("before_last", (16, 16)), ("last", (16, 16))])
def test_the_odd_layer_of_r1_is_one_of_three_dense_ones_only_where_the_first_stage_has_it(longer, most):
    """61 layers, 3 dense, on four stages: 16 layers of experts in one, or 15 and, beside the dense ones, 13."""
    stages = stages_of((0,) * 3 + (1,) * 58, 2, 4, longer)
    assert max(stage.layers[1] for stage in stages) == most[0]
    assert max(stage.layers[1] for stage in stages if sum(stage.layers) == 16) == most[1]
    assert [stage.last for stage in stages if sum(stage.layers) == 16][-1] == (longer == "last")


@pytest.mark.parametrize("tp", [1, 4, 8, 16])
def test_cache_duplication(tp):
    """A sequence takes max(1, tp/n_kv) times its cache of all GPUs together."""
    model = load_model("llama_3_1_70b")
    at = cached_setting("llama_3_1_70b", "gb200_nvl72", "ideal")
    mapping = Sharding(tp_attn=float(tp), tp_ffn=float(tp))
    # the cache of one more sequence of 8192+2 tokens on each of tp GPUs
    more, less = (decode_bytes(at, mapping, b, cached=decode_residents(8192, 2)) for b in (2.0, 1.0))
    live = 2 * (4 * 8192 + max(2 * 28_672, 80 * 128) / tp) + model.vocab * 4 / tp + (tp > 1) * 2 * 2 * 8192
    assert tp * float(more - less - live) == pytest.approx(8194 * 163_840 * max(1, tp / 8), rel=1e-3)
