"""The dashboard in headless Chromium: wide and narrow, light and dark, alive and failed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specengine.core.config import ServerConfig
from specengine.core.spec_stats import DepthChoice
from specengine.core.spec_totals import SpecTotals
from specengine.engine.outputs import EngineStats, RequestTimes
from specengine.server.app import create_app
from specengine.server.run import background_server
from specengine.server.service import Service
from tests.server.conftest import KEY, FakeEngine
from tests.server.test_metrics_of_operation import finished

playwright = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package")
SCREENSHOTS = os.environ.get("SPECENGINE_SCREENSHOTS")  # a folder to leave them in


@dataclass
class BusyEngine(FakeEngine):
    """Each time it is asked, another 100 rounds have run."""

    asked: int = 0
    spec: SpecTotals = field(default_factory=SpecTotals)

    def stats(self) -> EngineStats:
        self.asked += 1
        wave = self.asked % 7
        for length in range(4):
            self.spec.record(25, [3] * 25, [length] * (25 - wave) + [0] * wave)
        return EngineStats(
            num_running=8 + wave,
            num_waiting=max(wave - 3, 0),
            num_slots=4096,
            num_free_slots=2000 - 100 * wave,
            num_prompt_tokens=1000 * self.asked,
            num_cached_tokens=300 * self.asked,
            num_generated_tokens=100 * self.asked + self.spec.num_accepted_tokens,
            spec=self.spec,
            depth=DepthChoice(2 + wave // 4, f"batch {8 + wave}: K=3, 1.84x of none", 1.84),
            model_name="fake",
            algorithm="EAGLE3",
        )


@dataclass
class Shown:
    url: str
    service: Service
    browser: Any

    def open(self, width: int, height: int, scheme: str, every: float = 0.1) -> tuple[Any, Any]:
        """A page, and the list that its errors and requests to other places go to."""
        wrong: list[str] = []
        context = self.browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            http_credentials={"username": "anyone", "password": KEY},
        )
        page = context.new_page()
        page.on("console", lambda one: wrong.append(one.text) if one.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda one: None if one.url.startswith((self.url, "data:")) else wrong.append(one.url),
        )
        page.goto(f"{self.url}/dashboard?every={every}")
        return page, wrong


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    service = Service()
    config = ServerConfig(port=0, log_level="warning")
    app = create_app(service, [KEY], config)
    with background_server(app, config) as url, playwright.sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Shown(url, service, browser)
        browser.close()


def finish_requests(service: Service, count: int) -> None:
    for number in range(count):
        late = 0.01 + 0.002 * (number % 50)
        times = RequestTimes(1.0, 1.0 + 2 * late, 1.5 + 9 * late, 1.0 + late / 9)
        service.metrics.observe(finished(times))


def drawn_pixels(page: Any) -> list[int]:
    """How many pixels of each chart are drawn."""
    counted = page.evaluate(
        """() => [...document.querySelectorAll("canvas")].map((canvas) => {
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const colours = {};
            for (let i = 0; i < data.length; i += 4) {
                if (data[i + 3] > 200) {
                    const key = `${data[i] >> 4},${data[i + 1] >> 4},${data[i + 2] >> 4}`;
                    colours[key] = (colours[key] || 0) + 1;
                }
            }
            // Saturated ones are lines of series: text and grid are grey.
            return Object.entries(colours).filter(([key]) => {
                const [r, g, b] = key.split(",").map(Number);
                return Math.max(r, g, b) - Math.min(r, g, b) >= 3;
            }).reduce((sum, [, count]) => sum + count, 0);
        })"""
    )
    return list(counted)


@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(1400, 1000, "light"), (390, 844, "dark"), (390, 844, "light")]
)
def test_page_draws_every_chart(shown: Shown, width: int, height: int, scheme: str) -> None:
    shown.service.engine = BusyEngine()
    page, wrong = shown.open(width, height, scheme)
    for _ in range(12):
        finish_requests(shown.service, 20)
        page.wait_for_timeout(100)
    page.wait_for_selector("#state.good")
    assert page.inner_text("#model") == "fake"
    assert page.inner_text("#algorithm") == "EAGLE3"
    assert "1.84x of none" in page.inner_text("#reason")
    terms, values = page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts()
    tiles = dict(zip(terms, values, strict=True))
    assert 2.0 < float(tiles["Accepted length"]) < 2.5
    assert tiles["Expected gain"] == "1.84×"
    assert tiles["First token, p99"].endswith("ms")
    assert "–" not in values
    pixels = drawn_pixels(page)
    assert len(pixels) == 11
    assert min(pixels) > 50, pixels
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 23)"
    assert dark == (scheme == "dark")
    if SCREENSHOTS:
        path = Path(SCREENSHOTS) / f"{width}-{scheme}.png"
        page.screenshot(path=str(path), full_page=width > 1000)
    page.context.close()
    assert wrong == []


def test_page_says_that_the_engine_is_gone(shown: Shown) -> None:
    shown.service.engine = BusyEngine()
    page, _ = shown.open(800, 600, "light")
    page.wait_for_selector("#state.good")
    shown.service.engine = None
    page.wait_for_selector("#state.bad")
    assert "no engine" in page.inner_text("#state")
    shown.service.engine = BusyEngine()  # another, whose counters begin anew
    page.wait_for_selector("#state.good")
    page.context.close()
