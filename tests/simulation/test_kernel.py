"""The compiled kernel: closed decode runs equal single steps; tokens, blocks and segments are conserved."""

import heapq
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.kernel import compiled
from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import (
    BLOCK_TOKENS,
    CLOSES,
    HOLD,
    NOTIFY,
    AdmissionRule,
    Mode,
    RankChoice,
    Scheduling,
    SegmentStatus,
)
from disagg_sim.simulation.kernel.step_table import StepTable

#: Columns of instances that count something.
COUNTED = (
    *("active", "queued_requests", "queued_prompt_tokens", "queued_context_tokens", "running_requests"),
    *("running_tokens", "free_blocks", "total_blocks", "decode_steps", "passes", "prefill_tokens", "decode_tokens"),
    *("first_tokens", "preemptions"),
)
#: Two DP ranks in two pipeline stages, prompts of a pass cut into chunks, and a formula.
PIPELINE = StepTable.build(
    setup("mixtral_8x7b", "h100_sxm", "bf16"), Sharding(dp_attn=2.0, ep=2.0, pp=2.0, chunk_tokens=64), max_sequences=16
)
#: Four attention ranks.
RANKS = StepTable.build(
    setup("mixtral_8x7b", "h100_sxm", "bf16"), Sharding(dp_attn=4.0, ep=4.0), max_sequences=16, max_tokens=1024
)
TABLE = StepTable.affine(step=1e-3, per_sequence=1e-5, per_context=1e-7, per_token=1e-6, max_sequences=16)
LENGTH = st.one_of(st.integers(1, 40), st.integers(1, 400))


@st.composite
def instances(draw):
    table = draw(st.sampled_from([TABLE, PIPELINE, RANKS]))
    return InstanceSpec(
        table=table,
        blocks=draw(st.integers(76, 120)) * table.ranks,  # context, prompt and output of 400 each fit in 76 blocks
        mode=draw(st.sampled_from(Mode)),
        token_budget=draw(st.sampled_from([8, 64, 512])),
        max_sequences=draw(st.sampled_from([1, 4, 16])),
        max_prompts=draw(st.sampled_from([1, 3, 100])),
        step_limit_s=draw(st.sampled_from([1.2e-3, 5e-3, math.inf])),
        admission=draw(st.sampled_from(AdmissionRule)),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.1])),
        keeps_preempted=draw(st.booleans()),
        rank_choice=draw(st.sampled_from(RankChoice)),
        steps_ahead=draw(st.integers(0, 1)),
    )


@st.composite
def arrivals(draw):
    """Time, instance, (context, prompt, generate), hold, change of the token budget."""
    gap = st.one_of(st.just(0.0), st.floats(0.0, 0.02), st.floats(0.0, 0.5))
    kind = draw(st.sampled_from(["whole", "prefill", "decode", "rest"]))
    context, prompt, generate = draw(LENGTH), draw(LENGTH), draw(LENGTH)
    lengths = {
        "whole": (0, prompt, generate),
        "prefill": (0, prompt, 1),
        "decode": (context, 0, generate),
        "rest": (context, prompt, generate),
    }[kind]
    return draw(gap), draw(st.integers(0, 1)), lengths, draw(st.booleans()), draw(st.integers(0, 9))


WORK = st.tuples(st.lists(instances(), min_size=2, max_size=2), st.lists(arrivals(), min_size=1, max_size=25))


def play(specs, work, *, step_by_step, look=lambda fleet, now: None):
    """Submit the work, release held blocks 0.03 s later; the fleet at the end."""
    fleet = Fleet(specs, step_by_step=step_by_step, capacity=4)
    serial, agenda, now = 0, [], 0.0
    for index, (gap, *rest) in enumerate(work):
        now += gap
        heapq.heappush(agenda, (now, index, "submit", rest))
    serial = len(work)
    while True:
        limit = agenda[0][0] if agenda else math.inf
        segment, now = fleet.run_until(limit)
        look(fleet, now)
        if segment >= 0:
            if fleet.status_of(segment) == SegmentStatus.HELD:
                heapq.heappush(agenda, (now + 0.03, serial, "release", segment))
                serial += 1
        elif not agenda:
            return fleet
        else:
            now, _, what, about = heapq.heappop(agenda)
            if what == "submit":
                instance, lengths, hold, budget = about
                flags = NOTIFY | CLOSES | (HOLD if hold else 0)
                last = now - 0.01 if lengths[0] else math.nan
                fleet.submit(instance, 0, lengths, now, flags=flags, last_token_s=last)
                if budget == 0:
                    fleet.set_limits(instance, now, {"token_budget": 17})
            else:
                fleet.release(about, now)


