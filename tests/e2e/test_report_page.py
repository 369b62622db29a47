"""The report in headless Chromium: what is on the page, at a desk, on a phone, on paper, in the dark.

Needs Chromium and its driver (``apt-get install -y chromium chromium-driver``; ``make test`` installs them).
They are no option: a machine without them fails here.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from draftproof import results as published
from draftproof.report.page import render

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
)  # fmt: skip
NEEDED = "the report's test needs Chromium and its driver: apt-get install -y chromium chromium-driver"
DESK, PHONE = 1400, 390
Show = Callable[..., webdriver.Chrome]


def _sample() -> ModuleType:
    """The unit tests' sample run."""
    path = Path(__file__).parents[1] / "unit" / "report" / "conftest.py"
    spec = importlib.util.spec_from_file_location("report_sample", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAMPLE = _sample()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    assert chromium, NEEDED
    assert driver, NEEDED
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of run as a file."""
    folder = tmp_path_factory.mktemp("pages")
    honest = SAMPLE.make_evidence()
    hostile = SAMPLE.make_evidence(labels=("news", "code"))
    pieces = ["</script>", "]]>", "\u202eabc", "\x00", *hostile.texts["news"]["pieces"][4:]]
    hostile = replace(hostile, texts={**hostile.texts, "news": {"prompt": "<b>p</b>", "pieces": pieces}})
    runs = {
        "honest": honest, "wrong": SAMPLE.make_evidence(wrong_on="code"),
        "noisy": SAMPLE.make_evidence(jitter=0.6), "tie": SAMPLE.make_evidence(slow=2.9),
        "evaluation": SAMPLE.make_evaluation(), "hostile": hostile,
    }  # fmt: skip
    for name, evidence in runs.items():
        audit = SAMPLE.make_audit(evidence) if name == "honest" else None
        margins = SAMPLE.make_margins(evidence) if name == "honest" else None
        html = render(evidence, published.compute(evidence), audit, margins)
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in runs}


@pytest.fixture
def show(browser: webdriver.Chrome, pages: dict[str, Path]) -> Iterator[Show]:
    """Opens a page at a width; afterwards the console is empty and nothing but the file was asked for."""
    opened: list[str] = []

    def open_page(name: str, width: int = DESK, **media: str) -> webdriver.Chrome:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": key.replace("_", "-"), "value": value} for key, value in media.items()]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        opened.append(pages[name].as_uri())
        browser.get(opened[-1])
        drawn = "return [...document.querySelectorAll('.plot')].every((plot) => plot.firstElementChild)"
        WebDriverWait(browser, 30).until(lambda b: b.execute_script(drawn), "a chart was never drawn")
        return browser

    browser.get_log("browser")
    browser.get_log("performance")
    yield open_page
    assert browser.get_log("browser") == []
    assert set(requests(browser)) <= {*opened, "data:,"}


def requests(browser: webdriver.Chrome) -> list[str]:
    """URLs the pages asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [params["request"]["url"] for params in sent]


def find(browser: webdriver.Chrome, css: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, css)


def text(browser: webdriver.Chrome, css: str) -> str:
    return " ".join(browser.find_element(By.CSS_SELECTOR, css).text.split())


def count(browser: webdriver.Chrome, css: str) -> int:
    return len(find(browser, css))


def width_beyond(browser: webdriver.Chrome) -> int:
    return int(browser.execute_script("return document.documentElement.scrollWidth - innerWidth"))


def test_the_log_of_requests_sees_one(
    browser: webdriver.Chrome, pages: dict[str, Path], tmp_path: Path
) -> None:
    """The check of every other test can fail."""
    (tmp_path / "x.css").write_text("")
    (tmp_path / "x.html").write_text("<link rel=stylesheet href=x.css><script>nothing()</script>")
    browser.get_log("performance")
    browser.get((tmp_path / "x.html").as_uri())
    assert (tmp_path / "x.css").as_uri() in requests(browser)
    assert "nothing is not defined" in browser.get_log("browser")[0]["message"]


def test_the_verdict_is_what_one_sees_first(show: Show) -> None:
    browser = show("honest")
    heading = browser.find_element(By.TAG_NAME, "h1")
    assert heading.is_displayed()
    assert " ".join(heading.text.split()) == (
        "Exact, and 2.84× faster than stock (95 % 2.42–3.25 over 12 inputs)"
    )
    box = heading.rect
    assert box["y"] + box["height"] < 450, "not in the first half of the screen"
    assert text(browser, ".facts div:nth-child(2)") == "mismatched 0"
    assert text(browser, ".facts div:nth-child(3)").startswith("audit passed")
    assert text(browser, ".dependent h2") == "Data-dependent"


def test_every_point_is_drawn(show: Show) -> None:
    browser = show("honest")
    for css, expected in {
        "#chart-speedups .whole circle, #chart-speedups .whole path": 12,
        "#chart-speedups .serial circle, #chart-speedups .serial path": 12,
        "#chart-split .bars rect, #chart-split .bars path": 3,
        "#chart-positions .conditional circle, #chart-positions .conditional path": 8,
        "#chart-offsets .bars rect, #chart-offsets .bars path": 6,
        "#chart-curve .curve circle, #chart-curve .curve path": 15,
        "#chart-predicted .measured circle, #chart-predicted .measured path": 12,
        "#chart-memory .bars rect, #chart-memory .bars path": 2,
        "#chart-repeats .first circle, #chart-repeats .first path": 12,
    }.items():
        assert count(browser, css) == expected, css
    speeds = text(browser, "#chart-speedups .plot")
    assert "median 2.84×" in speeds
    assert "worst, 2.02×" in speeds
    assert "stock" in speeds
    assert speeds.index("table") < speeds.index("chinese"), "best first"


def test_points_stand_where_their_figures_say(show: Show) -> None:
    browser = show("honest")
    places = browser.execute_script(
        "return [...document.querySelectorAll('#chart-speedups .whole circle, #chart-speedups .whole path')]"
        ".map(dot => { const box = dot.getBoundingClientRect(); return [box.x, box.y]; })"
    )
    data = json.loads(str(browser.execute_script("return document.getElementById('data').textContent")))
    speeds = [row["whole"]["median"] for row in data["charts"]["speedups"]["rows"]]
    scale = (places[0][0] - places[-1][0]) / (speeds[0] - speeds[-1])
    for (x, _), speed in zip(places, speeds, strict=True):
        assert x == pytest.approx(places[-1][0] + scale * (speed - speeds[-1]), abs=0.6)
    assert [y for _, y in places] == sorted(y for _, y in places)


def test_every_chart_has_words_and_a_table(show: Show) -> None:
    browser = show("honest")
    plots = find(browser, ".plot")
    assert len(plots) == 8
    assert all(plot.get_attribute("role") == "img" for plot in plots)
    assert all(str(plot.get_attribute("aria-label")).endswith(".") for plot in plots)
    for chart in find(browser, ".chart"):
        fold = chart.find_element(By.TAG_NAME, "details")
        table = fold.find_element(By.TAG_NAME, "table")
        assert not table.is_displayed()
        summary = fold.find_element(By.TAG_NAME, "summary")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", summary)
        summary.click()
        assert table.is_displayed()


def test_pointing_at_a_point_tells_its_figures(show: Show) -> None:
    browser = show("honest")
    point = find(browser, "#chart-speedups .whole circle, #chart-speedups .whole path")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", point)
    ActionChains(browser).move_to_element(point).perform()
    told = " ".join(tip.text for tip in find(browser, "#chart-speedups [aria-label=tip]"))
    assert "table, against stock" in told
    assert "5 pairs" in told


def style(element: WebElement) -> tuple[str, ...]:
    names = (
        "background-color",
        "text-decoration-line",
        "text-decoration-style",
        "font-weight",
        "outline-style",
    )
    return tuple(element.value_of_css_property(name) for name in names)


def test_tokens_are_coloured_by_how_they_came_about(show: Show) -> None:
    browser = show("honest")
    assert count(browser, ".output .t") == 12 * 192
    assert count(browser, ".output .t.p") == 12
    kinds = [".t.p", ".t.o", ".t.d.s0", ".t.d.s1", ".t.d.s2"]
    styles = [style(find(browser, f".output {kind}")[0]) for kind in kinds]
    assert len(set(styles)) == 5
    assert len({found[1:] for found in styles}) == 5, "told apart by colour alone"
    assert [" ".join(key.text.split()) for key in find(browser, "#token-keys .key")] == [
        "first from the prompt’s forward", "own the model’s own token", "drafted by draft_model, accepted",
        "drafted by lookup, accepted", "drafted by suffix, accepted", "↵ a character that would not show",
    ]  # fmt: skip


def test_pointing_at_a_token_tells_its_round(show: Show) -> None:
    browser = show("honest")
    assert not browser.find_element(By.ID, "tip").is_displayed()
    tokens = find(browser, ".output")[0].find_elements(By.CSS_SELECTOR, ".t")
    drafted = next(t for t in tokens if " d" in str(t.get_attribute("class")))
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", drafted)
    ActionChains(browser).move_to_element(drafted).perform()
    told = text(browser, "#tip")
    trace = SAMPLE.make_evidence().of("news", "auto")[0].trace
    round_ = trace.rounds[int(str(drafted.get_attribute("data-r")))]
    margin = SAMPLE.make_margins(SAMPLE.make_evidence())["news"][tokens.index(drafted)]
    assert told.startswith(
        f"Token {tokens.index(drafted) + 1} of 192 Drafted by {round_.source} and accepted:"
    )
    assert f"round {round_.index} depth {round_.num_drafted} accepted {round_.num_accepted}" in told
    assert f"margin {float(f'{margin:.3g}'):g}" in told
    lit = [t for t in tokens if {"on", "same"} & set(str(t.get_attribute("class")).split())]
    assert len(lit) == len(round_.emitted), "the whole round lights up"


def test_keys_move_from_token_to_token(show: Show) -> None:
    browser = show("honest")
    output = find(browser, ".output")[1]
    browser.execute_script("arguments[0].focus()", output)
    output.send_keys(Keys.HOME)
    assert text(browser, "#tip").startswith("Token 1 of 192 Chosen by the prompt’s own forward.")
    output.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, "#tip").startswith("Token 2 of 192")
    output.send_keys(Keys.END)
    assert text(browser, "#tip").startswith("Token 192 of 192")
    output.send_keys(Keys.ESCAPE)
    assert not browser.find_element(By.ID, "tip").is_displayed()


