"""Simulated instances that share caches or prompts take the times, and hold the tokens, that grids and plans count."""

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.simulation.kernel.step_physics import StepPhysics
from disagg_sim.simulation.physical_site import kv_blocks

R1 = ds.setup("deepseek_r1", "h200_sxm", "fp8", engine="sglang")
LLAMA = ds.setup("llama_3_1_70b", "h200_sxm", "fp8", engine="vllm")
SHARED = ds.Sharding(tp_attn=8, tp_ffn=8, dcp=8)


def test_steps_of_decode_are_those_of_the_grid():
    batch, contexts = np.array([1.0, 16.0, 64.0]), np.array([8192.0, 131_072.0])
    played = StepPhysics(R1, SHARED).decode(batch, contexts)
    for place, context in enumerate(contexts.tolist()):
        scored = decode_step(R1, SHARED, batch=batch, context=context).ttl
        np.testing.assert_allclose(played[:, place], scored, rtol=1e-12)
    alone = StepPhysics(R1, ds.Sharding(tp_attn=8, tp_ffn=8)).decode(batch, contexts)
    assert played[-1, -1] < 0.7 * alone[-1, -1]


@pytest.mark.parametrize("pcp", [1, 2])
def test_prefill_adds_up_to_the_pass_of_the_grid(pcp):
    mapping, tokens = ds.Sharding(tp_attn=4, tp_ffn=4 * pcp, pcp=pcp), np.array([8192.0])
    physics = StepPhysics(LLAMA, mapping)
    linear = physics.linear("prefill", np.zeros(1), tokens)[0]
    scores = physics.attention(tokens, np.zeros(1), np.ones(1)).ravel()[0] * 8192.0
    assert linear + scores == pytest.approx(prefill_pass(LLAMA, mapping, batch=1, isl=8192.0).ftl, rel=0.02)


def test_eight_gpus_that_share_a_latent_hold_eight_times_the_tokens():
    alone, shared = (kv_blocks(R1, each) for each in (ds.Sharding(tp_attn=8, tp_ffn=8), SHARED))
    assert shared / alone == pytest.approx(8.0, rel=1e-3)
