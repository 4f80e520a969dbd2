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
#: Most stages of a pipeline. [1]
MOST_STAGES = 128


class Mode(IntEnum):
    """How an instance forms its steps."""

    CHUNKED = 0  # all decodes, and prefill up to the token budget (vLLM)
    PREFILL_FIRST = 1  # passes of whole prompts; decodes stall (in-flight batching without piggyback)
    MANUAL = 2  # passes of the prompts that a policy submitted as one batch; decodes stall (DOPD)
    SLO_AWARE = 3  # all decodes, and the most prefill that keeps the step within its limit (DynaServe)


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
    """State of a segment."""

    QUEUED = 0  # waiting, or in prefill
    RUNNING = 1  # decoding
    LEAVING = 2  # its prefill pass has left the first pipeline stage, but not the last
    HELD = 3  # finished; its KV blocks are kept until ``release``
    DONE = 4  # finished, blocks free
    WITHDRAWN = 5  # taken back before it started
    LOST = 6  # its instance was aborted
    RESERVED = 7  # has blocks for a cache that has not arrived


#: Flags of a submitted segment: ``run_until`` returns at its end; it keeps its blocks until ``release``; it is the last
#: of its batch (manual mode); it reserves blocks for a context on another instance; that instance still works on it.
NOTIFY, HOLD, CLOSES, RESERVE, AHEAD = 1, 2, 4, 8, 16
#: Link ends of a transfer: out of the sender, into the receiver, out of a leaf switch, into a leaf switch.
OUT, IN, UP, DOWN = range(4)
#: Values of ``Segment.handed``: no hand-over (yet); a segment of a feed, which the kernel hands over itself.
NOT_HANDED, FED = -1, -2
#: States of a ``TransferRecord``: unused, waiting for blocks of the receiver, in transfer.
FREE, WAITS, MOVES = range(3)
#: Queues of an instance: prompts; segments that only decode or wait for reserved blocks; segments leaving its pipeline;
#: segments whose cache has arrived in reserved blocks.
PROMPTS, COMING, AWAY, LANDED = range(4)
#: Kinds of a run of steps.
IDLE, DECODING, MIXED, PASS = range(4)


class TableRecord:
    """A step table: sizes, and start positions (``_at``) of its parts in ``values``; see ``step_table``."""

    sequences: int  # largest number of decodes
    knots: int  # contexts of the decode axis
    knots_at: int
    decode_at: int  # (sequences + 1, knots) whole decode steps [s]
    scores_at: int  # (sequences + 1, knots) attention scores and values alone [s]
    row_at: int  # (sequences + 1) row of the linear part for a number of decodes
    tokens: int  # points of the token axis
    linear_at: int  # (2, rows, tokens) all but scores and values, in prefill and in decode kernels [s]
    rows: int
    pasts: int  # past tokens of prefill attention
    pasts_at: int
    prompts: int  # prompts of a step: half powers of two from 1
    lengths: int  # token counts of a prompt: several per doubling from 1, and both sides of every step
    lengths_at: int
    attention_at: int  # (stages + 1, prompts, lengths, pasts) scores and values per prefill token [s/token]
    stage_at: int  # (tokens) slowest pipeline stage of a prompt, without scores and values [s]
    pipeline: int  # stages
    ranks: int  # DP ranks of attention
    chunk: int  # tokens of a chunk of CPP, 0 = whole prompts
    host_at: int  # host time of a pass, of a micro-batch or chunk, launch time of a stage [s]
    floor_at: int  # (sequences + 1) least time of a step with prefill [s]
    stretch_at: int  # (sequences + 1) how many times as long techniques make a step of so many decodes [1]
    experts_at: int  # (2, tokens) routed experts for tokens of all ranks, as ``linear_at``, up to a constant [s]
    passed_at: int  # (2, tokens) routed experts of a pipelined pass: slowest stage, all stages [s]
    drafts: int  # draft tokens per sequence in a decode step; 0 = no speculation [token]
    accepted_at: int  # (drafts) share of steps that accept all drafts up to a position [1]


