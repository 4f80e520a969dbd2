"""Fits of collectives and of the MoE exchange: numbers that made the rows come back, ranks enter by the form."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from kernel_csv import frame

from disagg_sim.facts.efficiency import AllToAllFit, CollectiveFit
from disagg_sim.facts.load import load_system
from disagg_sim.units import GB, US
from lab.calibration.kernels.alltoall import PER_NODE, PER_PICK, PER_RANK, fit_alltoall, predict_alltoall
from lab.calibration.kernels.collectives import fit_collectives, predict_collectives

H100 = load_system("h100_sxm")
NO_FIT = {"version": "1", "points": 0, "median_error": 0.0, "p90_error": 0.0}
SIZES = 2.0 ** np.arange(9, 31, 2)


def law(algorithm: str, latency: float, hop: float, share: float, ramp: float = 0.0, engine: str = "nccl"):
    return CollectiveFit(
        engine=engine,
        op="all_reduce",
        gpus=0,
        algorithm=algorithm,
        latency=latency * US,
        hop=hop * US,
        e_bandwidth=share,
        ramp=ramp * US,
        **NO_FIT,
    )


RING = [law("ring", 5.0, 1.5, 0.85, 4.0), law("ring_ll", 5.0, 1.5, 0.3)]
NCCL = [*RING, law("in_switch", 5.0, 1.5, 0.7, 4.0)]
ENGINE = [law("one_shot", 2.5, 0.2, 0.65, engine="vllm"), law("two_shot", 6.0, 0.2, 0.6, engine="vllm")]
EAGER = law("eager", 22.0, 0.0, 0.7, engine="vllm")


def messages(kernel_source: str, framework: str):
    sizes, ranks = zip(*product(SIZES, (2, 4, 8)), strict=True)
    return frame(
        {
            "message_bytes": sizes,
            "num_gpus": ranks,
            "op": "all_reduce",
            "framework": framework,
            "kernel_source": kernel_source,
        }
    )


def test_numbers_of_nccl_and_of_an_engine_come_back():
    tables = [messages("NCCL", "nccl"), messages("custom_graph", "vllm"), messages("custom_eager", "vllm")]
    rows = pd.concat(tables, ignore_index=True)
    rows["latency"] = predict_collectives(rows, H100, [*NCCL, *ENGINE, EAGER])
    fits = fit_collectives(rows, H100)
    assert [(fit.engine, fit.algorithm) for fit in fits] == [
        ("nccl", "ring"),
        ("nccl", "ring_ll"),
        ("nccl", "in_switch"),
        ("vllm", "one_shot"),
        ("vllm", "two_shot"),
        ("vllm", "eager"),
    ]
    assert sum(fit.parameters for fit in fits) == 6 + 5 + 2
    again = predict_collectives(rows, H100, fits)
    assert np.median(np.abs(again / rows["latency"] - 1)) < 0.01
    ring, *_, eager = fits
    assert ring.latency == pytest.approx(5 * US, rel=0.05)
    assert ring.hop == pytest.approx(1.5 * US, rel=0.05)
    assert ring.e_bandwidth == pytest.approx(0.85, rel=0.03)
    assert eager.latency == pytest.approx(22 * US, rel=0.02)


def test_a_small_message_takes_one_shot_and_a_large_one_the_ring_of_nccl():
    """8 ranks on H100, by hand: 512 B 2.5 + 7*0.2 us + 7*512 B/292.5 GB/s; 512 MiB as NCCL, 14/8 of it over a link."""
    rows = messages("custom_graph", "vllm")
    found = predict_collectives(rows, H100, [*RING, *ENGINE])
    small = (rows["message_bytes"] == 2**9) & (rows["num_gpus"] == 8)
    assert found[small] == pytest.approx([3.9 * US + 7 * 512 / (0.65 * 450 * GB)], rel=1e-9)
    large = (rows["message_bytes"] == 2**29) & (rows["num_gpus"] == 8)
    wire = 1.75 * 2**29 / (0.85 * 450 * GB)
    assert found[large] == pytest.approx([5 * US + 7 * 1.5 * US + wire + 2 * np.sqrt(4 * US * wire)], rel=1e-9)


def test_a_switch_that_reduces_moves_nine_eighths_of_the_message_unless_it_is_int8():
    rows = messages("NCCL", "nccl")
    large = (rows["message_bytes"] == 2**29) & (rows["num_gpus"] == 8)
    wire = [volume * 2**29 / (share * 450 * GB) for volume, share in ((9 / 8, 0.7), (14 / 8, 0.85))]
    by_hand = [(5 + 7 * 1.5) * US + each + 2 * np.sqrt(4 * US * each) for each in wire]
    assert predict_collectives(rows[large], H100, NCCL) == pytest.approx(by_hand[:1], rel=1e-9)
    assert predict_collectives(rows[large].assign(dtype="int8"), H100, NCCL) == pytest.approx(by_hand[1:], rel=1e-9)


def test_no_prediction_without_a_fit_of_the_library():
    assert np.isnan(predict_collectives(messages("custom_graph", "sglang"), H100, [*NCCL, *ENGINE])).all()
    assert np.isnan(predict_collectives(messages("custom_eager", "vllm"), H100, [*NCCL, *ENGINE])).all()


def exchange(backend: str, phase: str, groups, *, sms=(0,), dtype: str = "fp8"):
    """Rows over 8 GPUs a node."""
    points = list(product((1, 16, 128, 1024, 8192), groups, (4, 8), sms))
    tokens, ranks, top_k, given = (list(column) for column in zip(*points, strict=True))
    return frame(
        {
            "num_tokens": tokens,
            "ep_size": ranks,
            "node_num": [max(n // 8, 1) for n in ranks],
            "topk": top_k,
            "sms": given,
            "hidden": 7168,
            "num_experts": 256,
            "comm_backend": backend,
            "kernel_source": "deepep",
            "phase": phase,
            "framework": "sglang",
            "dtype": dtype,
        }
    )


def fit_of(backend: str, phase: str, link: str, volume: str, **numbers):
    unset = {"e_bandwidth": None, "seconds_per_token": None}
    return AllToAllFit(
        engine="sglang",
        backend=backend,
        phase=phase,
        format="default",
        ranks=0,
        nodes=0,
        volume=volume,
        bytes_per_element=None,
        link=link,
        **NO_FIT,
        **unset | numbers,
    )


IN_NODES = {"latency": 20 * US, "step": 6 * US, "e_bandwidth": 0.9, "token_bandwidth": 40 * GB}
A_TOKEN = {"latency": 11 * US, "step": US, "seconds_per_token": 6e-9}


@pytest.mark.parametrize(
    ("truth", "groups", "sms"),
    [
        (fit_of("deepep_ll", "dispatch", "nvlink", PER_PICK, latency=15 * US, e_bandwidth=0.55), (8,), (0,)),
        (fit_of("deepep_normal", "combine", "nvlink", PER_RANK, latency=40 * US, e_bandwidth=0.6), (8,), (20,)),
        (fit_of("deepep_normal", "dispatch", "nic", PER_NODE, **IN_NODES), (16, 32, 64), (4, 8, 24)),
        (fit_of("deepep_ll", "prepare", "nvlink", "T (seconds per token)", **A_TOKEN), (2, 4, 8), (0,)),
    ],
)
def test_numbers_of_an_exchange_come_back(truth, groups, sms):
    rows = exchange(truth.backend, truth.phase, groups, sms=sms)
    rows["latency"] = predict_alltoall(rows, H100, [truth])
    (fit,) = fit_alltoall(rows, H100)
    assert (fit.backend, fit.phase, fit.link, fit.volume) == (truth.backend, truth.phase, truth.link, truth.volume)
    for name in ("latency", "step", "e_bandwidth", "seconds_per_token", "token_bandwidth"):
        expected = getattr(truth, name)
        assert getattr(fit, name) == (None if expected is None else pytest.approx(expected, rel=0.05)), name


def test_dispatch_of_one_rank_by_hand():
    """1024 tokens of 7168 fp8 elements to 8 picks on 8 ranks: 7 copies at 247.5 GB/s after 15 us."""
    rows = exchange("deepep_ll", "dispatch", (8,))
    truth = fit_of("deepep_ll", "dispatch", "nvlink", PER_PICK, latency=15 * US, e_bandwidth=0.55)
    mine = (rows["num_tokens"] == 1024) & (rows["topk"] == 8)
    found = predict_alltoall(rows[mine], H100, [truth])
    assert found == pytest.approx([15 * US + 1024 * 7168 * 1.03125 * 7 / (0.55 * 450 * GB)], rel=1e-9)
