"""The pictures of docs/report.md: ``python docs/screenshots.py SWEEP PLAN`` photographs two pages.

SWEEP is what ``disagg-sim report`` makes of ``disagg-sim sweep demo --uncertainty``, PLAN of ``disagg-sim plan --out``.
Needs chromium, its driver and selenium.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import time
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "img"
COLOURS = 256  # of a picture: enough for the page, a third of the bytes
#: Keys that pin two designs of a sweep.
PIN = ["ArrowRight"] * 6 + ["Enter", "ArrowDown", "Enter"]
PRESS = """
const stage = document.querySelector('.stage');
for (const key of arguments[0]) stage.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
"""


def photograph(browser: Any, page: Path, picture: Path, size: tuple[int, int], *, theme: str, keys: list[str]) -> None:
    """Write the upper part of a page as PNG."""
    width, height = size
    media = [{"name": "prefers-color-scheme", "value": theme}]
    shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
    browser.get(page.resolve().as_uri())
    while not browser.execute_script("return document.documentElement.dataset.ready"):
        time.sleep(0.05)
    browser.execute_script(PRESS, keys)
    time.sleep(0.3)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    found = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    colours = (
        Image.open(io.BytesIO(base64.b64decode(found["data"])))
        .convert("RGB")
        .quantize(COLOURS, Image.Quantize.FASTOCTREE)
    )
    colours.save(picture, optimize=True)
    print(picture)


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("plan", type=Path)
    given = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        photograph(browser, given.sweep, FOLDER / "report_sweep.png", (1240, 1180), theme="light", keys=PIN)
        photograph(browser, given.plan, FOLDER / "report_plan.png", (1240, 860), theme="dark", keys=[])
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
