"""Micro-benchmarks become rows that the calibration reads: with an invented device, and with PyTorch where it is."""

from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest

from disagg_sim.atomic import write_csv
from disagg_sim.facts.load import load_system
from lab.calibration.bench.measure import QUICK, TRIAL, measure
from lab.calibration.bench.torch_bench import torch_bench
from lab.calibration.kernels.efficiency_yaml import efficiency_text
from lab.calibration.kernels.fit import calibrate_kernels
from lab.calibration.kernels.tables import read_tables


class Invented:
    """A device at 60 % of the H100's peaks, two of a kind."""

    ranks = 2

    def __init__(self):
        self.versions = {"torch": "0", "nccl": "0"}
        system = load_system("h100_sxm")
        self.flops, self.memory = 0.6 * system.peak_flops["bf16"], 0.6 * system.hbm_bandwidth
        self.link = 0.6 * system.nvlink_bandwidth

    def gemm(self, dtype, m, n, k):
        rate = {"bfloat16": 1.0, "fp8": 2.0}[dtype]
        if (dtype, k) == ("fp8", 2048):
            return None  # no such kernel
        return 4e-6 + max(2 * m * n * k / (rate * self.flops), 2 * (m * k + n * k + m * n) / self.memory)

    def attention(self, batch, new, keys, q_heads, kv_heads, head_dim):
        if new > 1:
            return 1e-5 + 2 * batch * new**2 * q_heads * head_dim / self.flops
        return 1e-5 + 4 * batch * keys * kv_heads * head_dim / self.memory

    def copy(self, elements):
        return 2e-6 + 4 * elements / self.memory

    def launch(self, graph):
        return 1.5e-6 if graph else 5e-6

    def collectives(self, ranks, wanted):
        return [1e-5 + 2 * (ranks - 1) / ranks * size / self.link for _, size in wanted]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("measured") / "own.csv"
    told = Mock()
    write_csv(path, measure(Invented(), "h100_sxm", QUICK, told))
    told.start.assert_called_once_with(sum(call.args[0] for call in told.advance.call_args_list))
    told.finish.assert_called_once_with()
    return path


def test_every_planned_call_is_a_row_unless_the_device_lacks_the_kernel(table):
    rows = {each.form.name: each.rows for each in read_tables(table)}
    assert rows.keys() == {"quantize_ops", "gemm", "context_attention", "generation_attention", "collectives"}
    counts = rows["gemm"]["dtype"].value_counts().to_dict()  # one of the shapes has no kernel in fp8
    assert counts == {"bfloat16": len(QUICK.m) * len(QUICK.weights), "fp8": len(QUICK.m) * (len(QUICK.weights) - 1)}
    assert len(rows["context_attention"]) == len(QUICK.heads) * len(QUICK.prefill[1])
    assert set(rows["quantize_ops"]["op"]) == {"launch_graph", "launch_eager", "copy"}
    assert set(rows["collectives"]["framework"]) == {"nccl"}
    lines = np.concatenate([each["row"] for each in rows.values()])
    assert sorted(lines) == list(range(2, len(lines) + 2))  # each row knows its line in the file


def test_the_written_time_is_the_timed_one(table):
    gemm = next(each.rows for each in read_tables(table) if each.form.name == "gemm")
    row = gemm[(gemm["dtype"] == "fp8") & (gemm["m"] == 4096) & (gemm["n"] == 8192)].iloc[0]
    expected = 4e-6 + 2 * 4096 * 8192 * 8192 / (2 * 0.6 * 989.4e12)  # the H100's dense BF16 peak
    assert row["latency"] == pytest.approx(expected, rel=1e-3)


def test_a_fit_of_the_measured_table_finds_what_the_device_reaches_and_a_system_can_rest_on_it_alone(table):
    done = calibrate_kernels([table], "h100_sxm", split=False)
    (copy,) = (fit for fit in done.fits["elementwise"] if fit.op == "copy")
    assert copy.engine == "torch"
    assert copy.e_memory == pytest.approx(0.6, rel=0.02)
    assert copy.t0 == pytest.approx(2e-6, rel=0.02)
    bf16 = next(fit for fit in done.fits["gemm"] if fit.format == "bf16")
    assert bf16.e_compute == pytest.approx(0.6, rel=0.15)
    text = efficiency_text(done, data="own", date="today")
    assert "engine_order: [nccl, torch]" in text
    assert "engine: torch" in text


def test_pytorch_kernels_of_the_cpu_fill_the_same_table(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    path = tmp_path / "cpu.csv"
    write_csv(path, measure(torch_bench("cpu"), "h100_sxm", TRIAL, Mock()))
    rows = {each.form.name: each.rows for each in read_tables(path)}
    assert list(rows["gemm"][["dtype", "m", "n", "k"]].itertuples(index=False, name=None)) == list(
        product(["bfloat16"], TRIAL.m, [512], [512])
    )
    assert len(rows["generation_attention"]) == len(rows["context_attention"]) == 1
    assert all((each["latency"] > 0).all() for each in rows.values())


def test_collectives_run_over_processes_of_this_machine():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from lab.calibration.bench.torch_bench import collective_times

    wanted = [(op, size) for op in ("all_reduce", "all_gather") for size in (4096, 65536)]
    times = collective_times(2, wanted, "gloo")
    assert len(times) == len(wanted)
    assert min(times) > 0
