"""One attention rank of a serving instance in plain Python: its memory, its queues, and what it brings to a step.

A request is served in *turns*, one for each leg of its route: ``context`` tokens are in the cache when a turn begins,
``prompt`` tokens are computed, ``generate`` tokens are emitted, the first of them by the pass that completes the
prompt. KV blocks have numbers, and every list is walked.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import AdmissionRule, Mode, Scheduling

BLOCK = 16  # tokens of a KV block [token]
MIXED = (Mode.CHUNKED, Mode.SLO_AWARE)  # decodes and pieces of prompts share a step


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return math.ceil(tokens / BLOCK)


@dataclass(eq=False)
class Turn:
    """What one instance does for a request."""

    number: int  # in the order of submission
    request: int
    instance: int
    context: int
    prompt: int
    generate: int
    until: int  # tokens of the request that exist when it ends
    then: int  # the instance after it, or LATER
    goes_on: bool  # another turn follows
    rank: int = 0  # of its instance
    priority: int = 0  # higher ones go first, where the scheduler goes by it
    hit: int = 0  # prompt tokens found in the prefix cache
    names: list[int] = field(default_factory=list)  # of the blocks of its prompt, where turns share them
    named: int = 0  # of its first blocks, those that have names
    context_elsewhere: bool = False  # blocks are reserved before its cache moves
    sender_at_work: bool = False  # and the turn before it has not ended
    feeds: "Turn | None" = None  # the turn after it, whose blocks are asked for chunk by chunk
    asked: int | None = None  # of its cache, in whole chunks, where they have blocks of their own
    swapped: bool = False  # its cache is in the host's memory
    withdrawn: bool = False  # a reservation that was given up
    left: int = 0  # prompt tokens to compute
    cached: int = 0
    emitted: int = 0
    piece: int = 0  # prompt tokens of it in this step
    blocks: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # full blocks when it was preempted
    reached: int = 0  # tokens that it had in the cache when it was preempted
    kept_from: int = 0  # place of the first of them in the prompt, where turns share blocks
    drafts: int = 0  # that a step of its instance verifies
    joined: int = 0  # decode steps of its instance when it began to decode
    preemptions: int = 0
    there_s: float = 0.0  # when it, with its cache, came to wait for its first step
    start_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None

    def __post_init__(self) -> None:
        self.left, self.cached = self.prompt - self.hit, self.context + self.hit

    @property
    def most_blocks(self) -> int:
        """Blocks that it holds with its last token, which drafts may follow if a decode step emits it."""
        steps = self.generate if self.prompt == 0 else max(self.generate - 1, 0)
        return blocks_of(self.context + self.prompt + steps + (self.drafts if steps else 0))


def acceptance(spec: InstanceSpec) -> list[float]:
    """Shares of the decode steps of an instance in which the first one, two, ... drafts are all accepted."""
    head = spec.table.head[0]
    return [float(share) for share in spec.table.values[head["accepted_at"] :][: head["drafts"]]]


def place_in_order(turn: Turn) -> tuple[int, int]:
    """By priority the higher goes first, of equal ones the one that came first."""
    return (-turn.priority, turn.number)


def mean_context(decoding: list[Turn]) -> float:
    """Keys that a decode reads on average, its own included."""
    return sum(turn.cached + 1 for turn in decoding) / len(decoding) if decoding else 0.0


class Rank:
    """One attention rank of an instance: its queues, its memory, and what it brings to a step."""

    def __init__(self, spec: InstanceSpec, number: int) -> None:
        ranks = spec.table.ranks

        def share(total: int) -> int:
            return total // ranks + (number < total % ranks)

        self.spec, self.blocks = spec, spec.blocks // ranks
        self.acceptance = acceptance(spec)
        self.verified = 1 + len(self.acceptance)  # tokens that a step takes of a turn
        self.by_priority = spec.scheduling == Scheduling.PRIORITY
        self.token_budget, self.max_sequences = share(spec.token_budget), share(spec.max_sequences)
        self.max_prompts = spec.max_prompts  # of the step that is formed
        self.given: list[Turn] = []  # turns that have not ended
        self.free = list(range(self.blocks))  # blocks in the order in which they became free
        self.holds: dict[int, Turn] = {}  # block -> the turn whose tokens are in it, maybe freed since
        self.holding: list[Turn] = []  # turns with blocks, in whatever state
        self.decoding: list[Turn] = []
        self.prefilling: list[Turn] = []  # admitted prompts, the oldest first
        self.waiting: list[Turn] = []  # prompts without blocks, the preempted ones first, or by priority
        self.coming: list[Turn] = []  # turns that only decode, and all that wait for a reservation
        self.landed: list[Turn] = []  # caches in reserved blocks, without a sequence yet
        self.pieces: list[Turn] = []  # of the step in progress
        self.preempted = False  # in the step that is formed
        self.swaps = 0  # moves to the host or back
        self.swapping_s = 0.0  # what the next step waits for
        self.decode_steps = 0
        self.shares = False  # blocks of prompts are found by their names
        self.seen_s = math.inf  # what came later is not in the step that is formed
        self.step = BLOCK  # tokens from one place at which a prompt is taken up to the next
        self.by_name: dict[int, int] = {}  # block of each name that is there

    # --- memory -----------------------------------------------------------------------------------------------

    def take(self, turn: Turn, count: int) -> None:
        """The blocks that have been free for longest; what was cached in them is lost."""
        for _ in range(count):
            block = self.free.pop(0)
            self.by_name = {name: other for name, other in self.by_name.items() if other != block}
            self.holds[block] = turn
            turn.blocks.append(block)
        if turn not in self.holding:
            self.holding.append(turn)

    def give_back(self, turn: Turn) -> None:
        """Free all blocks of a turn, the last first; their content stays until they are taken."""
        if turn in self.holding:
            self.holding.remove(turn)
        held = self.held()
        self.free += [block for block in reversed(turn.blocks) if block not in held]
        turn.blocks, turn.named = [], 0

    def held(self) -> set[int]:
        """Blocks that turns hold."""
        return {block for turn in self.holding for block in turn.blocks}

    def found(self, turn: Turn) -> tuple[list[int], int]:
        """Blocks from which a turn that waits begins, of which one token is computed at least; of them the named ones.

        A turn that was preempted knows its own blocks, behind those that have names, as long as nobody took them.
        """
        if not self.shares:
            return self.still_cached(turn), 0
        if turn.cached or turn.context_elsewhere or not turn.left:
            return [], 0
        named: list[int] = []
        for name in turn.names:
            if name not in self.by_name:
                break
            named.append(self.by_name[name])
        blocks = named + self.own(turn, len(named))
        blocks = blocks[: min(len(blocks) * BLOCK, turn.left - 1) // self.step * self.step // BLOCK]
        return blocks, min(len(named), len(blocks))

    def own(self, turn: Turn, named: int) -> list[int]:
        """What a turn has computed itself before it was preempted, behind its first ``named`` blocks."""
        first = turn.kept_from
        if first > named:
            return []
        held = self.held()
        kept = []
        for block in turn.kept:
            if block in held or self.holds.get(block) is not turn or block in self.by_name.values():
                break
            kept.append(block)
        return kept[named - first :]

    def name(self, turn: Turn, tokens: int) -> None:
        """Others find the full blocks of the first tokens of a prompt; of two with one name one is given back."""
        if not self.shares:
            return
        tokens = min(tokens, turn.context + turn.prompt)
        while turn.named < min(tokens // BLOCK, len(turn.names)):
            place = turn.named
            other = self.by_name.setdefault(turn.names[place], turn.blocks[place])
            if other != turn.blocks[place]:
                if other in self.free:
                    self.free.remove(other)
                self.free.insert(0, turn.blocks[place])
                turn.blocks[place] = other
            turn.named += 1

    def still_cached(self, turn: Turn) -> list[int]:
        """The first of its blocks at preemption that nobody has taken since."""
        found: list[int] = []
        for block in turn.kept:
            if block not in self.free or self.holds[block] is not turn:
                break
            found.append(block)
        return found

    def growth(self) -> int:
        """Blocks that the next decode step needs."""
        return sum(self.lacks(turn) for turn in self.decoding)

    def lacks(self, turn: Turn) -> int:
        """Blocks that a turn needs for its next decode step beside those that it has."""
        return max(blocks_of(turn.cached + self.verified) - len(turn.blocks), 0)

    def admit(self, turn: Turn, piece: int) -> bool:
        """Take the blocks that a turn needs to begin with ``piece`` tokens, if the admission rule finds them free."""
        if turn.asked is not None:
            return self.admit_chunks(turn)
        rule, (found, named) = self.spec.admission, self.found(turn)
        tokens = turn.cached + turn.left
        decodes_only = turn.left == 0
        if decodes_only and turn.context_elsewhere:
            tokens += self.verified  # a reservation holds those of the next step, too
        whole = blocks_of(tokens)
        need = whole
        if rule != AdmissionRule.PROMPT and not decodes_only and not turn.context_elsewhere:  # chunk by chunk
            need = blocks_of(min(turn.cached + len(found) * BLOCK + piece, tokens))
        asked = need if rule == AdmissionRule.FIRST_CHUNK else whole
        if rule == AdmissionRule.OUTPUT_FITS:
            asked = turn.most_blocks + sum(
                each.most_blocks - len(each.blocks) for each in self.holding if each.finish_s is None
            )
        else:
            asked += self.growth()
            if decodes_only and not turn.context_elsewhere:
                asked += blocks_of(tokens + self.verified) - whole
        asked -= len(self.held() & set(found[:named]))  # those that others hold need no room
        spare = int(self.spec.watermark * self.blocks)
        if whole == 0 or len(self.free) == self.blocks:  # it takes nothing yet, or nobody else holds any
            spare = 0
        if asked > len(self.free) - spare:
            return False
        for block in found:
            if block in self.free:
                self.free.remove(block)
        if self.shares:
            turn.hit += max(min(len(found) * BLOCK, turn.context + turn.prompt) - turn.reached, 0)
        turn.named = named
        turn.cached += len(found) * BLOCK
        turn.left -= len(found) * BLOCK
        turn.blocks, turn.kept = found, []
        self.take(turn, need - len(found))
        return True

    def admit_chunks(self, turn: Turn) -> bool:
        """Take the blocks of the chunks that its sender has computed, or of all that it needs when that is done."""
        tokens = turn.asked
        if not turn.sender_at_work:
            tokens = turn.cached + turn.left + (self.verified if turn.left == 0 else 0)
        need = blocks_of(tokens) - len(turn.blocks)
        asked = need + self.growth()
        if self.spec.admission == AdmissionRule.OUTPUT_FITS:
            held = [each for each in self.holding if each.finish_s is None and each is not turn]
            asked = sum(each.most_blocks - len(each.blocks) for each in [*held, turn])
        alone = len(self.free) + len(turn.blocks) == self.blocks
        if asked > len(self.free) - (0 if alone else int(self.spec.watermark * self.blocks)):
            return False
        self.take(turn, need)
        if not turn.sender_at_work:
            turn.asked = None
        return True

    def extend(self, turn: Turn, piece: int) -> bool:
        """Take the blocks of the next piece of an admitted prompt, from the newest turns if need be, maybe itself."""
        need = blocks_of(turn.cached + piece) - len(turn.blocks)
        while need > 0 and need + self.growth() > len(self.free):
            self.preempt()
            if turn not in self.prefilling:
                return False
        self.take(turn, max(need, 0))
        return True

    def preempt(self) -> None:
        """The last admitted prompt; else what joined last, of several the one that was submitted last.

        By priority the last of all in its order, even if a piece of it is in the step that is formed.
        """
        if self.by_priority:
            turn = max(self.prefilling + self.decoding, key=place_in_order)
        elif self.prefilling:
            turn = self.prefilling[-1]
        else:
            turn = max(self.decoding, key=lambda each: (each.joined, each.number))
        decodes = turn in self.decoding
        for group in (self.prefilling, self.decoding, self.pieces):
            if turn in group:
                group.remove(turn)
        if self.spec.keeps_preempted:
            turn.kept_from = turn.named
            turn.kept = turn.blocks[turn.named : turn.cached // BLOCK]
        turn.reached = max(turn.reached, turn.cached)
        self.give_back(turn)
        if self.spec.swap_block_s >= 0 and decodes:
            self.swap(turn)
            turn.preemptions += 1
            self.preempted, turn.swapped, turn.context_elsewhere, turn.kept = True, True, False, []
            self.coming.insert(0, turn)
            if self.by_priority:
                self.coming.sort(key=place_in_order)
            return
        turn.left += turn.cached + (turn.left == 0)  # and the token that was emitted last, if it decodes
        turn.cached = 0
        turn.preemptions += 1
        self.preempted = True
        if self.by_priority:
            self.line_up(turn, self.waiting)
        else:
            self.waiting.insert(0, turn)

    def swap(self, turn: Turn) -> None:
        """The step that is formed waits for the blocks of a turn, to the host or back."""
        self.swaps += 1
        self.swapping_s += self.spec.swap_first_s + self.spec.swap_block_s * blocks_of(turn.cached)

    # --- queues -----------------------------------------------------------------------------------------------

    def line_up(self, turn: Turn, queue: list[Turn]) -> None:
        """A turn waits behind all others, or by priority."""
        queue.append(turn)
        if self.by_priority:
            queue.sort(key=place_in_order)

    def may_change(self, turn: Turn) -> bool:
        """Whether a turn that has just come waits at the head of its queue: behind others it changes nothing."""
        if turn in self.coming:
            return self.coming[0] is turn
        return self.waiting[0] is turn and (self.by_priority or not self.prefilling)

    def newcomers(self) -> bool:
        """Whether something waits that came too late for the step that is formed."""
        return any(queue[0].there_s > self.seen_s for queue in (self.prompts(), self.landed, self.coming) if queue)

    # --- its part of a step ------------------------------------------------------------------------------------

    def full(self) -> bool:
        """Whether all sequences are taken."""
        return len(self.decoding) + len(self.prefilling) >= self.max_sequences

    def decode(self, turn: Turn) -> None:
        """Its cache is complete: it decodes from the next step on."""
        turn.joined = self.decode_steps
        self.decoding.append(turn)

    def make_room(self, now: float, news: list[Turn]) -> None:
        """What decodes gets room for a token; then caches join. ``news`` gets the turns whose blocks are reserved."""
        self.preempted, self.pieces = False, []
        while self.decoding and self.growth() > len(self.free):
            self.preempt()
        self.join(now, news)

    def take_pieces(self, now: float, limit: int | None) -> None:
        """Prompts, or pieces of them, for the step that is formed: up to ``limit`` tokens, where there is one."""
        if self.spec.mode in MIXED:
            self.chunks(now, limit)
        else:
            self.whole_prompts(now)

    def grow(self) -> None:
        """Every decode takes the blocks that its next tokens need."""
        for turn in self.decoding:
            self.take(turn, self.lacks(turn))

    def join(self, now: float, news: list[Turn]) -> None:
        """Caches that have landed join; then what comes with its context takes blocks, and joins or is reserved."""
        for turn in [turn for turn in self.landed if turn.there_s <= self.seen_s]:
            if self.full():
                break
            self.landed.remove(turn)
            self.name(turn, turn.cached)
            turn.start_s = now if turn.start_s is None else turn.start_s
            if turn.left > 0:
                self.prefilling.append(turn)
            else:
                while len(turn.blocks) > blocks_of(turn.cached):  # it takes them again with its first step
                    self.free.insert(0, turn.blocks.pop())
                self.decode(turn)
        while (turn := self.next_coming()) is not None and not self.full():
            if turn.swapped and self.preempted:  # nothing comes back when something has to go
                break
            if not self.admit(turn, 0):
                break
            self.coming.remove(turn)
            if turn.swapped:
                self.swap(turn)
                turn.swapped = False
            if turn.context_elsewhere:
                news.append(turn)
            else:
                turn.start_s = now if turn.start_s is None else turn.start_s
                self.name(turn, turn.cached)
                self.decode(turn)

    def next_coming(self) -> Turn | None:
        """The first with its context that may join or reserve: those that came since the step was formed wait."""
        able = (turn for turn in self.coming if turn.context_elsewhere or turn.there_s <= self.seen_s)
        return next(able, None)

    def may_begin(self, turn: Turn, piece: int, now: float) -> bool:
        """Admit the first waiting prompt, if nothing speaks against it."""
        chunkwise = self.spec.admission != AdmissionRule.PROMPT
        if self.full() or (self.preempted and chunkwise):
            return False
        first = self.next_coming()  # what could come now goes before prompts
        if first is not None and not first.sender_at_work and not (self.by_priority and turn.priority > first.priority):
            return False
        if not self.admit(turn, piece):
            return False
        self.waiting.remove(turn)
        self.prefilling.append(turn)
        turn.start_s = now if turn.start_s is None else turn.start_s
        return True

    def prompts(self) -> list[Turn]:
        """All prompts in order, those with blocks first."""
        return self.prefilling + self.waiting

    def begin(self, turn: Turn, piece: int, now: float) -> bool:
        """A prompt that waits is admitted, or one that is partly computed gets blocks for its next piece."""
        return self.extend(turn, piece) if turn in self.prefilling else self.may_begin(turn, piece, now)

    def candidates(self) -> Iterator[Turn]:
        """Prompts in order; those that have given way, or came, since the step was formed are passed over."""
        for turn in list(self.prefilling):
            if turn in self.prefilling:
                yield turn
        yield from [turn for turn in self.waiting if turn.there_s <= self.seen_s]

    def chunks(self, now: float, limit: int | None) -> None:
        """Pieces of prompts beside the decodes, up to the token budget, or to the step limit."""
        budget = self.token_budget - len(self.decoding) * self.verified
        budget = budget if limit is None else min(budget, limit)
        for turn in self.candidates():
            left = budget - sum(each.piece for each in self.pieces)
            if left <= 0 or len(self.pieces) == self.max_prompts:
                break
            if not self.begin(turn, left if turn in self.waiting else min(turn.left, left), now):
                break
            turn.piece = min(turn.left, left)  # less is left where blocks were still cached
            self.take_piece(turn)

    def whole_prompts(self, now: float) -> None:
        """Whole prompts of one pass, while decodes wait."""
        for turn in self.candidates():
            left = self.token_budget - sum(each.piece for each in self.pieces)
            rest = turn.left
            if self.shares and turn in self.waiting:
                rest -= len(self.found(turn)[0]) * BLOCK
            if len(self.pieces) == self.max_prompts or (self.pieces and rest > left):
                break
            if not self.begin(turn, rest, now):
                break
            turn.piece = turn.left
            self.take_piece(turn)

    def take_piece(self, turn: Turn) -> None:
        """A piece of a prompt is in the step, and has its blocks."""
        self.pieces.append(turn)
        if not self.spec.finds_computed:
            self.name(turn, turn.cached + turn.piece)
