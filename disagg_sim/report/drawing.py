"""Import what pictures take of matplotlib, without a ``matplotlibrc`` of the working directory."""

from __future__ import annotations

from disagg_sim.extras import unconfigured

with unconfigured():
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

__all__ = [
    "Figure",
    "FigureCanvasAgg",
    "FuncFormatter",
    "Line2D",
    "LogLocator",
    "NullLocator",
    "Text",
    "TwoSlopeNorm",
    "mpl",
]