def test_a_tap_holds_the_words_inside_the_screen(show: Show) -> None:
    browser = show("honest", PHONE)
    tokens = find(browser, ".output")[2].find_elements(By.CSS_SELECTOR, ".t")
    for token in (tokens[0], tokens[20], tokens[100]):
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", token)
        browser.execute_script("arguments[0].click()", token)
        box = browser.execute_script(
            "const box = document.getElementById('tip').getBoundingClientRect();"
            "return [box.left, box.right, box.top, box.bottom, innerWidth, innerHeight]"
        )
        left, right, top, bottom, width, height = box
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


@pytest.mark.parametrize("name", ["honest", "wrong", "noisy", "tie", "evaluation", "hostile"])
@pytest.mark.parametrize("width", [PHONE, 768, DESK])
def test_nothing_scrolls_sideways(show: Show, name: str, width: int) -> None:
    browser = show(name, width)
    assert width_beyond(browser) <= 0
    browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert width_beyond(browser) <= 0
    widest = browser.execute_script(
        "return Math.max(...[...document.querySelectorAll('.plot svg')]"
        ".map(drawn => drawn.getBoundingClientRect().right))"
    )
    assert widest <= width


def test_charts_are_drawn_again_for_another_width(show: Show) -> None:
    browser = show("honest")
    wide = find(browser, "#chart-speedups .plot > *")[0].rect["width"]
    metrics = {"width": PHONE, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    drawn = "return document.querySelector('#chart-speedups svg').width.baseVal.value"
    WebDriverWait(browser, 30).until(lambda b: b.execute_script(drawn) < PHONE, "never drawn again")
    narrow = find(browser, "#chart-speedups .plot > *")[0].rect["width"]
    assert narrow < PHONE < wide


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "wrong",
            "Failed, so no speed is shown: code: token 191 is not stock's (5 of its compared tokens differ)",
        ),
        ("noisy", "Withheld: the machine was too noisy"),
        ("tie", "Exact, with no difference in speed shown: 0.9"),
        ("evaluation", "Exact, and 2.20× faster than stock (95 % 2.12–2.26 over 5 pairs of the main input)"),
    ],
)
def test_other_outcomes(show: Show, name: str, sentence: str) -> None:
    browser = show(name)
    assert text(browser, "h1").startswith(sentence)
    is_withheld = name in ("wrong", "noisy")
    assert count(browser, "#chart-speedups svg") == (0 if is_withheld else 1)
    assert ("faster" in text(browser, "#verdict")) == (name == "evaluation")


