"""The page of results in a real browser, headless: hover, pin, filter, export, keys, themes, widths, spoilt names."""

import csv
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from disagg_sim.report.page.write import content_of, write_page
from tests.report.pages import SPOILT, plan_directory, small_sweep

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not BROWSER or not DRIVER, reason="no chromium and chromedriver; apt-get install chromium chromium-driver"
    ),
]
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000")
ARGUMENTS += ("--force-prefers-reduced-motion",)  # or a click would miss what still scrolls
#: A click, a download or a new drawing is done within. [s]
PATIENCE = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def browser(folder):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def sweep_page(folder):
    results = small_sweep(folder / "small")
    write_page(content_of(results, beside=300), folder / "sweep.html")
    return folder / "sweep.html"


@pytest.fixture
def sweep(browser, sweep_page):
    return opened(browser, sweep_page)


def opened(browser: Any, page: Path) -> Any:
    """The browser with a page that has drawn itself."""
    browser.get(page.as_uri())
    until(lambda: browser.execute_script("return document.documentElement.dataset.ready"))
    return browser


def until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < end, "the page did not answer"
        time.sleep(0.02)
    return value


def texts(browser: Any, selector: str) -> list[str]:
    return [each.text for each in browser.find_elements("css selector", selector)]


def press(browser: Any, *keys: str) -> None:
    browser.find_element("css selector", ".stage").send_keys(*keys)


def hover(browser: Any, curve: int = 0, point: int = 0) -> Any:
    """Move the mouse to a point of a curve, found by the keys."""
    browser.execute_script("document.querySelector('.stage').scrollIntoView({block: 'center', behavior: 'instant'})")
    keys = webdriver.Keys
    press(browser, keys.HOME, *[keys.ARROW_DOWN] * curve, keys.HOME, *[keys.ARROW_RIGHT] * point)
    ring = browser.find_element("css selector", ".ring").rect
    press(browser, keys.ESCAPE)
    x, y = ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2
    x -= browser.execute_script("return scrollX")
    y -= browser.execute_script("return scrollY")
    webdriver.ActionChains(browser, duration=0).move_by_offset(0, 0).perform()
    actions = webdriver.common.action_chains.ActionBuilder(browser, duration=0)
    actions.pointer_action.move_to_location(round(x), round(y))
    actions.perform()
    return actions


def test_hover_shows_the_deployment_under_the_pointer(sweep):
    hover(sweep)
    told = until(lambda: sweep.find_element("css selector", ".tip").text)
    assert "tokens/s/GPU at" in told
    assert "decode" in told
    assert "batch" in told
    assert "TTL" in told


def test_click_pins_the_design_with_its_bands_and_breakdown(sweep):
    actions = hover(sweep)
    actions.pointer_action.click()
    actions.perform()
    (card,) = until(lambda: texts(sweep, ".design"))
    assert "prefill" in card
    assert "bands of 80 %" in card
    assert "of the speed of light" in card
    assert "rests on: fitted" in card
    assert "small --row" in card
    shares = [float(text.removesuffix(" %")) for text in texts(sweep, ".bars td:nth-child(4)") if text]
    assert sum(shares) == pytest.approx(100.0, abs=1.0)
    assert texts(sweep, ".pin") == ["1"]
    sweep.find_element("css selector", ".design header button").click()
    assert not texts(sweep, ".design")


def test_filters_take_points_curves_and_rows_away(sweep):
    def curves() -> int:
        return int(sweep.find_element("id", "shown").text.split(" curves")[0].rpartition(" ")[2])

    assert curves() == 4
    sweep.find_element("css selector", "input[data-value='a100_sxm_80gb']").click()
    assert curves() == 2
    assert all("a100" not in text for text in texts(sweep, ".legend li"))
    assert all("a100" not in text for text in texts(sweep, "#best tbody tr"))
    assert len(texts(sweep, "#gains tbody tr")) == 1
    sweep.find_element("css selector", "input[data-value='co-located']").click()
    assert curves() == 1
    sweep.find_element("css selector", "button[aria-label='system: none']").click()
    assert curves() == 0


def test_views_show_kv_bandwidth_and_ratio_of_disaggregated_designs_alone(sweep):
    for words in ("KV out", "KV in", "P:D ratio"):
        sweep.find_element("xpath", f"//label[span[text()='{words}']]").click()
        assert " on 2 curves" in sweep.find_element("id", "shown").text
    sweep.find_element("xpath", "//label[span[text()='Throughput']]").click()
    assert " on 4 curves" in sweep.find_element("id", "shown").text


def test_points_that_are_shown_are_exported(sweep, folder):
    sweep.find_element("css selector", "input[data-value='a100_sxm_80gb']").click()
    sweep.find_element("id", "csv").click()
    file = folder / "small.csv"
    until(lambda: file.exists() and file.stat().st_size)
    with file.open() as handle:
        rows = list(csv.DictReader(handle))
    assert {row["system"] for row in rows} == {"h100_sxm"}
    front = pd.read_csv(folder / "small" / "frontier.csv")
    mine = [row for row in rows if int(row["row"]) >= 0]
    assert len(mine) == (front["system"] == "h100_sxm").sum()
    assert float(mine[0]["ttl_s"]) == pytest.approx(front["ttl_s"][int(mine[0]["row"])], rel=1e-6)


def test_the_figure_is_exported_as_svg_and_png(sweep, folder):
    for kind, start in (("SVG", b"<svg "), ("PNG", b"\x89PNG")):
        sweep.find_element("xpath", f"//button[text()='{kind}']").click()
        file = folder / f"small-throughput.{kind.lower()}"
        until(lambda file=file: file.exists() and file.stat().st_size)
        assert file.read_bytes().startswith(start)
    assert "interactivity [tokens/s/user]" in (folder / "small-throughput.svg").read_text()


