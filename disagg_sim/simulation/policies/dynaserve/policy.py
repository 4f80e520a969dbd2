"""DynaServe: each request is split at its own token between two instances, so that both parts end together.

C. Ruan et al., "DynaServe: Unified and Elastic Execution for Dynamic Disaggregated LLM Serving", arXiv 2504.09285:
micro-requests; global scheduling by bisection of the split (algorithm 1) over a predictor that plays passes
forward; local batches that hold a step within the limit between tokens (algorithm 2); caches pushed chunk by chunk.

Corrected: the paper compares the times at which the instances finish all their work. Each is the end of the longest
answer, however little other work there is, so prompts queue at one instance while the other has room. Here the two
parts of the new request end together, each behind the queue of its instance; ``balance: all`` is the printed rule.

Algorithm 2 as printed takes what prefill keeps a step within the limit. After a long past no step does: a single
token after 100,000 takes 100 ms where 70B runs on two H100, and the prompt would go on token by token. If even alone
``least_piece`` tokens exceed the limit, a step takes so many (``least_piece: 1`` is the printed rule); 256 is the
smallest chunk that the paper tries for its baseline (section 6.1).

Two instances share a request: by default those of a fixed pair, the one with the fewest requests, as all runs of the
paper have one pair. With ``pairing: any`` they are any two, by load and SLO (section 3.1): those with the fewest
requests, equals in turn, where instances whose queue would take longer than the TTFT limit come last.

By default step times are those of the model from the first pass on, and the predictor plays the passes to come.
``predictor: history`` learns them while it serves (``history``); with ``balance: all`` the passes to come are still
played, at the pace of the last ones.

Our choices where the paper is silent: the bisection ends if both times differ by at most 2 %, or 1 ms; the predictor
gives a sequence memory as vLLM does, for what is cached when it starts. With drafts a step may take the limit between
tokens for each of the tokens that it emits on average, and the predictor counts these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.options import MOST_TOKENS, Checked, max_sequences_option, option, token_budget_option
from disagg_sim.simulation.policies.dynaserve import book, predictor
from disagg_sim.simulation.policies.dynaserve.predictor import Search, SplitRequest
from disagg_sim.simulation.policies.loads import ByRole, fewest_requests
from disagg_sim.simulation.policy import Parts, register
from disagg_sim.simulation.site import AsPlanned, Site
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Leg, Limits, Role, State, Wish

#: Of the newest pass in the averages. [1]
WEIGHT = 0.3


class Counts(NamedTuple):
    """What an instance has done so far."""

    steps: float  # passes with decodes [1]
    passes: float  # passes with prefill [1]
    prefill: float  # tokens that these computed [token]
    decode: float  # tokens that decodes emitted [token]
    busy_s: float  # [s]


@dataclass(slots=True)
class Recent:
    """Averages over the last passes of an instance."""

    chunk: float = math.nan  # prefill tokens of a pass that has some [token]
    decodes: float = math.nan  # of a pass that has some [1]
    share: float = math.nan  # of the passes that have prefill [1]
    factor: float = 1.0  # observed time over that of the step table [1]


def moved(average: float, observed: float, passes: float) -> float:
    """Let an average follow the mean of so many passes, one after the other."""
    return observed if math.isnan(average) else observed + (average - observed) * (1.0 - WEIGHT) ** passes


class History:
    """The averages of all instances, by which the predictor ``history`` learns.

    Section 4.1 calibrates pass times with those observed, section 4.2 keeps them by composition, and the composition of
    batches to come is that of recent ones. A real scheduler sees every pass; here each request is an occasion to look
    at what has happened on an instance since the last one: its passes, their tokens and their time. Until an instance
    has prefilled and decoded, its passes are played by the step table.
    """

    def __init__(self, instances: int) -> None:
        self._recent = [Recent() for _ in range(instances)]
        self._before: Floats = np.zeros((instances, len(Counts._fields)))

    def look(self, view: ClusterView, instance: int) -> Recent | None:
        """Learn what has happened on an instance since the last look; None until it has prefilled and decoded."""
        recent, passes_so_far = self._recent[instance], view.inst["passes"][instance]
        columns = (view.decode_steps, None, view.prefill_tokens, view.decode_tokens, view.busy_time)
        now = np.array([passes_so_far if each is None else each[instance] for each in columns], dtype=float)
        new, self._before[instance] = Counts(*(now - self._before[instance]).tolist()), now
        if new.passes > 0:
            recent.chunk = moved(recent.chunk, new.prefill / new.passes, new.passes)
        if new.steps > 0:
            recent.decodes = moved(recent.decodes, new.decode / new.steps, new.steps)
        if math.isnan(recent.chunk) or math.isnan(recent.decodes):
            return None
        if (count := max(new.steps, new.passes)) > 0:
            recent.share = moved(recent.share, new.passes / count, count)
            mixed, plain = self._times(view, instance)
            expected = new.passes * mixed + (count - new.passes) * plain
            recent.factor = moved(recent.factor, new.busy_s / expected, count)
        return recent

    def _times(self, view: ClusterView, instance: int) -> tuple[float, float]:
        """Passes with and without prefill, by the step table. [s], [s]"""
        recent, running = self._recent[instance], int(view.running_requests[instance])
        context = float(view.running_tokens[instance]) / running if running else 0.0
        decodes, table = round(recent.decodes), view.table(instance)
        return table.step_time(decodes, context, max(round(recent.chunk), 1)), table.step_time(decodes, context)

    def part_s(self, view: ClusterView, instance: int, queued: float, part: tuple[int, int, int]) -> float:
        """Time of a part of a request behind ``queued`` prompt tokens: from, to, and tokens of the prompt. [s]"""
        have, until, prompt = part
        recent = self._recent[instance]
        mixed, plain = (recent.factor * each for each in self._times(view, instance))
        compute = max(min(until, prompt) - have, 0)
        emit = until - max(have, prompt) - (compute > 0)  # the pass that completes the prompt emits one
        prefill_s = (queued + compute) / recent.chunk * mixed if compute else 0.0
        return prefill_s + max(emit, 0) * (recent.share * mixed + (1.0 - recent.share) * plain)


def halved(wanted: SplitRequest, search: Search, ends: Callable[[int], tuple[float, float]]) -> int:
    """Bisection of the split as in ``finish_times``, by a function of the split that has both ends. [token]"""
    low, high, ratio = 0.0, 1.0, wanted.prompt / wanted.expected
    for turn in range(search.rounds + 1):
        split = min(max(math.ceil(ratio * wanted.expected - 1e-9), 1), wanted.expected)
        first, second = ends(split)
        if turn == search.rounds or abs(first - second) <= max(search.tolerance * max(first, second), search.least_s):
            break
        low, high = (low, ratio) if first > second else (ratio, high)
        ratio = 0.5 * (low + high)
    return split


#: Which instance of a pair takes first parts: always the same, or the one with fewer requests.
ALPHAS = ("fixed", "least_loaded")
#: What is to end on both instances at the same time: all that they were given, or the parts of the new request.
BALANCES = ("all", "request")
#: Which two instances share a request, and what predicts when they end their parts.
PAIRINGS, PREDICTORS = ("fixed", "any"), ("table", "history")
#: Instances with the fewest requests of which two are chosen. [1]
CANDIDATES = 8
#: Difference of the two times at which the bisection ends in any case. [s]
LEAST_DIFFERENCE_S = 0.001
#: Prefill of a step where the past of a prompt exceeds the limit by itself: the smallest chunk of section 6.1. [token]
LEAST_PIECE = 256
#: Most halvings: so many cut any number of tokens down to one. [1]
MOST_ROUNDS = 64
#: Names of the random stream of prediction errors.
ERRORS = "output_error"


@register("dynaserve")
@dataclass(frozen=True, slots=True, kw_only=True)
class DynaServe(Checked):
    """Split each request over a pair of instances so that both parts end at the same time."""

    needs: ClassVar[tuple[str, ...]] = ("pairs",)
    token_budget: int = token_budget_option("decodes and prefill of one step, at most")
    max_sequences: int = max_sequences_option()
    slo_aware: bool = option(True, "steps stay within the TPOT limit; false: they fill the budget")
    least_piece: int = option(
        LEAST_PIECE,
        "prefill of a step after a past so long that no step with so much of it keeps the limit; 1: as printed",
        unit="token",
        low=1,
        high=MOST_TOKENS,
    )
    rounds: int = option(6, "most halvings of the split", low=0, high=MOST_ROUNDS)
    tolerance: float = option(
        0.02, "difference of the two times, over the later, at which a split is good enough", low=0.0, high=1.0
    )
    ratio: float = option(
        0.0, "share of every request that its first instance takes; 0: searched for each request", low=0.0, high=1.0
    )
    balance: str = option(
        "request",
        "what ends at the same time on both instances: all their work, or the two parts of the new request",
        choices=BALANCES,
    )
    alpha: str = option(
        "fixed",
        "instance of a pair that takes the first part: always the same, or the one with fewer requests",
        choices=ALPHAS,
    )
    pairing: str = option(
        "fixed",
        "which two instances share a request: those of a fixed pair, or any two by load and TTFT limit",
        choices=PAIRINGS,
    )
    predictor: str = option(
        "table",
        "what predicts the ends of parts: passes played forward by the step table, or times and batches of the last "
        "passes",
        choices=PREDICTORS,
    )
    length_error: float = option(
        51.0,
        "standard deviation of the error of predicted outputs: 95 % within 100 tokens",
        unit="token",
        low=0.0,
        high=float(MOST_TOKENS),
    )
    margin: int = option(20, "added to predicted outputs", unit="token", low=0, high=MOST_TOKENS)
    overhead_s: float = option(
        0.015, "time of the decision, before a request reaches its first instance", unit="s", low=0.0
    )

    def build(self, site: Site) -> Parts:
        """See ``Policy``."""
        start = site.instances(("pairs", Role.BOTH))
        if len(start) % 2:
            raise InputError(
                f"deployment {site.deployment.name!r} has {len(start)} instances for policy 'dynaserve'; allowed: an "
                f"even number, two per pair"
            )
        drafts = sorted({int(mapping.draft_tokens) for mapping, _ in start})
        if len(drafts) > 1:
            said = " and ".join(map(str, drafts))
            raise InputError(
                f"policy 'dynaserve' splits requests over instances with {said} draft tokens, which have limits of a "
                "step of their own; allowed: the same number of all"
            )
        limits = Limits(
            mode=Mode.SLO_AWARE if self.slo_aware else Mode.CHUNKED,
            token_budget=self.token_budget,
            max_sequences=self.max_sequences,
            step_limit_s=site.slo.tpot * float(site.setup.accepted_length(drafts[0] if drafts else 0)),
            least_prefill=self.least_piece,
        )
        steps = AsPlanned(site=site, parts=self.needs, usual=ByRole(prefill=limits, decode=limits))
        splits = Splits(self, site)
        return Parts(start=start, routing=splits, steps=steps, failover=splits, transfer="push", keeps_segments=True)


class Splits:
    """Algorithm 1: where each request is cut, and which instances take its parts."""

    def __init__(self, options: DynaServe, site: Site) -> None:
        self._options = options
        self._rng = site.rng(ERRORS)
        self._book = book.Book(np.zeros(0, book.BOOK), len(site.instances(("pairs", Role.BOTH))))
        self._search = predictor.Search(
            options.rounds, options.tolerance, LEAST_DIFFERENCE_S, options.balance == "request"
        )
        self._history = History(self._book.promised.size)
        self._turn, self._ttft_s = -1, site.slo.ttft
        self._expected: list[int] = []
        self._any = False

    def place(self, view: ClusterView, request: int) -> Leg:
        """See ``Routing``; the rest goes to the other instance of the pair, its cache pushed on the way."""
        if request >= len(self._expected):
            self._predict(view)
        options, prompt, expected = self._options, view.input_tokens[request], self._expected[request]
        home, own = view.home, self._book.home
        first = 2 * book.choose_pair(home, own, view.kernel.submitted)
        second = first + 1
        if options.pairing == "any":
            first, second = self._any_two(view)
        if first < 0:  # each pair has lost an instance to a failure
            alone = fewest_requests(view, view.prefill)
            book.commit(home, own, request, (prompt, expected, expected), alone, -1)
            return Leg(alone, delay_s=options.overhead_s)
        if options.alpha == "least_loaded" and _requests(view, second) < _requests(view, first):
            first, second = second, first
        if options.ratio:
            split = min(max(round(options.ratio * expected), 1), expected)
        elif not self._any:
            split = prompt  # the first request of all: plain disaggregation
        else:
            view.refresh(first)
            view.refresh(second)
            split = self._split(view, predictor.SplitRequest(prompt, expected, first, second))
        self._any = True
        whole = split >= expected
        book.commit(home, own, request, (prompt, expected, split), first, -1 if whole else second)
        if whole:
            return Leg(first, delay_s=options.overhead_s)
        return Leg(first, split, second, delay_s=options.overhead_s)

    def _any_two(self, view: ClusterView) -> tuple[int, int]:
        """The two with the fewest requests whose prompts can be in time, else those with the fewest; -1 = none."""
        ready, promised = view.prefill, self._book.promised["requests"]
        if ready.size < 2:
            return -1, -1
        self._turn += 1
        ready = np.roll(ready, -(self._turn % ready.size))
        loads = (view.queued_requests + view.running_requests + promised)[ready]
        order = ready[np.argsort(loads, kind="stable")][:CANDIDATES].tolist()
        chosen: list[int] = []
        for each in order:
            view.refresh(each)
            if predictor.waiting_s(view.home, self._book.home, each, view.now) <= self._ttft_s:
                chosen.append(each)
            if len(chosen) == 2:
                break
        chosen += [each for each in order if each not in chosen]
        return chosen[0], chosen[1]

    def _split(self, view: ClusterView, wanted: predictor.SplitRequest) -> int:
        """Existing tokens at the end of the first part. [token]"""
        one, other, prompt, history = wanted.first, wanted.second, wanted.prompt, self._history
        looks: list[Recent | None] = [None, None]
        if self._options.predictor == "history":
            looks = [history.look(view, each) for each in (one, other)]
        learned = [each for each in looks if each is not None]
        if len(learned) < 2 or not self._search.watch:
            if len(learned) == 2:
                wanted = wanted._replace(paces=(learned[0].factor, learned[1].factor))
            split, *_ = predictor.finish_times(view.home, self._book.home, wanted, view.now, self._search)
            return int(split)
        queued = (view.queued_prompt_tokens + self._book.promised["tokens"]).tolist()
        return halved(
            wanted,
            self._search,
            lambda split: (
                history.part_s(view, one, queued[one], (0, split, prompt)),
                history.part_s(view, other, queued[other], (split, wanted.expected, prompt)),
            ),
        )

    def proceed(self, view: ClusterView, request: int, origin: int) -> Leg:
        """See ``Routing``; asked only where the second instance is not ready, or the answer goes on after its split."""
        second = int(self._book.entries["second"][request])
        return Leg(second if second >= 0 and view.states[second] == State.READY else origin)

    def failed(self, view: ClusterView, instances: Sequence[int], requests: Sequence[int]) -> Sequence[Wish]:
        """See ``Failover``: no new request goes to a pair that lost an instance, if there is another pair."""
        self._look(view)
        home, own, submitted = view.home, self._book.home, view.kernel.submitted
        for request in requests:
            if request < len(self._expected):
                book.forget(home, own, submitted, request, True)
        to_come = self._book.open
        for request in to_come[np.isin(self._book.entries["second"][to_come], instances)].tolist():
            book.forget(home, own, submitted, request, False)
        return ()

    def restored(self, view: ClusterView, instances: Sequence[int]) -> Sequence[Wish]:  # noqa: ARG002  looks at all
        """See ``Failover``."""
        self._look(view)
        return ()

    def _look(self, view: ClusterView) -> None:
        """Note which instances serve: new requests go to pairs both of whose instances do."""
        self._book.note_serving(np.array([state == State.READY for state in view.states]))

    def _predict(self, view: ClusterView) -> None:
        """Predict outputs, at first of all requests: the true length with a normal error, at least one token, and the
        margin.
        """
        options, before = self._options, len(self._expected)
        outputs = np.array(view.output_tokens[before:])
        errors = np.rint(self._rng.normal(0.0, 1.0, outputs.size) * options.length_error).astype(np.int64)
        predicted = np.maximum(outputs + errors, 1) + options.margin
        self._expected += (np.array(view.input_tokens[before:]) + predicted).tolist()
        self._book.grow(outputs.size)


def _requests(view: ClusterView, instance: int) -> int:
    return int(view.queued_requests[instance] + view.running_requests[instance] + view.coming[instance])
