"""Find the ``config.json`` that a file, a directory or a name on the Hugging Face hub means, and what is beside it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg_sim.errors import InputError, MissingExtraError, SpecError, quoted
from disagg_sim.extras import extra
from disagg_sim.facts.yaml_files import spec_error, text_of
from disagg_sim.facts.yaml_text import MOST_BYTES
from disagg_sim.reading import heard, is_readable, read_file

CONFIG, QUANTISATION, INDEX, CARD = "config.json", "hf_quant_config.json", "model.safetensors.index.json", "README.md"
#: ``org/name`` of a model on the hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: Directory of the hub's cache in which the snapshots of a model stand.
_CACHED = re.compile(r"models--(.+?)--(.+)")
#: Of the library: the hub is not asked where it is one of ``_YES``.
OFFLINE = "HF_HUB_OFFLINE"
_YES = ("1", "ON", "YES", "TRUE")
#: How long the hub may take to answer. [s]
ANSWER_WITHIN = 10.0
#: Of files that people name; a model of the hub has other names.
_FILES = (".json", ".yaml", ".yml", ".csv", ".txt", ".gz", ".parquet", ".safetensors")
#: Directories of the hub's cache in which what was asked for by name lies.
FETCHED: set[Path] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A ``config.json`` with what stands beside it."""

    path: Path
    data: Mapping[str, Any]
    quantisation: Mapping[str, Any] | None  # hf_quant_config.json
    index: Mapping[str, Any] | None  # model.safetensors.index.json
    card: str  # text of README.md
    hub_name: str  # org/name, "" where nothing tells


def is_config(name: str | Path) -> bool:
    """Tell whether a model's name means a Hugging Face configuration rather than a spec of this project."""
    if not isinstance(name, str | Path) or (path := Path(name)).suffix in (".yaml", ".yml"):
        return False
    try:
        here = Path(heard(path)).exists()
        return path.suffix == ".json" or (path / CONFIG).is_file() or (not here and _is_hub_name(name))
    except (OSError, ValueError):  # too long, or with a null character in it
        return False


def _is_hub_name(name: str | Path) -> bool:
    """Whether the hub may be asked: not for what looks like a path, nor for a name below a directory that is here."""
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name) or name.lower().endswith(_FILES):
        return False
    return not Path(name).parent.is_dir()


def model_files(source: str | Path) -> ModelFiles:
    """Read the files of a model."""
    path, hub_name = _place(source)
    data = read_json(path)
    beside = path.with_name(QUANTISATION if path.name == CONFIG else f"{path.stem}.{QUANTISATION}")
    whole = path.name == CONFIG  # other files of the directory may be of other models
    return ModelFiles(
        path=path,
        data=data,
        quantisation=read_json(beside) if beside.is_file() else None,
        index=read_json(index) if whole and (index := path.with_name(INDEX)).is_file() else None,
        card=_text(card) if whole and (card := path.with_name(CARD)).is_file() else "",
        hub_name=hub_name or _name_by_place(path, data),
    )


def _place(source: str | Path) -> tuple[Path, str]:
    """Path of the configuration, and its name on the hub if it was fetched from there."""
    path = Path(source)
    try:
        if path.is_dir():
            if not (path / CONFIG).is_file():
                raise SpecError(f"{quoted(str(source))}: a directory without {CONFIG}")
            return path / CONFIG, ""
        if is_readable(path) or not _is_hub_name(source):
            return path, ""
    except (OSError, ValueError):
        raise SpecError(f"{quoted(str(source))}: no such file") from None
    path = _fetched(str(source))
    FETCHED.add(path.parent)
    return path, str(source)


def _fetched(name: str) -> Path:
    """The configuration of a model of the hub, from its cache or the network."""
    try:
        with extra("hub"):
            import huggingface_hub as hub
    except MissingExtraError as error:
        raise InputError(f"{quoted(name)}: no such file; {error}") from None
    held = hub.try_to_load_from_cache(name, CONFIG)
    if os.environ.get(OFFLINE, "").upper() in _YES:
        if isinstance(held, str):
            return Path(held)
        raise InputError(f"{quoted(name)}: no such file, and the hub, whose cache lacks it, is not asked (offline)")
    try:
        if not isinstance(held, str):  # once: the download would try for half a minute
            hub.get_hf_file_metadata(hub.hf_hub_url(name, CONFIG), timeout=ANSWER_WITHIN)
        path = Path(hub.hf_hub_download(name, CONFIG))
    except Exception as error:  # of the network, of access, of the disk: the library has no common base
        first = " ".join(str(error).split("\n", maxsplit=1)[0].split())
        raise InputError(f"{quoted(name)}: no such file, and not fetched from the hub: {first}") from None
    for beside in (QUANTISATION, INDEX, CARD):
        try:
            hub.hf_hub_download(name, beside)
        except Exception:  # many models have none of it
            continue
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    try:
        data = json.loads(text_of(path, "JSON"))
    except json.JSONDecodeError as error:
        raise spec_error(path, [f"broken JSON: line {error.lineno}, column {error.colno}: {error.msg}"]) from None
    except RecursionError:
        raise spec_error(path, ["broken JSON: nested too deeply"]) from None
    except ValueError:
        raise spec_error(path, ["broken JSON: a number is too long"]) from None
    if not isinstance(data, dict):
        raise spec_error(path, [f"not a model's {CONFIG}: {'a list' if isinstance(data, list) else quoted(data)}"])
    return data


def _text(path: Path) -> str:
    try:
        return read_file(path, MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _name_by_place(path: Path, data: Mapping[str, Any]) -> str:
    """Name on the hub by the place of the file: its cache, or ``org--name.json``; else by the file's own word."""
    for parent in path.parts[:-1]:
        if found := _CACHED.fullmatch(parent):
            return f"{found[1]}/{found[2]}"
    if path.name != CONFIG and "--" in path.stem:
        return path.stem.replace("--", "/", 1)
    own = data.get("_name_or_path")
    return own if isinstance(own, str) and _HUB_NAME.fullmatch(own) else ""
