"""The least time of a call, by hand from the vendor's peaks: H100, 989.4 TFLOP/s in bf16, 3.35 TB/s, 450 GB/s."""

import pytest
from kernel_csv import frame
from shared_data import shared_file

from disagg_sim.facts.load import load_system
from lab.calibration.kernels.limits import least_time
from lab.calibration.kernels.tables import read_exclusions, read_tables

H100 = load_system("h100_sxm")
PEAK, HBM, LINK, L2 = 989.4e12, 3.35e12, 450e9, H100.l2_capacity


def least(form: str, **columns: object) -> float:
    return float(least_time(form, frame({name: [value] for name, value in columns.items()}), H100)[0])


def test_a_large_product_is_bound_by_arithmetic_and_a_thin_one_by_weights_beyond_l2():
    assert least("gemm", m=8192, n=8192, k=8192) == pytest.approx(2 * 8192**3 / PEAK)
    weights = 2 * 16384 * 16384 + 2 * 16384 + 2 * 16384  # one row of A and of C
    assert least("gemm", m=1, n=16384, k=16384) == pytest.approx((weights - L2) / HBM)
    assert least("gemm", m=1, n=16384, k=16384, dtype="fp8") < least("gemm", m=1, n=16384, k=16384)


def test_what_l2_holds_need_not_move():
    assert least(
        "generation_attention",
        batch=1,
        kv_len=64,
        q_heads=8,
        kv_heads=8,
        head_dim=128,
        compute_dtype="bfloat16",
        kv_dtype="bfloat16",
    ) == pytest.approx(4 * 64 * 128 * 8 / PEAK)


def test_a_cache_in_fp8_is_multiplied_in_fp8():
    sizes = {"batch": 1, "kv_len": 32768, "heads": 128, "compute_dtype": "bfloat16"}  # 38 MB: L2 holds them
    slow, fast = (least("mla_generation", kv_dtype=cache, **sizes) for cache in ("bfloat16", "fp8"))
    assert slow == pytest.approx(2 * (2 * 512 + 64) * 128 * 32768 / PEAK)
    assert fast == pytest.approx(slow / 2, rel=1e-3)


def test_skewed_routing_may_leave_experts_unread_and_balanced_may_not():
    sizes = {"hidden": 7168, "inter": 2048, "topk": 8, "num_experts": 256, "tp": 1, "ep": 1, "num_tokens": 1024}
    every_expert = 256 * 3 * 7168 * 2048 * 2
    assert least("moe", distribution="balanced", **sizes) == pytest.approx((every_expert - L2) / HBM, rel=1e-6)
    assert least("moe", distribution="power_law_1.2", **sizes) == pytest.approx(6 * 7168 * 2048 * 8 * 1024 / PEAK)


@pytest.mark.parametrize(("op", "share"), [("all_reduce", 1.0), ("all_gather", 7 / 8), ("alltoall", 7 / 8)])
def test_a_tensor_crosses_the_link_once(op, share):
    assert least("collectives", op=op, num_gpus=8, message_bytes=450_000_000) == pytest.approx(share * 1e-3)


def test_an_exchange_sends_a_token_once_to_each_rank_or_node():
    sizes = {"num_tokens": 1000, "hidden": 7168, "topk": 8, "dtype": "fp8", "sms": 0, "num_experts": 256}
    inside = least("moe_alltoall", phase="dispatch", ep_size=8, node_num=1, **sizes)
    assert inside == pytest.approx(7168e3 * 7 * (1 - (7 / 8) ** 8) / LINK)
    across = least("moe_alltoall", phase="dispatch", ep_size=16, node_num=2, **sizes)
    assert across == pytest.approx(7168e3 * (1 - (1 / 2) ** 8) / 50e9)
    assert least("moe_alltoall", phase="prepare", ep_size=8, node_num=1, **sizes) == 0.0


@pytest.mark.parametrize("name", ["collectives", "moe_alltoall", "mla_generation", "quantize_ops"])
def test_no_row_that_is_not_excluded_beats_the_peaks(name):
    known = read_exclusions(shared_file("kernels/exclude.csv"))
    (table,) = read_tables(shared_file(f"kernels/{name}.csv"), exclusions=known)
    for system, rows in table.rows[table.rows["masked"] == ""].groupby("system"):
        assert (rows["latency"].to_numpy() >= least_time(name, rows, load_system(str(system)))).all(), system
