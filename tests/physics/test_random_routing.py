"""Fullest expert rank under random picks, against the draw itself."""

from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.domain import Mapping
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import fullest_of_random


@pytest.mark.parametrize(("mean", "ranks"), [(4, 8), (16, 8), (64, 8), (8, 2), (32, 64)])
def test_fullest_rank_is_that_of_random_draws(mean, ranks):
    draws = np.random.default_rng(1).multinomial(mean * ranks, [1 / ranks] * ranks, size=4000).max(axis=1).mean()
    assert float(fullest_of_random(mean, ranks)) == pytest.approx(draws / mean, rel=0.06)


def test_one_rank_and_many_picks_are_balanced():
    assert fullest_of_random(3.0, 1) == 1.0
    assert float(fullest_of_random(1e8, 64)) == pytest.approx(1.0, abs=1e-3)


def test_random_routing_slows_small_batches_most():
    at = setup("deepseek_r1", "h200_sxm", "fp8", engine="trtllm")
    random = at.changed(profile=replace(at.profile, random_routing=True))
    mapping = Mapping(tp_attn=8.0, tp_ffn=1.0, ep=8.0)
    slower = []
    for batch in (4.0, 64.0, 1024.0):
        both = [decode_step(one, mapping, batch=batch, context=2000.0).ttl for one in (random, at)]
        slower.append(float(both[0] / both[1] - 1))
    assert slower[0] > slower[1] > slower[2] >= 0
    whole = Mapping(tp_attn=8.0, tp_ffn=8.0)
    same = [decode_step(one, whole, batch=4.0, context=2000.0).ttl for one in (random, at)]
    assert same[0] == same[1]
