"""Let the kernel place requests by itself, where a load is all that counts: no call from Python for each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.kernel.home import FEED
from disagg_sim.simulation.kernel.layout import CLOSES, HOLD, NOTIFY
from disagg_sim.simulation.kernel.ranking import ranking

#: Fields of ``layout.Feed`` with the addresses of its arrays.
ADDRESSES = ("times_at", "prompts_at", "totals_at", "trees_at", "group_at", "present_at")


class Placing(NamedTuple):
    """How a policy places prompts that looks at nothing but a load."""

    load: int  # of ``ranking``
    served: str  # column of the view: what each instance serves
    own_tokens: bool  # whether the prompt is added to the load; else one request is
    whole: bool  # whether a request stays; else it goes on after its first token


class Feed:
    """Requests by the times at which they come, for the kernel.

    Parameters
    ----------
    times : (requests,) array
        Ascending. [s]
    prompts, totals : (requests,) arrays
        Tokens of the prompt, and of prompt and output. [token]
    placing : Placing
        Where they go.
    among, served : arrays
        Instances, and what each of the fleet serves; neither changes while the feed lasts.
    most : int
        Tokens of the largest request that any instance holds; larger ones are reported. [token]
    emits_late : bool
        Whether the next instance emits the first token, so that a request of a single token goes on, too.

    Examples
    --------
    >>> from disagg_sim.simulation.kernel.fleet import Fleet, InstanceSpec
    >>> from disagg_sim.simulation.kernel.ranking import REQUESTS
    >>> from disagg_sim.simulation.kernel.step_table import StepTable
    >>> fleet = Fleet([InstanceSpec(table=StepTable.affine(step=1.0), blocks=100)] * 2)
    >>> placing, two = Placing(REQUESTS, "seats", False, True), np.arange(2)
    >>> columns = np.array([0.0, 0.5, 9.0]), np.full(3, 10), np.full(3, 12)
    >>> feed = Feed(*columns, placing, two, np.ones(2), most=1600, emits_late=False)
    >>> fleet.take(feed)
    >>> fleet.run_until(8.0), feed.come, fleet.segments.instance.tolist(), fleet.segments.finish_s.tolist()
    ((-1, 8.0), 2, [0, 1], [2.0, 2.5])
    """

    def __init__(
        self,
        times: Floats,
        prompts: Ints,
        totals: Ints,
        placing: Placing,
        among: NDArray[np.intp],
        served: Floats | Ints,
        *,
        most: int,
        emits_late: bool,
    ) -> None:
        lengths = (np.ascontiguousarray(each, np.int64) for each in (prompts, totals))
        #: Alive as long as the kernel knows where they are.
        self._columns: list[NDArray[Any]] = [np.ascontiguousarray(times, np.float64), *lengths, *ranking(among, served)]
        trees, self.row = self._columns[3], np.zeros(1, FEED)
        values = {
            "requests": len(times),
            "most": most,
            "whole": placing.whole,
            "kept": emits_late,
            "hold": NOTIFY | HOLD | CLOSES,
            "closes": CLOSES,
            "load": placing.load,
            "own_tokens": placing.own_tokens,
            "groups": trees.shape[0],
            "width": trees.shape[1],
        }
        for name, value in values.items():
            self.row[name] = value
        self._bind()

    def _bind(self) -> None:
        """Say where the arrays are."""
        for name, column in zip(ADDRESSES, self._columns, strict=True):
            self.row[name] = column.ctypes.data
        self._next, self._submitted = self.row["next"], self.row["submitted"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on in another process, where they lie elsewhere."""
        self.__dict__.update(state)
        self._bind()

    @property
    def come(self) -> int:
        """Requests that have come so far. [request]"""
        return int(self._next.item())

    def skip(self) -> int:
        """Take the next request out, which somebody else places; its number."""
        request = self.come
        self._next[0] = request + 1
        return request

    @property
    def submitted(self) -> int:
        """Segments of the fleet so far. [1]"""
        return int(self._submitted.item())

    def begin(self, submitted: int) -> None:
        """So many segments are there now."""
        self._submitted[0] = submitted
