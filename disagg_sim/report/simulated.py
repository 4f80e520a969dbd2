"""Lines that say what a simulated run gave, in the units that people read."""

from __future__ import annotations

from collections.abc import Iterator

from disagg_sim.report.words import degrees_text
from disagg_sim.simulation.capacity import Capacity
from disagg_sim.simulation.deployment import PARTS, ServedDeployment
from disagg_sim.simulation.metrics import Summary
from disagg_sim.units import MS

Line = tuple[str, ...]


def summary_lines(row: Summary) -> Iterator[Line]:
    """What a reader looks at first: ended requests, the SLO, latencies, throughput, use of the GPUs."""
    lost = row.rejected + row.failed + row.unfinished
    yield "requests", f"{row.requests:,}, of which {row.completed:,} completed and {lost:,} did not"
    yield "SLO", f"TTFT {row.slo_ttft_s:g} s, TPOT {row.slo_tpot_s / MS:g} ms"
    yield "inside the SLO", f"{row.slo_attainment:.1%} of all requests"
    yield "goodput", f"{row.goodput_requests_per_s:.4g} requests/s, {row.goodput_tokens_per_s:,.4g} tokens/s"
    yield "TTFT p50, p90, p99", f"{row.ttft_p50_s:.3g}, {row.ttft_p90_s:.3g}, {row.ttft_p99_s:.3g} s"
    per_token = (row.tpot_p50_s, row.tpot_p90_s, row.tpot_p99_s)
    yield "TPOT p50, p90, p99", ", ".join(f"{value / MS:.3g}" for value in per_token) + " ms"
    yield "ITL p99, of all gaps", f"{row.itl_p99_s / MS:.3g} ms"
    yield "GPU-hours", f"{row.gpu_hours:.4g}, in passes {row.utilisation:.0%} of the time, MFU {row.mfu:.1%}"
    yield "KV blocks in use", f"{row.kv_use_mean:.1%} on average, {row.kv_use_max:.1%} at most"
    if row.transfers:
        exposed = f"{row.exposed_transfer_mean_s / MS:.3g} ms of each waited for"
        yield "KV transfers", f"{row.transfers:,}, {exposed}"
    if row.flips:
        yield "changes of role", f"{row.flips:,}"
    yield "simulated", f"in {row.wall_s:.3g} s, {row.requests_per_cpu_s:,.0f} requests per CPU second"


def capacity_lines(capacity: Capacity) -> Iterator[Line]:
    """Every rate that the search tried."""
    for row in capacity.runs:
        rate = f"{row.rate_scale:.4g} times the rate of the trace"
        yield rate, f"{row.slo_attainment:.1%} inside the SLO, goodput {row.goodput_requests_per_s:.4g} requests/s"


def deployment_rows(deployment: ServedDeployment) -> Iterator[Line]:
    """Part, instances, mapping and GPUs of one of them."""
    for part in PARTS:
        for replicas in getattr(deployment, part):
            m = replicas.mapping
            text = degrees_text(m.tp_attn, m.dp_attn, m.tp_ffn, m.ep, m.pp)
            yield part, f"{replicas.instances:,}", text, f"{m.gpus:,}"
