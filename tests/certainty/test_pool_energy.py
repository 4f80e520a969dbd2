"""Energy of decode steps over attention and feed-forward GPUs."""

import pytest

import disagg_sim as ds
from disagg_sim.certainty.energy import energy_parts
from disagg_sim.certainty.pool_parts import split_spent
from disagg_sim.physics.power import power_at
from disagg_sim.techniques.split.physics import Split

LENGTHS = ds.lengths(4096, 512)


@pytest.mark.parametrize("batch", [8, 64])
def test_halves_spend_on_their_work_what_a_whole_instance_does(batch):
    """One GPU each, one micro-batch: above waiting, the work of a step of a dense model is that of one GPU.

    The two activations of a layer are read and written in two kernels in place of one.
    """
    at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    halves = split_spent(at, at, Split(ds.Sharding(), ds.Sharding(), 1), LENGTHS, float(batch))
    parts = energy_parts(ds.decode_grid(at, ds.Sharding(), LENGTHS, batch=[batch]))
    idle = power_at(at).idle
    apart = sum(float(each.joules - idle * each.seconds) for each in halves)
    assert apart == pytest.approx(parts["joules"].sum() - idle * parts["seconds"].sum(), rel=0.005)
