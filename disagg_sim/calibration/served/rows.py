"""Serving measurements in one row schema, whatever form they came in; names of sources to names of specs.

``read_rows`` tells the form of a CSV by its columns and returns every row of it, in order: a row that no
model of ours can answer keeps its place with a reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg_sim.domain import Mapping
from disagg_sim.errors import DisaggSimError, given_twice, nearest, quoted
from disagg_sim.facts.yaml_files import canonical_name, shown

if TYPE_CHECKING:
    import pandas as pd

#: Share of the source configurations that no engine parameter may be fitted on.
HELD_OUT_SHARE = 0.3
#: What is in flight: a closed loop, everything queued, a Poisson stream at a stated rate, one fixed batch, one phase.
LOADS = ("closed_loop", "offline", "server", "static", "prefill", "decode")


class ServingDataError(DisaggSimError):
    """A file of serving measurements is in no known form, or holds no number where one must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One measured number of a row.

    ``basis`` says what a throughput counts ("total" tokens, "input", "output", or "request"s) and ``gpus``
    over how many GPUs it is divided.
    """

    name: str  # "tpot", "ttft", "latency", "throughput", "transfer"
    measured: float  # [s], or [1/s] for a throughput
    statistic: str = "mean"
    basis: str = ""
    gpus: float = 1.0  # [1]
    reason: str = ""  # why this quantity is not evaluated; "" = it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Equal workers of one kind: co-located instances, prefill workers or decode workers."""

    count: int = 1
    mapping: Mapping = field(default_factory=Mapping)

    @property
    def gpus(self) -> int:
        """GPUs of all of them. [1]"""
        return self.count * self.mapping.gpus


