"""Judge the claims of DynaServe as its authors set them up: vLLM V0 and V1, rates that saturate, algorithms as printed.

Section 6.1 names vLLM 0.7.2 for the baselines and an extension from "v0" to "v1" for disaggregation: both engines are
judged. Arrivals are Poisson there. Acceptances were set before these runs; where they are not this project's own,
``inferred`` says what they read. DynaServe is algorithm 1 as printed, which balances all work of both instances.
"""

from __future__ import annotations

from lab.studies.as_authors import AsAuthors
from lab.studies.dynaserve import claims, claims_equal, judges
from lab.studies.dynaserve.judges import BELOW, ORACLE
from lab.studies.dynaserve.setup import CHUNK

#: vLLM 0.7.2 by its default engine, and the one that disaggregation was extended to.
ENGINES = ("vllm_v0", "vllm")
PAIR_14B = "Qwen2.5-14B, two A100, one an instance"
EVALUATION = "6.1: Azure Code, arXiv Summarization, BurstGPT, Mini Reasoning; Poisson arrivals; p99 TBT within 100 ms"
LENGTHS = "Mini Reasoning and BurstGPT by their means, arXiv lengths cut at 4,096 tokens; gaps count, not requests"
LOOP = (
    "2.4: rates tuned to saturate; here the rate that a closed loop of 125 requests for each instance that decodes "
    "serves (250 co-located)"
)
FOLLOWS = "125 follows from table 1 at 219/1467"
SATURATED = f"{LOOP}, with Poisson arrivals; {FOLLOWS}"
TUNED = "with chunks tuned, a step of co-location fits into 100 ms on a machine without noise, and both GPUs stay full"
CHUNKS = (
    "chunks leave when they are done, as figure 7 shows; that they take blocks of the second instance then, and what "
    "they do where it is full, is not said: they wait, and the youngest cache gives its blocks back where none can go "
    "on"
)
PRINTED = "with all work balanced as printed, prompts queue where the other instance has room"

