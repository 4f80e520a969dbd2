"""What equal queues of unequal requests cost: the simulated ranks against their order statistics, within 2 %."""

import math

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import CLOSES, NOTIFY, Mode, RankChoice
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.techniques.ranks.physics import PieceLoads, RankLoads, RestLoads
from disagg_sim.techniques.ranks.physics_sums import request_law
from disagg_sim.workload.named import lengths_named

BOUND = 0.02
EIGHT = Sharding(dp_attn=8, ep=8)


@pytest.fixture(scope="module")
def deployment():
    at = setup("deepseek_r1", "h200_sxm", "fp8")
    return at, StepTable.build(at, EIGHT, max_sequences=256, max_tokens=2**18)


def drawn(median, requests, seed):
    """Log-normal lengths with a standard deviation near their mean."""
    return np.maximum(np.random.default_rng(seed).lognormal(math.log(median), 0.8, requests), 2.0).astype(int)


def served_in_passes(table, prompts, past, together):
    """Requests/s of a prefill instance with a full queue. [1/s]"""
    spec = InstanceSpec(
        table=table, blocks=10**8, mode=Mode.PREFILL_FIRST, token_budget=10**9, max_prompts=together, watermark=0.0
    )
    fleet = Fleet([spec])
    for request, (held, prompt) in enumerate(zip(past.tolist(), prompts.tolist(), strict=True)):
        fleet.submit(0, request, (held, prompt - held, 1), 0.0)
    while fleet.next_time() < math.inf:
        fleet.run_until(math.inf)
    return prompts.size / fleet.segments.finish_s.max()


@pytest.mark.parametrize(
    ("choice", "routing"), [(RankChoice.LEAST_WAITING, "least_load"), (RankChoice.IN_TURN, "round_robin")]
)
def test_a_decode_pool_waits_for_its_fullest_rank(deployment, choice, routing):
    """128 requests in flight: even ranks would be 3 to 5 % faster."""
    at, table = deployment
    residents, requests = 128, 128 * 30
    context, output = drawn(4096, requests, 1), drawn(256, requests, 2)
    fleet = Fleet([InstanceSpec(table=table, blocks=10**7, max_sequences=256, rank_choice=choice, watermark=0.0)])
    now = 0.0
    for request in range(requests):
        if request >= residents:
            _, now = fleet.run_until(math.inf)
        lengths = (int(context[request]), 0, int(output[request]))
        fleet.submit(0, request, lengths, now, flags=NOTIFY | CLOSES, last_token_s=now)
    segments = fleet.segments
    since, until = segments.submit_s[4 * residents], segments.submit_s[-1]
    emitted = output[(segments.finish_s > since) & (segments.finish_s <= until)].sum()
    step = residents * (until - since) / emitted
    even, waits = (
        ds.decode_grid(at, EIGHT, ds.lengths(context, output, rank_imbalance=each), batch=[residents]).latency.item()
        for each in ("even", routing)
    )
    assert waits == pytest.approx(step, rel=BOUND)
    assert even < 0.98 * step


def test_a_prefill_pool_waits_for_its_longest_prompts(deployment):
    """Two prompts a rank: even ranks would be twice as fast."""
    at, table = deployment
    prompts = drawn(1024, 2400, 1)
    served = served_in_passes(table, prompts, np.zeros_like(prompts), 16)
    lengths = ds.lengths(prompts, np.full(prompts.size, 128), rank_imbalance="least_load")
    rate = ds.prefill_grid(at, EIGHT, lengths, batch=[16]).request_rate.item()
    assert rate == pytest.approx(served, rel=BOUND)


