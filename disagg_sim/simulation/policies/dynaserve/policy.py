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

Two instances share a request: those of a fixed pair, the one with the fewest requests, as all runs of the paper have
one pair (section 3.1 has any two, by load and SLO).

Step times are those of the model from the first pass on, where the paper calibrates them while it serves; the
predictor plays the passes to come.

Our choices where the paper is silent: the bisection ends if both times differ by at most 2 %, or 1 ms; the predictor
gives a sequence memory as vLLM does, for what is cached when it starts. With drafts a step may take the limit between
tokens for each of the tokens that it emits on average, and the predictor counts these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from disagg_sim.errors import InputError
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.options import MOST_TOKENS, Checked, max_sequences_option, option, token_budget_option
from disagg_sim.simulation.policies.dynaserve import book, predictor
from disagg_sim.simulation.policies.loads import ByRole, fewest_requests
from disagg_sim.simulation.policy import Parts, register
from disagg_sim.simulation.site import AsPlanned, Site
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Leg, Limits, Role, State, Wish

#: Which instance of a pair takes first parts: always the same, or the one with fewer requests.
ALPHAS = ("fixed", "least_loaded")
#: What is to end on both instances at the same time: all that they were given, or the parts of the new request.
BALANCES = ("all", "request")
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
            wanted = predictor.SplitRequest(prompt, expected, first, second)
            split = int(predictor.finish_times(view.home, self._book.home, wanted, view.now, self._search)[0])
        self._any = True
        whole = split >= expected
        book.commit(home, own, request, (prompt, expected, split), first, -1 if whole else second)
        if whole:
            return Leg(first, delay_s=options.overhead_s)
        return Leg(first, split, second, delay_s=options.overhead_s)

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
