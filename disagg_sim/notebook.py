"""Display values in notebooks: the hook between values and the HTML renderer.

A low room may not import ``report``. So its classes derive from ``Shown``, whose ``_repr_html_`` asks a
renderer that the package sets when it is imported, and which loads ``report.html`` at the first use.
"""

from __future__ import annotations

from collections.abc import Callable

_renderer: list[Callable[[object], str]] = []


def show_with(renderer: Callable[[object], str]) -> None:
    """Let a function turn every ``Shown`` value into HTML; it takes the place of the one before.

    >>> before = _renderer[:]
    >>> show_with(lambda value: f"<b>{type(value).__name__}</b>")
    >>> Shown()._repr_html_()
    '<b>Shown</b>'
    >>> _renderer[:] = before
    """
    _renderer[:] = [renderer]


class Shown:
    """Base of frozen values that a notebook shows as a table; adds no field and no state."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _renderer[0](self)
