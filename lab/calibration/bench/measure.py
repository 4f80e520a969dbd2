"""Run micro-benchmarks on the user's own GPU and write them as rows of kernel tables.

What is measured, at which sizes, and how the times become rows of ``lab.calibration.kernels.forms``. How a call is
timed is the business of ``lab.calibration.bench.torch_bench``, which runs PyTorch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import pandas as pd

from disagg_sim.sweep.store import RunListener
from disagg_sim.units import US
from lab.calibration.bench.torch_bench import TorchBench
from lab.calibration.kernels.forms import FORM, FORMS, IDENTITY, LATENCY

#: A measured row: its form, words and sizes.
Row = dict[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Sizes to measure; every list is crossed with the others of its kernel."""

    dtypes: tuple[str, ...] = ("bfloat16", "fp8", "nvfp4")
    m: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
    #: (n, k): projections and FFN of 8B, 70B and 671B models at several tensor-parallel degrees.
    weights: tuple[tuple[int, int], ...] = (
        (4096, 4096),
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
        (10240, 8192),
        (8192, 8192),
        (57344, 8192),
        (8192, 28672),
        (1280, 8192),
        (8192, 1024),
        (7168, 8192),
        (2112, 7168),
        (24576, 1536),
        (7168, 16384),
        (3072, 1536),
        (7168, 2048),
    )
    #: (q_heads, kv_heads, head_dim) on one GPU.
    heads: tuple[tuple[int, int, int], ...] = ((8, 1, 128), (16, 2, 128), (32, 8, 128), (64, 8, 128), (16, 16, 64))
    prefill: tuple[tuple[int, int], ...] = tuple(product((1, 4), (128, 512, 1024, 2048, 4096, 8192, 16384)))
    decode: tuple[tuple[int, int], ...] = tuple(product((1, 4, 16, 64, 256), (128, 512, 2048, 8192, 32768)))
    copies: tuple[int, ...] = tuple(2**power for power in range(11, 30, 2))  # elements
    collectives: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
    messages: tuple[int, ...] = tuple(2**power for power in range(10, 31, 2))


#: A minute's work: enough to see whether a device runs as its data sheet says.
QUICK = MeasurementPlan(
    m=(1, 16, 64, 256, 1024, 4096),
    weights=((4096, 4096), (28672, 4096), (8192, 8192), (7168, 2048)),
    heads=((8, 1, 128), (32, 8, 128)),
    prefill=tuple(product((1,), (512, 2048, 8192))),
    decode=tuple(product((1, 16, 64), (512, 4096))),
    copies=tuple(2**power for power in (15, 21, 27)),
    messages=tuple(2**power for power in (12, 20, 26)),
)


#: Seconds on a CPU: shows the form of the table, says nothing of a GPU.
TRIAL = MeasurementPlan(
    m=(1, 64),
    weights=((512, 512),),
    heads=((8, 2, 64),),
    prefill=((1, 256),),
    decode=((4, 256),),
    copies=(2**15, 2**20),
)


def measure(bench: TorchBench, system: str, plan: MeasurementPlan, progress: RunListener) -> pd.DataFrame:
    """Measure the rows of all tables: ``form``, the words of every form, the sizes of all forms, ``latency_us``.

    Takes ``bench`` (times a call on the device [s]). Returns one row a call that could run; columns that a form lacks
    are empty; ``calibrate kernels`` reads the CSV of it.
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
    for heads, (batch, tokens) in product(plan.heads, plan.prefill):
        row = _attention(*heads) | {FORM: "context_attention", "batch": batch, "seq_len": tokens}
        yield row, partial(bench.prefill_attention, batch, tokens, *heads)
    for heads, (batch, context) in product(plan.heads, plan.decode):
        row = _attention(*heads) | {FORM: "generation_attention", "batch": batch, "kv_len": context}
        yield row, partial(bench.decode_attention, batch, context, *heads)


def _activations(op: str, elements: int) -> Row:
    return {FORM: "quantize_ops", "kernel_source": "torch", "op": op, "dtype": "bfloat16", "m": 1, "k": elements}


def _attention(q_heads: int, kv_heads: int, head_dim: int) -> Row:
    types: Row = {"kernel_source": "sdpa", "compute_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return types | {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
