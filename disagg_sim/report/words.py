"""Format mappings, cases and rates for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from disagg_sim.domain import SHARDING, UNSAID
from disagg_sim.units import MS

if TYPE_CHECKING:
    from disagg_sim.domain import Sharding as Shards
    from disagg_sim.planning.question import Size
    from disagg_sim.sweep.spec import PoolSystems


def mapping_text(point: Mapping[str, Any], phase: str) -> str:
    """Write the mapping of one phase of a point in short: ``TP8``, ``DP32 EP32``, ``TP4 EP4 PP2``, ``1 GPU``."""
    named = {name: point.get(f"{phase}_{name}", UNSAID.get(name)) for name in SHARDING}
    return degrees_text(**{name: int(value) for name, value in named.items()})


def text_of(mapping: Shards) -> str:
    """Write a mapping in short, as ``degrees_text`` does."""
    return degrees_text(**{name: int(getattr(mapping, name)) for name in SHARDING})


def degrees_text(
    tp_attn: int, dp_attn: int, tp_ffn: int, ep: int, pp: int, redundant_slots: int = 0, dcp: int = 1, pcp: int = 1
) -> str:
    """A mapping in short: ``TP8``, ``DP32 EP32``, ``TP4 EP4 PP2``, ``DP48 EP48+32`` with 32 redundant expert slots.

    One degree stands for both halves of a layer where they agree: ``TP8`` is attention and FFN, ``TP8 EP8`` attention
    over 8 and experts over the same 8. ``attn``/``ffn`` tell apart what differs. Returns ``1 GPU`` where nothing is
    sharded.
    """
    parts = [f"DP{dp_attn}"] * (dp_attn > 1) + [f"PCP{pcp}"] * (pcp > 1)
    own = [f"TP{tp_attn}"] * (tp_attn > 1) + [f"DCP{dcp}"] * (dcp > 1)
    parts += own if tp_attn == tp_ffn else own + [f"FFN-TP{tp_ffn}"] * (tp_ffn > 1)
    copies = f"+{redundant_slots}" if redundant_slots else ""
    parts += [f"EP{ep}{copies}"] * (ep > 1) + [f"PP{pp}"] * (pp > 1)
    return " ".join(parts) or "1 GPU"


def pools_text(pools: PoolSystems) -> str:
    """Systems and recipes: ``h100_sxm, fp8``, or ``prefill a100_sxm_80gb, bf16; decode h100_sxm, bf16``."""
    decode = f"{pools.system}, {pools.precision}"
    if pools.alike:
        return decode
    return f"prefill {pools.prefill_system}, {pools.prefill_precision}; decode {decode}"


#: What a mode is called where people read it.
MODE_TEXT = {"disaggregated": "disaggregated", "colocated": "co-located", "piggyback": "piggybacked"}


def beside_text(chunk_tokens: int, draft_tokens: int) -> str:
    """Write what stands behind the degrees of a mapping; nothing where there is neither."""
    chunk = f", chunks of {chunk_tokens}" if chunk_tokens else ""
    return chunk + (f", draft tokens {draft_tokens}" if draft_tokens else "")


def drafts_text(point: Mapping[str, Any]) -> str:
    """Write what a point speculates, behind its decode mapping; nothing where it does not."""
    drafts = int(point.get("decode_draft_tokens", 0))
    if not drafts:
        return ""
    return f", {drafts} draft{'s' * (drafts > 1)} ({point['accepted_tokens_per_step']:.3g} tokens a step)"


def decode_parts_text(point: Mapping[str, Any]) -> str:
    """Write the decode side of a frontier over pools: one mapping, or that of attention and of feed-forward ranks."""
    if not point["ffn_gpus"]:
        return mapping_text(point, "decode")
    halves = f"attention {mapping_text(point, 'decode')}, experts {mapping_text(point, 'ffn')}"
    return f"{halves}, {int(point['microbatches'])} micro-batches"


def ratio_text(point: Mapping[str, Any]) -> str:
    """Prefill to decode: instances and GPUs, ``3x8 : 2x16``."""
    prefill = f"{int(point['prefill_instances'])}×{int(point['prefill_gpus'])}"
    return f"{prefill} : {int(point['decode_instances'])}×{int(point['decode_gpus'])}"


def prefill_text(point: Mapping[str, Any]) -> str:
    """How a co-located point prefills: ``up to 4 a pass, chunk 2048``, ``512 tokens in 25 % of the steps``."""
    if point["mixed_chunk_tokens"]:
        share = 100.0 * point["mixed_step_share"]
        often = f"{share:.0f}" if share >= 1.0 else f"{share:.1g}"
        return f"{point['mixed_chunk_tokens']:.0f} tokens in {often} % of the steps"
    chunk = f", chunk {int(point['prefill_chunk_tokens'])}" if point["prefill_chunk_tokens"] else ""
    held = f", prefill delay up to {steps} steps" if (steps := int(point.get("hold_steps", 0))) else ""
    return f"up to {int(point['prefill_batch'])} a pass{chunk}{held}"


#: Cell of a table where a frontier does not reach so far.
NOT_REACHED = "–"


def throughput_text(point: Mapping[str, Any] | None, column: str) -> str:
    """Write the throughput of a point to three digits, or that a frontier has none."""
    if point is None:
        return NOT_REACHED
    value = float(point[column])
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> str:
    """Write a table of Markdown."""
    rule = ["---"] * (len(head) - numbers) + ["--:"] * numbers
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def records(points: pd.DataFrame) -> list[dict[str, Any]]:
    """Read the rows of a table by column name."""
    return [{str(name): value for name, value in row.items()} for row in points.to_dict("records")]


def size_text(size: Size) -> str:
    """Write how much is to be served."""
    if size.gpus:
        return f"{size.gpus} GPU{'s' * (size.gpus != 1)}"
    return f"{size.users} users" if size.users else f"{size.rate:g} requests/s"


#: Latencies from here on are told in seconds. [s]
LONG = 0.9995


def rate_text(rate: float) -> str:
    """Write a rate in whole requests/s, or with four digits below 1,000."""
    return f"{rate:,.0f}" if rate >= 1e3 else f"{rate:.4g}"


def seconds_text(seconds: float) -> str:
    """Write a latency: ``31.2 ms``, ``1.27 s``; ``-`` where it has no end."""
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.3g} s" if seconds >= LONG else f"{seconds / MS:.3g} ms"


def seconds_band(band: tuple[float, float]) -> str:
    """Write a band of latencies: ``420 to 870 ms``, ``0.98 to 1.3 s``, ``1.2 s or more``.

    >>> seconds_band((0.42, 0.871)), seconds_band((0.9833, 1.3)), seconds_band((1.2, math.inf))
    ('420 to 871 ms', '0.983 to 1.3 s', '1.2 s or more')
    >>> seconds_band((math.inf, math.inf))
    'no end'
    """
    low, high = band
    if not math.isfinite(high):
        return f"{seconds_text(low)} or more" if math.isfinite(low) else "no end"
    unit, scale = ("s", 1.0) if high >= LONG else ("ms", MS)
    return f"{low / scale:.3g} to {high / scale:.3g} {unit}"
