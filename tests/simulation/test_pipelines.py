"""Passes of prompts that follow each other through the stages of a pipeline. All numbers are worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import Mode, RankChoice
from disagg_sim.simulation.kernel.step_table import StepTable


def in_stages(table, stages):
    """A table of a formula, of whose passes each stage takes its even share, without host time."""
    head, first = table.head.copy(), int(table.head["linear_at"][0])  # of passes without decodes
    tokens, prompts, lengths, pasts = (int(head[name][0]) for name in ("tokens", "prompts", "lengths", "pasts"))
    parts = {
        "stage_at": table.values[first : first + tokens] / stages,
        "passed_at": np.zeros(2 * tokens),
        "attention_at": np.zeros((stages + 1) * prompts * lengths * pasts),
    }
    place = table.values.size
    for name, part in parts.items():
        head[name], place = place, place + part.size
    head["pipeline"] = stages
    return replace(table, head=head, values=np.concatenate([table.values, *parts.values()]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_pass_leaves_a_stage_after_the_long_one_before_it(ranks):
    """Two stages of 0.5 ms and 0.05 ms a token, one prompt a pass, on the ranks in turn.

    300 tokens: the stages work from 0 to 15.5 and to 31 ms. 10 tokens: the first from 15.5 to 16.5, the second from 31
    to 32 ms. 100 tokens: from 16.5 to 22, and from 32 to 37.5 ms. 10 tokens, and another by a decode step of 1.1 ms:
    from 22 to 23, from 37.5 to 38.5, and to 39.6 ms.
    """
    table = StepTable.affine(step=1e-3, per_sequence=1e-4, per_token=1e-4, ranks=ranks, max_sequences=16)
    limits = {"token_budget": 4096, "max_sequences": 16, "watermark": 0.0, "rank_choice": RankChoice.IN_TURN}
    spec = InstanceSpec(table=in_stages(table, 2), blocks=200, mode=Mode.PREFILL_FIRST, max_prompts=1, **limits)
    fleet = Fleet([spec])
    for request, (prompt, output) in enumerate([(300, 1), (10, 1), (100, 1), (10, 2)]):
        fleet.submit(0, request, (0, prompt, output), 0.0)
    fleet.run_until(math.inf)
    assert fleet.segments["rank"].tolist() == [request % ranks for request in range(4)]
    assert fleet.segments.start_s.tolist() == pytest.approx([0.0, 0.0155, 0.0165, 0.022])
    assert fleet.segments.finish_s.tolist() == pytest.approx([0.031, 0.032, 0.0375, 0.0396])
