"""Time a page of many points in a headless Chromium: until it is drawn, and until it answers a move of the mouse.

    python benchmarks/report_page.py RESULTS [--points 100000] [--times 5]

RESULTS is a directory of ``disagg-sim sweep``. The page holds its frontiers and so many of its points beside them,
without breakdowns; all filters are opened before the mouse moves, so that all points are drawn. The clocks are the
browser's own. ``docs/report.md`` has the numbers.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium import webdriver

from disagg_sim.report.page.write import content_of, write_page

#: Places of the pointer over the figure, as shares of its width and height.
PLACES = [(0.05 + 0.9 * step / 39, 0.1 + 0.8 * (step * 17 % 40) / 39) for step in range(40)]
#: Move the mouse over the figure; milliseconds from each event to the end of its handlers, and to the next frame.
MOVES = """
const [places, done] = arguments, over = document.querySelector('.u-over'), found = [];
const box = over.getBoundingClientRect();
const step = (number) => {
  if (number === places.length) return done(found);
  const [x, y] = [places[number][0] * box.width, places[number][1] * box.height];
  const begun = performance.now();
  over.dispatchEvent(new MouseEvent('mousemove', {clientX: box.left + x, clientY: box.top + y, bubbles: true}));
  const handled = performance.now() - begun;
  requestAnimationFrame(() => setTimeout(() => {
    found.push([handled, performance.now() - begun]);
    step(number + 1);
  }));
};
step(0);
"""
#: Tick every box of the filters; milliseconds until all is drawn.
ALL = """
const begun = performance.now();
document.querySelectorAll('.filter input:not(:checked)').forEach((box) => box.click());
return performance.now() - begun;
"""


def opened(size: str) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={size}"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def loaded(browser: Any, page: Path) -> float:
    """Seconds from navigation until the page has drawn itself."""
    browser.get(page.as_uri())
    while not (ready := browser.execute_script("return document.documentElement.dataset.ready")):
        time.sleep(0.02)
    return float(ready) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        content = content_of(given.results, beside=given.points, breakdowns=False)
        size = write_page(content, page)
        print(f"{len(content.tables['points']):,} points, {size / 1e6:.1f} MB")
        browser = opened("1400,1000")
        try:
            loads = [loaded(browser, page) for _ in range(given.times)]
            print(f"load: median {statistics.median(loads):.2f} s, largest {max(loads):.2f} s")
            browser.execute_script(ALL)
            redrawn = browser.execute_script(
                "const box = document.querySelector('.toggle input'), begun = performance.now(); box.click(); "
                "return performance.now() - begun"
            )
            shown = browser.find_element("id", "shown").text
            moves = browser.execute_async_script(MOVES, PLACES)
        finally:
            browser.quit()
    for name, column in (("handlers", 0), ("to the next frame", 1)):
        values = sorted(move[column] for move in moves)
        print(f"hover, {name}: median {statistics.median(values):.1f} ms, largest {values[-1]:.1f} ms")
    print(f"redraw of all: {redrawn:.0f} ms ({shown})")


if __name__ == "__main__":
    main()
