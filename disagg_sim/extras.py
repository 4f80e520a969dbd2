"""Say what to install where the package of an extra is missing.

The core plans, sweeps, explains and reports. What only some users need is an extra of the distribution, and is imported
inside ``extra``, so that its lack is one line, on the command line as in a notebook.
"""

from __future__ import annotations

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
        "bucket": Extra("a bucket", ("fsspec",)),
        "measure": Extra("timing the kernels of a GPU", ("torch",)),
    }
)


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import the packages of an extra inside the block.

    Parameters
    ----------
    name
        Of ``EXTRAS``.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    MissingExtraError
        One of its packages is not installed; one line says how to. A fault inside an installed package stays as it is.

    Examples
    --------
    >>> with extra("measure"):
    ...     raise ModuleNotFoundError(name="torch.cuda")
    Traceback (most recent call last):
    disagg_sim.errors.MissingExtraError: timing the kernels of a GPU needs torch: pip install 'disagg-sim[measure]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS[name].packages:
            raise
        raise MissingExtraError(f"{EXTRAS[name].purpose} needs {package}: pip install 'disagg-sim[{name}]'") from None