#: Digits of a file's SHA-256 by which an engine profile knows the data that it was fitted to. [1]
DIGEST = 12
#: Longest header of a CSV; those known have some 1,500. [character]
LONGEST_HEADER = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One measured run. Names are ours; blank names and a ``reason`` mean that it cannot be evaluated."""

    file: str
    row: str  # row_id, or the line of the file (the header is line 1)
    form: str
    quantities: tuple[Quantity, ...]
    model: str = ""
    system: str = ""
    engine: str = ""
    recipe: str = ""
    load: str = ""  # one of LOADS
    mode: str = ""  # "aggregated" or "disaggregated"
    workers: Workers | None = None  # co-located, or decode workers when disaggregated
    prefill: Workers | None = None  # prefill workers when disaggregated
    isl: float = float("nan")  # [token]
    osl: float = float("nan")  # [token]
    concurrency: float = float("nan")  # in flight in the whole deployment [request]
    rate: float = float("nan")  # of a Poisson stream [request/s]
    batch: float = float("nan")  # sequences of a static batch or a step, of the whole deployment [request]
    waves: float = 0.0  # prompts of a run per concurrency slot; 0 = endless [1]
    spread: float = 0.1  # half width of the service times over their mean [1]
    chunk_tokens: int = 0  # token budget of a step where the source states it; 0 = the engine's [token]
    speculative: bool = False
    qa_flag: str = ""
    hardware: str = ""  # as the source writes it
    framework: str = ""  # as the source writes it
    reason: str = ""
    digest: str = ""  # of the file's bytes, see ``DIGEST``

    @property
    def gpus(self) -> float:
        """GPUs of the deployment, nan where they are unknown. [1]"""
        if self.workers is None:
            return float("nan")
        return float(self.workers.gpus + (self.prefill.gpus if self.prefill else 0))

    @property
    def configuration(self) -> str:
        """What was run, without the load: rows of one configuration stay together when data are split.

        Of what the source states alone, so that the split does not move with our reading of it.
        """
        gpus = (self.workers.gpus if self.workers else 0, self.prefill.gpus if self.prefill else 0)
        lengths = (f"{length:.0f}" for length in (self.isl, self.osl))
        names = (self.form, self.system, self.model, self.framework, self.recipe.partition("_")[0], self.mode)
        return "|".join(map(str, (*names, *gpus, *lengths)))

    @property
    def held_out(self) -> bool:
        """Whether the row is kept from fits of engine parameters: a stable hash of its configuration."""
        digest = hashlib.sha256(self.configuration.encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE

    def refused(self, reason: str) -> ServingRow:
        """The same row with a reason, unless it has one."""
        return self if self.reason else replace(self, reason=reason)


#: Part of a model's name as sources write it -> name of its spec; the first match counts.
MODEL_NAMES = (
    ("deepseek", "deepseek_r1"),
    ("kimi_k2", "kimi_k2"),
    ("gpt_oss_120b", "gpt_oss_120b"),
    ("gpt_oss_20b", "gpt_oss_20b"),
    ("qwen3_235b", "qwen3_235b_a22b"),
    ("qwen3_30b_a3b", "qwen3_30b_a3b"),
    ("qwen3_32b", "qwen3_32b"),
    ("qwen_2_5_14b", "qwen2_5_14b"),
    ("qwen2_5_14b", "qwen2_5_14b"),
    ("qwen2_5_32b", "qwen2_5_32b"),
    ("qwen2_5_72b", "qwen2_5_72b"),
    ("qwen2_72b", "qwen2_72b"),
    ("qwen2_7b", "qwen2_7b"),
    ("qwen1_5_7b", "qwen1_5_7b"),
    ("llama_4_maverick", "llama_4_maverick"),
    ("llama_4_scout", "llama_4_scout"),
    ("405b", "llama_3_1_405b"),
    ("llama_2_70b", "llama_2_70b"),
    ("llama2_70b", "llama_2_70b"),
    ("llama_2_7b", "llama_2_7b"),
    ("llama_70b", "llama_3_1_70b"),
    ("llama_3_70b", "llama_3_1_70b"),
    ("llama_3_1_70b", "llama_3_1_70b"),
    ("llama_3_3_70b", "llama_3_3_70b"),
    ("llama_3_8b", "llama_3_1_8b"),
    ("llama_3_1_8b", "llama_3_1_8b"),
    ("llama3_1_8b", "llama_3_1_8b"),
    ("huggyllama_llama_7b", "llama_2_7b"),
    ("aquila_7b", "aquila_7b"),
    ("decilm_7b", "decilm_7b"),
    ("gemma_7b", "gemma_7b"),
    ("mistral_7b", "mistral_7b"),
    ("mixtral_8x7b", "mixtral_8x7b"),
    ("falcon_180b", "falcon_180b"),
    ("gpt_j", "gpt_j_6b"),
    ("gptj", "gpt_j_6b"),
    ("bloom_7b", "bloom_7b"),
    ("bloom", "bloom_176b"),
    ("opt_6_7b", "opt_6_7b"),
    ("opt_30b", "opt_30b"),
)
#: GPU family as sources write it -> name of the system.
SYSTEM_NAMES = {
    "A100": "a100_sxm_80gb",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "H800": "h800_sxm",
    "H20": "h20_sxm",
    "GH200": "gh200",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200_nvl72",
    "GB300": "gb300_nvl72",
    "MI300X": "mi300x",
}
#: Boards that carry a name of ``SYSTEM_NAMES`` but not its chip, power or links.
OTHER_BOARDS = ("pcie", "nvl_", "nvlx", "cts", "maxq", "h100_nvl", "h200_nvl")
#: Part of a framework's name -> engine; the first match counts.
ENGINE_NAMES = (("sglang", "sglang"), ("vllm", "vllm"), ("trt", "trtllm"), ("tensorrt", "trtllm"), ("dynamo", "trtllm"))


def _first(text: str, table: Iterable[tuple[str, str]]) -> str:
    name = canonical_name(text)
    return next((value for key, value in table if key in name), "")


def model_named(text: str) -> str:
    """Name of our spec of a model as a source writes it; "" where there is none."""
    return _first(text, MODEL_NAMES)


def engine_named(text: str) -> str:
    """Engine of a framework as a source writes it; "" where there is none."""
    return _first(text, ENGINE_NAMES)


def old_engine(engine: str) -> str:
    """Profile of an engine as it was before 2025: vLLM V0, TensorRT-LLM with built engines."""
    return {"vllm": "vllm_v0", "trtllm": "trtllm_engine"}.get(engine, engine)


def system_named(family: str, hardware: str = "") -> tuple[str, str]:
    """Name of our spec of a GPU family and, for boards that are not that part, why they are not evaluated."""
    name = SYSTEM_NAMES.get(family, "")
    if not name:
        return "", f"no system {family!r}"
    board = canonical_name(hardware)
    if any(part in board for part in OTHER_BOARDS):
        return name, f"board {hardware!r} is not the standard part"
    return name, ""


def recipe_of(weights: str, cache: str, model: str) -> str:
    """Precision recipe of a weight format and a cache format ("bf16" or "fp8").

    Checkpoints of gpt-oss are MXFP4 experts in a bf16 model, whatever a source calls them.
    """
    if model.startswith("gpt_oss"):
        return "mxfp4_fp8kv" if cache == "fp8" else "mxfp4"
    kind = canonical_name(weights)
    if "fp4" in kind:
        return "nvfp4_fp8kv" if cache == "fp8" else "nvfp4_bf16kv"
    if "fp8" in kind:
        block = "fp8_block" if "block" in kind else "fp8"
        return block if cache == "fp8" else f"{block}_bf16kv"
    return "bf16_fp8kv" if cache == "fp8" else "bf16"


def columns_of(path: Path) -> list[str]:
    """Column names of a CSV.

    Raises
    ------
    ServingDataError
        When it cannot be read, or has a name twice.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            names = stream.readline(LONGEST_HEADER).rstrip("\r\n").split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise ServingDataError(f"{shown(path)}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if twice := given_twice(name for name in names if name):
        raise ServingDataError(f"{shown(path)}: column {quoted(twice)} stands twice in the header")
    return names


def read_rows(path: Path) -> list[ServingRow]:
    """Every row of a file of serving measurements, in order; none of a file that lists rows of others.

    Raises
    ------
    ServingDataError
        Unreadable, or in no form of ``calibration.served.forms``; one line.
    """
    import pandas as pd

    from disagg_sim.calibration.served.forms import FORMS, LISTS

    columns = set(columns_of(path))
    if any(marks <= columns for marks in LISTS.values()):
        return []
    form = next((name for name, (marks, _) in FORMS.items() if marks <= columns), "")
    if not form:
        known = {name: sorted(marks) for name, (marks, _) in FORMS.items()}
        close = max(known, key=lambda name: len(columns & set(known[name])))
        missing = sorted(set(known[close]) - columns)
        hint = nearest(missing[0], columns) if missing else ""
        raise ServingDataError(
            f"{shown(path)}: no known form of serving measurements; closest is {close!r}, which needs column "
            f"{missing[0]!r}{hint}; forms: {', '.join(known)}"
        )
    try:
        table = pd.read_csv(path, low_memory=False)
    except (ValueError, UnicodeDecodeError) as error:
        raise ServingDataError(f"{shown(path)}: not a CSV: {str(error).splitlines()[0]}") from None
    reader: Callable[[Any], ServingRow] = FORMS[form][1]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST]
    rows = [_placed(reader(line), path, form, number) for number, line in enumerate(_lines(table), start=2)]
    return [replace(row, digest=digest) for row in rows]


def _lines(table: pd.DataFrame) -> Iterable[Any]:
    return table.itertuples(index=False)


def _placed(row: ServingRow, path: Path, form: str, number: int) -> ServingRow:
    """The row with its place in the file and the reasons that hold for every form."""
    row = replace(row, file=path.name, form=form, row=row.row or str(number))
    if row.speculative:
        row = row.refused("speculative decoding: a step makes more than one token")
    for what, name in (("model", row.model), ("system", row.system), ("engine profile", row.engine)):
        if not name:
            row = row.refused(f"no {what} for {row.framework!r}" if what == "engine profile" else f"no {what}")
    if not row.load:
        row = row.refused("states no load that can be evaluated")
    return row
