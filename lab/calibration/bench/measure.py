"""Run micro-benchmarks on the user's own GPU and write them as rows of kernel tables.

What is measured, at which sizes, and how the times become rows of ``lab.calibration.kernels.tables``. How a call is
timed is the business of ``lab.calibration.bench.torch_bench``, which runs PyTorch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd

from disagg_sim.facts.yaml_files import read_mapping
from disagg_sim.sweep.store import RunListener
from disagg_sim.units import US
from lab.calibration.bench.torch_bench import TorchBench
from lab.calibration.kernels.tables import FORM, FORMS, IDENTITY, LATENCY

#: A measured row: its form, words and sizes.
Row = dict[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Sizes to measure (``plans.yaml``)."""

    dtypes: Sequence[str]
    m: Sequence[int]
    weights: Sequence[tuple[int, int]]  # n, k
    heads: Sequence[tuple[int, int, int]]  # q_heads, kv_heads, head_dim
    prefill: Sequence[Sequence[int]]  # sequences; tokens
    decode: Sequence[Sequence[int]]
    copies: Sequence[int]
    collectives: Sequence[str]
    messages: Sequence[int]


_PLANS = read_mapping(Path(__file__).with_name("plans.yaml"))
FULL, QUICK, TRIAL = (MeasurementPlan(**_PLANS["full"] | _PLANS[name]) for name in ("full", "quick", "trial"))


def measure(bench: TorchBench, system: str, plan: MeasurementPlan, progress: RunListener) -> pd.DataFrame:
    """Measure the rows of all tables by a bench that times calls on the device: one row a call that could run, columns
    that a form lacks empty; ``calibrate kernels`` reads the CSV of it.
    """
    calls = list(_calls(bench, plan))
    groups = [2**power for power in range(1, bench.ranks.bit_length()) if 2**power <= bench.ranks]
    wanted = tuple(product(plan.collectives, plan.messages))
    progress.start(len(calls) + len(groups) * len(wanted))
    rows: list[dict[str, object]] = []

    def add(row: Row, library: str, seconds: float) -> None:
        words = {"system": system, "framework": library, "version": bench.versions[library]}
        rows.append({**words, **row, LATENCY: float(f"{seconds / US:.5g}")})

    for row, timed in calls:
        measured = timed()
        if measured is not None:
            add(row, "torch", measured)
        progress.advance(1)
    for ranks in groups:
        for (op, size), seconds in zip(wanted, bench.collectives(ranks, wanted), strict=True):
            row = {FORM: "collectives", "kernel_source": "NCCL", "op": op, "dtype": "half"}
            add(row | {"num_gpus": ranks, "message_bytes": size}, "nccl", seconds)
        progress.advance(len(wanted))
    progress.finish()
    present = {row[FORM] for row in rows}
    own = [name for form in FORMS.values() if form.name in present for name in (*form.words, *form.sizes)]
    columns = [FORM, *IDENTITY, *dict.fromkeys(own), LATENCY]
    table = pd.DataFrame(rows, columns=columns)
    sizes = {name for form in FORMS.values() for name in form.sizes} & set(columns)
    return table.astype(dict.fromkeys(sizes, "Int64"))


def _calls(bench: TorchBench, plan: MeasurementPlan) -> Iterator[tuple[Row, Callable[[], float | None]]]:
    """Every planned call with the row that it fills."""
    for graph in (True, False):
        yield _activations("launch_graph" if graph else "launch_eager", 1), partial(bench.launch, graph)
    for elements in plan.copies:
        yield _activations("copy", elements), partial(bench.copy, elements)
    for dtype, (n, k), m in product(plan.dtypes, plan.weights, plan.m):
        row: Row = {FORM: "gemm", "kernel_source": "mm", "dtype": dtype, "m": m, "n": n, "k": k}
        yield row, partial(bench.gemm, dtype, m, n, k)
    for heads, (batch, tokens) in product(plan.heads, product(*plan.prefill)):
        row = _attention(*heads) | {FORM: "context_attention", "batch": batch, "seq_len": tokens}
        yield row, partial(bench.attention, batch, tokens, tokens, *heads)
    for heads, (batch, context) in product(plan.heads, product(*plan.decode)):
        row = _attention(*heads) | {FORM: "generation_attention", "batch": batch, "kv_len": context}
        yield row, partial(bench.attention, batch, 1, context, *heads)


def _activations(op: str, elements: int) -> Row:
    return {FORM: "quantize_ops", "kernel_source": "torch", "op": op, "dtype": "bfloat16", "m": 1, "k": elements}


def _attention(q_heads: int, kv_heads: int, head_dim: int) -> Row:
    types: Row = {"kernel_source": "sdpa", "compute_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return types | {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
