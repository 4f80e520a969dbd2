"""Tables of context parallelism on the page of layouts: crossings of DCP with TP, and DP against TP for one KV head."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

import disagg_sim as ds
from disagg_sim.certainty.error_bars import uncertainty
from disagg_sim.domain import Sharding
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.cost import group_cost
from disagg_sim.physics.memory import instance_parts
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.residents import Residents
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Operator, Work
from disagg_sim.units import US
from docs.computed import quick, table

#: Cached tokens -> requests between which DCP8 overtakes TP8 (sgl-project/sglang pull request 33926, MLA). [token]
PUBLISHED = {32_768: (8, 16), 65_536: (4, 8), 131_072: (2, 4), 262_144: (0, 1)}
#: Batches at which both are timed. [request]
BATCHES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128], dtype=float)
TP8, DCP8 = (Sharding(tp_attn=8, tp_ffn=8, dcp=dcp) for dcp in (1, 8))
#: Output tokens of the requests; a decode step has the prompt and half of these in its cache. [token]
OUTPUT = 256
SAMPLES = 400


class Ratio(NamedTuple):
    """Time of a step under DCP8 over that under TP8: forecast, and 80 % of its samples. [1]"""

    nominal: float
    low: float
    high: float

    def __str__(self) -> str:
        """As a page tells it."""
        return f"{self.nominal:.2f} ({self.low:.2f} to {self.high:.2f})"


def crossing(at: Setup, context: int) -> float:
    """Batch at which DCP8 overtakes TP8, between the batches by their logarithms; 0 = before the first. [request]"""
    both = Sharding.stack([TP8, DCP8]).for_grid()
    alone, shared = decode_step(at, both, batch=BATCHES[None, :], context=float(context)).ttl
    slower = np.log(shared / alone)  # falls with the batch
    return 0.0 if slower[0] < 0 else float(np.exp(np.interp(0.0, -slower, np.log(BATCHES))))


def ratio(at: Setup, context: int, batch: int) -> Ratio:
    """Steps of one batch under both, with the spread of the shipped engine; what fits is not asked."""
    lengths = ds.lengths(context - OUTPUT // 2, OUTPUT)
    shipped = ds.setup(at.model, at.system, at.precision.name, engine=at.engine)
    options = {"batch": [batch], "allow_long_context": True}
    prefill = ds.prefill_grid(shipped, TP8, lengths, batch=[1], chunk_tokens=[], allow_long_context=True)
    decode = ds.decode_grid(shipped, [TP8, DCP8], lengths, **options)
    own = ds.decode_grid(at, [TP8, DCP8], lengths, **options)
    prefill, decode = (replace(each, memory_bytes=0.0 * each.memory_bytes) for each in (prefill, decode))
    found = uncertainty(ds.disaggregated(prefill, decode, ftl_limit=1e6, gpu_cap=4096), samples=SAMPLES)
    degrees = found.points["decode_dcp"].to_numpy()
    sampled = found.ttl[degrees == 8][0] / found.ttl[degrees == 1][0]
    nominal, there = (float(grid.latency[1, 0] / grid.latency[0, 0]) for grid in (own, decode))
    return Ratio(nominal, *(np.quantile(sampled, (0.1, 0.9)) * (nominal / there)).tolist())


def sglang(system: str, exchange: str) -> Setup:
    """DeepSeek-R1 with SGLang, which exchanges outputs so."""
    at = ds.setup("deepseek_r1", system, "fp8", engine="sglang")
    return replace(at, overheads=replace(at.overheads, dcp_exchange=exchange))


@quick
def dcp_crossings() -> str:
    """Where DCP8 overtakes TP8 for DeepSeek-R1, beside what was published."""
    b200 = sglang("b200_sxm", "ag_rs")
    setups = [sglang("h200_sxm", "ag_rs"), b200, sglang("b200_sxm", "a2a")]
    rows = []
    for context, (low, high) in PUBLISHED.items():
        ends = [f"{batch}: {ratio(b200, context, batch)}" for batch in (low, high) if batch]
        found = [f"{where:.1f}" if (where := crossing(at, context)) else "below 1" for at in setups]
        published = f"{low} to {high}" if low else f"below {high}"
        rows.append((f"{context:,}", published, *found, "; ".join(ends)))
    head = ("context", "published", "H200", "B200", "B200, a2a", "DCP8 over TP8 at the ends, B200 (80 % band)")
    return table(head, rows)


@quick
def dcp_collectives() -> str:
    """Three collectives of 8 ranks on B200, of nothing. [us]"""
    at = sglang("b200_sxm", "ag_rs")
    names = ("all-gather", "all-gather", "reduce-scatter")
    each = (group_cost(Operator(name, "gather", Work(0.0, 0.0), size=0.0, ranks=8.0), at).time for name in names)
    return f"{sum(map(float, each)) / US:.0f}"


@quick
def dcp_gains() -> str:
    """What DCP8 gains in steps of 64 sequences on B200."""
    at = sglang("b200_sxm", "ag_rs")
    both = Sharding.stack([TP8, DCP8]).for_grid()
    times = (decode_step(at, both, batch=64.0, context=float(each)).ttl[:, 0] for each in tuple(PUBLISHED)[:3])
    return ", ".join(f"{alone / shared - 1.0:.0%}" for alone, shared in times)


class Capacity(NamedTuple):
    """Sequences of one length that an instance holds: forecast, and with all but the cache off by a fifth. [1]"""

    nominal: float
    low: float
    high: float


def capacity(at: Setup, mapping: Sharding, context: float, off: float = 0.2) -> Capacity:
    """Sequences beside weights and the activations of a full step; ``off`` is the error of all that is no cache. [1]"""

    def parts(sequences: float) -> float:
        held = Residents(sequences=sequences, tokens=sequences * context, live=0.0, live_total=0.0, emitted=0.0)
        return float(sum(np.asarray(part) for part in instance_parts(at, mapping, held)))

    fixed, one = parts(0.0), parts(1.0) - parts(0.0)
    ranks = float(mapping.dp_attn)
    held = [ranks * (at.memory_limit - fixed * factor) / one for factor in (1.0, 1.0 + off, 1.0 - off)]
    return Capacity(*held)


@quick
def dp_crossing() -> str:
    """Resident tokens from which attention DP of 8 GPUs reads less than TP of Qwen3-235B. [token]"""
    at = ds.setup("qwen3_235b_a22b", "h200_sxm", "fp8", profile="ideal")
    ((layer, _),) = layers_of(at.model)
    spec, element = layer.attention.spec, at.precision.projection("gqa").bytes
    row = sum(store.token_bytes for store in spec.stores(at.precision.cache.bytes))
    return f"{spec.matmul_params(at.model.hidden) * element * 7 / (row * (8 / spec.cache_parts - 1)):,.0f}"


@quick
def dp_against_tp() -> str:
    """Sequences of a million tokens under DP8, TP8 and DCP8 for models of one KV head, on 8 B200 with vLLM."""
    rows = []
    for name, published in (("deepseek_v4_flash", "7.7"), ("deepseek_r1", "")):
        at = ds.setup(name, "b200_sxm", "fp8", engine="vllm")
        at = replace(at, overheads=replace(at.overheads, memory_utilisation=0.95))
        tp, dp = (capacity(at, each, 2**20) for each in (Sharding(tp_attn=8, ep=8), Sharding(dp_attn=8, ep=8)))
        shares = any(layer.attention.spec.shared_rows for layer, _ in layers_of(at.model))
        dcp = capacity(at, Sharding(tp_attn=8, ep=8, dcp=8), 2**20).nominal / tp.nominal if shares else np.nan
        factor = f"{dp.nominal / tp.nominal:.1f} ({dp.low / tp.high:.1f} to {dp.high / tp.low:.1f})"
        cells = (f"{tp.nominal:.1f}", f"{dp.nominal:.0f}", factor, published or "–")
        rows.append((at.model.title, *cells, f"{dcp:.1f}" if shares else "–"))
    head = ("model", "TP8", "DP8", "DP8 over TP8 (all but the cache off by 20 %)", "published", "DCP8 over TP8")
    return table(head, rows)