class InstanceRecord:
    """One instance, or one of several attention ranks of an instance; its columns are current up to its last event.

    An instance of several ranks has runs, times and sums over ranks in its own row; each rank has queues and memory in
    another row (``lockstep``).
    """

    ranks: int  # attention ranks, each with its own queues, memory and running set [1]
    rank_at: int  # row of the first rank; with one rank, the row of the instance
    rank_choice: int  # routing to ranks, see ``RankChoice``
    turn: int  # next rank for a request, round robin
    begins: int  # next rank to take prompts first, where ``max_prompts`` limits a step
    rank_blocks: int  # of one rank, so the most of one request [block]
    active: int  # 1 = forms steps
    draining: int  # 1 = reports when empty, 2 = report pending
    stalled: int  # 1 = report pending: work waits for memory, and nothing runs that frees memory
    mode: int
    table: TableRecord
    token_budget: int  # tokens of a step: decodes and prefill [token]
    max_sequences: int  # running and in prefill together [1]
    max_prompts: int  # prompts of one pass [1]
    hold_steps: int  # prefill delay: most decode steps until every rank has a prompt; 0 = none [1]
    held: int  # decode steps delayed so far [1]
    holds: int  # 1 = prompts are delayed during the current run
    step_limit_s: float  # of a SLO_AWARE step [s]
    least_prefill: int  # of a SLO_AWARE step that misses its limit without prefill [token]
    total_blocks: int
    free_blocks: int
    watermark: int  # blocks to leave free at admission, unless the instance is empty
    admission: int  # condition for admission of a prompt, see ``AdmissionRule``
    scheduling: int  # order of queues and of preemption, see ``Scheduling``
    keeps: int  # 1 = blocks of a preempted segment stay cached until overwritten
    swap_block_s: float  # a block over the host link; below 0 = preempted segments are computed again [s]
    swap_first_s: float  # before the first block of a segment [s]
    swapping_s: float  # time of the blocks that the next step waits for [s]
    late: int  # 1 = blocks of a prompt can be reused once computed, 0 = once allocated
    ahead: int  # 1 = a step is formed as the one before it begins, 0 = as that ends
    seen_s: float  # what came later is not in the step that is formed; inf = all may be [s]
    taken: int  # blocks allocated so far, the clock of cached blocks [block]
    promised: int  # blocks that admitted segments will still need, where admission counts outputs [block]
    preempted: int  # 1 = a segment was preempted in this step: no prompt is admitted
    running_requests: int  # sequences in decode [1]
    running_tokens: int  # cached tokens of running sequences [token]
    queued_requests: int  # segments waiting or in prefill [1]
    queued_prompt_tokens: int  # prompt tokens of queued segments that are not yet cached [token]
    queued_context_tokens: int  # context of queued segments, computed elsewhere or before preemption [token]
    coming_tokens: int  # cache in transfer to it [token]
    coming_requests: int  # transfers to it that are not reported to Python [1]
    loading_requests: int  # prompts loading cached tokens from tiers below HBM, not queued yet [1]
    loading_prompt_tokens: int  # tokens that these prompts will compute [token]
    admitted: int  # segments at the head of the queue of prompts that have blocks [1]
    last_admitted: int  # last of these segments
    requests: int  # active segments [1]
    request_tokens: int  # contexts and prompts of active segments [token]
    first: Annotated[MutableSequence[int], 4]  # heads of its queues, by PROMPTS, COMING, AWAY, LANDED; -1 = empty
    last: Annotated[MutableSequence[int], 4]
    first_free: int  # run of blocks to allocate first, where blocks are shared; -1 = none
    last_free: int
    closed: int  # batches of the queue that a policy has closed (manual mode)
    counter: int  # decode steps since the start, the clock of the running set
    residue: Annotated[MutableSequence[int], BLOCK_TOKENS]  # running segments by (cached tokens - counter) mod 16
    growing: int  # blocks for the next step of the running set, with speculation [block]
    groups: int  # segments that joined the running set since its last step, in row 1 of ``sets``
    run_kind: int  # IDLE to PASS
    run_steps: int  # decode steps of the current run, not yet counted
    pieces: int  # segments at the head of the queue that are in the current step
    next_s: float  # next event: end of the run, or a pass leaves the pipeline; inf = none [s]
    run_start_s: float  # start of the uncounted part of the run [s]
    run_end_s: float  # end of the run; inf = idle [s]
    leave_s: float  # when the first segment leaves the pipeline; inf = none [s]
    entered: int  # parts of passes that have entered the pipeline [1]
    leaves_s: Annotated[MutableSequence[float], MOST_STAGES]  # when the last of them leave it, in turn [s]
    last_step_s: float  # end of the last step with decodes [s]
    late_steps: int  # decode steps so far whose gap is above ``World.gap_limit_s``
    latency_s: float  # from the start of the current pass to its tokens [s]
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
    priority: int  # higher first, with priority scheduling; else 0 [1]
    context: int  # tokens cached on arrival (transferred) [token]
    prompt: int  # to prefill here [token]
    generate: int  # to emit here [token]
    notify: int  # flags of its submission
    hold: int
    closes: int
    reserve: int  # 1 = its context is on another instance, 2 = which still works on it, 0 = it is here
    status: int
    left: int  # prompt tokens still to prefill [token]
    cached: int  # tokens in the cache when it joined the running set, or so far in prefill [token]
    emitted: int  # tokens emitted when it joined the running set; with speculation both are current [token]
    joined: int  # counter of its instance when it joined
    blocks: int  # KV blocks; while it runs, blocks when it joined (current with speculation)
    next: int  # in its queue, -1 = last
    preemptions: int
    late_gaps: (
        int  # before its last token here, gaps above ``World.gap_limit_s``; up to ``late_from`` while it runs [1]
    )
    late_from: int  # late steps of its instance up to which they are counted
    hit: int  # prompt tokens found in the prefix cache [token]
    reached: int  # tokens cached at its preemption, where blocks are shared [token]
    expected: int  # cached tokens looked up on arrival, for the load of waiting segments [token]
    ready: int  # tokens loaded from tiers below HBM [token]
    shared: int  # prefix names of its prompt whose blocks it uses [1]
    lent: int  # KV blocks under these names [block]
    tail: int  # free run of blocks computed before its preemption; -1 = none
    piece: int  # tokens of it in the current step [token]
    kept: int  # tokens still cached at its preemption; where blocks are shared, before ``tail`` [token]
    lost_from: int  # value of ``taken`` from which on its freed blocks are overwritten, the last first
    handed: int  # index of its ``TransferRecord`` while it waits for its cache; else ``NOT_HANDED`` or ``FED``
    moved: int  # sent to the next instance after its end [token]
    feeds: int  # segment of the next instance that takes blocks as this one computes; -1 = none
    asked: int  # of its cache, what its sender has computed, in whole chunks; -1 = blocks are taken at once [token]
    submit_s: float
    there_s: float  # when it came to wait for its first step, with its cache if that comes from elsewhere [s]
    start_s: float  # start of its first step or pass; nan = never [s]
    first_token_s: float  # its first token here: end of its prefill, or of its first decode step; nan = none [s]
    finish_s: float  # its last token; nan = not finished [s]
    last_s: float  # last token before it joined the running set, maybe on another instance; nan = none [s]
    leaves_s: float  # when a pass in a pipeline emits its token [s]
    exposed_s: float  # from its end to the arrival of ``moved``, without the wait for blocks [s]
    transfer_s: float  # the same, including tokens sent before its end [s]
    blocked_s: float  # wait for blocks of the next instance [s]


