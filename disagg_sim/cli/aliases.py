"""Options under the names that users of other tools write, and values whose unit stands apart: ``--ttft 500 ms``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from typer.core import TyperCommand

#: Names of options in vLLM, SGLang, TensorRT-LLM and their benchmark tools -> ours.
ALIASES: Mapping[str, str] = {
    "backend": "engine",
    "concurrency": "users",
    "max-concurrency": "users",
    "request-rate": "rate",
    "qps": "rate",
    "rate-per-s": "rate",
    "input-len": "isl",
    "input-tokens": "isl",
    "random-input-len": "isl",
    "output-len": "osl",
    "output-tokens": "osl",
    "random-output-len": "osl",
    "num-gpus": "gpus",
    "total-gpus": "gpus",
    "gpu": "system",
    "hardware": "system",
    "quantization": "precision",
    "dtype": "precision",
    "tensor-parallel-size": "tp",
    "tp-size": "tp",
    "data-parallel-size": "dp",
    "dp-size": "dp",
    "expert-parallel-size": "ep",
    "ep-size": "ep",
    "pipeline-parallel-size": "pp",
    "pp-size": "pp",
    "max-batch-size": "batch",
    "batch-size": "batch",
}
_NUMBER, _UNIT = re.compile(r"[0-9.]+(?:[eE][-+]?[0-9]+)?"), re.compile(r"%|[a-zA-Z\u00b5]+(/[a-z]+)?(@[pP][0-9]+)?")


def own_name(name: str, known: Collection[str]) -> str:
    """Find the option that is meant."""
    meant = ALIASES.get(name.replace("_", "-"), name)
    return name if name in known or meant not in known else meant


class AliasedCommand(TyperCommand):
    """A command that takes ``ALIASES`` for options of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put its own names in the place of aliases, and units behind their numbers."""
        known = {opt.removeprefix("--") for each in self.params for opt in each.opts}
        positional = any(each.param_type_name == "argument" for each in self.params)
        found: list[str] = []
        for text in args:
            if found and not positional and _UNIT.fullmatch(text) and _NUMBER.fullmatch(found[-1]):
                found[-1] = f"{found[-1]} {text}"
                continue
            name, equals, value = text.removeprefix("--").partition("=")
            found.append(f"--{own_name(name, known)}{equals}{value}" if text.startswith("--") else text)
        return super().parse_args(ctx, found)
