"""Words, ranges and defaults of a question, which help and completion show without loading what they mean."""

from __future__ import annotations

#: Pools in the order in which a request passes them; the last two decode together.
POOLS = ("encode", "prefill", "decode", "attention", "ffn")
#: The pools of a text model whose layers stay whole.
TWO = ("prefill", "decode")
#: How requests find their attention rank; where DP ranks count as even; all words for how unequal they are.
RANK_ROUTINGS = ("least_load", "round_robin", "random")
EVEN_RANKS = "even"
RANK_IMBALANCES = (EVEN_RANKS, *RANK_ROUTINGS)
#: What a plan minimises, or is best at: GPUs (output tokens over GPUs), price, power at the TDP, or what GPUs draw.
OBJECTIVES = {"gpus": "gpu", "throughput": "gpu", "usd": "usd", "watt": "watt", "joule": "joule"}
#: How long prompts are held back where nothing else is said: of a plan, and of a design by hand.
HELD, NOT_HELD = "tuned", "none"
#: Share of its rate that a pool could serve beside it, where nothing is said: closed forms are right on average, and a
#: run of some thousand requests has more or less luck (chosen). [1]
HEADROOM = 0.03
#: Most headroom: a pool of eleven times the size that its rate needs. [1]
MOST_HEADROOM = 10.0
#: Largest coefficient of variation of the popularity of experts. [1]
MOST_SKEW = 3.0
#: Failure rates where none are named.
FAILURES = "llama_3_405b"
#: What ``launch`` takes as its engine, as users write it.
LAUNCHERS = ("dynamo", "vllm", "sglang", "trtllm", "llm-d")
#: Phases of an instance that is explained: of one phase or of both, and further pools.
PHASES = ("prefill", "decode", "colocated", "piggyback")
ATTENTION_FFN, ENCODE = MORE_PHASES = ("attention_ffn", "encode")
#: Largest seed of a random stream: tables keep it in 64 bits, and nobody needs more. [1]
MOST_SEED = 2**32
