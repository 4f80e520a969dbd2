"""Ranks that requests find at random are never sooner done than even ones."""

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.search.grid import decode_grid
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.workload.lengths import uneven

BATCH = np.array([1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256])


@pytest.mark.parametrize("lengths", [(2048, 256), ("log_normal_4096_512",)])
@pytest.mark.parametrize(
    ("model", "system", "precision"), [("deepseek_r1", "h200_sxm", "fp8"), ("gpt_oss_120b", "b200_sxm", "mxfp4")]
)
@pytest.mark.parametrize("profile", ["measured", "ideal"])
def test_random_ranks_are_no_faster_than_even_ones(model, system, precision, profile, lengths):
    """Pipelines, too, whose micro-batches have a request on some rank however few there are."""
    at, law = ds.setup(model, system, precision, profile=profile), ds.lengths(*lengths)
    mappings = enumerate_mappings(at)
    assert np.any(mappings.pp > 1)
    even = decode_grid(at, mappings, law, batch=BATCH).latency
    chance = decode_grid(at, mappings, uneven(law, "random"), batch=BATCH).latency
    assert np.all(chance >= even * (1.0 - 1e-12))


@pytest.mark.parametrize("requests", [1.0, 2.0, 8.0, 64.0])
def test_mixed_steps_of_random_ranks_are_no_faster_than_even_ones(requests):
    at, law = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.lengths(2048, 256)
    mapping = ds.Sharding(dp_attn=4, ep=4, pp=4)
    times = []
    for routed in (law, uneven(law, "random")):
        load = routed.on_ranks(requests, 4.0)
        held = {"batch": requests, "context": load.context, "rank_batch": load.batch}
        times.append(float(mixed_step(at, mapping, chunk=Chunk(512.0, 2048.0), **held).time))
    assert times[1] >= times[0]
