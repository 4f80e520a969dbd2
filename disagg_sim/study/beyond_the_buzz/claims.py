"""The claims of "Beyond the Buzz" (arXiv 2506.05508) as code: what is claimed, when it holds, whether it does.

Kinds say where a claim comes from: ``paper`` is said in its text, ``figure`` read from its pictures, ``derived``
follows from its equations. Acceptance bands of pictures are this project's own reading. Nothing is tuned
for a claim: a miss stands with the number that explains it. Every claim runs under the default recipe (fp8
attention) unless its note says otherwise; interactivity is compared over 20-100 tokens/s/user, near the
paper's plots, where the acceptance names no other range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from disagg_sim.errors import InputError
from disagg_sim.study.beyond_the_buzz import (
    claims_domain,
    claims_gain,
    claims_limits,
    claims_ratio,
    claims_shape,
    claims_sharing,
    claims_transfer,
)
from disagg_sim.study.beyond_the_buzz.evidence import Evidence, Finding, Source

if TYPE_CHECKING:
    import pandas as pd

PROFILES = ("ideal", "optimistic", "measured")
COLUMNS = ("id", "statement", "kind", "profile", "value", "acceptance", "holds", "note")
PAPER, FIGURE, DERIVED = "paper", "figure", "derived"

#: What the evaluators ask the source for, so that it can be computed at once.
SWEEPS = (
    "fig01",
    "fig05",
    "fig06",
    "fig06_every_step_mixed",
    "fig07",
    "fig08",
    "fig08_every_step_mixed",
    "fig09",
    "fig10",
    "fig11",
    "fig12",
    "fig12_long",
    "ftl_cut_off",
    "gpu_cap",
    "bf16_attention_fig05",
    "bf16_attention_fig06_every_step_mixed",
    "bf16_attention_fig09",
    "bf16_attention_fig11",
    "bf16_attention_fig12",
    "bf16_attention_fig12_long",
)

Evaluator = Callable[[Evidence], Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim and when it counts as reproduced."""

    id: str  # C1 ... C32
    statement: str
    kind: str  # "paper", "figure", "derived", or two of them
    acceptance: str


#: Every claim with its evaluator, in order.
CLAIMS: dict[Claim, Evaluator] = {}


def _claim(name: str, kind: str, statement: str, acceptance: str, evaluator: Evaluator) -> None:
    CLAIMS[Claim(id=name, statement=statement, kind=kind, acceptance=acceptance)] = evaluator


