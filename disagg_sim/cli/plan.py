"""``disagg-sim plan``: answer on one screen what to deploy."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import typer

from disagg_sim.cli.plan_inputs import plan_inputs
from disagg_sim.cli.tables import INFEASIBLE, blocks_text
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.launch.expressible import expressible
from disagg_sim.launch.launch import Launch, launch, lines_of
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import assurance, surer
from disagg_sim.planning.design import Design
from disagg_sim.planning.energy import Drawn, drawn, planned_prices
from disagg_sim.planning.flips import changes_of
from disagg_sim.planning.plan import plan as planned
from disagg_sim.planning.plan import plan_turns
from disagg_sim.planning.question import PlanOptions
from disagg_sim.question import PlanQuestion
from disagg_sim.report.plan import NOTHING, PlanExtras, changes, plan_json, screen, write_plan
from disagg_sim.serving.costs import JOULE
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.trace import Trace


def _power(asked: PlanQuestion, design: Design) -> Drawn | None:
    """What the design draws, where that is asked for."""
    return drawn(design) if asked.energy or asked.objective == JOULE else None


def rate_of(asked: PlanQuestion, options: PlanOptions) -> float | None:
    """The rate that is asked for: that of a trace where nothing says how much is to be served. [request/s]"""
    if options.trace is None or any(each is not None for each in (asked.gpus, asked.rate, asked.users)):
        return asked.rate
    return options.trace.rate


def start(found: Plan, engine: str) -> Launch:
    """Make the files that start the best design that the engine can express; notes say if it is a runner-up."""
    assert found.best is not None
    reasons = expressible(found.best, engine)
    for place, design in enumerate(found.runners_up if reasons else (), start=1):
        if not expressible(design, engine):
            made = launch(design, engine=engine)
            note = f"starts runner-up {place}; of the best: {'; '.join(reasons)}"
            return replace(made, notes=(note, *made.notes))
    return launch(found.best, engine=engine)


def plan_answer(asked: PlanQuestion) -> tuple[Plan, PlanExtras]:
    """Plan the pools that are asked for, or prefill and decode beside instances of both; say what was asked beside."""
    work, memory, limits, options = plan_inputs(asked)
    rate = rate_of(asked, options)

    def of(lengths: Lengths | Trace | TrafficCase) -> Plan:
        return planned(asked.model, asked.system, lengths, **limits, rate=rate, gpus=asked.gpus, options=options)

    found = of(work) if memory is None else plan_turns(options.trace or asked.traffic, memory, of).plan
    found, proof = surer(found, asked.confidence), None
    if found.best is None:
        return found, NOTHING
    if asked.proof:
        from disagg_sim.planning.prove import proven  # the simulator takes a second to load
        from disagg_sim.simulation.kernel.compiled import COMPILING, on_compilation

        with on_compilation(lambda: typer.echo(COMPILING, err=True)):
            found, proof = proven(found, seed=asked.seed)
    best = found.best
    assert best is not None
    used = asked.utilisation
    extras = PlanExtras(
        sure=assurance(found),
        proof=proof,
        drawn=_power(asked, best),
        prices=None if used is None else planned_prices(best, options.prices, used),
    )
    return found, extras


def with_changes(found: Plan, extras: PlanExtras) -> PlanExtras:
    """Add what would change the answer, which takes the time of another plan."""
    return extras if found.best is None else replace(extras, changes=changes_of(found))


def plan(asked: PlanQuestion) -> None:
    """Plan, print and write; exit code 2 where nothing keeps the limits."""
    found, extras = plan_answer(asked)
    made = start(found, asked.emit) if asked.emit and found.best is not None else None
    text, shown = blocks_text(screen(found, extras)), _Shown()
    if not asked.as_json:
        shown.echo(text)
    extras = with_changes(found, extras)  # after the answer, which need not wait for it
    if found.best is not None:
        last = f"\n{blocks_text([changes(found, extras)])}"
        text += last
        if not asked.as_json:
            shown.echo(last)
    if asked.as_json:
        files = {} if made is None else {"start": asdict(made)}
        shown.echo(json.dumps({**plan_json(found, extras), **files}, indent=2) + "\n")
    elif made is not None:
        where = None if asked.out is None else asked.out / "start"
        shown.echo("".join(f"\n{line}" for line in lines_of(made, where)) + "\n")
    if asked.out is not None:
        if made is not None:
            made.require_own(asked.out / "start")
        write_plan(found, extras, text, asked.out)
        if made is not None:
            made.write(asked.out / "start")
    shown.require_open()
    if found.best is None:
        raise typer.Exit(INFEASIBLE)


class _Shown:
    """Standard output of a plan, which is written to ``--out`` even where nobody reads it to its end."""

    def __init__(self) -> None:
        self._closed: BrokenPipeError | None = None

    def echo(self, text: str) -> None:
        """Print text as it is, unless the output was closed."""
        if self._closed is None:
            try:
                typer.echo(text, nl=False)
            except BrokenPipeError as error:
                self._closed = error

    def require_open(self) -> None:
        """End as any command does whose output was closed."""
        if self._closed is not None:
            raise self._closed
