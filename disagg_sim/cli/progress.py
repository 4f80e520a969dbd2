"""Report progress on standard error: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from disagg_sim.errors import printable
from disagg_sim.sweep.store import RunListener

PLAIN_INTERVAL = 5.0  # [s]


def listener(noun: str = "design points", done: str = "computed") -> RunListener:
    """Make a bar on a terminal, plain lines elsewhere; ``noun`` is what is counted, ``done`` the verb of the total."""
    return ProgressBar(noun, done) if sys.stderr.isatty() else Lines(noun, done)


class Lines:
    """Print a line every few seconds."""

    def __init__(self, noun: str = "design points", done: str = "computed", interval: float = PLAIN_INTERVAL) -> None:
        self._noun, self._did = noun, done
        self._interval = interval  # [s]
        self._total = self._done = 0
        self._begun = self._told = 0.0
        self._first: tuple[int, float] | None = None  # points and time of the first report, as workers start late

    def note(self, text: str) -> None:
        """Print a message."""
        print(printable(text), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.note(f"warning: {text}")

    def start(self, points: int) -> None:
        """Start counting."""
        self._total, self._done, self._first = points, 0, None
        self._begun = self._told = time.monotonic()

    def advance(self, points: int) -> None:
        """Print the progress, at most once every few seconds."""
        self._done += points
        now = time.monotonic()
        self._first = self._first or (self._done, now)
        if now - self._told >= self._interval:
            self._told = now
            done = f"{self._done:,} of {self._total:,} {self._noun} ({self._done / self._total:.0%})"
            self.note(f"{done}, {self._done / (now - self._begun):,.0f}/s{self._left(now)}")

    def _left(self, now: float) -> str:
        """Format the time left at the rate since the first report; empty before there is a rate."""
        done, since = self._first or (0, now)
        if self._done == done or now <= since:
            return ""
        return f", {(self._total - self._done) * (now - since) / (self._done - done):.0f} s left"

    def finish(self) -> None:
        """Print the total."""
        if self._total:
            took = max(time.monotonic() - self._begun, 1e-9)
            self.note(f"{self._done:,} {self._noun} {self._did} in {took:.1f} s, {self._done / took:,.0f}/s")


class ProgressBar(Lines):
    """A progress bar, and lines above it."""

    def __init__(self, noun: str = "design points", done: str = "computed") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        super().__init__(noun, done)
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._progress: Any = Progress(
            TextColumn(noun),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}/s"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task: Any = None

    def note(self, text: str) -> None:
        """Print a message above the bar."""
        self._console.print(printable(text), soft_wrap=True)

    def start(self, points: int) -> None:
        """Show the bar."""
        super().start(points)
        self._task = self._progress.add_task("", total=points, rate="0")
        self._progress.start()

    def advance(self, points: int) -> None:
        """Move the bar."""
        self._done += points
        rate = self._done / max(time.monotonic() - self._begun, 1e-9)
        self._progress.update(self._task, advance=points, rate=f"{rate:,.0f}")

    def finish(self) -> None:
        """Remove the bar, and print the total."""
        self._progress.stop()
        super().finish()