CLAIMS = (
    AsAuthors(
        claims_equal.y1_rates,
        place="2.4, table 1",
        setting=f"{PAIR_14B}; largest rates without a limit",
        paper="-44, -10, -41 % (8192/32, 2048/512, 219/1467)",
        inferred=f"{LOOP}; {FOLLOWS}",
    ),
    AsAuthors(
        claims_equal.y2_colocated_late,
        place="2.4, table 1",
        setting=f"{PAIR_14B}; chunk 2,048",
        paper="p50/p99 310/353, 47/337, 48/163 ms",
        inferred=f"{SATURATED}; whether 219/1467 is a shape or the means of Mini Reasoning",
        judge=judges.late_at_saturation,
        why="equal prompts of 219 tokens come one at a time and no step is long: p99 stays 2 to 7 ms below the limit",
    ),
    AsAuthors(
        claims_equal.y3_disaggregated_in_time,
        place="2.4, table 1",
        setting=PAIR_14B,
        paper="p50/p99 23/58, 47/65, 51/74 ms",
        inferred=SATURATED,
        judge=judges.in_time_at_saturation,
        why="at the full rate of 2048/512 the memory of the decode instance is full, and preempted answers wait",
    ),
    AsAuthors(
        claims_equal.y4_imbalance,
        place="2.4, table 1",
        setting=PAIR_14B,
        paper="8192/32: MFU 43 and 0.2 %; 219/1467: 2.1 and 14 %, memory of the second 96.3 %",
        inferred=SATURATED,
        judge=judges.imbalance_at_saturation,
    ),
    AsAuthors(
        claims_equal.y5_best_split,
        place="4.1",
        setting="1024/1024, Qwen2.5-32B, two A100, one an instance",
        paper="position 1358 (phi 0.66)",
        inferred=f"{CHUNKS}; chunks of {CHUNK} tokens",
        judge=judges.best_split,
        why="parts of caches fill the second instance, whose memory holds 14 to 20 such sequences, and the "
        "throughput grows slowly up to splits past 1200 to 1600; where no block is taken before the first "
        "part ends, half as much again is served, and the best split is within them",
    ),
    AsAuthors(
        claims_equal.y6_equal_times,
        place="4.1",
        setting="as Y5",
        paper="peak at equal times",
        inferred="as Y5",
        judge=judges.equal_times,
    ),
    AsAuthors(
        claims.y7_capacity,
        place="6.3",
        setting=EVALUATION,
        paper="1.15 to 3.07 (mean 2.37) and 1.09 to 1.67 (mean 1.37)",
        inferred=f"chunks in powers of two; {LENGTHS}",
        judge=judges.capacity,
        why=f"{TUNED}; {PRINTED}, so that on BurstGPT disaggregation is ahead, too",
    ),
    AsAuthors(
        claims.y8_goodput,
        place="6.2, figure 8",
        setting=EVALUATION,
        paper="up to 1.91 and 1.61",
        inferred=f"chunks in powers of two; {LENGTHS}",
        acceptance="both above 1",
        judge=judges.goodput,
        why=TUNED,
    ),
    AsAuthors(
        claims.y9_mix,
        place="6.3",
        setting="half BurstGPT, half Azure Code",
        paper="4.6 / 5.9 / 7.4 requests/s; goodput 316 / 399 / 474 tokens/s",
        inferred=f"chunks in powers of two; {LENGTHS}",
        judge=judges.mix,
        why=f"{TUNED}; {PRINTED}, so that DynaServe is below disaggregation, too",
    ),
    AsAuthors(
        claims.y10_who_is_strong,
        place="6.3",
        setting=EVALUATION,
        paper="order",
        inferred=f"chunks in powers of two; {LENGTHS}",
        judge=judges.who_is_strong,
        why=TUNED,
    ),
    AsAuthors(
        claims.y11_slo_aware,
        place="6",
        setting="mix at capacity",
        paper="99 against 52 % of the tokens within 100 ms",
        inferred="the mix; steps without it fill 2,048 tokens",
    ),
    AsAuthors(
        claims.y12_length_error,
        place="6",
        setting="errors of predicted outputs of 0, 10, 50, 100 tokens",
        paper="3607, 3591, 3565, 3502 tokens/s",
        inferred="219/1467 in a closed loop",
    ),
    AsAuthors(
        claims.y13_push,
        place="6.6",
        setting="Mini Reasoning, with and without chunks",
        paper="94 % less transfer that is not hidden",
        statement="pushing chunk by chunk cuts the transfer that is not hidden by 94 %",
        inferred=f"the chunk is not printed: 512, and 32; {BELOW:g} of the capacity; waits for blocks of the second "
        "instance do not count",
        acceptance="at most a tenth of what a cache pushed whole exposes",
        judge=judges.push,
        why="the last chunk is exposed, so that its size decides",
    ),
    AsAuthors(claims_equal.y14_more_cache, place="6", setting="a split in the decode", paper="about 3 times the cache"),
    AsAuthors(
        claims.y15_six_steps,
        place="4.1",
        statement="six steps of bisection come within 1 % of an offline oracle",
        setting="six steps against an offline oracle with perfect knowledge",
        paper="within 1 %",
        inferred="equal requests in a closed loop; the oracle is one split for all, in steps of 1 %; caches as in Y5",
        acceptance=f"at least {ORACLE:g} of the best split, in all three shapes",
        judge=judges.within_the_oracle,
        why="in our closed loop of equal requests splits that follow the queue serve up to 22 % less than the "
        "best one for all, on V1 as much at 2048/512",
    ),
    AsAuthors(
        claims_equal.y16_batch,
        place="figure 6",
        setting="Llama-8B on one A100, 512 tokens of prefill within 50 ms",
        paper="about 29",
        judge=judges.decodes_in_a_step,
        why="the prefill of V1 takes 1.387 times its kernels, fitted on Hopper and Blackwell: 512 tokens fill the step",
    ),
    AsAuthors(
        claims_equal.y17_chunks,
        place="2.4, insight 3",
        statement="larger prefill batches can raise throughput at light load, and quickly breach the SLO",
        setting=f"{PAIR_14B}; larger prefill batches",
        paper="can boost throughput at light load, quickly breach SLOs",
        inferred="2048/512, chunks of 256 to 2,048, light: 8 requests in flight an instance",
        acceptance="p99 grows with each chunk and passes 100 ms; at light load the largest serves no less than the "
        "smallest",
        judge=judges.larger_batches,
        why="p99 grows and passes the limit, but an A100 is busy computing from some 300 tokens a step on, so that "
        "longer chunks gain no throughput",
    ),
    AsAuthors(
        claims.y18_sizes,
        place="6.2, figure 8",
        setting="14B, 32B and 72B on two, four and eight A100",
        paper="co-location loses more from 14B to 72B; ahead of disaggregation at every size",
        inferred=f"the mix; chunks in powers of two; {LENGTHS}",
        judge=judges.sizes,
        why="with all work balanced as printed DynaServe is below disaggregation at every size on V0, at 14B on V1; "
        "that its ratio over co-location is larger at 72B than at 14B is met",
    ),
    AsAuthors(
        claims.y19_plateau,
        place="6.2, figure 8",
        setting="goodput over the rate",
        paper="DynaServe stays level, co-location falls past its peak",
        inferred="the mix; rates up to 8 times the capacity of each, for as long as there; chunks in powers of two; "
        f"{LENGTHS}",
        judge=judges.plateau,
        why="with chunks tuned no step of co-location is late at any rate, so that its goodput does not fall "
        "up to 8 times the capacity; that of DynaServe, past its peak, falls to 0.86 of it on V0, below the 0.9 that "
        "is asked, and to 0.90 on V1",
    ),
    AsAuthors(
        claims_equal.y20_attainment,
        place="2.4, table 1",
        setting=PAIR_14B,
        paper="100, 99.83, 99.95 % and 1.73, 84.09, 94.46 %",
        inferred=f"{SATURATED}; attainment counts tokens",
        judge=judges.attainment_at_saturation,
        why="as Y3: at the full rate of 2048/512 preempted answers wait",
    ),
    AsAuthors(
        claims_equal.y21_memory,
        place="2.4, table 1",
        setting=PAIR_14B,
        paper="96.3 % at 219/1467",
        inferred=f"{SATURATED}; whether the weights count",
        judge=judges.memory_at_saturation,
        why="the 150 sequences of 950 tokens that are in flight at that rate fill two thirds of the blocks",
    ),
)
