"""Find spec files by name, tell of what kind one is, and read a YAML file into a plain mapping.

Looked for in the directories of ``DISAGG_SIM_PATH``, then in the package's own data or, in a
checkout, in the directories beside the package; the first file of a name wins.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from disagg_sim.errors import SpecError, UnknownNameError, nearest, printable, quoted
from disagg_sim.facts.yaml_text import MOST_BYTES, parse_yaml
from disagg_sim.reading import is_readable, read_file

#: Environment variable with the user's own directories, each holding ``hw_specs/``, ``models/``, ...
PATH_VARIABLE = "DISAGG_SIM_PATH"

#: Kind of a spec -> directory of its files below a root.
DIRECTORIES = {
    "hardware": "hw_specs",
    "efficiency": "hw_specs/efficiency",
    "power": "hw_specs/power",
    "precision": "hw_specs/precision",
    "profile": "hw_specs/profiles",
    "engine": "hw_specs/engines",
    "scheduler": "hw_specs/schedulers",
    "uncertainty": "hw_specs/uncertainty",
    "layout": "hw_specs/layouts",
    "evidence": "hw_specs/evidence",
    "failures": "hw_specs/failures",
    "launcher": "hw_specs/launchers",
    "checkpoint": "hw_specs/checkpoints",
    "model": "models",
    "traffic": "traffic",
    "speculation": "speculation",
    "sweep": "sweeps",
    "scenario": "scenarios",
}
#: Kind -> keys that only such a file has.
MARKS = {
    "hardware": {"peak_flops", "hbm_capacity", "hbm_bandwidth", "nvlink_domain", "nic_bandwidth"},
    "efficiency": {"system", "inherits", "gemm", "decode_attention", "collectives", "alltoall"},
    "power": {"system", "inherits", "limit", "idle", "laws"},
    "precision": {"attention_projection", "cache", "dispatch_bytes", "combine_bytes"},
    "profile": {"fitted", "gemm_t0", "host", "elementwise_efficiency"},
    "engine": {"step_host", "request_host", "chunk_tokens", "mixed_steps"},
    "scheduler": {"admission", "watermark", "prefix_found", "keeps_preempted", "budget_per_rank", "rank_choice"},
    "model": {"hidden", "vocab", "layers", "max_context"},
    "traffic": {"cases"},
    "speculation": {"method", "acceptance", "measured_lengths"},
    "uncertainty": {"assumed", "per_doubling", "kinds", "served"},
    "layout": {"attention_groups", "expert_groups", "weight_block"},
    "evidence": {"kinds", "source"},
    "failures": {"gpu_mtbf", "node_mtbf", "link_mtbf", "restart"},
    "launcher": {"options", "image", "version"},
    "sweep": {"models", "systems", "limits", "modes"},
    "scenario": {"deployments", "slo", "trace"},
    "checkpoint": {"models", "source"},
}
#: What a person calls them.
NOUNS = {"hardware": "system", "efficiency": "efficiency file", "power": "power file", "precision": "precision recipe"}

#: Canonical spellings of names that others use, and ours.
ALIASES = {"tensorrt_llm": "trtllm", "trt_llm": "trtllm", "tensorrt": "trtllm"}
#: A message names no more than so many; there are more models. [1]
MOST_NAMED = 40

_SUFFIXES = (".yaml", ".yml")


def canonical_name(text: str) -> str:
    """Bring a name into its canonical spelling: lower case, every other character ``_``; of ``ALIASES`` the own one."""
    name = re.sub(r"[^a-z0-9]", "_", text.lower())
    return ALIASES.get(name, name)


def spec_roots() -> tuple[Path, ...]:
    """List the directories that are searched, first match first."""
    user = [Path(part) for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    faults = [f"{PATH_VARIABLE}: {root}: {fault}" for root in user if (fault := _root_fault(root))]
    if faults:
        raise SpecError("\n".join(faults))
    return (*user, shipped_root())


@cache
def shipped_root() -> Path:
    """Find the directory of the shipped specs."""
    package = Path(str(files("disagg_sim")))
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent


def _root_fault(root: Path) -> str:
    """Why a directory cannot be searched for specs; "" when it can."""
    known = sorted({place.split("/")[0] for place in DIRECTORIES.values()})
    try:
        held = {entry.name for entry in os.scandir(root) if entry.is_dir()}
    except FileNotFoundError:
        return "no such directory"
    except NotADirectoryError:
        return f"a file; name the directory that holds {', '.join(known)}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if held & set(known) else f"holds none of the directories {', '.join(known)}"


def spec_files(kind: str) -> dict[str, Path]:
    """List every spec of a kind."""
    found: dict[str, Path] = {}
    for root in spec_roots():
        directory = root / DIRECTORIES[kind]
        try:
            held = sorted(os.listdir(directory))
        except OSError:  # a directory of one's own need not hold every kind
            continue
        for suffix in _SUFFIXES:
            for name in held:
                if name.endswith(suffix):
                    found.setdefault(canonical_name(name.removesuffix(suffix)), directory / name)
    return dict(sorted(found.items()))


def list_specs(kind: str) -> tuple[str, ...]:
    """List the canonical names that ``load_*`` knows, sorted.

    Parameters
    ----------
    kind
        Of ``DIRECTORIES``: ``"model"``, ``"hardware"``, ``"traffic"``, ``"precision"``, ``"profile"`` ...

    Returns
    -------
    tuple of str
        Those that are shipped, and those of ``DISAGG_SIM_PATH``.
    """
    if kind not in DIRECTORIES:
        known = ", ".join(DIRECTORIES)
        raise UnknownNameError(f"unknown kind {quoted(kind)}{nearest(kind, DIRECTORIES)}; known: {known}")
    return tuple(spec_files(kind))


def is_path(name: str | Path) -> bool:
    """Tell whether a name means a file rather than a shipped spec."""
    return isinstance(name, Path) or name.endswith(_SUFFIXES) or os.sep in name


def find_file(kind: str, name: str | Path) -> Path:
    """Find the file that a path, or a name in the first of the ``spec_roots`` that has it, means."""
    if is_path(name):
        return Path(name)
    key, roots = canonical_name(str(name)), spec_roots()
    shipped = roots[0] / DIRECTORIES[kind] / (key + _SUFFIXES[0])
    if len(roots) == 1 and is_readable(shipped):
        return shipped  # the name of a shipped file is canonical, and no directory comes before it
    known = spec_files(kind)
    if key not in known:
        noun = NOUNS.get(kind, kind)
        names = ", ".join(known) if len(known) <= MOST_NAMED else f"those of 'disagg-sim specs list {kind}'"
        raise UnknownNameError(f"unknown {noun} {quoted(str(name))}{nearest(key, known)}; known: {names}")
    return known[key]


def find_document(kind: str, name: str) -> Path:
    """Find the file of a sweep or a scenario: the name of a shipped one, or a path."""
    path, shipped = Path(name), spec_files(kind)
    if name in shipped:  # before a file of that name in the working directory, which may be of others
        return shipped[name]
    if is_readable(path):
        return path
    if path.is_dir():
        raise SpecError(f"{name}: is a directory, not a {kind} file")
    raise SpecError(f"{name}: no such file or shipped {kind} ({', '.join(shipped)}){nearest(path.stem, shipped)}")


def shown(path: Path) -> str:
    """Write a path as messages print it: relative to the working directory when below it, on one line."""
    try:
        text = str(path.resolve().relative_to(Path.cwd()))
    except (OSError, ValueError):
        text = str(path)
    return printable(text).replace("\n", "\\n")


def spec_error(path: Path, faults: list[str]) -> SpecError:
    """Make one error of all faults of a file: one line when there is one, a list otherwise."""
    if len(faults) == 1:
        return SpecError(f"{shown(path)}: {faults[0]}")
    return SpecError("\n  - ".join([f"{shown(path)}:", *faults]))


def text_of(path: Path, kind: str) -> str:
    """Read the text of a file of a ``kind``, such as "YAML"."""
    try:
        return read_file(path, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise spec_error(path, ["no such file"]) from None
    except OSError as error:
        raise spec_error(path, [f"cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise spec_error(path, [f"not a {kind} file: it is no UTF-8 text"]) from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is ``key: value`` lines."""
    try:
        data = parse_yaml(text_of(path, "YAML"))
    except ValueError as error:
        raise spec_error(path, [str(error)]) from None
    if data is None:
        raise spec_error(path, ["empty file; expected 'key: value' lines"])
    if not isinstance(data, dict):
        raise spec_error(path, [f"expected 'key: value' lines, found {_noun(data)}"])
    return data


def _noun(value: object) -> str:
    return "a list" if isinstance(value, list) else f"the single value {quoted(value)}"


def kind_of(path: Path) -> str:
    """Kind of a file: by its directory when that is one of ours, else by its keys."""
    parents = path.resolve().parent.as_posix()
    for kind, directory in sorted(DIRECTORIES.items(), key=lambda item: -len(item[1])):
        if parents.endswith(f"/{directory}"):
            return kind
    keys = set(read_mapping(path))
    kind = max(MARKS, key=lambda name: len(MARKS[name] & keys))
    if not MARKS[kind] & keys:
        raise spec_error(path, [f"keys of no known kind of file; known kinds: {', '.join(DIRECTORIES)}"])
    return kind
