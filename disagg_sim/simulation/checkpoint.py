"""Write down a run in progress, so that another process goes on with it.

Everything that a run knows hangs together: clock, clusters, policies, kernel. It is pickled as a whole, with arrays
that look into other arrays as such, so that they still do afterwards; what says where arrays lie in memory is made anew
(``Fleet``, ``Feed``, ``Book``). Functions that the run was given are left out: they come from the run that goes on.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class _Pickler(pickle.Pickler):
    """Writes arrays that look into others as views of these."""

    def __init__(self, file: io.BytesIO, given: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._given = {id(each): name for name, each in given.items()}

    def persistent_id(self, thing: Any) -> str | None:
        """The name of what was given."""
        return self._given.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        """How views are made again."""
        if isinstance(thing, memoryview):
            return _looked_at, (thing.obj, thing.readonly)
        if isinstance(thing, np.ndarray) and isinstance(thing.base, np.ndarray):
            base = thing.base
            while isinstance(base.base, np.ndarray):
                base = base.base
            shape = _Shape(thing.ctypes.data - base.ctypes.data, thing.shape, thing.strides, thing.flags.writeable)
            return _view, (base, type(thing), thing.dtype, shape)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Puts in what is given."""

    def __init__(self, file: io.BytesIO, given: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._given = given

    def persistent_load(self, name: str) -> Any:
        """What was given under a name."""
        return self._given[name]


class _Shape(NamedTuple):
    """Where a view lies in its array."""

    offset: int  # [B]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # [B]
    writeable: bool


def _view(base: NDArray[Any], kind: type, dtype: np.dtype[Any], where: _Shape) -> NDArray[Any]:
    if not base.nbytes:
        found = np.zeros(where.shape, dtype)
    else:
        held = base if base.flags.c_contiguous else base.T
        found = np.ndarray(where.shape, dtype, held, where.offset, where.strides)
    found = found.view(kind)
    found.flags.writeable = where.writeable
    return found


def _looked_at(thing: Any, readonly: bool) -> memoryview:
    seen = memoryview(thing)
    return seen.toreadonly() if readonly else seen


def frozen(state: Any, given: Mapping[str, Any]) -> bytes:
    """Write down a state.

    Parameters
    ----------
    state
        Anything that can be pickled but for what is ``given``.
    given
        By names of your own: what is not written.

    Returns
    -------
    bytes
        For ``thawed``.

    Examples
    --------
    An array and a view of it stay such, and a function comes back from those that are given:

    >>> whole = np.zeros(3)
    >>> data = frozen((whole, whole[1:], print), {"told": print})
    >>> again, part, function = thawed(data, {"told": len})
    >>> part[0] = 5.0
    >>> again.tolist(), function([1, 2])
    ([0.0, 5.0, 0.0], 2)
    """
    file = io.BytesIO()
    _Pickler(file, given).dump(state)
    return file.getvalue()


def thawed(data: bytes, given: Mapping[str, Any]) -> Any:
    """Read a state that ``frozen`` wrote. Whoever wrote it can make this process do anything: check who it was.

    Parameters
    ----------
    data
        Of ``frozen``.
    given
        Of the same names.

    Returns
    -------
    object
        The state.

    Examples
    --------
    >>> thawed(frozen([1], {}), {})
    [1]
    """
    return _Unpickler(io.BytesIO(data), given).load()
