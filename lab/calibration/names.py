"""Translate names used by sources of measurements into names of our specs (``names.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from disagg_sim.facts.yaml_files import canonical_name, read_mapping


@cache
def names() -> dict[str, Any]:
    """The tables of ``names.yaml``, read once; where a key is part of a name, the first match counts."""
    return read_mapping(Path(__file__).with_name("names.yaml"))


def model_named(text: str) -> str:
    """Name of our spec of a model as a source writes it; "" where there is none."""
    return _first(text, names()["models"])


def derived_from(checkpoint: str) -> str:
    """Checkpoint of the same architecture that is known as published; itself where none is.

    >>> derived_from("moonshotai/Kimi-Dev-72B"), derived_from("mine/own")
    ('Qwen/Qwen2.5-72B-Instruct', 'mine/own')
    """
    return str(names()["derived"].get(checkpoint, checkpoint))


def engine_named(text: str) -> str:
    """Engine of a framework as a source writes it, of a list without parts that ran another benchmark; "" = none."""
    parts = text.split(",")
    own = [part for part in parts if not any(word in part.lower() for word in names()["other_benchmarks"])]
    return _first(",".join(own), names()["engines"])


def source_engine(source: str) -> str:
    """Engine of a source whose lines name none; "" where nothing is known."""
    engines: dict[str, str] = names()["source_engines"]
    return next((engine for start, engine in engines.items() if source.startswith(start)), "")


def old_engine(engine: str) -> str:
    """Profile of an engine as it was before 2025: vLLM V0, TensorRT-LLM with built engines."""
    return str(names()["old_engines"].get(engine, engine))


def system_named(family: str, hardware: str = "") -> tuple[str, str]:
    """Name of our spec of a GPU family and, for boards that are not that part, why they are not evaluated."""
    name = str(names()["systems"].get(family, ""))
    if not name:
        return "", f"no system {family!r}"
    board = canonical_name(hardware)
    part = next((part for part in names()["boards"] if part in board), "")
    name, board = names()["boards"].get(part, name), board.replace(part, "")
    if any(part in board for part in names()["other_boards"]):
        return name, f"board {hardware!r} is not the standard part"
    return name, ""


def recipe_of(weights: str, cache: str, model: str) -> str:
    """Precision recipe of a weight format and a cache format ("bf16" or "fp8").

    Checkpoints of gpt-oss are MXFP4 experts in a bf16 model, whatever a source calls them; those of DeepSeek-V4 are
    MXFP4 experts in an FP8 model with an FP8 cache.
    """
    kind = canonical_name(weights)
    if "mxfp4" in kind and "fp8" in kind and not model.startswith("gpt_oss"):
        return "mxfp4_fp8_block"
    if model.startswith("gpt_oss") or "mxfp4" in kind:
        return "mxfp4_fp8kv" if cache == "fp8" else "mxfp4"
    if "fp4" in kind:
        return "nvfp4_fp8kv" if cache == "fp8" else "nvfp4_bf16kv"
    if "fp8" in kind:
        block = "fp8_block" if "block" in kind else "fp8"
        return kind if kind == "fp8_tensor" and cache == "fp8" else block if cache == "fp8" else f"{block}_bf16kv"
    return "bf16_fp8kv" if cache == "fp8" else "bf16"


def _first(text: str, table: Mapping[str, str]) -> str:
    name = canonical_name(text)
    return next((value for key, value in table.items() if key in name), "")