class World:
    """State of the whole fleet."""

    instances: int  # of the fleet [1]
    now_s: float  # time of the last event; instances have none before it [s]
    soonest_s: float  # no event or report before it [s]
    pending_head: int  # segments to report, linked by ``next``
    pending_tail: int
    pending_events: int  # instances to report, with ``draining`` 2 or ``stalled`` 1
    reserves: int  # 1 = stalls are reported, since some segment has its context elsewhere
    shared: int  # address of the ``Shared``; 0 = instances share no blocks of prefixes
    chunk_tokens: int  # of a pushed cache whose chunks take blocks one by one; 0 = caches take all at once [token]
    gap_limit_s: float  # gaps between tokens above it are late; inf = none is [s]
    step_by_step: int  # 1 = every decode step is an event of its own
    changes: int  # entries in the log so far
    stream: int  # random stream of accepted drafts: one draw for each request and position
    feed: int  # address of the ``Feed``; 0 = none
    network: int  # address of the ``Network``
    home: int  # address of the array with the addresses of all arrays


class Feed:
    """Requests with known arrivals that the kernel places itself, where a load is least.

    Arrays are given by their addresses (``_at``).
    """

    times_at: int  # (requests) ascending [s]
    prompts_at: int  # (requests) [token]
    totals_at: int  # (requests) prompt and output [token]
    requests: int  # in the arrays [1]
    more: int  # 1 = more requests follow
    next: int  # first request that has not arrived
    most: int  # larger requests are reported, not placed [token]
    whole: int  # 1 = one instance serves a request, 0 = another one decodes
    kept: int  # 1 = requests of one output token are handed over, too
    hold: int  # flags of a segment with a hand-over
    closes: int  # flags of a segment without one
    submitted: int  # segments so far [1]
    load: int  # see ``ranking``
    own_tokens: int  # 1 = its prompt is added to the load, 0 = one request is
    trees_at: int  # (groups, width) of the ranking
    groups: int
    width: int
    group_at: int  # (instances + 1)
    present_at: int  # (instances)
    onward: int  # 1 = the kernel hands requests over, by the fields below
    next_load: int  # see ``ranking``
    next_own_tokens: int
    next_trees_at: int
    next_groups: int
    next_group_at: int
    next_present_at: int
    place_at: int  # function of a policy that places requests, instead of a ranking; 0 = none
    next_at: int  # function of a policy that chooses the decode instance; 0 = none
    context_at: int  # argument of both functions
    cache_bytes: float  # fixed part of a cache [B]
    token_bytes: float  # cache per token [B]
    descriptors: int  # per cache block [1]
    kinds: int  # of instances
    kind_at: int  # (instances) kind of each
    post_at: int  # (kinds, kinds) time per descriptor from one kind to another [s]


