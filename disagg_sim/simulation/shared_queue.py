"""The queue that all prefill instances share: prompts that wait until one of them takes them."""

from __future__ import annotations

from collections import OrderedDict

#: A segment that waits: context, prompt, generate, until [token], then, last token's time [s], whether more follows.
Waiting = tuple[int, int, int, int, int, float, bool]


class SharedQueue:
    """New requests that any instance may take, in the order in which they came.

    >>> queue = SharedQueue()
    >>> for request, prompt in enumerate((100, 20, 3)):
    ...     queue.add(request, (0, prompt, 1, prompt + 1, -1, 0.0, True))
    >>> queue.take(1)[1], queue.tokens, list(queue.segments)
    (20, 103, [0, 2])
    """

    def __init__(self) -> None:
        self.segments: OrderedDict[int, Waiting] = OrderedDict()  # by request; a dict would walk over what has left
        self.tokens = 0  # of prompts, together [token]

    def add(self, request: int, segment: Waiting) -> None:
        """A request joins at the end."""
        self.segments[request] = segment
        self.tokens += segment[1]

    def take(self, request: int) -> Waiting:
        """A request leaves, from wherever it stands."""
        segment = self.segments.pop(request)
        self.tokens -= segment[1]
        return segment