@pytest.mark.parametrize("together", [8, 32])
def test_a_prefill_pool_waits_for_the_longest_rests_of_its_prompts(deployment, together):
    """Up to all of a prompt is cached: even ranks would be 1.6 to 3.4 times as fast. Within 4 %: kernels
    of the equal prompts that stand for a rank are somewhat more efficient than those of its short rests."""
    at, table = deployment
    prompts = np.maximum(drawn(8192, 2400, 1), 300)
    share = np.random.default_rng(3).beta(2.0, 1.0, prompts.size)
    past = (np.minimum(share * prompts, prompts - 1) // 16 * 16).astype(int)
    served = served_in_passes(table, prompts, past, together)
    even, waits = (
        ds.prefill_grid(
            at,
            EIGHT,
            ds.lengths(prompts, np.full(prompts.size, 128), cached=past, rank_imbalance=each),
            batch=[together],
        ).request_rate.item()
        for each in ("even", "least_load")
    )
    assert waits == pytest.approx(served, rel=0.04)
    assert even > 1.5 * served


def test_pieces_anywhere_in_a_prompt_come_after_the_pasts_of_order_statistics():
    """The largest of R uniform pasts is at R/(R + 1); where one rank of two has a piece, at a half."""
    one = PieceLoads(np.array([600.0]), np.array([100.0]), np.ones(1))
    assert one.ends == (1600.0, 4800.0)  # pieces come after 400 tokens on average
    distance = 1600.0
    ranks, busy = np.array([[1.0], [2.0], [8.0]]), np.array([[1e-12, 1.0]])
    expected = [[0.0, 0.0], [0.0, 600 * (2 / 3 - 0.5)], [0.0, 600 * (8 / 9 - 0.5)]]
    assert one.further(1e-9, busy, ranks) * distance == pytest.approx(np.array(expected), abs=0.1)
    assert one.further(600.0, 1.0, 8.0) * distance == pytest.approx(0.0, abs=0.1)  # whole prompts come after 100 tokens


def test_chunks_of_one_length_are_those_of_even_ranks():
    """Three chunks of 400, 400 and 200 tokens, whatever rank has the most."""
    plain = RankLoads(request_law(np.full(3, 1000.0), np.ones(3)), "random").chunked(8.0, 4.0, 400.0)
    assert [float(each) for each in plain[:4]] == pytest.approx([2.0, 3.0, 400.0, 200.0])
    rest = RestLoads(np.full(3, 1000.0), np.full(3, 5000.0), np.full(3, 1 / 3)).chunked(8.0, 4.0, 400.0)
    assert [float(each) for each in rest[:4]] == pytest.approx([2.0, 3.0, 400.0, 200.0])
    assert [float(each) for each in rest.scored] == pytest.approx([2.0, 1000.0, 5000.0], rel=1e-3)


def test_rests_without_a_past_are_prompts():
    """T, P and Q = 0 give the equal prompts of T and the squares, and the same chunks."""
    prompts = np.array([100.0, 300.0, 2000.0])
    law = request_law(prompts, np.ones(3))
    batch, ranks = np.array([[8.0, 32.0, 100.0]]), np.array([[4.0], [8.0]])
    plain, rest = RankLoads(law, "least_load"), RestLoads(prompts, np.full(3, 1e-9), np.full(3, 1 / 3))
    for one, other in zip(rest.prefill(batch, ranks)[:2], plain.prefill(batch, ranks)[:2], strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    both = zip(rest.chunked(batch, ranks, 512.0)[:4], plain.chunked(batch, ranks, 512.0)[:4], strict=True)
    assert all(one == pytest.approx(other, rel=1e-6) for one, other in both)


def test_one_rank_and_equal_requests_are_as_ever():
    """To the last bit: one rank has nobody to wait for, and requests of one length keep their ranks even."""
    at, one = setup("mixtral_8x7b", "h100_sxm", "bf16"), Sharding(tp_attn=4, ep=4, pp=2)
    chat = ("log_normal_4096_512",)
    for mapping, asked in ((one, chat), (Sharding(dp_attn=4, ep=4, pp=2), (2048, 256))):
        for score in (ds.decode_grid, ds.prefill_grid):
            even = score(at, mapping, ds.lengths(*asked), batch=[4, 64])
            routed = "random" if mapping is one else "least_load"
            uneven = score(at, mapping, ds.lengths(*asked, rank_imbalance=routed), batch=[4, 64])
            assert np.array_equal(even.latency, uneven.latency)
            assert np.array_equal(even.memory_bytes, uneven.memory_bytes)
            assert np.array_equal(even.request_rate, uneven.request_rate)


@pytest.mark.parametrize(
    ("serve", "reuse"),
    [(ds.colocated, "/cached0.6"), (ds.piggyback, ""), ("disaggregated", "/cached0.6_hbm0.5_dram0.5")],
)
def test_a_table_is_timed_again_as_it_was(serve, reuse):
    """The traffic of a row says how its ranks were counted; timing its designs again gives its numbers."""
    at = setup("mixtral_8x7b", "h100_sxm", "bf16")
    word = f"log_normal_4096_512{reuse}/ranks_random"
    lengths = lengths_named(word)
    some = [Sharding(dp_attn=4, ep=4), Sharding(dp_attn=4, ep=4, pp=2)]
    assert lengths.rank_imbalance == "random"
    if serve == "disaggregated":
        prefill = ds.prefill_grid(at, some, lengths, batch=[4, 16])
        points = ds.disaggregated(prefill, ds.decode_grid(at, some, lengths, batch=[32, 128]))
    else:
        points = serve(at, some, lengths, options=ds.Colocation(batch=(32, 128)))
    timed = sum(designs.rows.size for designs in designs_of(points.assign(traffic=word), Origin(exact=True)))
    assert timed == len(points) > 1
