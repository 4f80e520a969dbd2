"""Numbers of README and of the physics page that are counts, sizes or errors of fits."""

from __future__ import annotations

import numpy as np

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_efficiency, load_engine, load_evidence, load_profile, resolve_precision
from disagg_sim.physics.collectives import copies_per_rank, copies_with_own
from disagg_sim.physics.counts import prefill_work
from disagg_sim.physics.kv_transfer import kv_bytes_per_request
from disagg_sim.physics.memory import activation_bytes, decode_bytes
from disagg_sim.physics.residents import Residents, decode_residents
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import expected_distinct_experts
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.techniques.experts.physics import lasting_imbalance
from disagg_sim.units import GB
from docs.computed import joined, on_site, power, quick, table


def tensor_parallel(n: float) -> Sharding:
    """TP over n GPUs."""
    return Sharding(tp_attn=float(n), tp_ffn=float(n))


@quick
def demo_points() -> str:
    """Design points of the demo, in millions."""
    return f"{plan_sweep(load_sweep('demo')).points / 1e6:.1f}"


@quick
def demo_cases() -> str:
    """Cases of the demo."""
    return str(len(plan_sweep(load_sweep("demo")).cases))


@quick
def demo_others() -> str:
    """Cases of the demo but for the one that README shows."""
    return str(len(plan_sweep(load_sweep("demo")).cases) - 1)


@on_site
def served_kinds() -> str:
    """Kinds of layouts to the most GPUs measured: the error that three quarters of the points keep (points)."""
    kinds = load_evidence("measured").kinds
    families, systems = (sorted({getattr(each, name) for each in kinds}) for name in ("family", "systems"))

    def cell(place: str, family: str) -> str:
        mine = [each for each in kinds if (each.systems, each.family) == (place, family)]
        sizes = ["" if each.most_gpus == 1 else f" to {each.most_gpus}" for each in mine]
        errors = ["–" if each.error is None else f"{each.error:.0%}" for each in mine]
        return "; ".join(
            f"{each.layout}{size}: {error} ({each.points:,})"
            for each, size, error in zip(mine, sizes, errors, strict=True)
        )

    return table(("systems", *families), [(place, *(cell(place, family) for family in families)) for place in systems])


@quick
def text_imbalance() -> str:
    """Tokens of the fullest of 4 to 32 expert ranks of DeepSeek-R1 over the mean, of text."""
    ranks, skew = np.array([4, 8, 16, 32]), load_profile("measured").rank_skew
    return joined(lasting_imbalance(256, ranks, 0, skew).tolist(), ".2f")


@quick
def exchange_stretches() -> str:
    """How much longer the exchange of experts lasts in decode, of the engines that tell."""
    engines = [load_engine(name) for name in ("trtllm", "sglang")]
    return " and ".join(f"{engine.exchange_stretch:.2f} ({engine.title})" for engine in engines)


#: Systems whose kernels were measured.
MEASURED = ("a100_sxm_80gb", "h100_sxm", "h200_sxm", "b200_sxm", "gb200_nvl72")


def fit_errors(*sections: str) -> str:
    """Least and largest median error of a fit on the shapes held out. [%]"""
    found = [
        100 * fit.held_out_median_error
        for system in MEASURED
        for section in sections
        for fit in getattr(load_efficiency(system), section)
        if fit.held_out_points and not fit.inherited_from
    ]
    return f"{min(found):.0f}-{max(found):.0f}"


@quick
def fit_errors_dense() -> str:
    """Errors of the fits of GEMM, attention and collectives. [%]"""
    return fit_errors("gemm", "prefill_attention", "decode_attention", "collectives")


@quick
def fit_errors_experts() -> str:
    """Errors of the fits of experts and their exchange. [%]"""
    return fit_errors("moe", "alltoall")


@quick
def r1_linear_params() -> str:
    """Parameters of R1 that a token meets."""
    return f"{ds.load_model('deepseek_r1').linear_params_per_token:,}"


def r1_prefill(isl: int) -> str:
    """FLOP of a prompt of R1, and the share of attention."""
    work = prefill_work("deepseek_r1", isl=isl)
    return f"{power(work.flops, 3)}, of it {100 * work['prefill attention'].flops / work.flops:.0f} % attention"


@quick
def r1_prefill_16k() -> str:
    """Of 16,384 tokens."""
    return r1_prefill(16_384)


@quick
def r1_prefill_256k() -> str:
    """Of 262,144 tokens."""
    return r1_prefill(262_144)


@quick
def llama_activations() -> str:
    """Activations of Llama-70B, 8,192 tokens, TP4. [GB]"""
    live = Residents(sequences=1.0, tokens=8192.0, live=8192.0, live_total=8192.0, emitted=1.0)
    return f"{activation_bytes(ds.load_model('llama_3_1_70b'), tensor_parallel(4), live, 1.0) / GB:.2f}"


@quick
def llama_decode_memory() -> str:
    """Fullest GPU of Llama-70B, 64 sequences of 4096/1024, at TP2, TP4, TP8. [GB]"""
    at = setup("llama_3_1_70b", "h100_sxm", "fp8_bf16kv")
    return joined(
        [decode_bytes(at, tensor_parallel(n), 64.0, cached=decode_residents(4096, 1024)) / GB for n in (2, 4, 8)], ".1f"
    )


@quick
def h100_memory_limit() -> str:
    """What an H100 may fill. [GB]"""
    return f"{setup('llama_3_1_70b', 'h100_sxm', 'fp8').memory_limit / GB:.1f}"


@quick
def copies_at_8() -> str:
    """Copies of a token at k = 8, n = 8, per rank and with its own."""
    return f"{copies_per_rank(8, 8.0):.2f} and {copies_with_own(8, 8.0):.2f}"


@quick
def copies_at_64() -> str:
    """The same at n = 64."""
    return f"{copies_per_rank(8, 64.0):.2f} and {copies_with_own(8, 64.0):.2f}"


@quick
def r1_active_experts() -> str:
    """Distinct experts that 8, 64 and 256 tokens of R1 pick."""
    return joined([float(expected_distinct_experts(tokens, 256, 8)) for tokens in (8, 64, 256)], ".1f")


def token_bytes(name: str) -> str:
    """Cache of a token in fp8. [B]"""
    model = ds.load_model(name)
    return f"{kv_bytes_per_request(model, resolve_precision('fp8', model, ds.load_system('h100_sxm')), 1):,.0f}"


@quick
def r1_token_bytes() -> str:
    """Of R1."""
    return token_bytes("deepseek_r1")


@quick
def llama_token_bytes() -> str:
    """Of Llama-70B."""
    return token_bytes("llama_3_1_70b")