@settings(max_examples=150)
@given(WORK, st.booleans())
def test_closed_runs_equal_single_steps_and_lose_nothing(given_work, looks):
    """Whether or not somebody looks at every event, which takes a run apart."""
    specs, work = given_work
    clock = [0.0]

    def look(fleet, now):
        fleet.refresh(now)
        segments, views = fleet.segments, fleet.views
        assert ((views.free_blocks >= 0) & (views.free_blocks <= views.total_blocks)).all()
        ready = np.isin(segments.status, (SegmentStatus.RUNNING, SegmentStatus.HELD))
        held = np.zeros(2, dtype=int)
        np.add.at(held, segments.instance[ready], -(-segments.context[ready] // BLOCK_TOKENS))
        assert (held <= views.total_blocks - views.free_blocks).all()
        assert (views.next_s >= clock[0]).all()
        clock[0] = float(np.nanmax([clock[0], *segments.finish_s]))

    fast = play(specs, work, step_by_step=False, **({"look": look} if looks else {}))
    slow = play(specs, work, step_by_step=True)
    assert_conserved(fast, specs)
    for name in ("status", "preemptions", "instance", "hit"):
        np.testing.assert_array_equal(getattr(fast.segments, name), getattr(slow.segments, name))
    for name in ("start_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(fast.segments, name), getattr(slow.segments, name), rtol=1e-9, atol=1e-12)
    for name in (*COUNTED, "decode_s", "busy_s", "next_s"):
        np.testing.assert_allclose(getattr(fast.views, name), getattr(slow.views, name), rtol=1e-9)
    np.testing.assert_array_equal(fast.itl_counts, slow.itl_counts)


def assert_conserved(fleet, specs):
    """All is done, every token was emitted once, and nothing is left in queues and memories."""
    segments, views = fleet.segments, fleet.views
    assert (segments.status == SegmentStatus.DONE).all()
    assert (views.free_blocks == views.total_blocks).all()
    queued = ("queued_requests", "queued_prompt_tokens", "queued_context_tokens")
    for name in (*queued, "running_requests", "running_tokens", "promised"):
        assert (getattr(views, name) == 0).all(), name
    for instance, spec in enumerate(specs):
        mine, one = segments.instance == instance, views[instance]
        assert one.decode_tokens + one.first_tokens == segments.generate[mine].sum()
        assert one.prefill_tokens >= segments.prompt[mine].sum()
        assert one.preemptions or one.prefill_tokens == segments.prompt[mine].sum()
        assert not one.preemptions or spec.admission != AdmissionRule.OUTPUT_FITS
    assert fleet.itl_counts.sum() == segments.generate.sum() - np.count_nonzero(segments.context == 0)
    assert (segments.start_s >= segments.submit_s).all()
    assert (segments.first_token_s > segments.start_s).all()
    assert (segments.finish_s >= segments.first_token_s).all()


def one(mode=Mode.CHUNKED, **limits):
    given_limits = {"blocks": 1000, "max_sequences": 16, **limits}
    table = StepTable.affine(step=1.0, per_token=0.01, max_sequences=16)
    return Fleet([InstanceSpec(table=table, mode=mode, **given_limits)])


@pytest.mark.parametrize(("ahead", "tokens"), [(0, [1.0, 5.0, 6.0]), (1, [1.0, 6.0, 7.0])])
def test_a_step_formed_ahead_leaves_out_what_comes_while_the_one_before_runs(ahead, tokens):
    """Steps of 1 s; prompts come to an idle instance, in the step from 3 to 4 s, and in the next one."""
    table = StepTable.affine(step=1.0, max_sequences=16)
    fleet = Fleet([InstanceSpec(table=table, blocks=100, max_sequences=16, steps_ahead=ahead)])
    for arrival in (0.0, 3.4, 4.2):
        fleet.run_until(arrival)
        fleet.submit(0, 0, (0, 10, 20), arrival)
    fleet.run_until(math.inf)
    np.testing.assert_allclose(fleet.segments.first_token_s, tokens)


def test_prompts_of_higher_priority_that_come_while_a_step_runs_do_not_hold_up_the_one_that_was_there():
    """Steps of 1 s; the prompt of 3.4 s begins at 5 s, though one of higher priority comes a second from 4.5 s on."""
    table = StepTable.affine(step=1.0, max_sequences=64)
    rules = {"max_sequences": 64, "scheduling": Scheduling.PRIORITY, "steps_ahead": 1}
    fleet = Fleet([InstanceSpec(table=table, blocks=1000, **rules)], priority=np.array([2, 0, *[1] * 10]))
    for request, arrival in enumerate((0.0, 3.4, *(4.5 + k for k in range(10)))):
        fleet.run_until(arrival)
        fleet.submit(0, request, (0, 10, 20), arrival)
    fleet.run_until(math.inf)
    np.testing.assert_allclose(fleet.segments.first_token_s[:3], [1.0, 6.0, 7.0])


def test_caches_that_keep_coming_do_not_hold_up_a_prompt_that_was_there():
    """Steps of 1 s; the prompt of 3.4 s begins at 5 s, though segments that only decode come from 3.6 s on."""
    table = StepTable.affine(step=1.0, max_sequences=64)
    fleet = Fleet([InstanceSpec(table=table, blocks=1000, max_sequences=64, steps_ahead=1)])
    work = [(0.0, (0, 10, 30)), (3.4, (0, 10, 2)), *((3.6 + k, (10, 0, 2)) for k in range(12))]
    for arrival, lengths in work:
        fleet.run_until(arrival)
        fleet.submit(0, 0, lengths, arrival, last_token_s=math.nan if lengths[1] else arrival - 0.01)
    fleet.run_until(math.inf)
    assert fleet.segments.start_s[1] == pytest.approx(5.0)


def test_where_nothing_decodes_prompts_that_come_during_a_pass_begin_at_its_end():
    """Passes of 1 s of one prompt: those of 0.2 and 0.4 s wait for its end alone, as the queue was empty at 0 s."""
    table = StepTable.affine(step=1.0, max_sequences=16)
    limits = {"max_prompts": 1, "max_sequences": 16}
    fleet = Fleet([InstanceSpec(table=table, blocks=100, mode=Mode.PREFILL_FIRST, steps_ahead=1, **limits)])
    for arrival in (0.0, 0.2, 0.4):
        fleet.run_until(arrival)
        fleet.submit(0, 0, (0, 10, 1), arrival)
    fleet.run_until(math.inf)
    np.testing.assert_allclose(fleet.segments.first_token_s, [1.0, 2.0, 3.0])


def test_the_step_limit_bounds_prefill():
    """1 s + 0.01 s a token within 1.5 s: 50 tokens a step; within 0.5 s: one token a step."""
    fleet = one(Mode.SLO_AWARE, step_limit_s=1.5)
    fleet.submit(0, 0, (0, 100, 1), 0.0)
    fleet.run_until(math.inf)
    assert fleet.views.passes[0] == 2
    fleet.set_limits(0, 10.0, {"step_limit_s": 0.5})
    fleet.submit(0, 0, (0, 10, 1), 10.0)
    fleet.run_until(math.inf)
    assert fleet.views.passes[0] == 12


def test_what_waits_is_what_nothing_was_computed_of():
    """A prompt in pieces of 40 and 2 behind it: the first has begun, a cache that came is no whole prompt."""
    fleet = one(max_sequences=2, token_budget=40)
    for request, context in enumerate((0, 0, 16, 0)):
        fleet.submit(0, request, (context, 100, 1), 0.0)
    assert fleet.waiting(0).tolist() == [0, 1, 3]
    fleet.run_until(0.5)
    assert fleet.waiting(0).tolist() == [1, 3]
    assert not fleet.withdraw(0, 0.5)
    assert fleet.withdraw(3, 0.5)
    assert fleet.waiting(0).tolist() == [1]
    fleet.run_until(math.inf)
    assert fleet.waiting(0).size == 0


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 160, 2), (-1, 5, 1), (5, 0, 0), (160, 0, 1)])
def test_impossible_segments_are_refused(lengths):
    fleet = one(blocks=10)
    with pytest.raises(InputError, match="at most 160 tokens"):
        fleet.submit(0, 0, lengths, 0.0)