_claim(
    "C1",
    f"{PAPER}, figure 8",
    "disaggregation gains most on prefill-heavy traffic (R1)",
    "A(16384/2048) > A(2048/2048) and at least 1.15 A(2048/16384)",
    claims_gain.c1_prefill_heavy,
)
_claim(
    "C2",
    f"{PAPER}, figure 7",
    "the gain grows with the size of the model (Llama, 4096/256)",
    "A(8B) < A(70B) < A(405B)",
    claims_gain.c2_model_size,
)
_claim(
    "C3",
    PAPER,
    "small models and generation-heavy traffic gain little",
    "A of 8B at 4096/256 and of R1 at 1024/32768 within 0.9-1.25",
    claims_gain.c3_little_gain,
)
_claim(
    "C4",
    PAPER,
    "the gain sits at medium latency (R1 and Llama-70B, 16384/2048)",
    "largest G strictly inside the range, G near 1 over its loosest and tightest tenth",
    claims_gain.c4_medium_latency,
)
_claim(
    "C5",
    PAPER,
    "towards short latency the batch falls and TP rises along the frontier",
    "rank correlation with interactivity: batch per GPU < -0.8, TP > 0.5",
    claims_shape.c5_batch_and_tp,
)
_claim(
    "C6",
    PAPER,
    "decode TP of Llama-70B at 16384/2048 runs from 2 to 64 in a domain of 72",
    "first TP <= 4, last TP >= 32",
    claims_shape.c6_llama_tp,
)
_claim(
    "C7",
    PAPER,
    "R1 at 16384/2048 uses EP inside the NVLink domain all along the frontier",
    "EP > 1 on at least 90 % of the points",
    claims_shape.c7_expert_parallel,
)
_claim(
    "C8",
    PAPER,
    "R1's attention goes from DP to TP towards short latency",
    "TP of attention below an earlier value at no more than 10 % of the points, first <= 2, last >= 4",
    claims_shape.c8_attention_modes,
)
_claim(
    "C9",
    PAPER,
    "R1's batch at the throughput end is in the hundreds",
    "at least 100 requests an instance",
    claims_shape.c9_loose_batch,
)
_claim(
    "C10",
    FIGURE,
    "R1, 256k prompts, EP x PP = 64: PP 32 cuts FTL about 31 times at the throughput of PP 1",
    "chunks of 512, MLA cached: factor 20-32, rate within 10 %, FTL 60-140 s at PP 1 and 2-5 s at PP 32",
    claims_limits.c10_pipelined_prefill,
)
_claim(
    "C11",
    FIGURE,
    "the best prefill:decode ratio falls as interactivity rises, in every model",
    "never more than 10 % above an earlier value",
    claims_ratio.c11_ratio_falls,
)
_claim(
    "C12",
    FIGURE,
    "the ratio spreads more than 40 times for R1, about 10 for 405B, 2 for 70B, 1.3 for 8B",
    "R1 > 405B > 70B > 8B, R1 at least 10, 8B at most 2",
    claims_ratio.c12_spread,
)
_claim(
    "C13",
    FIGURE,
    "the ratio at the loose end: R1 3.6, 405B 2.1, 70B 0.95, 8B 0.4",
    "in this order, each within a factor of 3",
    claims_ratio.c13_loose_end,
)
_claim(
    "C14",
    FIGURE,
    "every fixed ratio loses somewhere, the best ratio is the upper envelope (R1, 16384/2048)",
    "fixed never above the best (1e-9); 0.5 loses >= 40 % at the loose end, 3.5 >= 60 % at the tight end",
    claims_ratio.c14_fixed_ratios,
)
_claim(
    "C15",
    DERIVED,
    "a fixed ratio q over the best r = R/P: min(q, r)/r * (1 + r)/(1 + q)",
    "within 5 %",
    claims_ratio.c15_closed_form,
)
_claim(
    "C16",
    PAPER,
    "a larger NVLink domain is never worse (8 against 72, same GPU)",
    "ratio >= 1 - 1e-9 at every point, above 1 somewhere",
    claims_domain.c16_never_worse,
)
_claim(
    "C17",
    FIGURE,
    "from the larger domain R1 gains at medium latency, Llama-70B at short latency",
    "largest ratio in the middle half of the range for R1, in its upper half for 70B",
    claims_domain.c17_where,
)
_claim("C18", PAPER, "egress falls with the prompt length", "strictly, from 4k on", claims_transfer.c18_egress_falls)
_claim(
    "C19",
    PAPER,
    "ingress hardly depends on the prompt where decode reads its cache, and goes with 1/(OSL-1)",
    "change below 25 % from 64k to 1M; 1/(OSL-1) exactly",
    claims_transfer.c19_ingress_of_long_prompts,
)
_claim(
    "C20",
    PAPER,
    "ingress per GPU falls as TTL tightens",
    "monotone along the frontier",
    claims_transfer.c20_ingress_falls,
)
_claim("C21", PAPER, "R1 needs less egress than Llama-70B", "2-6 times less at 16k", claims_transfer.c21_latent_cache)
_claim(
    "C22",
    FIGURE,
    "R1's KV bandwidth: 0.4-1.2 GB/s per GPU at 16384/2048, 1.0-1.8 at 1M/2048, far below a NIC",
    "within a factor of 3 of the bands, below 10 GB/s everywhere",
    claims_transfer.c22_bandwidth,
)
_claim(
    "C23",
    f"{PAPER}, {DERIVED}",
    "TP copies the cache max(1, TP/n_kv) times; MLA, TP times",
    "exact",
    claims_transfer.c23_duplication,
)
_claim(
    "C24",
    DERIVED,
    "cache sent is cache received: N_p*egress = N_d*ingress",
    "1e-9 for balanced pairs and for integer pairs at their matched rate",
    claims_transfer.c24_conservation,
)
_claim(
    "C25",
    f"{PAPER}, figure 6",
    "piggybacked R1 lies well below the best co-located mode, Llama-70B close to it",
    "every step mixed, MLA naive: R1 below 0.9 somewhere in the middle third, 70B above 0.9 over the loose two",
    claims_sharing.c25_piggyback,
)
_claim(
    "C26",
    PAPER,
    "keeping the projected past removes most of that loss",
    "above 0.95 in the middle third wherever memory is not full",
    claims_sharing.c26_cached,
)
_claim(
    "C27",
    PAPER,
    "piggybacking pays most for decode-heavy traffic at relaxed latency",
    "every step mixed over no piggyback: A(2048/16384) > A(16384/2048), falling from third to third of the range",
    claims_sharing.c27_decode_heavy,
)
_claim(
    "C28",
    f"{PAPER}, figure 14",
    "constant lengths at the medians track a distribution (Llama-70B, 4096/512)",
    "log-normal with these medians: within 20 % everywhere, 10 % on average",
    claims_limits.c28_representative_lengths,
)
_claim(
    "C29",
    PAPER,
    "no point exceeds the FTL limit, and loosening it never lowers the frontier",
    "exact",
    claims_limits.c29_cut_off,
)
_claim(
    "C30",
    PAPER,
    "few GPUs cost throughput as a fixed ratio does",
    "T(16 GPUs) <= T(576 GPUs) everywhere, < somewhere",
    claims_ratio.c30_few_gpus,
)
_claim(
    "C31",
    PAPER,
    "at medium latency disaggregated decode uses higher TP than co-located instances",
    "median of the ratio of TP at least 1",
    claims_shape.c31_tensor_parallel,
)
_claim(
    "C32",
    PAPER,
    "FTL goes with active parameters, the cache does not (Llama 405B over 70B at 4k)",
    "FTL ratio 5.8 within 15 %, cache 1.575",
    claims_limits.c32_active_parameters,
)


