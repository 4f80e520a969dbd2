"""``disagg-sim plan --pools``: plan encode, attention and feed-forward pools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from disagg_sim.choices import EVEN_RANKS, TWO
from disagg_sim.cli.plan_inputs import plan_inputs
from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.launch.launch import Launch, launch
from disagg_sim.planning.pool_facts import PoolFacts, drawn_of_pools, prices_of_pools
from disagg_sim.planning.pools_plan import PlannedPools, PoolsQuestion, plan_more_pools
from disagg_sim.planning.question import Size
from disagg_sim.question import PlanQuestion, changed_flags
from disagg_sim.report.more_pools import NO_FACTS, played_screen, pools_json, pools_screen, write_pools
from disagg_sim.report.plan import ScreenPart
from disagg_sim.report.schemas import PoolsJson
from disagg_sim.serving.pool_names import Images
from disagg_sim.workload.lengths import Lengths, lengths, uneven
from disagg_sim.workload.trace import Trace

if TYPE_CHECKING:
    from disagg_sim.planning.prove import ProofRun

_IMAGES = re.compile(r"(\d+)x(\d+)x(\d+)(?:@([0-9.]+))?")


def of_more_pools(asked: PlanQuestion) -> bool:
    """Whether pools beside prefill and decode are asked for; those two are every plan's."""
    names = _names(asked.pools)
    return bool(asked.images or asked.ffn_system or {*names} - {*TWO}) or len(names) == 1


def _names(pools: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in pools.split(",") if part.strip()))


def images_of(text: str) -> Images:
    """Images of a request, from ``2x1120x1120`` or ``2x1120x1120@0.5``."""
    found = _IMAGES.fullmatch(text.strip())
    share = float(found[4] or 0.0) if found and (found[4] or "0").count(".") <= 1 and found[4] != "." else 1.0
    if found is None or not share < 1.0 or not all(1 <= int(found[i]) <= 10**5 for i in (1, 2, 3)):
        raise InputError(
            f"--images {quoted(text)}; allowed: COUNTxHEIGHTxWIDTH in pixels, 2x1120x1120, and @SHARE below 1 of them "
            "whose encoding is kept"
        )
    return Images(images=int(found[1]), height=int(found[2]), width=int(found[3]), cached=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsAnswer:
    """A plan of further pools, and what was asked for beside it."""

    found: PlannedPools
    run: ProofRun | None = None  # None where nothing was simulated
    facts: PoolFacts = NO_FACTS

    @property
    def feasible(self) -> bool:
        """Whether pools keep the limits."""
        return bool(self.found.plan.members)

    def screen(self) -> list[ScreenPart]:
        """Write it for people."""
        played = [] if self.run is None else [played_screen(self.found, self.run)]
        return [*pools_screen(self.found, self.facts), *played]

    def flipped(self) -> tuple[PoolsAnswer, list[ScreenPart]]:
        """Add what would change the answer: nothing is known of further pools."""
        return self, []

    def json(self) -> PoolsJson:
        """Write it for programs."""
        return pools_json(self.found, self.run, self.facts)

    def write(self, text: str, out: Path) -> None:
        """Write it as files."""
        write_pools(self.found, text, out, self.run, self.facts)

    def start(self, engine: str) -> Launch:
        """Make the files that start it."""
        return launch(self.found, engine=engine)


def pools_answer(asked: PlanQuestion) -> PoolsAnswer:
    """Plan encode, attention and feed-forward pools beside prefill and decode."""
    work, memory, limits, options = plan_inputs(asked)
    flags = [*(["--tiers of sessions"] if memory else []), *changed_flags(asked, "trace", "hold_prompts", "confidence")]
    if flags:
        raise InputError(f"{', '.join(flags)} and --pools exclude each other: only plans of prefill and decode take it")
    if not _names(asked.pools):
        raise InputError("--images and --ffn-system need --pools, such as encode,prefill,decode")
    question = PoolsQuestion(
        pools=_names(asked.pools),
        size=Size(rate=asked.rate, gpus=asked.gpus, users=asked.users),
        images=images_of(asked.images) if asked.images else None,
        **limits,
        ffn_system=asked.ffn_system or None,
    )
    law = work if isinstance(work, Lengths) else lengths(work)
    if options.rank_imbalance != EVEN_RANKS:
        law = uneven(law, options.rank_imbalance)
    found = plan_more_pools(asked.model, asked.system, law, question, options)
    assert isinstance(found, PlannedPools)  # of prefill and decode alone the command plans as without --pools
    if not found.plan.members:
        return PoolsAnswer(found=found)
    prices = None if asked.utilisation is None else prices_of_pools(found, asked.utilisation)
    return PoolsAnswer(
        found=found,
        run=_played(found, work, asked.seed) if asked.proof else None,
        facts=PoolFacts(drawn=drawn_of_pools(found) if asked.energy else None, prices=prices),
    )


def _played(found: PlannedPools, work: Lengths | Trace | TrafficCase, seed: int) -> ProofRun:
    """Simulate the pools; say on standard error if the simulator has to be compiled first."""
    from disagg_sim.planning.proven import play_pools  # the simulator takes a second to load
    from disagg_sim.simulation.kernel.compiled import COMPILING, on_compilation

    law = found.lengths
    source = work if isinstance(work, TrafficCase) else (round(law.mean_isl), round(law.mean_osl))
    with on_compilation(lambda: typer.echo(COMPILING, err=True)):
        return play_pools(found, source, seed=seed)
