"""Options that several policies share, with the same default, meaning and range."""

from __future__ import annotations

from disagg_sim.simulation.options import LEAST_PERIOD_S, MOST, MOST_SEQUENCES, MOST_TOKENS, option


def token_budget_option(meaning: str = "decodes and prefill of one step of an attention rank") -> int:
    """Tokens of one step. [token]"""
    return option(0, f"{meaning}; 0: as the engine's scheduler", unit="token", low=0, high=MOST_TOKENS)


def max_sequences_option(meaning: str = "most sequences of an attention rank, running and in prefill") -> int:
    """Sequences of an instance. [1]"""
    return option(0, f"{meaning}; 0: as the engine's scheduler", low=0, high=MOST_SEQUENCES)


def prompts_per_step_option() -> int:
    """Prompts that share one step. [1]"""
    return option(
        MOST, "most prompts that share one step of an attention rank; 1: one after the other", low=1, high=MOST
    )


#: Where prompts wait for prefill: in one queue, from which instances take them, or each at an instance.
QUEUES = ("shared", "instances")


def queue_option() -> str:
    """Where prompts wait."""
    return option(
        "shared", "where prompts wait: in one queue, from which prefill instances take them, or at one", choices=QUEUES
    )


def least_option() -> int:
    """Instances that no planner stops. [1]"""
    return option(1, "least number of instances of each pool", low=1, high=MOST)


def headroom_option() -> float:
    """Share of the forecast load that sizes leave free. [1]"""
    return option(
        0.0, "by what the forecast load is raised before sizes are taken; 0.2: by a fifth", low=0.0, high=10.0
    )


def drain_option() -> bool:
    """Whether requests outlive the stop of their instance."""
    return option(True, "a stopped instance finishes its requests; false: they fail")


def period_option(default: float, meaning: str) -> float:
    """Time between two checks or decisions, or of one observation. [s]"""
    return option(default, meaning, unit="s", low=LEAST_PERIOD_S)
