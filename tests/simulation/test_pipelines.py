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


def played(prompts, *, ranks=1, mode=Mode.PREFILL_FIRST, budget=4096):
    """Prompts and outputs that come at once to two stages of 0.5 ms and 0.05 ms a token; whole prompts one a pass."""
    table = StepTable.affine(step=1e-3, per_sequence=1e-4, per_token=1e-4, ranks=ranks, max_sequences=16)
    limits = {"token_budget": budget, "max_sequences": 16, "watermark": 0.0, "rank_choice": RankChoice.IN_TURN}
    most = 16 if mode == Mode.CHUNKED else 1
    fleet = Fleet([InstanceSpec(table=in_stages(table, 2), blocks=200, mode=mode, max_prompts=most, **limits)])
    for request, (prompt, output) in enumerate(prompts):
        fleet.submit(0, request, (0, prompt, output), 0.0)
    fleet.run_until(math.inf)
    return fleet.segments


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_pass_leaves_a_stage_after_the_long_one_before_it(ranks):
    """A pass on the ranks in turn; the third enters when the first has left the second stage.

    300 tokens: the stages work from 0 to 15.5 and to 31 ms. 10 tokens: the first from 15.5 to 16.5, the second from 31
    to 32 ms. 100 tokens: from 31 to 36.5, and to 42 ms. 10 tokens, and another by a decode step of 1.1 ms: from 36.5 to
    37.5, from 42 to 43, and to 44.1 ms.
    """
    found = played([(300, 1), (10, 1), (100, 1), (10, 2)], ranks=ranks)
    assert found["rank"].tolist() == [request % ranks for request in range(4)]
    assert found.start_s.tolist() == pytest.approx([0.0, 0.0155, 0.031, 0.0365])
    assert found.finish_s.tolist() == pytest.approx([0.031, 0.032, 0.042, 0.0441])


def test_whole_prompts_of_unlike_lengths_leave_stages_idle():
    """190 tokens take 10 ms of a stage, 10 tokens 1 ms: a long prompt enters when the one before it has left.

    So two prompts take 20 ms in place of 11.
    """
    found = played([(190, 1), (10, 1)] * 3)
    assert found.finish_s.tolist() == pytest.approx([0.02, 0.021, 0.04, 0.041, 0.06, 0.061])


def test_prompts_packed_into_chunks_leave_no_stage_idle():
    """The same prompts in six passes of 100 tokens, 5.5 ms a stage, which follow each other from 5.5 ms on.

    A long prompt has one pass to itself, and 90 tokens of the next beside the short one: prompts end with passes 2, 4
    and 6, a stage after them.
    """
    found = played([(190, 1), (10, 1)] * 3, mode=Mode.CHUNKED, budget=100)
    assert found.finish_s.tolist() == pytest.approx([3 * 5.5e-3] * 2 + [5 * 5.5e-3] * 2 + [7 * 5.5e-3] * 2)


def test_a_prompt_in_chunks_fills_the_stages():
    """400 tokens in four chunks of 5.5 ms a stage: they leave 5.5 ms apart, the last at (4 + 1) * 5.5 ms."""
    assert played([(400, 1)], mode=Mode.CHUNKED, budget=100).finish_s.tolist() == pytest.approx([27.5e-3])
