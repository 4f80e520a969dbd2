"""Slowdown under a power cap beside a published sweep of limits, to which nothing is fitted."""

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.physics.power import clock_under

#: Prompt tokens per second of six RTX 3090 (350 W) by power limit [W] (llmgarage.ai, "Tokens-per-Second Test Bench:
#: Power Limit Sweep", February 2026; MiniMax M2.5 in llama.cpp, context 198K).
PREFILL = {350.0: 9893.0, 300.0: 9326.0, 250.0: 8436.0, 200.0: 5941.0}
#: What a 3090 draws that waits, memory clocked up, as a share of its limit: that of an H200 (hw_specs/power). [1]
IDLE = 0.19


@pytest.mark.parametrize("limit", [300.0, 250.0])
def test_prefill_slows_as_the_clock_does_down_to_seven_tenths_of_the_limit(limit):
    clock = clock_under(limit, drawn=350.0, idle=IDLE * 350.0)
    assert clock == pytest.approx(PREFILL[limit] / PREFILL[350.0], rel=0.03)


def test_below_seven_tenths_clocks_fall_faster_than_the_law():
    """So a system may not state a lower cap: at 0.57 of the limit the law would be a quarter too fast."""
    clock = clock_under(200.0, drawn=350.0, idle=IDLE * 350.0)
    assert clock / (PREFILL[200.0] / PREFILL[350.0]) == pytest.approx(1.29, abs=0.04)


def steps(system: str, grid, batch: list[int]) -> np.ndarray:
    at = ds.setup("llama_3_1_70b", system, "fp8", engine="vllm")
    return grid(at, ds.Sharding(tp_attn=8, tp_ffn=8), ds.lengths(8192, 512), batch=batch).latency[0]


@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm"])
def test_decode_of_short_batches_never_meets_the_cap(system):
    """arXiv 2605.11999: decode draws 137 to 300 W of an H200, so that no cap on its power is ever reached."""
    capped, free = (steps(name, ds.decode_grid, [1, 8, 32]) for name in (f"{system}_500w", system))
    assert capped == pytest.approx(free, rel=1e-12)
