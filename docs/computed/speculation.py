"""Tables of speculative decoding: what drafts gain by batch, beside published statements, and how many are best."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

import disagg_sim as ds
from disagg_sim.physics.passes.decode import decode_step
from docs.computed import quick, table


class Statement(NamedTuple):
    """A published gain in tokens per second and user, over the same deployment without drafts."""

    who: str
    what: str  # deployment
    setup: tuple[str, str, str, str, str]  # model, system, recipe, profile, engine
    mapping: ds.Sharding
    batch: int  # over all GPUs [request]
    context: int  # mean [token]
    drafts: int  # 0 = not stated: one is counted [token]
    accepted: tuple[float, ...]  # marginal shares that add up to the published length; () = not stated
    gain: float  # [1]


#: NVIDIA, TensorRT-LLM blog 1, "Pushing Latency Boundaries", section MTP: 1K/2K, 8 x B200, one request. Accepted
#: lengths of 1.92, 2.58, 2.82, 2.99, 3.01 at 1 to 5 drafts.
R1_SHARES = (0.92, 0.66, 0.24, 0.17, 0.02)
_B200 = ("deepseek_r1", "b200_sxm", "nvfp4_bf16kv", "measured", "trtllm")
_H200 = ("deepseek_v3", "h200_sxm", "fp8", "measured", "sglang")
_ONE = ds.Sharding(tp_attn=8, tp_ffn=2, ep=4)
_RANKS = ds.Sharding(dp_attn=16, ep=16)
_TP8 = ds.Sharding(tp_attn=8, tp_ffn=8)
NVIDIA, LMSYS, SGLANG = "NVIDIA", "LMSYS", "SGLang documentation"
#: LMSYS, "Accelerating SGLang with Multiple Token Prediction", July 2025: over no drafts and no overlapped scheduling,
#: which drafts had not either; its split of the accepted length over positions is not published. SGLang's page on
#: DeepSeek states neither drafts nor accepted length.
STATEMENTS = (
    *(
        Statement(NVIDIA, "R1 in FP4, 8 B200, TP 8", _B200, _ONE, 1, 2048, k, R1_SHARES[:k], gain)
        for k, gain in enumerate((1.78, 2.25, 2.28, 2.21, 2.15), start=1)
    ),
    Statement(LMSYS, "V3, 16 H200, 65,536 tokens", _H200, _RANKS, 32, 67_584, 2, (0.72, 0.46), 81.5 / 51.0),
    Statement(LMSYS, "V3, 16 H200, 65,536 tokens", _H200, _RANKS, 32, 67_584, 3, (0.72, 0.46, 0.26), 82.0 / 51.0),
    Statement(SGLANG, "V3, 8 H200, TP 8", _H200, _TP8, 1, 1500, 0, (), 1.8),
    Statement(SGLANG, "V3, 8 H200, TP 8", _H200, _TP8, 32, 1500, 0, (), 1.5),
    Statement(
        LMSYS, "V3, 96 H200", _H200, ds.Sharding(dp_attn=96, ep=96, redundant_slots=32), 96 * 128, 2050, 1, (), 1.142
    ),
)
#: Batches of the tables of the best number of drafts. [request]
BATCHES = (1, 8, 32, 128, 512, 1024, 2048, 4096)
#: Layouts in these tables.
TP_EIGHT = ("TP 8, EP 8", ds.Sharding(tp_attn=8, ep=8))
DP_EIGHT = ("attention DP 8, EP 8", ds.Sharding(dp_attn=8, ep=8))
DP_WIDE = ("attention DP 32, EP 32", ds.Sharding(dp_attn=32, ep=32))


def gain_of(said: Statement) -> float:
    """The same gain by the model: TTL of a step without drafts over that with them. [1]"""
    shares = said.accepted or ds.load_speculation("deepseek_r1_mtp").acceptance
    at = ds.setup(*said.setup, speculation="mtp " + " ".join(map(str, shares)))
    mapping = replace(said.mapping, draft_tokens=len(shares))
    load = {"batch": float(said.batch), "context": float(said.context)}
    plain = decode_step(replace(at, speculation=None), said.mapping, **load).ttl
    return float(plain / decode_step(at, mapping, **load).ttl)


@quick
def drafts_as_published() -> str:
    """Published gains beside ours, the largest batch last."""
    rows = []
    for said in STATEMENTS:
        ours = gain_of(said)
        each, ranks = said.batch, int(said.mapping.dp_attn)
        rows.append(
            (
                said.who,
                said.what,
                f"{each // ranks} a rank" if ranks > 1 else f"{each}",
                str(said.drafts or "not stated"),
                f"{1 + sum(said.accepted):.2f}" if said.accepted else "not stated",
                f"{said.gain:.2f}",
                f"{ours:.2f}",
                f"{ours / said.gain - 1:+.0%}".replace("-", "−"),
            )
        )
    head = ("who", "what", "batch", "drafts", "AL", "gain, published", "ours", "miss")
    return table(head, rows)


def best_drafts(at: ds.Setup, mapping: ds.Sharding, lengths: tuple[int, int]) -> list[str]:
    """Best number of drafts and its gain at each of ``BATCHES``; a dash where nothing fits."""
    case, batch = (mapping, ds.lengths(*lengths)), np.array(BATCHES)
    drafted = ds.decode_grid(at, *case, batch=batch)
    plain = ds.decode_grid(replace(at, speculation=None), *case, batch=batch)
    gains = (plain.latency / drafted.latency)[0].tolist()
    points = zip(drafted.drafts[0].tolist(), gains, drafted.feasible[0].tolist(), strict=True)
    return [(f"{k}: {gain:.2f}" if k else "none") if fits else "–" for k, gain, fits in points]


def _by_batch(at: ds.Setup, lengths: tuple[int, int], *layouts: tuple[str, ds.Sharding]) -> str:
    columns = [best_drafts(at, mapping, lengths) for _, mapping in layouts]
    head = ("batch", *(f"{name}, best drafts: gain" for name, _ in layouts))
    return table(head, [(f"{each:,}", *row) for each, *row in zip(BATCHES, *columns, strict=True)])


@quick
def drafts_by_batch_r1() -> str:
    """DeepSeek-R1 on H200 with the accepted lengths that NVIDIA published."""
    at = ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation="mtp " + " ".join(map(str, R1_SHARES)))
    return _by_batch(at, (1024, 2048), TP_EIGHT, DP_EIGHT, DP_WIDE)
