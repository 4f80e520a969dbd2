"""Co-located modes under laws of lengths: the limit of one point, bounds, and what a request may bring along."""

import numpy as np
import pandas as pd
import pytest

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import setup
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.colocation import Colocation
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.workload.lengths import lengths

AT = setup("llama_3_1_8b", "h100_sxm", "fp8")
R1 = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
CUTS = [Sharding(), Sharding(tp_attn=2, tp_ffn=2, pp=2)]
MODES = pytest.mark.parametrize("serve", [colocated, piggyback])
SOME = Colocation(batch=(8, 64))
NUMBERS = ["ftl_s", "ttl_s", "ttl_mean_s", "ttl_largest_gap_s", "tokens_per_s_per_gpu", "decode_memory_bytes"]


def values(points: pd.DataFrame) -> np.ndarray:
    return points[NUMBERS].to_numpy(dtype=float)


@MODES
@pytest.mark.parametrize(("at", "cuts"), [(AT, CUTS), (R1, [Sharding(dp_attn=8, ep=8)])])
def test_a_law_of_one_point_is_constant_lengths(serve, at, cuts):
    """Requests that all are alike, given one by one, score as constant lengths do."""
    one = lengths(np.full(7, 2048), np.full(7, 256))
    np.testing.assert_array_equal(
        values(serve(at, cuts, one, options=SOME)), values(serve(at, cuts, lengths(2048, 256), options=SOME))
    )


@MODES
def test_a_law_lies_between_its_shortest_and_its_longest_requests(serve):
    """A mix of two requests is served no faster than the shorter alone and no slower than the longer alone."""
    one = Colocation(batch=(16,), prefill_batch=(4,), rank_chunk_tokens=(256,), mla_form="naive")
    short, both, long = (
        serve(AT, Sharding(), each, options=one).iloc[0]
        for each in (lengths(1024, 128), lengths([1024, 4096], [128, 128]), lengths(4096, 128))
    )
    for name in ("ftl_s", "ttl_mean_s", "ttl_largest_gap_s"):
        assert short[name] < both[name] <= long[name] * (1 + 1e-9), name
    assert short["tokens_per_s_per_gpu"] > both["tokens_per_s_per_gpu"] > long["tokens_per_s_per_gpu"]
