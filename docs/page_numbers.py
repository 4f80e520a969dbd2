"""The numbers that pages state, computed: ``python docs/page_numbers.py`` writes them where README and docs mark them.

A value in a sentence stands between ``<!-- number: NAME -->`` and ``<!-- /number -->``, a table between
``<!-- table: NAME -->`` and ``<!-- /table -->``, each on a line of its own; a reader sees neither. A function below has
the name, with ``_`` for ``-``, and returns the text. It owns the digits: as many as a page needs, so that noise of the
last digit of a float does not show. ``--all`` computes those that take minutes, too; ``--check`` writes nothing, names
every page whose text differs, and exits 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this tree, and the examples that tests and pages share

import numpy as np  # noqa: E402

import disagg_sim as ds  # noqa: E402
from disagg_sim.facts.load import load_efficiency, resolve_precision  # noqa: E402
from disagg_sim.facts.yaml_files import PATH_VARIABLE  # noqa: E402
from disagg_sim.physics.collective import copies_per_rank, copies_with_own  # noqa: E402
from disagg_sim.physics.kv_transfer import kv_bytes_per_request  # noqa: E402
from disagg_sim.physics.layer import Tokens, mla_dims  # noqa: E402
from disagg_sim.physics.memory import Residents, activation_bytes  # noqa: E402
from disagg_sim.physics.phases import Degrees, decode_step, prefill_pass  # noqa: E402
from disagg_sim.physics.work import expected_distinct_experts, mla_work  # noqa: E402
from disagg_sim.search.setting import Setting, setting  # noqa: E402
from disagg_sim.study.claims import evaluate  # noqa: E402
from disagg_sim.study.frontiers import Frontiers  # noqa: E402
from disagg_sim.sweep.plan import plan_sweep  # noqa: E402
from disagg_sim.sweep.spec import load_sweep  # noqa: E402
from disagg_sim.units import GB, MS  # noqa: E402
from disagg_sim.workload.synthetic import log_normal  # noqa: E402
from tests.published.breakdown import seconds_by_operator  # noqa: E402
from tests.simulation.plans import holding, plans  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"(<!-- (number|table): ([\w-]+) -->)(.*?)(<!-- /\2 -->)", flags=re.DOTALL)
#: Efficiency profiles, as studies order them.
PROFILES = ("ideal", "optimistic", "measured")
#: Plain rooflines with which the worked examples were derived by hand.
PLAIN_FITS = ROOT / "tests" / "published" / "seed_fits"


class Entry(NamedTuple):
    """A function that makes a text, and whether it takes minutes."""

    make: Callable[[], str]
    slow: bool


ENTRIES: dict[str, Entry] = {}


def quick(make: Callable[[], str]) -> Callable[[], str]:
    """Register a text that takes at most a second or two."""
    ENTRIES[make.__name__.replace("_", "-")] = Entry(make, slow=False)
    return make


def slow(make: Callable[[], str]) -> Callable[[], str]:
    """Register a text that takes minutes."""
    ENTRIES[make.__name__.replace("_", "-")] = Entry(make, slow=True)
    return make


def plain(make: Callable[[], str]) -> Callable[[], str]:
    """Compute a text with the plain rooflines of the worked examples in place of the shipped fits."""

    def within() -> str:
        with plain_fits():
            return make()

    within.__name__ = make.__name__
    return within


@contextmanager
def plain_fits() -> Iterator[None]:
    """Efficiency files of ``PLAIN_FITS`` are found before the shipped ones."""
    before = os.environ.get(PATH_VARIABLE)
    os.environ[PATH_VARIABLE] = str(PLAIN_FITS)
    try:
        yield
    finally:
        if before is None:
            del os.environ[PATH_VARIABLE]
        else:
            os.environ[PATH_VARIABLE] = before


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def joined(values: Sequence[float], form: str) -> str:
    """Numbers of one form, with commas between them."""
    return ", ".join(format(value, form) for value in values)


def power(value: float, digits: int) -> str:
    """``1.84e15``: a mantissa and an exponent without its plus sign."""
    return f"{value:.{digits}e}".replace("e+", "e")


# README.


@quick
def demo_points() -> str:
    """Design points of the demo, in millions."""
    return f"{plan_sweep(load_sweep('demo')).points / 1e6:.1f}"


@quick
def demo_cases() -> str:
    """Cases of the demo."""
    return str(len(plan_sweep(load_sweep("demo")).cases))


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


#: Measured rows of W2 (InferenceX, Llama-3.1-70B, H100, vLLM): TP, ISL, OSL, requests in flight, TPOT [ms].
W2 = (
    (2, 1024, 1024, 4, 17.41), (2, 1024, 1024, 64, 28.77), (2, 8192, 1024, 16, 34.63),
    (8, 8192, 1024, 4, 10.22), (8, 8192, 1024, 64, 34.48), (8, 1024, 1024, 64, 15.45),
)  # fmt: skip


def w2_row(tp: int, isl: float, osl: float, batch: int) -> tuple[float, float, float]:
    """Decode step, prefill of one prompt and mean TTL of a co-located instance, at 0.9 of the columns. [s]"""
    at = setting("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", "measured", "vllm")
    isl, osl = 0.9 * isl, 0.9 * osl
    step = decode_step(at.model, at.rates, tensor_parallel(tp), batch=float(batch), context=isl + osl / 2).ttl
    prefill = prefill_pass(at.model, at.rates, tensor_parallel(tp), batch=1.0, isl=isl).ftl
    return float(step), float(prefill), float(step + batch * prefill / (osl - 1))


@quick
def w2_errors() -> str:
    """Predicted TPOT of W2 by the shipped fits against the measured one, row by row. [%]"""
    above = [100 * (w2_row(*row)[2] / MS / measured - 1) for *row, measured in W2]
    assert above[0] > 0 > max(above[1:])  # as the sentence says
    return f"{above[0]:.1f} % above the first row, then {joined([-each for each in above[1:]], '.1f')} %"


@quick
def w2_largest_errors() -> str:
    """The three largest misses of W2. [%]"""
    errors = sorted(abs(100 * (w2_row(*row)[2] / MS / measured - 1)) for *row, measured in W2)
    assert errors[2] < 3  # what README says of the other three
    return f"{errors[3]:.0f}, {errors[4]:.0f} and {errors[5]:.0f}"


# Physics: counts and memory.


def tensor_parallel(n: float) -> Degrees:
    """TP over n GPUs."""
    return Degrees(tp_attn=float(n), tp_ffn=float(n))


def total(parts: dict[str, float], *names: str) -> float:
    """Time of the named operators. [ms]"""
    return sum(parts[name] for name in names) / MS


GEMMS, ALL_REDUCES = ("qkv", "o", "gate, up", "down"), ("attention all-reduce", "FFN all-reduce")
R1 = ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
EP64 = Degrees(dp_attn=64.0, ep=64.0)


@quick
def r1_linear_params() -> str:
    """Parameters of R1 that a token meets."""
    return f"{ds.load_model('deepseek_r1').linear_params_per_token:,}"


def r1_prefill(isl: int) -> str:
    """FLOP of a prompt of R1, and the share of attention."""
    work = ds.prefill_work("deepseek_r1", isl=isl)
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
    at = setting("llama_3_1_70b", "h100_sxm", "fp8_bf16kv")
    return joined([at.decode_bytes(tensor_parallel(n), 64.0, isl=4096, osl=1024) / GB for n in (2, 4, 8)], ".1f")


@quick
def h100_memory_limit() -> str:
    """What an H100 may fill. [GB]"""
    return f"{setting('llama_3_1_70b', 'h100_sxm', 'fp8').memory_limit / GB:.1f}"


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


# Physics: worked examples.


@quick
@plain
def w1_ideal() -> str:
    """Decode step of W1 under ``ideal``. [ms]"""
    at = setting("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", "ideal")
    return f"{decode_step(at.model, at.rates, tensor_parallel(8), batch=64.0, context=4096.0).ttl / MS:.2f}"


def w1() -> tuple[Setting, dict[str, float], float]:
    """W1 under ``measured``: setting, seconds of each operator, step. [s]"""
    at = setting("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", "measured", "vllm")
    tokens = Tokens(decodes=64.0, context=4096.0, emitted=64.0)
    parts = seconds_by_operator(at, tensor_parallel(8), tokens, phase="decode", stage_tokens=64.0)
    step = decode_step(at.model, at.rates, tensor_parallel(8), batch=64.0, context=4096.0).ttl
    return at, parts, float(step)


@quick
@plain
def w1_measured() -> str:
    """Operators and whole of that step. [ms]"""
    at, parts, step = w1()
    named = {
        "GEMM": total(parts, *GEMMS), "attention": total(parts, "decode attention"),
        "all-reduce": total(parts, *ALL_REDUCES), "elementwise": total(parts, "elementwise"),
        "head and host": total(parts, "head") + at.profile.host / MS,
    }  # fmt: skip
    return f"{', '.join(f'{name} {ms:.2f}' for name, ms in named.items())}: **{step / MS:.2f} ms**, {64 / step:,.0f}"


@quick
@plain
def w2_rows() -> str:
    """Table of W2 by the plain fits."""
    header = ("TP", "isl/osl", "in flight", "T_d ms", "t_p ms", "predicted TPOT", "measured")
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
    at = setting("llama_3_1_70b", "h100_sxm", "fp8_bf16kv", "measured", "vllm")
    tokens = Tokens(prompts=1.0, new=8192.0, emitted=1.0)
    parts = seconds_by_operator(at, tensor_parallel(4), tokens, phase="prefill", stage_tokens=8192.0)
    named = {
        "GEMM": total(parts, *GEMMS), "all-reduce": total(parts, *ALL_REDUCES),
        "elementwise": total(parts, "elementwise"), "attention": total(parts, "prefill attention"),
    }  # fmt: skip
    return ", ".join(f"{name} {ms:.0f}" for name, ms in named.items())


def w3(recipe: str, engine: str) -> str:
    """Prefill of 1000 tokens of Llama-70B on one H100. [ms]"""
    at = setting("llama_3_1_70b", "h100_sxm", recipe, "measured", engine)
    return f"{prefill_pass(at.model, at.rates, Degrees(), batch=1.0, isl=1000.0).ftl / MS:.0f}"


@quick
@plain
def w3_vllm() -> str:
    """With the fits of vLLM."""
    return w3("fp8_bf16kv", "vllm")


@quick
@plain
def w3_trtllm() -> str:
    """With those of TensorRT-LLM."""
    return w3("fp8", "trtllm")


@quick
@plain
def w4_operators() -> str:
    """Operators of W4. [ms]"""
    at = setting(*R1, "measured", "trtllm")
    tokens = Tokens(prompts=1.0, new=16384.0, emitted=1.0)
    even, skewed = (
        seconds_by_operator(at, EP64, tokens, phase="prefill", stage_tokens=64 * 16384.0, imbalance=imbalance)
        for imbalance in (1.0, at.profile.prefill_imbalance)
    )
    projections = total(even, "q_a, kv_a", "q_b", "kv_b", "o")
    return (
        f"projections {projections:.0f}, attention {total(even, 'prefill attention'):.0f}, routed experts "
        f"{total(even, 'routed experts'):.0f} ({total(skewed, 'routed experts'):.0f} at the imbalance of "
        f"{at.profile.prefill_imbalance:g}), dispatch {total(even, 'dispatch'):.0f} and combine "
        f"{total(even, 'combine'):.0f}, elementwise {total(even, 'elementwise'):.0f}, dense FFN "
        f"{total(even, 'gate, up', 'down'):.0f}, router {total(even, 'router'):.0f} ms; shared experts "
        f"({total(even, 'shared gate, up', 'shared down'):.0f})"
    )


@quick
@plain
def w4_ftl() -> str:
    """FTL of W4, requests/s and egress of a GPU."""
    at = setting(*R1, "measured", "trtllm")
    found = prefill_pass(at.model, at.rates, EP64, batch=64.0, isl=16384.0)
    rate = 1 / float(found.busy)
    egress = rate * kv_bytes_per_request(at.model, at.precision, 16384) / GB
    return f"**FTL {float(found.ftl):.2f} s**, {rate:.2f} requests/s and {egress:.2f} GB/s"


@quick
@plain
def w5_rows() -> str:
    """Table of W5."""
    at = setting(*R1, "measured", "trtllm")
    header = (
        "sequences a GPU", "GEMM without head", "experts", "attention", "exchange", "TTL", "tokens/s/GPU",
        "tokens/s/user",
    )  # fmt: skip
    gemms = ("q_a, kv_a", "q_b", "kv_b", "o", "gate, up", "down", "shared gate, up", "shared down", "router")
    rows = []
    for count in (16, 64, 200):
        tokens = Tokens(decodes=float(count), context=17_408.0, emitted=float(count))
        parts = seconds_by_operator(at, EP64, tokens, phase="decode", stage_tokens=64.0 * count)
        ttl = float(decode_step(at.model, at.rates, EP64, batch=64.0 * count, context=17_408.0).ttl)
        named = (total(parts, *gemms), *(total(parts, *of) for of in (["routed experts"], ["decode attention"])))
        cells = (*named, total(parts, "dispatch", "combine"), ttl / MS)
        rows.append((f"{count}", *(f"{ms:.1f}" for ms in cells), f"{count / ttl:,.0f}", f"{1 / ttl:.0f}"))
    return table(header, rows)


def reprojected(chunk: int) -> tuple[float, float]:
    """FLOP that chunks of 16,384 tokens of R1 project again, and their share of the prefill."""
    model = ds.load_model("deepseek_r1")
    dims = mla_dims(model.layers[0].attention, 1.0, 1.0)
    past = np.arange(0, 16384, chunk, dtype=float)
    again, kept = (mla_work(form, dims, sequences=1.0, new=float(chunk), past=past) for form in ("naive", "cached"))
    extra = len(model.layers) * float(np.sum(again.flops - kept.flops))
    return extra, 100 * extra / ds.prefill_work(model, isl=16384).flops


@quick
def w6_chunks_2048() -> str:
    """Projected again in chunks of 2,048."""
    flops, share = reprojected(2048)
    return f"{power(flops, 2)} FLOP again ({share:.1f} % of the prefill)"


@quick
def w6_chunks_512() -> str:
    """The same of 512."""
    flops, share = reprojected(512)
    return f"{power(flops, 2)} ({share:.0f} %)"


#: Profile and form of the past of the rows of W7.
W7 = (("measured", "cached"), ("measured", "naive"), ("ideal", "cached"))


def w7_ftl(profile: str, form: str) -> list[float]:
    """FTL of R1, 262,144 tokens on 64 GPUs, PP 1 whole and 2 to 32 in chunks of 512. [s]"""
    found = []
    for pp in (1, 2, 4, 8, 16, 32):
        n = 64 // pp
        mapping = ds.Mapping(dp_attn=n, ep=n, pp=pp)
        grid = ds.prefill_grid(
            R1[0], R1[1], mapping, isl=262_144, precision=R1[2], profile=profile, batch=[n],
            chunk_tokens=[512 if pp > 1 else 0], mla_form=form, allow_long_context=True,
        )  # fmt: skip
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
        at = setting("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv", profile, "trtllm")
        steps = [decode_step(at.model, at.rates, tensor_parallel(n), batch=1.0, context=17_000.0) for n in (2, 8, 64)]
        rows.append((f"`{profile}`", *(f"{float(step.ttl) / MS:.2f}" for step in steps)))
    return table(("profile", "TP2", "TP8", "TP64"), rows)


#: Instances and limits of the table of unequal instances on the page of policies.
UNEQUAL_RATES = (0.6, 1.5, 3.0, 4.5, 6.0)  # [request/s]
UNEQUAL_SYSTEMS = {
    "vllm": "`vllm` on all six", "arrow": "", "disaggregated": "", "least_load": "", "dynamo_sla": "", "dopd": "",
    "dynaserve": "`dynaserve`, pairs of equals", "dynamo_load": "", "round_robin": "",
}  # fmt: skip


@slow
def unequal_instances() -> str:
    """Attainment of every system on unequal instances. [%]"""
    tp4, tp8 = (ds.Mapping(tp_attn=n, tp_ffn=n) for n in (4, 8))
    pp4_twice, tp4_twice = (ds.Replicas(mapping=mapping, instances=2) for mapping in (ds.Mapping(pp=4), tp4))
    tp8_once, tp8_twice = (ds.Replicas(mapping=tp8, instances=count) for count in (1, 2))
    prefill, decode = (pp4_twice, tp8_once), (tp4_twice, tp8_once)
    deployment = ds.ServedDeployment(
        name="unequal", gpus=32, prefill=prefill, decode=decode, colocated=(*prefill, *decode),
        pairs=(pp4_twice, tp4_twice, tp8_twice),
    )  # fmt: skip
    served = {"model": "llama_3_1_70b", "system": "a100_sxm_80gb", "precision": "bf16"}
    lengths = (log_normal(2048, 1.0), log_normal(300, 1.0))
    traces = [ds.synthetic_trace(rate=rate, lengths=lengths, requests=2000, seed=1) for rate in UNEQUAL_RATES]
    rows = []
    for name, title in UNEQUAL_SYSTEMS.items():
        runs = [ds.simulate(deployment, trace, name, slo=ds.Slo(ttft=5.0, tpot=0.1), **served) for trace in traces]
        shares = [f"{100 * run.summary().slo_attainment:.0f}" for run in runs]
        rows.append((title or f"`{name}`", *shares))
    return table(("requests/s", *(f"{rate:g}" for rate in UNEQUAL_RATES)), rows)


@slow
def plans_that_hold() -> str:
    """How many plans serve 99 % of the requests in time, at a share of their rate."""
    found = list(plans())
    rows = [
        (f"{load:g}", "Poisson" if poisson else "even", f"{holding(found, load, poisson=poisson)} of {len(found)}")
        for load in (0.8, 0.95)
        for poisson in (False, True)
    ]
    header = ("share of the planned rate", "arrivals", "plans with at least 99 % of the requests in time")
    return table(header, rows)


@slow
def beyond_the_buzz_verdicts() -> str:
    """How many claims hold under each profile."""
    with TemporaryDirectory() as folder:
        frontiers = Frontiers(Path(folder), jobs=os.cpu_count() or 1)
        frontiers.prepare(frontiers.names, PROFILES)
        claims = evaluate(frontiers, PROFILES)
    rows = []
    for profile in PROFILES:
        of = claims[claims["profile"] == profile]
        misses = " ".join(of.loc[~of["holds"].astype(bool), "id"])
        rows.append((f"`{profile}`", f"{int(of['holds'].sum())} of {len(of)}", misses))
    return table(("profile", "hold", "miss"), rows)


# Writing and checking.


class Place(NamedTuple):
    """A marked place: the page, the name, what is written there."""

    page: Path
    name: str
    written: str


def places() -> list[Place]:
    """Every marked place of every page."""
    return [
        Place(page, found[3], found[4]) for page in PAGES for found in MARK.finditer(page.read_text(encoding="utf-8"))
    ]


def made(names: Sequence[str]) -> dict[str, str]:
    """The texts of these names."""
    return {name: ENTRIES[name].make() for name in names}


def stale(texts: dict[str, str]) -> list[str]:
    """One line for every place that says something else."""
    return [
        f"{place.page.relative_to(ROOT)}: {place.name}: written {place.written.strip()!r}, "
        f"computed {texts[place.name].strip()!r}"
        for place in places()
        if place.name in texts and place.written != texts[place.name]
    ]


def write(texts: dict[str, str]) -> None:
    """Put the texts into the pages."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = MARK.sub(lambda found: f"{found[1]}{texts.get(found[3], found[4])}{found[5]}", before)
        if after != before:
            page.write_text(after, encoding="utf-8")


def main() -> int:
    """Write or check the numbers of the pages."""
    parser = argparse.ArgumentParser(description="Compute the numbers that README and docs mark, and write them there.")
    parser.add_argument("names", nargs="*", help="these alone; all quick ones by default")
    parser.add_argument("--all", action="store_true", help="compute those that take minutes, too")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page says something else")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(ENTRIES))
    if unknown:
        parser.error(f"no number {', '.join(unknown)}; known: {', '.join(sorted(ENTRIES))}")
    names = asked.names or [name for name, entry in ENTRIES.items() if asked.all or not entry.slow]
    texts = made(names)
    lines = stale(texts)
    print("\n".join([*lines, f"{len(texts)} numbers, {len(lines)} places {'differ' if asked.check else 'rewritten'}"]))
    if not asked.check:
        write(texts)
    return int(asked.check and bool(lines))


if __name__ == "__main__":
    sys.exit(main())