def test_keys_alone_go_along_the_frontier_and_pin(sweep):
    keys = webdriver.Keys
    press(sweep, keys.HOME)
    first = sweep.find_element("css selector", ".tip").text
    press(sweep, keys.ARROW_RIGHT)
    second = sweep.find_element("css selector", ".tip").text
    assert first
    assert second
    assert first != second
    assert sweep.find_element("id", "status").get_attribute("textContent").replace(",", "")
    press(sweep, keys.ARROW_DOWN)
    assert sweep.find_element("css selector", ".tip").text not in (first, second)
    press(sweep, keys.ENTER)
    assert len(texts(sweep, ".design")) == 1
    press(sweep, keys.ESCAPE)
    assert not sweep.find_element("css selector", ".tip").is_displayed()


def test_a_box_that_is_dragged_is_shown_alone_until_all_is_asked_for(sweep):
    def first_point() -> float | None:
        press(sweep, webdriver.Keys.HOME)
        ring = sweep.find_element("css selector", ".ring")
        return ring.rect["x"] if ring.is_displayed() else None

    whole = first_point()
    over = sweep.find_element("css selector", ".u-over")
    drag = webdriver.ActionChains(sweep, duration=10).move_to_element_with_offset(over, 100, -100).click_and_hold()
    drag.move_by_offset(60, 60).move_by_offset(100, 80).release().perform()
    assert first_point() != whole
    sweep.find_element("xpath", "//button[text()='Show all']").click()
    assert first_point() == pytest.approx(whole, abs=1.5)


def test_tables_sort_by_their_heads(sweep):
    head = sweep.find_element("xpath", "//section[@id='points']//button[starts-with(text(), 'GPUs')]")
    head.click()
    cells = "//section[@id='points']//tbody/tr/td[14]"
    down = [int(each.text) for each in sweep.find_elements("xpath", cells)]
    assert down == sorted(down, reverse=True)
    sweep.find_element("xpath", "//section[@id='points']//button[starts-with(text(), 'GPUs')]").click()
    up = [int(each.text) for each in sweep.find_elements("xpath", cells)]
    assert up == sorted(up)
    assert up[0] <= down[-1]


def test_what_can_be_operated_has_a_name(sweep):
    nameless = sweep.execute_script(
        "return [...document.querySelectorAll('button, input, select, [tabindex=\"0\"]')].filter(e => "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length))).length"
    )
    assert nameless == 0


def test_themes_follow_the_system_and_the_switch(sweep):
    def light() -> float:
        return sweep.execute_script(
            "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0) / 765"
        )

    def system(theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        sweep.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    system("light")
    assert light() > 0.9
    system("dark")
    assert light() < 0.2
    sweep.find_element("xpath", "//label[span[text()='light']]").click()
    assert light() > 0.9
    sweep.find_element("xpath", "//label[span[text()='auto']]").click()
    system("light")


def test_a_phone_shows_all_without_scrolling_sideways(browser, sweep_page):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened(browser, sweep_page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert browser.find_element("css selector", ".stage canvas").rect["width"] <= 390
        assert not browser.find_element("css selector", ".filters").is_displayed()  # folded, one tap away
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_of_users_never_run(browser, tmp_path):
    write_page(content_of(plan_directory(tmp_path)), tmp_path / "plan.html")
    opened(browser, tmp_path / "plan.html")
    assert "taken" not in browser.title.replace(SPOILT, "")
    assert browser.find_element("css selector", ".verdict").text == SPOILT
    assert not browser.find_elements("css selector", "main img, main script")
    assert "computing" in browser.find_element("css selector", "#caches tbody").text


def test_the_band_of_a_first_token_stands_with_those_of_its_causes(browser, tmp_path):
    write_page(content_of(plan_directory(tmp_path)), tmp_path / "plan.html")
    opened(browser, tmp_path / "plan.html")
    told = "p90 150 ms or more pass 90 ms to 120 ms, queue 50 ms or more"
    assert " ".join(texts(browser, "#latencies tbody tr")[0].split()).endswith(told)


def test_halves_of_a_decode_instance_are_spared_and_judged_together(browser, tmp_path):
    """Counts and judgements are of encode, prefill and decode; of 12 GPUs of four decode instances three are 9."""
    write_page(content_of(plan_directory(tmp_path)), tmp_path / "plan.html")
    opened(browser, tmp_path / "plan.html")
    rows = [
        [each.text for each in row.find_elements("css selector", "td")]
        for row in browser.find_elements("css selector", "#pools tbody tr")
    ]
    assert [row[0] for row in rows] == ["encode", "prefill", "attention", "FFN"]
    assert [row[1].split(" ×")[0] for row in rows] == ["2 + 1", "2", "2 + 2", "2 + 2"]
    assert [row[6] for row in rows] == ["–", *["60 GB"] * 3]
    bound = ["compute", "memory bandwidth", "waits 25 % of a full step", "waits 50 % of a full step"]
    assert [row[7] for row in rows] == bound
    layouts = ["never measured", "served", "launchable", "launchable"]
    assert [row[8].split("layout ")[1] for row in rows] == layouts
    spares = texts(browser, "#availability tbody tr")
    assert [row.split(" GPUs")[0].split()[-1] for row in spares] == ["4", "3", "9", "9"]
    assert "23.1 days" in spares[1]
    assert all("34.7 days" in row and "75 %" in row for row in spares[2:])


def test_pages_say_nothing_on_the_console(browser, sweep_page):
    browser.get_log("browser")
    opened(browser, sweep_page)
    assert browser.get_log("browser") == []
