"""Worked examples of the physics page, by the plain rooflines unless a function says otherwise."""

from __future__ import annotations

from dataclasses import replace

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.physics.kv_transfer import kv_bytes_per_request
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.physics.work import Tokens
from disagg_sim.units import GB, MS
from docs.computed import joined, plain, quick, table
from docs.computed.counts import tensor_parallel
from tests.published.breakdown import seconds_by_operator


def total(parts: dict[str, float], *names: str) -> float:
    """Time of the named operators. [ms]"""
    return sum(parts[name] for name in names) / MS


GEMMS, ALL_REDUCES = ("qkv", "o", "gate, up", "down"), ("attention all-reduce", "FFN all-reduce")
R1 = ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
EP64 = Sharding(dp_attn=64.0, ep=64.0)


#: Measured rows of W2 (InferenceX, Llama-3.1-70B, H100, vLLM): TP, ISL, OSL, concurrency, TPOT [ms].
def bare(at: Setup) -> Setup:
    """The examples were worked out with bare kernels, the host time of the profile, and even expert ranks."""
    return replace(even(at), overheads=None)


def even(at: Setup) -> Setup:
    """The setup with expert ranks that are filled evenly but for chance."""
    return at.changed(profile=replace(at.profile, rank_skew=0.0))


W2 = (
    (2, 1024, 1024, 4, 17.41),
    (2, 1024, 1024, 64, 28.77),
    (2, 8192, 1024, 16, 34.63),
    (8, 8192, 1024, 4, 10.22),
    (8, 8192, 1024, 64, 34.48),
    (8, 1024, 1024, 64, 15.45),
)


def w2_row(tp: int, isl: float, osl: float, batch: int) -> tuple[float, float, float]:
    """Decode step, prefill of one prompt and TPOT of a co-located instance, at 0.9 of the columns. [s]"""
    at = bare(setup("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", "measured", "vllm"))
    isl, osl = 0.9 * isl, 0.9 * osl
    step = decode_step(at, tensor_parallel(tp), batch=float(batch), context=isl + osl / 2).ttl
    prefill = prefill_pass(at, tensor_parallel(tp), batch=1.0, isl=isl).ftl
    return float(step), float(prefill), float(step + (batch - 1) * prefill / (osl - 1))


@quick
def w2_errors() -> str:
    """Predicted TPOT of W2 by the shipped fits against the measured one, row by row. [%]"""
    above = [100 * (w2_row(*row)[2] / MS / measured - 1) for *row, measured in W2]
    assert above[0] > 0 > max(above[1:])  # as the sentence says
    return f"{above[0]:.1f} % above the first row, then {joined([-each for each in above[1:]], '.1f')} %"


@quick
def w2_largest_errors() -> str:
    """The four largest misses of W2. [%]"""
    errors = sorted(abs(100 * (w2_row(*row)[2] / MS / measured - 1)) for *row, measured in W2)
    assert errors[1] < 3  # what README says of the other two
    return f"{errors[2]:.0f}, {errors[3]:.0f}, {errors[4]:.0f} and {errors[5]:.0f}"


@quick
@plain
def w1_ideal() -> str:
    """Decode step of W1 under ``ideal``. [ms]"""
    at = setup("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", "ideal")
    return f"{decode_step(at, tensor_parallel(8), batch=64.0, context=4096.0).ttl / MS:.2f}"


def w1() -> tuple[Setup, dict[str, float], float]:
    """W1 under ``measured``: setting, seconds of each operator, step. [s]"""
    at = bare(setup("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", "measured", "vllm"))
    tokens = Tokens(decodes=64.0, context=4096.0, emitted=64.0)
    parts = seconds_by_operator(at, tensor_parallel(8), tokens, phase="decode", stage_tokens=64.0)
    step = decode_step(at, tensor_parallel(8), batch=64.0, context=4096.0).ttl
    return at, parts, float(step)


@quick
@plain
def w1_measured() -> str:
    """Operators and whole of that step. [ms]"""
    at, parts, step = w1()
    named = {
        "GEMM": total(parts, *GEMMS),
        "attention": total(parts, "decode attention"),
        "all-reduce": total(parts, *ALL_REDUCES),
        "elementwise": total(parts, "elementwise"),
        "head and host": total(parts, "head") + at.profile.host / MS,
    }
    return f"{', '.join(f'{name} {ms:.2f}' for name, ms in named.items())}: **{step / MS:.2f} ms**, {64 / step:,.0f}"


@quick
@plain
def w2_rows() -> str:
    """Table of W2 by the plain fits."""
    header = ("TP", "isl/osl", "concurrency", "T_d ms", "t_p ms", "predicted TPOT", "measured")
    rows = []
    for tp, isl, osl, batch, measured in W2:
        step, prefill, tpot = (seconds / MS for seconds in w2_row(tp, isl, osl, batch))
        cells = (f"{step:.2f}", f"{prefill:.1f}", f"{tpot:.2f}", f"{measured:.2f}")
        rows.append((f"{tp}", f"{isl}/{osl}", f"{batch}", *cells))
    return table(header, rows)


