"""Prefix reuse in the serving modes: rates, memory, hand-over, and rows that are timed again."""

from itertools import pairwise

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import Origin, rescore
from disagg_sim.facts.traffic import BetaShare, ConstantShare, Reuse
from disagg_sim.serving.points import THROUGHPUT

MAPPINGS = [ds.Mapping(tp_attn=8, tp_ffn=8), ds.Mapping(tp_attn=4, tp_ffn=4, pp=2)]


@pytest.fixture(scope="module")
def at():
    return ds.setup("llama_3_1_70b", "h200_sxm", "fp8")


def grids(at, found):
    prefill = ds.prefill_grid(at, MAPPINGS, found, batch=[1, 4], chunk_tokens=[256])
    return prefill, ds.decode_grid(at, MAPPINGS, found, batch=[16, 64])


def test_a_larger_share_is_prefilled_faster_and_in_less_memory(at):
    shares = (0.0, 0.5, 0.9, 0.98)
    found = [grids(at, ds.lengths(32_768, 512, cached=share))[0] for share in shares]
    for before, after in pairwise(found):
        assert (after.request_rate > before.request_rate).all()
        assert (after.latency < before.latency).all()
        assert (after.memory_bytes <= before.memory_bytes).all()  # live activations are those of new tokens
    assert {grid.kv_bytes_per_request for grid in found} == {found[0].kv_bytes_per_request}


def test_what_decode_holds_takes_no_link(at):
    reuse = Reuse(share=ConstantShare(share=0.9), in_decode=1.0)
    all_sent, rest_sent = (grids(at, ds.lengths(32_768, 512, cached=each))[1] for each in (0.9, reuse))
    assert rest_sent.kv_bytes_per_request / all_sent.kv_bytes_per_request == pytest.approx(3280 / 32_768)
    assert (rest_sent.latency == all_sent.latency).all()


def test_the_link_sees_more_per_unit_of_prefill(at):
    """The hit does not reduce the transfer: ten times the bytes per unit of prefill work, in the limit of GEMMs."""
    cold, warm = (
        ds.disaggregated(*grids(at, ds.lengths(32_768, 512, cached=share)), gpu_cap=256) for share in (0.0, 0.9)
    )
    egress = "kv_egress_bytes_per_s_per_gpu"
    assert 4 < warm[egress].iloc[0] / cold[egress].iloc[0] < 10
    assert warm["ctx_gen_gpu_ratio"].iloc[0] < cold["ctx_gen_gpu_ratio"].iloc[0] / 4


@pytest.mark.parametrize("share", [0.9, BetaShare(alpha=8.0, beta=2.0)])
def test_rows_of_every_mode_are_timed_again(at, share):
    reuse = Reuse(share=ConstantShare(share=share) if isinstance(share, float) else share)
    found, options = ds.lengths(16_384, 512, cached=reuse), ds.Colocation(batch=(16, 64), ttl_measure="p99")
    tables = [
        ds.disaggregated(*grids(at, found)),
        ds.colocated(at, MAPPINGS, found, options=options),
        ds.piggyback(at, MAPPINGS, found, options=options),
    ]
    for points in tables:
        again = rescore(points, origin=Origin(lengths=found))
        assert again["ftl_s"].to_numpy() == pytest.approx(points["ftl_s"].to_numpy(), rel=1e-9)
        assert again[THROUGHPUT].to_numpy() == pytest.approx(points[THROUGHPUT].to_numpy(), rel=1e-9)


def test_a_colocated_instance_gains_what_prefill_took(at):
    """``TTL = T_d + B*t_p/(OSL-1)``: at a share of 1 next to nothing of it is prefill."""
    options = ds.Colocation(batch=(64,), prefill_batch=(1,))
    cold, warm = (
        ds.colocated(at, MAPPINGS[:1], ds.lengths(16_384, 512, cached=share), options=options) for share in (0.0, 1.0)
    )
    step = ds.decode_grid(at, MAPPINGS[:1], ds.lengths(16_384, 512), batch=[64]).latency[0, 0]
    assert warm["ttl_s"].iloc[0] < 1.2 * step + 64 * warm["ftl_s"].iloc[0] / 511
    assert cold["ttl_s"].iloc[0] > 4 * warm["ttl_s"].iloc[0]


def test_a_distribution_of_shares_is_no_mean_share(at):
    """Prefill work falls with 1 - h and 1 - h^2: ``E[h^2] > E[h]^2`` leaves less attention to spread shares."""
    spread = Reuse(share=BetaShare(alpha=0.8, beta=0.8))
    constant, drawn = (grids(at, ds.lengths(130_000, 64, cached=each))[0] for each in (0.5, spread))
    assert (drawn.request_rate > constant.request_rate).all()
    assert np.all(drawn.request_rate < 1.3 * constant.request_rate)


def test_states_are_taken_up_at_checkpoints():
    """Qwen3-Next saves recurrent states at the ends of blocks of the cache; Llama goes on at any of its blocks."""
    hybrid = ds.setup("qwen3_next_80b_a3b", "h200_sxm", "fp8")
    found = ds.lengths(32_768, 512, cached=0.9)
    grid = ds.prefill_grid(hybrid, ds.Mapping(tp_attn=2, ep=2), found, batch=[1])
    assert 0 < grid.lengths.cached.mean_past < found.cached.mean_past
