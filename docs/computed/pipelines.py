"""The table of pipelined prefill as served: published rates and times to the first token beside ours, nothing fitted.

Kimi-K3 in its MXFP4 checkpoint on GB200 (sgl-project/sglang issue 32592) and GB300 (LMSYS blog of 2026-07-27); GLM-5.2
and Kimi-K2.5 on MI355X (ROCm/ATOM docs and recipes, issue 1552). The runs on MI355X had MXFP4 weights, of which that
system has no recipe: FP8 is taken, and the kernels of SGLang, as ATOM has no profile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.setup import Setup
from docs.computed import quick, table

#: Prompts of the run of 60,000 tokens, and of the others: 8,192, drawn from 0.8 of them where the source says so.
GLM_PROMPTS, LONG, SHORT, DRAWN = 32, 60_000.0, 8192.0, 0.9 * 8192.0
#: Prompt tokens a second and GPU through four and eight stages, and of TP4.
GLM = (11_274.0, 8996.0, 4530.8)
#: Prompts in flight -> prompt tokens a second and GPU of 16 stages; of TP16 with EP16 at four.
GB200, GB200_TEP = {4: 1227.0, 16: 3978.0, 32: 4550.0, 64: 4552.0}, 1947.0
#: Chunk -> time to the first token of one prompt of 131,072 tokens through four stages. [s]
BEST_CHUNK = 8192
CHUNKS = {32_768: 14.874, 16_384: 11.432, 8192: 10.082, 4096: 10.261, 2048: 12.270}


class Beside(NamedTuple):
    """Published quantities of one kind and the forecasts of them; ratios of two layouts are told apart."""

    what: str
    measured: tuple[float, ...]
    forecast: tuple[float, ...]
    of_layouts: bool = False

    @property
    def misses(self) -> tuple[float, ...]:
        """Each forecast over its measurement, less 1. [1]"""
        return tuple(ours / real - 1.0 for real, ours in zip(self.measured, self.forecast, strict=True))


class Pool(NamedTuple):
    """An instance that prefills alone: seconds to the first token, and between prompts at least. [s]"""

    gpus: float
    alone: float
    apart: float

    @classmethod
    def of(cls, at: Setup, mapping: Sharding, prompt: float, chunk: float) -> Pool:
        """Time prompts of so many tokens in chunks, one prompt a pass."""
        done = chunked_prefill_pass(at, mapping, batch=1.0, isl=prompt, chunk_tokens=chunk)
        return cls(float(mapping.gpus), float(done.ftl), float(done.interval))

    def rate(self, prompt: float, in_flight: float) -> float:
        """Prompt tokens a second and GPU with so many prompts in flight."""
        return min(in_flight / self.alone, 1.0 / self.apart) * prompt / self.gpus

    def run(self, prompt: float, prompts: int) -> float:
        """Prompt tokens a second and GPU of a run of so many prompts, filling and draining the stages."""
        return prompts * prompt / (self.alone + (prompts - 1) * self.apart) / self.gpus


def stages(count: int) -> Sharding:
    """Stages of one GPU each."""
    return Sharding(pp=count)


def kimi_k3() -> list[Beside]:
    """16 GB200 at several loads, and eight GB300, where the source gives a range: its nearer end."""
    at = ds.setup("kimi_k3", "gb200_nvl72", "mxfp4", engine="sglang")
    piped, wide = (Pool.of(at, each, SHORT, SHORT) for each in (stages(16), Sharding(tp_attn=16, ep=16)))
    rates = tuple(piped.rate(SHORT, n) for n in GB200)
    four = wide.rate(SHORT, 4)
    at = ds.setup("kimi_k3", "gb300_nvl72", "mxfp4", engine="sglang")
    eight, eight_wide = (Pool.of(at, each, SHORT, SHORT) for each in (stages(8), Sharding(tp_attn=8, ep=8)))
    most = eight_wide.apart / eight.apart
    return [
        Beside("Kimi-K3, 16 GB200, PP16, 4 / 16 / 32 / 64 in flight: tokens/s/GPU", tuple(GB200.values()), rates),
        Beside("the same, TP16 EP16, 4 in flight", (GB200_TEP,), (four,)),
        Beside("PP16 over TP16 EP16, 4 in flight", (GB200[4] / GB200_TEP,), (rates[0] / four,), of_layouts=True),
        Beside("8 GB300, PP8 over TP8 EP8 (1.45 to 1.72)", (min(max(most, 1.45), 1.72),), (most,), of_layouts=True),
    ]


def glm_5_2() -> list[Beside]:
    """MI355X: 32 prompts of 60,000 tokens in chunks of 16,384, and the first token at four in flight."""
    at = ds.setup("glm_5_2", "mi355x", "fp8", engine="sglang")
    four, eight, tp = stages(4), stages(8), Sharding(tp_attn=4, tp_ffn=4)
    rates = tuple(Pool.of(at, each, LONG, 16_384.0).run(LONG, GLM_PROMPTS) for each in (four, eight, tp))
    first = [Pool.of(at, each, DRAWN, 16_384.0).alone for each in (four, tp)]
    over = (GLM[0] / GLM[2], GLM[1] / GLM[2]), (rates[0] / rates[2], rates[1] / rates[2])
    return [
        Beside("GLM-5.2, MI355X, 60,000 tokens, PP4 / PP8 / TP4: tokens/s/GPU", GLM, rates),
        Beside("the same, PP4 and PP8 over TP4", *over, of_layouts=True),
        Beside("8,192 tokens, TTFT of PP4 over TP4", (704.0 / 484.0,), (first[0] / first[1],), of_layouts=True),
    ]


def kimi_k2_5() -> list[Beside]:
    """MI355X, PP4, one prompt: its time in chunks of 8,192, and that in others over it."""
    at = ds.setup("kimi_k2_5", "mi355x", "fp8", engine="sglang")
    ours = {chunk: Pool.of(at, stages(4), 131_072.0, float(chunk)).alone for chunk in CHUNKS}
    others = [chunk for chunk in CHUNKS if chunk != BEST_CHUNK]
    shapes = (tuple(each[chunk] / each[BEST_CHUNK] for chunk in others) for each in (CHUNKS, ours))
    return [
        Beside("Kimi-K2.5, MI355X, PP4, 131,072 tokens: TTFT [s]", (CHUNKS[BEST_CHUNK],), (ours[BEST_CHUNK],)),
        Beside("TTFT at chunks of 32k / 16k / 4k / 2k over 8k", *shapes),
    ]


def beside() -> list[Beside]:
    """All of them."""
    return [*kimi_k3(), *glm_5_2(), *kimi_k2_5()]


@quick
def pipelines_as_served() -> str:
    """Published pipelined prefill beside the forecast."""

    def told(numbers: tuple[float, ...]) -> str:
        return " / ".join(f"{each:,.{0 if each > 100 else 2}f}" for each in numbers)

    rows = [
        (each.what, told(each.measured), told(each.forecast), " / ".join(f"{miss:+.0%}" for miss in each.misses))
        for each in beside()
    ]
    return table(["published", "measured", "forecast", "off"], rows)


@quick
def pipelines_ratios() -> str:
    """Median and largest miss of the ratios of two layouts."""
    misses = [abs(miss) for each in beside() if each.of_layouts for miss in each.misses]
    return f"{np.median(misses):.0%} (largest {max(misses):.0%}, {len(misses)} pairs)".replace("%", " %")