@quick
@plain
def w2_prefill_at_tp4() -> str:
    """Prefill of 8192 tokens at TP4, by operator. [ms]"""
    at = bare(setup("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", "measured", "vllm"))
    tokens = Tokens(prompts=1.0, new=8192.0, emitted=1.0)
    parts = seconds_by_operator(at, tensor_parallel(4), tokens, phase="prefill", stage_tokens=8192.0)
    named = {
        "GEMM": total(parts, *GEMMS),
        "all-reduce": total(parts, *ALL_REDUCES),
        "elementwise": total(parts, "elementwise"),
        "attention": total(parts, "prefill attention"),
    }
    return ", ".join(f"{name} {ms:.0f}" for name, ms in named.items())


@quick
@plain
def w4_operators() -> str:
    """Operators of W4. [ms]"""
    at = bare(setup(*R1, "measured", "trtllm"))
    tokens = Tokens(prompts=1.0, new=16384.0, emitted=1.0)
    even, at_random = (
        seconds_by_operator(at, EP64, tokens, phase="prefill", stage_tokens=64 * 16384.0, imbalance=imbalance)
        for imbalance in (1.0, None)
    )
    projections = total(even, "q_a, kv_a", "q_b", "kv_b", "o")
    return (
        f"projections {projections:.0f}, attention {total(even, 'prefill attention'):.0f}, routed experts "
        f"{total(even, 'routed experts'):.0f} ({total(at_random, 'routed experts'):.0f} on the "
        f"fullest rank), dispatch {total(even, 'dispatch'):.0f} and combine "
        f"{total(even, 'combine'):.0f}, elementwise {total(even, 'elementwise'):.0f}, dense FFN "
        f"{total(even, 'gate, up', 'down'):.0f}, router {total(even, 'router'):.0f} ms; shared experts "
        f"({total(even, 'shared gate, up', 'shared down'):.0f})"
    )


@quick
@plain
def w4_ftl() -> str:
    """FTL of W4, requests/s and egress of a GPU."""
    at = bare(setup(*R1, "measured", "trtllm"))
    found = prefill_pass(at, EP64, batch=64.0, isl=16384.0)
    rate = 1 / float(found.busy)
    egress = rate * kv_bytes_per_request(at.model, at.precision, 16384) / GB
    return f"**FTL {float(found.ftl):.2f} s**, {rate:.2f} requests/s and {egress:.2f} GB/s"


@quick
@plain
def w5_rows() -> str:
    """Table of W5."""
    at = bare(setup(*R1, "measured", "trtllm"))
    header = (
        "sequences a GPU",
        "GEMM without head",
        "experts",
        "attention",
        "exchange",
        "TTL",
        "tokens/s/GPU",
        "tokens/s/user",
    )
    gemms = ("q_a, kv_a", "q_b", "kv_b", "o", "gate, up", "down", "shared gate, up", "shared down", "router")
    rows = []
    for count in (16, 64, 200):
        tokens = Tokens(decodes=float(count), context=17_408.0, emitted=float(count))
        parts = seconds_by_operator(at, EP64, tokens, phase="decode", stage_tokens=64.0 * count)
        ttl = float(decode_step(at, EP64, batch=64.0 * count, context=17_408.0).ttl)
        named = (total(parts, *gemms), *(total(parts, *of) for of in (["routed experts"], ["decode attention"])))
        cells = (*named, total(parts, "dispatch", "combine"), ttl / MS)
        rows.append((f"{count}", *(f"{ms:.1f}" for ms in cells), f"{count / ttl:,.0f}", f"{1 / ttl:.0f}"))
    return table(header, rows)


#: Profile and form of the past of the rows of W7.
W7 = (("measured", "cached"), ("measured", "naive"), ("ideal", "cached"))


def w7_ftl(profile: str, form: str) -> list[float]:
    """FTL of R1, 262,144 tokens on 64 GPUs, PP 1 whole and 2 to 32 in chunks of 512. [s]"""
    found = []
    for pp in (1, 2, 4, 8, 16, 32):
        n = 64 // pp
        mapping = ds.Sharding(dp_attn=n, ep=n, pp=pp)
        grid = ds.prefill_grid(
            even(ds.setup(*R1, profile)),
            mapping,
            ds.lengths(262_144, 2),
            batch=[n],
            chunk_tokens=[512 if pp > 1 else 0],
            mla_form=form,
            allow_long_context=True,
        )
        found.append(float(grid.latency[-1, 0]))
    return found


@quick
@plain
def w7_rows() -> str:
    """Table of W7 by the plain fits."""
    rows = []
    for profile, form in W7:
        first, *others = w7_ftl(profile, form)
        cells = [f"{ftl:.1f} ({first / ftl:.1f})" for ftl in others]
        rows.append((f"`{profile}`, {form}", f"{first:.1f}", *cells))
    return table(("FTL in s (factor over PP 1)", *(f"PP {pp}" for pp in (1, 2, 4, 8, 16, 32))), rows)


@quick
def w7_shipped() -> str:
    """W7 by the shipped fits, ``cached``."""
    first, *_, last = w7_ftl("measured", "cached")
    return f"{first:.1f} s at PP 1, {last:.1f} s ({first / last:.1f} times) at PP 32"


@quick
@plain
def w8_rows() -> str:
    """Table of W8."""
    rows = []
    for profile in ("measured", "optimistic", "ideal"):
        at = bare(setup("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv", profile, "trtllm"))
        steps = [decode_step(at, tensor_parallel(n), batch=1.0, context=17_000.0) for n in (2, 8, 64)]
        rows.append((f"`{profile}`", *(f"{float(step.ttl) / MS:.2f}" for step in steps)))
    return table(("profile", "TP2", "TP8", "TP64"), rows)