def test_what_a_model_wrote_is_shown_and_does_nothing(show: Show) -> None:
    browser = show("hostile")
    shown = find(browser, ".output")[0]
    assert shown.text.startswith("</script>]]>[U+202E]abc␀")
    assert shown.value_of_css_property("unicode-bidi") == "isolate"
    assert count(browser, ".prompt b") == 0
    assert count(browser, ".output .t") == 2 * 192


def luminance(colour: str) -> float:
    red, green, blue = (float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_dark_is_dark_and_charts_follow(show: Show) -> None:
    for scheme, is_dark in (("light", False), ("dark", True)):
        browser = show("honest", DESK, prefers_color_scheme=scheme)
        body = browser.find_element(By.TAG_NAME, "body")
        assert (luminance(body.value_of_css_property("background-color")) < 60) is is_dark
        label = find(browser, "#chart-speedups svg text")[0]
        assert (luminance(label.value_of_css_property("fill")) > 180) is is_dark


def test_on_paper_every_fold_is_open_and_nothing_is_dark(show: Show) -> None:
    browser = show("honest", DESK, prefers_color_scheme="dark")
    browser.execute_script(
        "addEventListener('beforeprint', () => { window.folds ="
        " ['details', 'details[open]'].map(css => document.querySelectorAll(css).length); })"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    body = browser.find_element(By.TAG_NAME, "body")
    assert luminance(body.value_of_css_property("background-color")) > 250
    assert not browser.find_element(By.TAG_NAME, "nav").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    printed: Any = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    folds, opened = browser.execute_script("return window.folds")
    assert folds == opened >= 20
    assert count(browser, "details[open]") == 0, "folds are closed again afterwards"
