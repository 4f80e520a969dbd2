"""Say what to install where the package of an extra is missing.

The core plans, sweeps, explains and reports. What only some users need is an extra of the distribution, and is imported
inside ``extra``, so that its lack is one line, on the command line as in a notebook. The working directory, whose
files may be of others, has neither configuration nor code for what is imported and started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from disagg_sim.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Extra:
    """What an extra is for, and the packages that are imported from it."""

    purpose: str  # stands before "needs" in the message
    packages: tuple[str, ...]


#: Extras by name, as in ``pyproject.toml``.
EXTRAS: Mapping[str, Extra] = MappingProxyType(
    {
        "simulate": Extra("simulation", ("numba", "statsmodels")),
        "calibrate": Extra("a fit to measurements", ("scipy",)),
        "mcp": Extra("a server of tools for agents", ("mcp",)),
        "hub": Extra("a name of the Hugging Face hub", ("huggingface_hub",)),
        "dask": Extra("the backend dask", ("distributed", "dask")),
        "ray": Extra("the backend ray", ("ray",)),
        "measure": Extra("timing the kernels of a GPU", ("torch",)),
    }
)
#: What libraries read in the working directory as they are imported.
_FILES = (".numba_config.yaml", "matplotlibrc")
#: Python looks for modules in the working directory of what it starts by ``-c`` and ``-m`` unless this is set.
_SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import the packages of an extra inside the block."""
    try:
        with unconfigured():
            yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS[name].packages:
            raise
        raise MissingExtraError(f"{EXTRAS[name].purpose} needs {package}: pip install 'disagg-sim[{name}]'") from None


@contextmanager
def unconfigured() -> Iterator[None]:
    """Import libraries inside the block without what the working directory has for them.

    >>> with unconfigured():
    ...     os.path.exists("matplotlibrc"), os.path.exists(".")
    (False, True)
    """
    exists = os.path.exists
    os.path.exists = lambda path: path not in _FILES and exists(path)
    try:
        yield
    finally:
        os.path.exists = exists


@contextmanager
def safe_path() -> Iterator[None]:
    """Start Python processes inside the block that find no modules in the working directory.

    >>> with safe_path():
    ...     os.environ["PYTHONSAFEPATH"]
    '1'
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        del os.environ[_SAFE_PATH]
        if before is not None:
            os.environ[_SAFE_PATH] = before
