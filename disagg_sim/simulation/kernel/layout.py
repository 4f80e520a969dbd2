"""Define the records that hold the state of a fleet, and their codes.

Each class is the layout of one row of an array: ``dtype_of`` makes its numpy type, the compiled kernel reads and
writes the fields of ``inst[i]`` and ``seg[s]`` by name, and ``inst["free_blocks"]`` is a column, at no cost.

Past 400 lines: every record of the kernel stands here, each field with its meaning and unit.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

#: Tokens of one KV block; vLLM's default. [token]
BLOCK_TOKENS = 16
#: Bins of the histogram of gaps between tokens: 64 an octave (1.1 % wide) from 10 us to 1,000 s.
ITL_LEAST_S = 1e-5
ITL_PER_OCTAVE = 64
ITL_BINS = 1704


class Mode(IntEnum):
    """How an instance forms its steps."""

    CHUNKED = 0  # all decodes, and prefill up to the token budget (vLLM)
    PREFILL_FIRST = 1  # passes of whole prompts; decodes stall (in-flight batching without piggyback)
    ONE_PROMPT = 2  # passes of one whole prompt, first in first out; decodes stall (DistServe, Arrow)
    MANUAL = 3  # passes of the prompts that a policy submitted as one batch; decodes stall (DOPD)
    SLO_AWARE = 4  # all decodes, and the most prefill that keeps the step within its limit (DynaServe)


class AdmissionRule(IntEnum):
    """What an engine asks for before it admits a prompt, and what it takes then."""

    PROMPT = 0  # the blocks of the whole prompt, taken at once (vLLM V0)
    FIRST_CHUNK = 1  # those of its first chunk; each chunk takes its own (vLLM V1 of 2025)
    PROMPT_FITS = 2  # room for the whole prompt; each chunk takes its own (vLLM of 2026)
    OUTPUT_FITS = 3  # room for prompt and output beside what others may still take (TensorRT-LLM)


class Scheduling(IntEnum):
    """In which order an engine serves what waits, and what gives way where blocks lack."""

    FCFS = 0  # as it came; the newest gives way
    PRIORITY = 1  # the highest priority, of equal ones the first that came; the last in this order gives way (vLLM)


class RankChoice(IntEnum):
    """Which attention rank of an instance takes a request that arrives."""

    LEAST_WAITING = 0  # the fewest that wait, which count four times, and run (vLLM)
    IN_TURN = 1  # one after the other (SGLang)
    FEWEST_TOKENS = 2  # the fewest tokens of prompts, of the ranks with the fewest requests (TensorRT-LLM)


class SegmentStatus(IntEnum):
    """Where a segment is in its life."""

    QUEUED = 0  # waits, or its prompt is in prefill
    RUNNING = 1  # decodes
    LEAVING = 2  # its pass has left the first stage of a pipeline and not yet the last
    HELD = 3  # finished; its KV blocks wait for ``release``
    DONE = 4  # finished, and its blocks are free
    WITHDRAWN = 5  # taken back before it started
    LOST = 6  # its instance was aborted
    RESERVED = 7  # holds blocks for a cache that is not there yet


#: What is asked of a segment when it is submitted: ``run_until`` returns when it has finished; its blocks stay taken
#: until ``release``; it is the last of its batch (manual mode); its context is on another instance, blocks are reserved
#: before it comes; and that instance still works on it.
NOTIFY, HOLD, CLOSES, RESERVE, AHEAD = 1, 2, 4, 8, 16
#: Ends of the links that a transfer takes: out of its sender, into its receiver, out of a leaf, into a leaf.
OUT, IN, UP, DOWN = range(4)
#: Where a segment is not handed over (yet); and where it is one of a feed, which the kernel hands over by itself.
NOT_HANDED, FED = -1, -2
#: What a place for a hand-over has: nothing, one that waits for blocks of the receiver, one whose cache is on its way.
FREE, WAITS, MOVES = range(3)
#: Queues of an instance: prompts; segments without a prompt here, and all that wait for a reservation; those that leave
#: its pipeline; those whose cache has landed in reserved blocks.
PROMPTS, COMING, AWAY, LANDED = range(4)
#: Kinds of a run.
IDLE, DECODING, MIXED, PASS = range(4)


class TableRecord:
    """A step table: its sizes, and where (``_at``) its parts begin in ``values``; see ``step_table``."""

    sequences: int  # largest number of decodes
    knots: int  # contexts of the decode axis
    knots_at: int
    decode_at: int  # (sequences + 1, knots) whole decode steps [s]
    scores_at: int  # (sequences + 1, knots) their scores and values alone [s]
    row_at: int  # (sequences + 1) position of a number of decodes among the rows of the linear part
    tokens: int  # points of the token axis
    linear_at: int  # (2, rows, tokens) everything but scores and values, in the kernels of prefill and of decode [s]
    rows: int
    pasts: int  # past tokens of prefill attention
    pasts_at: int
    prompts: int  # prompts of a step: half powers of two from 1
    lengths: int  # tokens of each: so many a doubling from 1, and both sides of every stair
    lengths_at: int
    attention_at: int  # (stages + 1, prompts, lengths, pasts) scores and values of a token of prefill [s/token]
    stage_at: int  # (tokens) slowest pipeline stage of a prompt, without scores and values [s]
    pipeline: int  # stages
    ranks: int  # DP ranks of attention
    chunk: int  # tokens of a chunk of CPP, 0 = whole prompts
    host_at: int  # host time of a pass, of each of its micro-batches or chunks, launches of a stage [s]
    floor_at: int  # (sequences + 1) least time of a step with prefill [s]
    experts_at: int  # (2, tokens) routed experts on tokens of all ranks, as ``linear_at``, but for a constant [s]
    passed_at: int  # (2, tokens) those of a pass through a pipeline: in its slowest stage, and in all of them [s]
    drafts: int  # that a decode step verifies of each sequence; 0 = no speculation [token]
    accepted_at: int  # (drafts) marginal acceptance: share of steps in which the first drafts are all accepted [1]


class InstanceRecord:
    """One instance, or one of several attention ranks of an instance; its columns are current up to its last event.

    An instance of several ranks has its run and its counters of time in its own row, queues and memory in theirs
    (``lockstep``); what is a sum over the ranks stands in its row, too.
    """

    ranks: int  # attention ranks, each with queues, memory and a running set of its own [1]
    rank_at: int  # the first of their rows; that of an instance with one rank is its own
    rank_choice: int  # which of them takes a request, see ``RankChoice``
    turn: int  # the rank whose turn it is to take a request
    begins: int  # the rank whose turn it is to take prompts first, where a step has a most number of them
    rank_blocks: int  # of one rank: no request holds more [block]
    active: int  # 1 = forms steps
    draining: int  # 1 = reports when empty, 2 = to be reported
    stalled: int  # 1 = to be reported: work waits for memory, and nothing runs that would free some
    mode: int
    table: TableRecord
    token_budget: int  # tokens of a step: decodes and prefill [token]
    max_sequences: int  # running and in prefill together [1]
    max_prompts: int  # prompts of one pass [1]
    hold_steps: int  # most decode steps that prompts wait until every rank can take one; 0 = they do not wait [1]
    held: int  # decode steps that they have waited so far [1]
    holds: int  # 1 = they wait while the current run lasts
    step_limit_s: float  # of a SLO_AWARE step [s]
    least_prefill: int  # of a SLO_AWARE step whose limit the past of the prompt exceeds by itself [token]
    total_blocks: int
    free_blocks: int
    watermark: int  # blocks that an admission leaves free, unless the instance is empty
    admission: int  # what a prompt needs to be admitted, see ``AdmissionRule``
    scheduling: int  # the order of its queues, and what gives way, see ``Scheduling``
    keeps: int  # 1 = blocks of a preempted segment stay cached until others take them
    late: int  # 1 = others find the blocks of a prompt when they are computed, 0 = when they are taken
    taken: int  # blocks taken so far, the clock of what is still cached [block]
    promised: int  # blocks that those admitted will still take, where admission counts outputs [block]
    preempted: int  # 1 = a segment was preempted in this step: no prompt is admitted
    running_requests: int  # sequences in decode [1]
    running_tokens: int  # their cached tokens [token]
    queued_requests: int  # segments that wait or are in prefill [1]
    queued_prompt_tokens: int  # prompt tokens of theirs that are not yet in the cache [token]
    queued_context_tokens: int  # that they came with, computed elsewhere; of preempted ones too [token]
    coming_tokens: int  # cache in transfer to it [token]
    coming_requests: int  # transfers to it of which Python does not hear [1]
    loading_requests: int  # prompts given to it whose past comes from tiers below HBM: not in a queue yet [1]
    loading_prompt_tokens: int  # what they compute then [token]
    admitted: int  # first segments of the queue of prompts that already hold blocks [1]
    last_admitted: int  # last of them
    requests: int  # segments that were given to it and have not ended [1]
    request_tokens: int  # their contexts and prompts [token]
    first: Annotated[MutableSequence[int], 4]  # ends of its queues, by PROMPTS, COMING, AWAY, LANDED; -1 = empty
    last: Annotated[MutableSequence[int], 4]
    first_free: int  # run that is taken first, where blocks are shared; -1 = none
    last_free: int
    closed: int  # batches of the queue that a policy has closed (manual mode)
    counter: int  # decode steps since the start, the clock of the running set
    residue: Annotated[MutableSequence[int], BLOCK_TOKENS]  # running segments by (cached tokens - counter) mod 16
    growing: int  # blocks that the running set takes for its next step, where it drafts: it has no residues [block]
    groups: int  # segments that joined the running set since its last step: row 1 of ``sets``
    run_kind: int  # what the instance does, IDLE to PASS
    run_steps: int  # decode steps of the current run that are not yet counted
    pieces: int  # first segments of the queue that are in the current step
    next_s: float  # next event: end of the run, or a pass that leaves its pipeline; inf = none [s]
    run_start_s: float  # start of the part of the run that is not yet counted [s]
    run_end_s: float  # end of the run; inf = idle [s]
    leave_s: float  # when the first of the leaving segments leaves; inf = none [s]
    last_step_s: float  # end of the last step with decodes [s]
    latency_s: float  # of the pass in progress: its tokens come this long after its start [s]
    decode_steps: int  # steps with at least one decode [1]
    passes: int  # steps with prefill [1]
    prefill_tokens: int  # computed, recomputation included [token]
    decode_tokens: int  # emitted by decode steps [token]
    first_tokens: int  # emitted by prefill [token]
    preemptions: int
    decode_s: float  # time of the steps with at least one decode [s]
    busy_s: float  # [s]
    prefill_pairs: float  # query-key pairs of all prefill [1]
    decode_context: float  # keys read by all decodes: sum of contexts [token]


class Segment:
    """One segment."""

    request: int
    instance: int
    rank: int  # of the instance
    priority: int  # higher ones go first, where its instance schedules by it; else 0 [1]
    context: int  # tokens that were in the cache when it came (transferred) [token]
    prompt: int  # to prefill here [token]
    generate: int  # to emit here [token]
    notify: int  # flags of its submission
    hold: int
    closes: int
    reserve: int  # 1 = its context is on another instance, 2 = and that one still works on it; 0 = it is here
    status: int
    left: int  # prompt tokens still to prefill [token]
    cached: int  # tokens in the cache when it joined the running set, or so far in prefill [token]
    emitted: int  # tokens emitted when it joined the running set; both up to date where an instance drafts [token]
    joined: int  # counter of its instance when it joined
    blocks: int  # held; while it runs, those that it held when it joined, unless its instance drafts
    next: int  # in its queue, -1 = last
    preemptions: int
    hit: int  # prompt tokens found in the prefix cache, and never computed by it [token]
    reached: int  # tokens that it had in the cache when it was preempted, where it shares blocks [token]
    expected: int  # of it while it waits, as its load counts them: looked up when it came [token]
    ready: int  # tokens that were loaded for it from tiers below HBM [token]
    shared: int  # names of its prompt whose runs it holds [1]
    lent: int  # KV blocks in them [block]
    tail: int  # free run of what it had computed when it was preempted; -1 = none
    piece: int  # tokens of it in the current step [token]
    kept: int  # tokens whose blocks were cached when it was preempted; those before ``tail`` where it shares [token]
    lost_from: int  # blocks taken (``taken``) from which on those that it gave back are overwritten, the last first
    handed: int  # its place among ``TransferRecord`` while it waits for its cache; else ``NOT_HANDED`` or ``FED``
    moved: int  # what left for the next instance when it had ended [token]
    submit_s: float
    start_s: float  # start of the first step or pass that worked on it; nan = never [s]
    first_token_s: float  # its first token here: end of its prefill, or of its first decode step; nan = none [s]
    finish_s: float  # its last token; nan = not finished [s]
    last_s: float  # last token before it joined the running set, maybe on another instance; nan = none [s]
    leaves_s: float  # when a pass in a pipeline emits its token [s]
    exposed_s: float  # from its end until what left has arrived, without the wait for blocks [s]
    transfer_s: float  # the same, with what left before its end [s]
    blocked_s: float  # wait for blocks of the next instance [s]


class World:
    """What the whole fleet has in common."""

    instances: int  # of the fleet [1]
    now_s: float  # time of the last event; instances have none before it [s]
    soonest_s: float  # nothing happens or is to be reported before it [s]
    pending_head: int  # segments to report, linked by ``next``
    pending_tail: int
    pending_events: int  # instances to report: ``draining`` is 2, or ``stalled`` 1
    reserves: int  # 1 = a segment came whose context is elsewhere: stalls are reported
    shared: int  # address of the ``Shared``; 0 = what is found of a prompt is not in the blocks of its instance
    step_by_step: int  # 1 = every decode step is an event of its own
    changes: int  # entries in the log so far
    stream: int  # that drafts are accepted by: each request and place in it has a draw of its own
    feed: int  # address of the ``Feed``; 0 = none
    network: int  # address of the ``Network``
    home: int  # address of the array that says where all arrays are


class Feed:
    """Requests that come at known times and go where a load is least: nobody outside has to be asked.

    The arrays of requests and of the ranking are named by their addresses (``_at``).
    """

    times_at: int  # (requests) ascending [s]
    prompts_at: int  # (requests) [token]
    totals_at: int  # (requests) prompt and output [token]
    requests: int  # how many are at hand [1]
    more: int  # 1 = others follow these
    next: int  # the first that has not come
    most: int  # larger ones are reported instead: a place may lack the memory [token]
    whole: int  # 1 = they stay where they are placed, 0 = they go on after the first token
    kept: int  # 1 = those with one output token go on, too
    hold: int  # flags of a segment whose request goes on
    closes: int  # of one that stays
    submitted: int  # segments so far [1]
    load: int  # see ``ranking``
    own_tokens: int  # 1 = its prompt is added to the load, 0 = one request is
    trees_at: int  # (groups, width) of the ranking
    groups: int
    width: int
    group_at: int  # (instances + 1)
    present_at: int  # (instances)
    onward: int  # 1 = those that go on are handed over by the kernel: what follows says where and at what cost
    next_load: int  # see ``ranking``
    next_own_tokens: int
    next_trees_at: int
    next_groups: int
    next_group_at: int
    next_present_at: int
    place_at: int  # function of a policy that places requests, in place of a ranking; 0 = none
    next_at: int  # the one that says where they go on
    context_at: int  # what these work on
    cache_bytes: float  # of any cache [B]
    token_bytes: float  # of a token [B]
    descriptors: int  # of a block of a cache [1]
    kinds: int  # of instances
    kind_at: int  # (instances) kind of each
    post_at: int  # (kinds, kinds) time of a descriptor from one kind to another [s]


class TransferRecord:
    """A cache that leaves one instance for another; before that, a hand-over that waits for blocks of the receiver."""

    state: int  # FREE, WAITS, MOVES
    told: int  # 1 = its end is reported, and nothing else happens then
    gone: int  # 1 = one of its instances has died since it left
    held: int  # segment of the sender, whose blocks are held until the end; -1 = not known here
    segment: int  # of the receiver, with blocks reserved; -1 = not known here
    sender: int  # instance
    receiver: int
    tokens: int  # [token]
    ended_s: float  # end of the sender's segment [s]
    asked_s: float  # when it could have begun, but for blocks of the receiver [s]
    began_s: float  # [s]
    post_s: float  # time of its descriptors, before its first byte [s]
    left: float  # what was to move at ``since_s`` [B]
    rate: float  # since then [B/s]
    since_s: float
    end_s: float  # at that rate; inf = never [s]
    serial: int  # of equal ends the one comes first that was known first
    place: int  # in the heap of ends
    port: Annotated[MutableSequence[int], 4]  # what it takes, by OUT to DOWN; -1 = nothing
    before: Annotated[MutableSequence[int], 4]  # neighbours in the lists of these; -1 = none
    after: Annotated[MutableSequence[int], 4]


class Port:
    """One end of a link, which transfers share. Those of instance, and leaf, i are 4 i + OUT to 4 i + DOWN."""

    bandwidth: float  # at present [B/s]
    latency_s: float  # before the first byte [s]
    free_s: float  # when the last transfer so far has ended, where they queue [s]
    count: int  # transfers [1]
    first: int  # of their list; -1 = none
    last: int
    changed: int  # 1 = they have to get new rates
    next_changed: int  # -1 = last
    leaf: int  # of an instance


class Network:
    """Links between the instances of a fleet."""

    transfers_at: int
    heap_at: int  # of the ends of those that move
    room: int  # for so many transfers [1]
    ports_at: int
    ports: int
    queues: int  # 1 = transfers of a link queue, 0 = they share it
    leaves: int  # whose uplinks are shared; 0 = none
    free: int  # a place for the next transfer, linked by ``place``; -1 = none
    moving: int  # transfers [1]
    waiting: int  # hand-overs that wait for blocks [1]
    serial: int
    share_s: float  # when rates are shared anew; inf = nothing has changed [s]
    first_changed: Annotated[MutableSequence[int], 2]  # ends of links, by OUT and IN, in the order of their changes
    last_changed: Annotated[MutableSequence[int], 2]


class BlockRun:
    """KV blocks that go together, see ``sharing``."""

    memory: int  # of a rank of an instance
    name: int  # of a prompt's block; or ``NAMELESS``, ``UNUSED``
    size: int  # [block]
    holders: int  # segments; 0 = it is free [1]
    owner: int  # preempted segment that computed it; -1 = none
    before: int  # neighbours among the free runs of its memory; -1 = none
    next: int  # and of those not in use
    chain: int  # next in its bucket
    newer: int  # of the same name in other memories; -1 = none
    older: int


class Shared:
    """Blocks of prompts that segments share."""

    runs_at: int
    room: int  # runs [1]
    unused: int  # the next, linked by ``next``
    buckets_at: int
    buckets: int  # a power of two [1]
    named_at: int  # (names) newest run; -1 = none
    named: int  # [1]
    starts_at: int  # (requests) into the names of all
    counts_at: int  # (requests) [1]
    requests: int
    names_at: int
    names: int  # [1]
    block_tokens: int  # of a name [token]
    step: int  # from one place at which a prompt is taken up to the next [token]
    begun_at: int  # (segments) those whose prompt was admitted, in order
    begun: int  # [1]


class FleetState(NamedTuple):
    """The arrays of a fleet."""

    inst: Sequence[InstanceRecord]
    seg: Sequence[Segment]
    sets: NDArray[np.int64]  # (2, instances, sequences): heaps of running segments; those that joined
    values: NDArray[np.float64]  # of all step tables, end to end
    itl: NDArray[np.float64]  # (2, bins): gaps between tokens, and left edges [s]
    world: Sequence[World]  # one row
    soon: NDArray[np.float64]  # tree of ``next_s`` of the instances, see ``least`` [s]
    due: NDArray[np.float64]  # tree of times before which ``refresh`` has nothing to count on an instance [s]
    log: NDArray[np.int64]  # instances that changed, the newest ``changes`` - 1, in turn
    priority: NDArray[np.int64]  # of requests by their numbers; those beyond it have 0 [1]


class Queues(NamedTuple):
    """Those of ``FleetState`` that change when something comes from outside: no step is formed."""

    inst: Sequence[InstanceRecord]
    seg: Sequence[Segment]
    values: NDArray[np.float64]
    world: Sequence[World]
    soon: NDArray[np.float64]
    due: NDArray[np.float64]
    log: NDArray[np.int64]
    priority: NDArray[np.int64]


def dtype_of(record: type) -> np.dtype[np.void]:
    """Return the numpy type of a row of such records: 8 bytes a field, nested records and arrays in place."""
    return np.dtype([(name, *_field(hint)) for name, hint in get_type_hints(record, include_extras=True).items()])


def _field(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        return np.int64, (get_args(hint)[1],)
    return (np.float64 if hint is float else np.int64 if hint is int else dtype_of(hint),)
