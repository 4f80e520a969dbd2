"""Fits of linear attention: the form is found again from rows that it made, shape by shape, and errors are told."""

import pytest
from kernel_csv import write_lists

from disagg_sim.facts.load import load_system
from disagg_sim.physics.blocks.linear import delta_scan_flops
from lab.calibration.kernels.fit import calibrate_kernels

H200 = load_system("h200_sxm")
WORDS = "system,framework,version,kernel_source,kind,phase"
COLUMNS = f"{WORDS},k_heads,k_dim,v_heads,v_dim,d_conv,batch,seq_len,latency_us"


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    """Rows of a scan and of a step of the gated DeltaNet by known rates: 6 us + max(F/9e13, B/1e12, 40 ns S)."""
    rows = []
    for heads in (8, 16, 32):
        state = 4.0 * heads * 128 * 128
        for batch in (1, 4, 16, 64, 256):
            for length in (2, 16, 64, 512, 2048, 8192):
                tokens = batch * length
                flops = tokens * heads * delta_scan_flops(128, 128, 64)
                moved = tokens * 2.0 * (2 * heads // 2 * 128 + 2 * heads * 128) + batch * 2 * state
                time = 6e-6 + max(flops / 9e13, moved / 1e12, 40e-9 * length)
                head = ["h200_sxm", "vllm", "1", "chunk_rule", "gdn", "context", heads // 2, 128, heads, 128, 4]
                rows.append([*head, batch, length, time * 1e6])
            step = ["h200_sxm", "vllm", "1", "recurrent", "gdn", "generation", heads // 2, 128, heads, 128, 4]
            rows.append([*step, batch, 1, (4e-6 + batch * 2 * state / 4e12) * 1e6])
    path = write_lists(tmp_path_factory.mktemp("rows") / "linear.csv", COLUMNS, rows)
    return {fit.part: fit for fit in calibrate_kernels([path], "h200_sxm").fits["attention_parts"]}


def test_the_rates_of_a_scan_are_found_again(fits):
    fit = fits["scan"]
    assert fit.t0 == pytest.approx(6e-6, rel=0.03)
    assert fit.walk == pytest.approx(40e-9, rel=0.01)
    assert fit.e_compute * H200.peak_flops["bf16"] == pytest.approx(9e13, rel=0.02)
    assert fit.e_memory * H200.hbm_bandwidth == pytest.approx(1e12, rel=0.05)
    assert (fit.kind, fit.engine, fit.parameters) == ("gdn", "vllm", 4)
    assert fit.held_out_points > 0
    assert fit.held_out_median_error < 0.01


def test_a_step_moves_its_states_at_a_share_of_the_bandwidth(fits):
    assert fits["step"].e_memory * H200.hbm_bandwidth == pytest.approx(4e12, rel=0.02)
    assert fits["step"].e_compute is None
