"""``disagg-sim trace stats``: print the statistics of a request trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg_sim.choices import MOST_SEED
from disagg_sim.cli.commands import parser_of
from disagg_sim.cli.tables import print_table
from disagg_sim.errors import InputError
from disagg_sim.question import Ask
from disagg_sim.workload.readers.load import load_trace
from disagg_sim.workload.statistics import LengthStatistics, MinuteStatistics, TraceStatistics, trace_statistics

RATE = Ask("", unit="rate")


def stats(
    file: Annotated[Path, typer.Argument(help="trace file")],
    kind: Annotated[
        str, typer.Option("--kind", help="azure, burstgpt, mooncake, csv or lengths; auto: recognise by the first line")
    ] = "auto",
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            parser=parser_of(RATE),
            help="rate of Poisson arrivals for a table without arrival times [requests/s]",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="ROLE=HEADER",
            help="header of a column: arrival=NAME, input_tokens=NAME or output_tokens=NAME; repeatable",
        ),
    ] = None,
    time_unit: Annotated[
        str, typer.Option("--time-unit", help="unit of the times: s, ms, us or ns; default: that of the kind")
    ] = "",
    as_is: Annotated[bool, typer.Option("--as-is", help="Mooncake: keep batches of requests at one instant")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="seed of drawn arrivals")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print requests, rate, burstiness, lengths and prefix reuse of a trace."""
    trace = load_trace(
        file, kind, columns=_columns(column or ()), time_unit=time_unit, spread=not as_is, rate=rate, seed=seed
    )
    found = trace_statistics(trace)
    if as_json:
        typer.echo(json.dumps(_without_nan(asdict(found)), indent=2))
    else:
        print_table(_lines(found))


def _columns(given: Sequence[str]) -> dict[str, str]:
    """Parse ``("arrival=ts",)`` into ``{"arrival": "ts"}``."""
    pairs = [each.partition("=") for each in given]
    for (role, equals, header), each in zip(pairs, given, strict=True):
        if not (role and equals and header):
            raise InputError(f"--column {each!r} is not ROLE=HEADER, such as arrival=timestamp")
    return {role: header for role, _, header in pairs}


def _lines(found: TraceStatistics) -> Iterator[tuple[str, str]]:
    yield "requests", str(found.requests)
    yield "rows with zero tokens, dropped", str(found.dropped)
    yield "first arrival to last", _shown(found.duration_s, " s")
    yield "mean rate", _shown(found.rate_per_s, " requests/s")
    yield "fullest minute", f"{found.peak_minute} requests"
    yield "c_v of gaps", _shown(found.gap_cv)
    yield f"every minute ({found.every_minute.minutes})", _minutes(found.every_minute)
    yield f"minutes with requests ({found.busy_minutes.minutes})", _minutes(found.busy_minutes)
    yield "input", _lengths(found.input_tokens)
    yield "output", _lengths(found.output_tokens)
    yield "correlation input-output of a request", _shown(found.length_correlation)
    if found.prefix_hit_rate is not None:
        yield "prefix blocks found in an infinite cache", f"{found.prefix_hit_rate:.1%}"
    if (turns := found.sessions) is not None:
        yield "sessions", f"{turns.sessions:,}, {turns.turns:.1f} turns in the mean, {turns.most_turns} at most"
        yield "think time before a later turn", f"median {turns.think_p50_s:.3g} s, p90 {turns.think_p90_s:.3g} s"
    for note in found.notes:
        yield "note", note


def _minutes(found: MinuteStatistics) -> str:
    return (
        f"c_v of requests {_shown(found.requests_cv)}, input {_shown(found.input_cv)}, output "
        f"{_shown(found.output_cv)}; correlation input-output {_shown(found.correlation)}"
    )


def _lengths(found: LengthStatistics) -> str:
    return (
        f"mean {found.mean:.0f}, c_v {_shown(found.cv)}, p50 {found.p50:.0f}, p90 {found.p90:.0f}, "
        f"p99 {found.p99:.0f}, largest {found.maximum} tokens"
    )


def _shown(value: float, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:.4g}{unit}"


def _without_nan(value: Any) -> Any:
    """Replace NaN, which JSON lacks, by ``None``."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
