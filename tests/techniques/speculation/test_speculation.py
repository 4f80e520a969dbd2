"""Speculative decoding: counts by hand, limits, and what a search over draft tokens must keep."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_speculation
from disagg_sim.facts.speculation import stated_speculation
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.memory import decode_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import overlaps, prefill_pass
from disagg_sim.physics.residents import colocated_load, decode_residents, prefilling_in_pieces, prompt_residents
from disagg_sim.physics.setup import accepted_length
from disagg_sim.physics.work import Operator, Tokens, decode_pairs
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.techniques.speculation.facts_asked import measured_speculation
from disagg_sim.techniques.speculation.physics import joining_bytes
from disagg_sim.workload.lengths import lengths

CURVES = ds.list_specs("speculation")
WIDE = Sharding(dp_attn=8, ep=8)


def drafted(model: str, speculation: Any = "mtp 0.8 0.6 0.45", system: str = "h200_sxm", **options: Any) -> ds.Setup:
    return ds.setup(model, system, "fp8", profile=options.pop("profile", "ideal"), speculation=speculation, **options)


def operators_of(at: ds.Setup, mapping: Sharding, batch: float, context: float) -> list[Operator]:
    """Every operator that a decode step times, in order."""
    seen: list[Operator] = []

    def record(op: Operator, cost: Any) -> Any:
        seen.append(op)
        return cost

    decode_step(replace(at, rates=replace(at.rates, adjust=record)), mapping, batch=batch, context=context)
    return seen


def decode_operators(model: str, queries: float, decodes: float = 2.0, context: float = 100.0) -> dict[str, Operator]:
    at = ds.setup(model, "h200_sxm", "fp8", profile="ideal")
    tokens = Tokens(decodes=decodes, context=context, queries=queries)
    layer = next(layer for layer, _ in layers_of(at.model) if layer.attention.present)
    (operators,) = layer.attention.decode(at.precision, 1, tokens, "auto")
    return {op.name: op for op in operators}


class TestCounts:
    def test_grouped_queries_read_the_cache_once_for_all_queries_of_a_sequence(self):
        work = decode_operators("llama_3_1_70b", queries=4.0)["decode attention"].work
        pairs = 100 + 101 + 102 + 103  # of four queries, the first of which sees 100 keys
        assert work.flops == 2 * pairs * 4 * 64 * 128
        assert work.hbm_bytes == 2 * 103 * 2 * 8 * 128  # the last query sees 103 keys of 8 heads, one byte each

    def test_latent_attention_does_twice_the_work_on_the_same_bytes(self):
        one, two = (decode_operators("deepseek_r1", q, context=16384.0)["decode attention"].work for q in (1.0, 2.0))
        assert one.flops == 2 * 16384 * 2 * 128 * (576 + 512)
        assert two.flops == 2 * (16384 + 16385) * 2 * 128 * (576 + 512)
        assert (one.hbm_bytes, two.hbm_bytes) == (2 * 16384 * 576, 2 * 16385 * 576)

    @given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 200))
    def test_pairs_in_a_window_are_the_sum_over_queries(self, queries, context, window):
        seen = [min(context + i, window) for i in range(queries)]
        assert decode_pairs(float(context), float(queries), window) == sum(seen)
        assert decode_pairs(float(context), np.float64(queries)) == sum(context + i for i in range(queries))

    def test_a_state_is_read_once_and_written_after_every_query(self):
        one, four = (decode_operators("qwen3_5_397b_a17b", q)["recurrent step"].work for q in (1.0, 4.0))
        state = 64 * 128 * 128 * 4  # value heads, key and value size, fp32
        assert one == (2 * 7 * 64 * 128 * 128, 2 * 2 * state)
        assert four == (4 * one.flops, 2 * 5 * state)

    def test_each_query_of_sparse_attention_chooses_its_own_tokens(self):
        """An index scores all keys for each query and reads them once; 2048 tokens are chosen each."""
        ops = {q: decode_operators("deepseek_v3_2", q, context=32768.0) for q in (1.0, 3.0)}
        assert ops[3.0]["decode attention"].work.flops == 3 * ops[1.0]["decode attention"].work.flops
        assert ops[3.0]["decode attention"].work.hbm_bytes == 3 * ops[1.0]["decode attention"].work.hbm_bytes
        index = ops[3.0]["index"].work.flops / ops[1.0]["index"].work.flops
        assert index == pytest.approx((32768 + 32769 + 32770) / 32768)
        assert ops[3.0]["index"].work.hbm_bytes / ops[1.0]["index"].work.hbm_bytes == pytest.approx(32770 / 32768)

    def test_few_tokens_are_read_once_by_all_queries_of_sparse_attention(self):
        """Two queries that see 1000 and 1001 keys both choose all of them."""
        one, two = (decode_operators("deepseek_v3_2", q, context=1000.0)["decode attention"].work for q in (1.0, 2.0))
        assert two.hbm_bytes / one.hbm_bytes == pytest.approx(1001 / 1000)

    def test_a_step_verifies_all_positions_and_drafts_one_by_one(self):
        """R1 at TP 8, 16 sequences, 3 drafts: rows of the projections, of the head, of the passes of its module."""
        at, tp = drafted("deepseek_r1"), Sharding(tp_attn=8, ep=8, draft_tokens=3)
        found = operators_of(at, tp, 16.0, 4096.0)
        rows = {name: [float(op.shape[0]) for op in found if op.name == name] for name in ("o", "head", "router")}
        joined = [op for op in found if op.name == "join hidden states"]
        assert rows["o"] == [64.0, 64.0, 16.0]  # dense and MoE layers verify alike, then the module, first and later
        assert rows["head"] == [64.0, 16.0, 16.0]
        assert rows["router"] == [64.0, 64.0, 16.0]
        assert [op.shape for op in joined] == [(64.0, 7168, 14336), (16.0, 7168, 14336)]
        picked = [float(op.size) for op in found if op.kind == "experts"]
        assert picked == [64.0, 64.0, 16.0]

    def test_an_eagle_head_has_a_layer_and_a_vocabulary_of_its_own(self):
        at = drafted("kimi_k2_5", "kimi_k2_5_eagle3_thinking")
        found = operators_of(at, Sharding(dp_attn=8, ep=8, draft_tokens=2), 64.0, 4096.0)
        joined = [op.shape for op in found if op.name == "join hidden states"]
        assert joined == [(24.0, 7168, 3 * 7168)]  # hidden states of three layers, once a step, for 3 x 8 tokens
        beside = [op.shape[:2] for op in found if op.name == "qkv of the embedding"]
        assert beside == [(24.0, 3 * 64 * 128), (8.0, 3 * 64 * 128)]
        assert sum(op.table == "gqa" for op in found) == 2
        once, cut = 3 * 7168**2, (3 * 64 * 128 + 163_840) * 7168  # joined on every GPU; qkv of the embedding, and head
        assert joining_bytes(at, 4.0) == 2 * (once + cut / 4)

    def test_a_drafter_lies_in_memory_with_a_layer_of_cache_and_rows_of_logits(self):
        """R1 on one GPU each of 8: a layer of experts, 2d^2, a latent a token, and three times the live tokens."""
        at, resident = drafted("deepseek_r1"), decode_residents(1000, 1000)
        plain = decode_bytes(replace(at, speculation=None), WIDE, 64.0, cached=resident)
        deviations = at.profile.resident_deviations
        tokens = 8 * 1500 + deviations * np.sqrt(8.0) * 1000 / np.sqrt(12.0)
        moe = at.with_draft_layers.model.layers[-1]
        experts = 256 * 3 * 7168 * 2048 / 8
        rest = moe.attention.matmul_params(7168) + 3 * 7168 * 2048  # attention and the shared expert, whole, in fp8
        router = 7168 * 256 + 256
        layer = experts + rest + 2 * (router + moe.attention.other_params(7168) + 2 * 7168)
        caches = 576 * tokens + 62 * 576 * 2 * 8  # of the layer, and two more places of 8 sequences in all layers
        logits = 2 * 8 * 129280 * 4
        one = decode_bytes(at, replace(WIDE, draft_tokens=2), 64.0, cached=resident)
        live = 2 * 8 * 2 * 4 * 7168  # residual of 16 more tokens
        more = float(one - plain) - (layer + 2 * 2 * 7168**2 + caches + logits + live)
        assert 0 < more < 0.2e9  # what is left are wider activations and buffers of those tokens

    def test_tokens_that_are_live_are_those_that_every_sequence_verifies(self):
        """8 of 64 sequences on a rank, three tokens each, beside 256 of a piece; on all eight ranks 64 and 2048."""
        at, wide = drafted("deepseek_r1"), replace(WIDE, draft_tokens=2)
        pieces = prefilling_in_pieces(wide, 8, prompt_residents(1000), 2048, 64)
        load = colocated_load(at, wide, 64, cached=decode_residents(1000, 1000), prefilling=pieces)
        assert (float(load.live), float(load.live_total)) == (3 * 8 + 256, 3 * 64 + 2048)

    def test_states_are_kept_for_roll_back(self):
        at, resident = drafted("qwen3_5_397b_a17b"), decode_residents(100, 2)
        held = [decode_bytes(at, replace(WIDE, draft_tokens=k), 64.0, cached=resident) for k in (1, 2)]
        state = at.model.state_bytes
        assert 8 * state < float(held[1] - held[0]) < 8 * state * 1.1

    def test_what_is_handed_over_grows_by_a_layer_and_a_hidden_state(self):
        at = drafted("deepseek_r1")
        assert at.handed_bytes(1000) == 62 * 576 * 1000 + 2 * 7168
        eagle = drafted("kimi_k2_5", "kimi_k2_5_eagle3_thinking")
        assert eagle.handed_bytes(1000) == 61 * 576 * 1000 + 2 * 64 * 128 * 1000 + 3 * 2 * 7168

    def test_prompts_pass_the_draft_layer(self):
        """One layer more of 62, the last of the same kind: between nothing and 1/58 of the pass more."""
        at = drafted("deepseek_r1")
        plain, longer = (
            prefill_pass(each, WIDE, batch=8, isl=4096).ftl for each in (replace(at, speculation=None), at)
        )
        assert plain < longer < plain * (1 + 1 / 58)


class TestLimits:
    @pytest.mark.parametrize("model", ["llama_3_1_70b", "deepseek_r1", "gpt_oss_120b", "qwen3_5_397b_a17b"])
    def test_no_drafts_are_a_decode_step_without_speculation(self, model):
        at = drafted(model, profile="measured")
        batch = np.array([[1.0, 64.0, 500.0]])
        mapping = Sharding.stack([Sharding(), Sharding(tp_attn=2, tp_ffn=2)]).for_grid()
        plain = decode_step(replace(at, speculation=None), mapping, batch=batch, context=3000.0)
        none = decode_step(at, mapping, batch=batch, context=3000.0)
        assert (plain.ttl == none.ttl).all()
        assert (plain.time == none.time).all()

    def test_certain_acceptance_gives_k_plus_one_times_the_tokens_of_a_step(self):
        at = drafted("llama_3_1_70b", stated_speculation("mtp", (1.0,) * 5), profile="measured")
        for k in range(6):
            step = decode_step(at, Sharding(tp_attn=8, tp_ffn=8, draft_tokens=k), batch=64.0, context=4096.0)
            assert step.time / step.ttl == pytest.approx(k + 1, rel=1e-14)


class TestSearch:
    def test_the_grid_takes_the_fastest_number_of_drafts_that_fits(self):
        """Against every number by itself, point by point."""
        at, lens = drafted("deepseek_r1", profile="measured"), lengths(4096, 1024)
        tables = [Sharding(dp_attn=8, ep=8), Sharding(tp_attn=8, ep=8)]
        batch = [1, 8, 64, 256, 1024, 4096]
        best = decode_grid(at, tables, lens, batch=batch)
        each = [
            decode_grid(replace(at, speculation=at.speculation.trying((k,))), tables, lens, batch=batch)
            for k in range(4)
        ]
        ttl = np.stack([np.where(grid.feasible, grid.latency, np.inf) for grid in each])
        assert (best.feasible == np.isfinite(ttl.min(axis=0))).all()
        assert (best.latency == ttl.min(axis=0))[best.feasible].all()
        assert (best.drafts == ttl.argmin(axis=0))[best.feasible].all()
        assert len(np.unique(best.drafts[best.feasible])) > 1

    def test_speculation_on_and_off_share_every_number_where_no_draft_pays(self):
        at, lens = drafted("deepseek_r1", stated_speculation("mtp", (0.0,)), profile="measured"), lengths(4096, 1024)
        drafted_grid = decode_grid(at, WIDE, lens, batch=[8, 64])
        plain = decode_grid(replace(at, speculation=None), WIDE, lens, batch=[8, 64])
        assert (drafted_grid.latency == plain.latency).all()
        assert (drafted_grid.memory_bytes == plain.memory_bytes).all()

    def test_pools_of_other_drafters_do_not_match(self):
        at, lens = drafted("deepseek_r1"), lengths(1024, 128)
        plain = replace(at, speculation=None)
        with pytest.raises(InputError, match=r"differ in speculation: none and mtp 0\.8 0\.6 0\.45"):
            ds.disaggregated(prefill_grid(plain, WIDE, lens, batch=[1]), decode_grid(at, WIDE, lens, batch=[8]))

    def test_prompts_in_halves_over_nodes_know_no_drafts_of_decode(self):
        """An instance of both phases that drafts in decode prefills as one that does not."""
        at, wide = drafted("deepseek_r1", profile="measured", engine="sglang"), Sharding(dp_attn=16, ep=16)
        assert overlaps(at, wide)
        one, other = (prefill_pass(at, replace(wide, draft_tokens=k), batch=16.0, isl=2048.0).ftl for k in (0, 2))
        assert float(one) == float(other)

    def test_drafts_need_a_drafter(self):
        at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
        with pytest.raises(InputError, match="2 draft tokens and its setup no speculation"):
            decode_step(at, Sharding(draft_tokens=2), batch=8.0, context=100.0)


class TestCurves:
    @pytest.mark.parametrize("name", CURVES)
    def test_a_shipped_curve_is_the_concave_one_nearest_to_what_was_measured(self, name):
        curve = load_speculation(name)
        measured = np.array(curve.measured_lengths) - 1.0
        places = np.arange(1, measured.size + 1)
        parts, _ = nnls(np.minimum(places[:, None], places[None, :]).astype(float), measured)
        assert curve.acceptance == pytest.approx(np.cumsum(parts[::-1])[::-1].tolist(), abs=5e-5)
        assert np.abs(accepted_length(curve, places) - 1.0 - measured).max() < 0.1  # the noise of one run

    def test_no_curve_is_no_default(self):
        with pytest.raises(
            InputError, match=r"no acceptance was measured on llama_3_1_8b.*deepseek_r1_mtp.*state your own"
        ):
            measured_speculation("llama_3_1_8b")
        with pytest.raises(InputError, match=r"has 2 curves of acceptance: .*name one, or state your own"):
            measured_speculation("qwen3_5_397b_a17b")

    @pytest.mark.parametrize(
        ("word", "message"),
        [
            ("mtp 0.6 0.8", "acceptance 0.6, 0.8 rises"),
            ("mtp 1.2", r"acceptance \[1.2\] is out of range"),
            ("mtp many", "is no method and its acceptance, such as 'mtp 0.8 0.6'"),
            ("medusa 0.8", "method 'medusa' is not timed; allowed: mtp, eagle3, draft_model"),
            ("eagle3 0.8", "method eagle3 needs key 'layer'"),
            ("mtp" + " 0.1" * 9, "9 positions; allowed: up to 8"),
        ],
    )
    def test_a_wrong_statement_is_refused_in_one_line(self, word, message):
        with pytest.raises(InputError, match=message):
            load_speculation(word)
