"""Columns of the arrays in which a fleet keeps its state, and the codes found in them.

The compiled kernel and its Python face share these arrays, so a policy reads a column at no cost.
Rows of ``inst_*`` are instances, rows of ``seg_*`` are segments.
"""

from __future__ import annotations

from enum import IntEnum

#: Tokens of one KV block; vLLM's default. [token]
BLOCK_TOKENS = 16


class Mode(IntEnum):
    """How an instance forms its steps."""

    CHUNKED = 0  # all decodes, and prefill up to the token budget (vLLM)
    PREFILL_FIRST = 1  # passes of whole prompts; decodes stall (in-flight batching without piggyback)
    ONE_PROMPT = 2  # passes of one whole prompt, first in first out; decodes stall (DistServe, Arrow)
    MANUAL = 3  # passes of the prompts that a policy submitted as one batch; decodes stall (DOPD)
    SLO_AWARE = 4  # all decodes, and the most prefill that keeps the step within its limit (DynaServe)


class SegmentStatus(IntEnum):
    """Where a segment is in its life."""

    QUEUED = 0  # waits, or its prompt is in prefill
    RUNNING = 1  # decodes
    LEAVING = 2  # its pass has left the first stage of a pipeline and not yet the last
    HELD = 3  # finished; its KV blocks wait for ``release``
    DONE = 4  # finished, and its blocks are free
    WITHDRAWN = 5  # taken back before it started
    RESERVED = 6  # its blocks are taken; its context is on the way, until ``ready``
    LOST = 7  # its instance was aborted


# --- inst_int: int64, one row an instance -----------------------------------------------------------------------
ACTIVE = 0  # 1 = forms steps
DRAINING = 1  # 1 = reports when empty
MODE = 2
TABLE = 3  # which step table
TOKEN_BUDGET = 4  # tokens of a step: decodes and prefill [token]
MAX_SEQUENCES = 5  # running and in prefill together [1]
MAX_PROMPTS = 6  # prompts of one pass [1]
TOTAL_BLOCKS = 7
FREE_BLOCKS = 8
WATERMARK = 9  # blocks that an admission leaves free, unless the instance is empty
RUNNING = 10  # sequences in decode [1]
RUNNING_TOKENS = 11  # their cached tokens, up to the last step counted [token]
QUEUED = 12  # segments that wait or are in prefill [1]
QUEUED_TOKENS = 13  # prompt tokens of theirs that are not yet in the cache [token]
ADMITTED = 14  # first segments of the queue that already hold blocks [1]
HEAD = 15  # first segment of the queue, -1 = none
TAIL = 16
LAST_ADMITTED = 17  # last of them
COUNTER = 18  # decode steps since the start, the clock of the running set
RUN_KIND = 19  # what the instance does, see IDLE to PASS
RUN_STEPS = 20  # decode steps of the current run that are not yet counted
PIECES = 21  # first segments of the queue that are in the current step
COMING_HEAD = 22  # segments without prompt, or not yet ready, that wait for blocks
COMING_TAIL = 23
LEAVE_HEAD = 24
LEAVE_TAIL = 25
DECODE_STEPS = 26  # steps with at least one decode [1]
PASSES = 27  # steps with prefill [1]
PREFILL_TOKENS = 28  # computed, recomputation included [token]
DECODE_TOKENS = 29  # emitted by decode steps [token]
PREEMPTIONS = 30
FIRST_TOKENS = 31  # emitted by prefill [token]
GROUPS = 32  # segments that joined the running set since its last step: row 1 of ``sets``
CLOSED = 33  # batches of the queue that a policy has closed (manual mode)
QUEUED_CONTEXT = 34  # context of queued segments, computed elsewhere [token]
RESIDUE = 35  # 16 columns: running segments by (cached tokens - counter) mod 16
INST_INTS = RESIDUE + BLOCK_TOKENS

#: Kinds of a run.
IDLE, DECODING, MIXED, PASS = range(4)

# --- inst_float: float64, one row an instance, and a last row for the clock in its first column ------------------
NEXT_S = 0  # next event: end of the run, or a pass that leaves its pipeline; inf = none [s]
RUN_START_S = 1  # start of the part of the run that is not yet counted [s]
RUN_END_S = 2  # end of the run; inf = idle [s]
LEAVE_S = 3  # when the first of the leaving segments leaves; inf = none [s]
STEP_LIMIT_S = 4  # of a slo_aware step [s]
BUSY_S = 5  # [s]
DECODE_S = 6  # time of the steps with at least one decode [s]
PREFILL_PAIRS = 7  # query-key pairs of all prefill [1]
DECODE_CONTEXT = 8  # keys read by all decodes: sum of contexts [token]
LAST_STEP_S = 9  # end of the last step with decodes [s]
LATENCY_S = 10  # of the pass in progress: its tokens come this long after its start [s]
INST_FLOATS = 11

# --- seg_int: int64, one row a segment --------------------------------------------------------------------------
REQUEST = 0
INSTANCE = 1
CONTEXT = 2  # tokens that were in the cache when it came (transferred) [token]
PROMPT = 3  # to prefill here [token]
GENERATE = 4  # to emit here [token]
HOLD = 5  # 1 = keep its blocks after it finished, until ``release``
NOTIFY = 6  # 1 = ``run_until`` returns when it has finished
CLOSES = 7  # 1 = last of a batch (manual mode)
STATUS = 8
LEFT = 9  # prompt tokens still to prefill [token]
CACHED = 10  # tokens in the cache when it joined the running set, or so far in prefill [token]
EMITTED = 11  # tokens emitted when it joined the running set [token]
JOINED = 12  # counter of its instance when it joined
BLOCKS = 13  # held; while it runs, those that it held when it joined
NEXT = 14  # in its queue, -1 = last
PREEMPTED = 15  # how often
HIT = 16  # prompt tokens found in the prefix cache [token]
PIECE = 17  # tokens of it in the current step [token]
READY = 18  # 0 = its context is still on the way
SEG_INTS = 19

# --- seg_float: float64, one row a segment ----------------------------------------------------------------------
SUBMIT_S = 0
START_S = 1  # start of the first step or pass that worked on it; nan = never [s]
FIRST_S = 2  # its first token here; nan = none [s]
FINISH_S = 3  # its last token; nan = not finished [s]
LAST_S = 4  # last token before it joined the running set, maybe on another instance; nan = none [s]
LEAVES_S = 5  # when a pass in a pipeline emits its token [s]
SEG_FLOATS = 6

# --- world: int64, of the whole fleet ---------------------------------------------------------------------------
PENDING_HEAD = 0  # segments to report, linked by NEXT
PENDING_TAIL = 1
DRAINED = 2  # instances to report: DRAINING is 2
STEP_BY_STEP = 3  # 1 = every decode step is an event of its own
WORLD = 4

#: Bins of the histogram of gaps between tokens: 64 an octave (1.1 % wide) from 10 us to 1,000 s.
ITL_LEAST_S = 1e-5
ITL_PER_OCTAVE = 64
ITL_BINS = 1704