class TransferRecord:
    """A KV transfer, or a hand-over that waits for blocks of the receiver."""

    state: int  # FREE, WAITS, MOVES
    told: int  # 1 = its end is only reported
    gone: int  # 1 = the sender or receiver has failed since its start
    held: int  # segment of the sender, which keeps its blocks until the end; -1 = unknown to the kernel
    segment: int  # segment of the receiver, with reserved blocks; -1 = unknown to the kernel
    sender: int  # instance
    receiver: int
    tokens: int  # [token]
    ended_s: float  # end of the sender's segment [s]
    asked_s: float  # when it started to wait for blocks of the receiver [s]
    began_s: float  # [s]
    post_s: float  # time of its descriptors, before its first byte [s]
    left: float  # bytes left at ``since_s`` [B]
    rate: float  # since ``since_s``; -1 = no byte has left, and it shares no link [B/s]
    since_s: float  # of the first byte, if none has left [s]
    end_s: float  # at that rate; before the first byte ``since_s``; inf = never [s]
    serial: int  # order of equal ends
    place: int  # index in the heap of ends
    port: Annotated[MutableSequence[int], 4]  # ports, by OUT to DOWN; -1 = none
    before: Annotated[MutableSequence[int], 4]  # neighbours in the list of each port; -1 = none
    after: Annotated[MutableSequence[int], 4]


class Port:
    """One end of a link, which transfers share. Those of instance, and leaf, i are 4 i + OUT to 4 i + DOWN."""

    bandwidth: float  # at present [B/s]
    latency_s: float  # before the first byte [s]
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
    blocks: int  # [block]
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


def dtype_of(record: type) -> np.dtype[np.void]:
    """Return the numpy type of a row of such records: 8 bytes a field, nested records and arrays in place."""
    hints = get_type_hints(record, include_extras=True)
    return np.dtype((np.record, [(name, *_field(hint)) for name, hint in hints.items()]))


def _field(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        (of,) = get_args(get_args(hint)[0])
        return _field(of)[0], (get_args(hint)[1],)
    return (np.float64 if hint is float else np.int64 if hint is int else dtype_of(hint),)
