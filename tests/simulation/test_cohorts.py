"""Where the sequences of a decode instance are all of one age they fill its memory together.

Four instances whose requests come evenly at 0.9 of what 64 sequences each serve, with a quarter more memory than these
hold on average: sequences of all ages fit, sequences that are all near their end do not.
"""

import numpy as np
import pytest
from sites import deployment, served

from disagg_sim.domain import Slo
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.workload.trace import Trace

SEQUENCES, INSTANCES, PROMPT, OUTPUT = 64, 4, 256, 700
TABLE = StepTable.affine(step=0.010, per_sequence=0.0001, per_token=3e-5, max_sequences=512)


def ages(policy):
    """Preemptions a request, and how far ages go together: the variance of the mean age over that of independent ones.

    Ages are shares of the decode: even from 0 to 1, of n sequences the mean varies by 1/12n. 1: independent ages, 0:
    evenly staggered, n: all alike.
    """
    rate = 0.9 * INSTANCES * SEQUENCES / (OUTPUT * (0.010 + 0.0001 * SEQUENCES))
    count = 40 * SEQUENCES * INSTANCES
    trace = Trace(
        arrival=np.arange(count) / rate, input_tokens=np.full(count, PROMPT), output_tokens=np.full(count, OUTPUT)
    )
    blocks = round(1.25 * SEQUENCES * (PROMPT + OUTPUT / 2 + 8) / 16)
    r = served(
        trace,
        policy_named(policy, max_sequences=SEQUENCES),
        deployment(prefill=4, decode=INSTANCES),
        table=TABLE,
        blocks=blocks,
        link_bandwidth=1e15,
        slo=Slo(ttft=1e4, tpot=1.0),
    ).requests
    means, sequences = [], []
    for now in np.linspace(*np.quantile(r.finish_s, [0.25, 0.75]), 100):
        for instance in np.unique(r.decode_instance):
            there = (r.decode_instance == instance) & (r.decode_start_s <= now) & (r.finish_s > now)
            share = (now - r.decode_start_s[there]) / (r.finish_s[there] - r.decode_start_s[there])
            means.append(share.mean())
            sequences.append(share.size)
    return float(r.preemptions.mean()), float(12 * np.mean(sequences) * np.var(means))


@pytest.mark.long
def test_the_fewest_tokens_gather_sequences_of_one_age_and_turns_do_not():
    """New requests go where tokens are fewest, which is where sequences are young; these grow old together."""
    preempted, together = ages("disaggregated")
    assert together > 10
    assert preempted > 0.03
    preempted, together = ages("round_robin")
    assert together < 0.1
    assert preempted == 0
