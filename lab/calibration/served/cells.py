"""Read cells of a line as text, numbers and our own names, for the readers of serving measurements."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_engine, load_system
from disagg_sim.units import MS
from lab.calibration.names import engine_named, model_named, recipe_of, system_named
from lab.calibration.served.rows import Measurement

#: Statistics of a latency that sources state, by the word in the name of the column.
STATISTICS = ("mean", "median", "p90", "p99")


def text(line: Any, name: str) -> str:
    """A cell as text, "" where it is blank or the column is missing."""
    value = getattr(line, name, "")
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value).strip()


def value(line: Any, name: str) -> float:
    """A cell as a number, nan where it is blank, no number, or the column is missing."""
    try:
        return float(getattr(line, name, math.nan))
    except (TypeError, ValueError):
        return math.nan


def stated(number: float) -> bool:
    """Whether a number is one: a blank cell is nan."""
    return not math.isnan(number)


def count(line: Any, name: str) -> int:
    """A cell as a whole number from 1; 0 where it is blank, below 1 or infinite."""
    number = value(line, name)
    return int(number) if 1 <= number < math.inf else 0


def yes(line: Any, name: str) -> bool:
    """Whether a cell means true."""
    return text(line, name).lower() in ("true", "1", "1.0")


def times(line: Any, *pairs: tuple[str, str, str]) -> tuple[Measurement, ...]:
    """Quantities in milliseconds: (name, statistic, column), blank ones left out."""
    found = ((name, statistic, value(line, column)) for name, statistic, column in pairs)
    return tuple(Measurement(name=n, statistic=s, measured=v * MS) for n, s, v in found if stated(v))


#: Quantities whose median is taken where it is stated. The mean of a short run is that of its start: ten prompts a slot
#: have 3 to 113 % more than a long run, medians up to 9 % (repeats of gpt-oss on an H200), and one stall moves it by
#: seconds.
JUDGED_BY_MEDIAN = ("ttft",)


def mean_or_median(line: Any, *names: str) -> tuple[Measurement, ...]:
    """``<name>_mean_ms`` of each name, or its median where only that is stated, or is what judges."""
    found: tuple[Measurement, ...] = ()
    for name in names:
        first, then = ("median", "mean") if name in JUDGED_BY_MEDIAN else ("mean", "median")
        found += times(line, (name, first, f"{name}_{first}_ms")) or times(line, (name, then, f"{name}_{then}_ms"))
    return found


def other_statistics(line: Any, *names: str) -> tuple[Measurement, ...]:
    """``<name>_<statistic>_ms`` of each name beside what ``mean_or_median`` takes, where stated."""
    taken = {(each.name, each.statistic) for each in mean_or_median(line, *names)}
    columns = ((name, word, f"{name}_{word}_ms") for name in names for word in STATISTICS if (name, word) not in taken)
    return times(line, *columns)


def total_throughput(line: Any, gpus: float) -> tuple[Measurement, ...]:
    """Input and output tokens a second and GPU over all GPUs, where stated."""
    measured = value(line, "tput_total_tok_s_gpu")
    if not stated(measured):
        return ()
    return (Measurement(name="throughput", measured=measured, basis="total", gpus=max(gpus, 1.0)),)


def instance(gpus: int, *, ep: int = 1, dp: int = 1, pp: int = 1) -> Sharding:
    """An instance of ``gpus`` GPUs: attention over ``dp`` groups (0 = every GPU its own), experts over ``ep``."""
    stage = max(gpus // max(pp, 1), 1)
    spread, groups = math.gcd(max(ep, 1), stage), math.gcd(dp or stage, stage)
    return Sharding(tp_attn=stage // groups, dp_attn=groups, tp_ffn=stage // spread, ep=spread, pp=max(pp, 1))


def groups_of(line: Any, name: str = "dp_attention") -> int:
    """``dp`` of ``instance``: every GPU its own group where the cell says so, else one group."""
    return 0 if yes(line, name) else 1


def cache_format(engine: str, weights: str, said: str = "") -> str:
    """Cache format, "bf16" or "fp8": as stated, else the engine's for a quantised checkpoint, else 16 bit."""
    if said:
        return "fp8" if said.startswith("fp8") else "bf16"
    if not engine or not ("fp8" in weights or "fp4" in weights):
        return "bf16"
    return load_engine(engine).cache_of_quantised


def version_in(image: str, stated: str = "") -> str:
    """Version of the framework, ``1.2``: as stated, else by the tag of its image; "" where neither is."""
    said = stated or image.rpartition(":")[2]
    number = re.match(r"v?(\d+\.\d+)", said)
    return "dynamo-" * ("ai-dynamo" in image) + (number[1] if number else said)


class Names(NamedTuple):
    """What a line is about, in our names; "" where we have none."""

    model: str
    system: str
    engine: str
    recipe: str
    hardware: str  # as the source writes it
    framework: str  # as the source writes it
    reason: str  # why the board cannot be evaluated


def names_of(line: Any, *, weights: str, engine: str = "", cache: str = "") -> Names:
    """Names of a line with the columns ``model``, ``gpu_family``, ``hardware`` and ``framework``, formats as the source
    writes them: "" are weights of 16 bit, and the engine's own cache. The fp4 of AMD is MXFP4.
    """
    model, hardware, framework = model_named(text(line, "model")), text(line, "hardware"), text(line, "framework")
    system, reason = system_named(text(line, "gpu_family"), hardware)
    engine = engine or engine_named(framework)
    mxfp4 = "fp4" in weights and system and load_system(system).vendor == "AMD"
    recipe = recipe_of("mxfp4" if mxfp4 else weights, cache_format(engine, weights, cache), model)
    return Names(model, system, engine, recipe, hardware, framework, reason)