def evaluate(source: Source, profiles: Sequence[str] = PROFILES) -> pd.DataFrame:
    """Every claim under every profile.

    Parameters
    ----------
    source : Source
        Frontiers of the figures, such as ``study.beyond_the_buzz.frontiers.Frontiers``.
    profiles : sequence of str
        Efficiency profiles.

    Returns
    -------
    DataFrame
        Columns ``COLUMNS``; one row a claim and profile, in order of claims.

    Raises
    ------
    InputError
        No profile.
    """
    import pandas as pd

    if not profiles:
        raise InputError(f"profiles is empty; allowed: one or more of {', '.join(PROFILES)}")
    evidence = {profile: Evidence(source, profile) for profile in profiles}
    rows = [
        asdict(claim) | {"profile": profile} | evaluator(evidence[profile])._asdict()
        for claim, evaluator in CLAIMS.items()
        for profile in profiles
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def holding(claims: pd.DataFrame) -> pd.DataFrame:
    """How many claims hold under each profile: columns ``profile``, ``holds``, ``of``, ``misses`` (their ids)."""
    import pandas as pd

    rows = [
        {
            "profile": profile,
            "holds": int(part["holds"].sum()),
            "of": len(part),
            "misses": " ".join(part.loc[~part["holds"].astype(bool), "id"]),
        }
        for profile, part in claims.groupby("profile", sort=False)
    ]
    return pd.DataFrame(rows)