def test_time_does_not_run_backwards():
    fleet = one()
    fleet.submit(0, 0, (0, 10, 1), 0.0)
    with pytest.raises(InputError, match="run_until first"):
        fleet.submit(0, 1, (0, 10, 1), 5.0)


def test_limits_out_of_range_are_refused():
    with pytest.raises(InputError, match="up to 16"):
        one(max_sequences=17)
    fleet = one()
    segment = fleet.submit(0, 0, (0, 10, 1), 0.0)
    with pytest.raises(InputError, match="which is queued"):
        fleet.release(segment, 0.0)


def test_machine_code_is_named_after_every_source_that_it_is_made_of():
    here = Path(compiled.__file__).parent
    compiling = re.compile(r"simulation\.kernel\.compiled import .*\b(entry|inlined|inner)\b")
    made_of = {path.stem for path in here.glob("*.py") if compiling.search(path.read_text())}
    assert made_of | {"compiled", "layout"} == set(compiled.SOURCES)


def test_no_linear_algebra_is_imported_and_it_can_be_afterwards():
    script = (
        "import sys; from disagg_sim.simulation.kernel.fleet import Fleet\n"
        "from disagg_sim.simulation.kernel.instance_spec import InstanceSpec\n"
        "from disagg_sim.simulation.kernel.step_table import StepTable\n"
        "table = StepTable.affine(step=1.0, per_sequence=0.0, per_context=0.0, per_token=0.0, max_sequences=1)\n"
        "Fleet([InstanceSpec(table=table, blocks=9, max_sequences=1)]).run_until(1.0)\n"
        "print(any(name.startswith('scipy.linalg') for name in sys.modules))\n"
        "import scipy.linalg.cython_blas"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
