"""Words, ranges and defaults of a question, which help and completion show without loading what they mean."""

from __future__ import annotations

#: Pools in the order in which a request passes them; the last two decode together.
POOLS = ("encode", "prefill", "decode", "attention", "ffn")
#: The pools of a text model whose layers stay whole.
TWO = ("prefill", "decode")
#: How requests are routed to attention ranks; ``even``: all ranks count as equally full.
LEAST_LOAD, ROUND_ROBIN, RANDOM = RANK_ROUTINGS = ("least_load", "round_robin", "random")
EVEN_RANKS = "even"
RANK_IMBALANCES = (EVEN_RANKS, *RANK_ROUTINGS)
#: Objective of a plan -> the unit to divide its output tokens by: GPUs, price, power at the TDP, power drawn.
OBJECTIVES = {"gpus": "gpu", "throughput": "gpu", "usd": "usd", "watt": "watt", "joule": "joule"}
#: Default prefill delay of a plan, and of a design given by options.
TUNED_DELAY, NO_DELAY = "tuned", "none"
#: Default spare rate of every pool, as a share of its rate: closed forms give means, and the rate of a run of some
#: thousand requests varies (chosen). [1]
HEADROOM = 0.03
#: Most headroom: a pool of eleven times the size that its rate needs. [1]
MOST_HEADROOM = 10.0
#: Largest coefficient of variation of the popularity of experts. [1]
MOST_SKEW = 3.0
#: Most drafts of a step; no published curve goes further. [token]
MOST_DRAFTS = 8
#: Failure rates where none are named.
FAILURES = "llama_3_405b"
#: Engines of ``launch``, as users write them.
LAUNCHERS = ("dynamo", "vllm", "sglang", "trtllm", "llm-d")
#: Phases of ``explain``: instances of one phase or of both; then further pools.
PHASES = ("prefill", "decode", "colocated", "piggyback")
ATTENTION_FFN, ENCODE = MORE_PHASES = ("attention_ffn", "encode")
#: Largest seed of a random stream: tables store it in 64 bits. [1]
MOST_SEED = 2**32
