"""The files of a comparison: complete, well-formed whatever overrides hold, and looked at in a browser."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from sweep_examples import STAGES, example_result, write_job

from accel.record import Reason
from tasks.comparison import compare

NASTY = 'prompt=gelée, "猫" | <script>alert(1)</script>\n*x*'
ACCELS = ("eager", "graph", "fused", "graph+fused")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight jobs of two models; the last one failed, and job 1 has a trace."""
    folder = tmp_path_factory.mktemp("sweep")
    jobs = []
    for number in range(8):
        model, accel = ("flux3_action", "ltx2")[number // 4], ACCELS[number % 4]
        result = example_result(
            model=model,
            accel=accel,
            walls_ms=[float(10 * (number // 4 + 1) - number % 4)] * 5,
            extra_bytes=2**20 * 100 * (number % 4),
            reason=Reason.NO_CUDA if accel != "eager" else None,
        )
        failed = number == 7
        error = {"error": "MemoryError: <device>"} if failed else {}
        overrides = (f"model={model}", f"accel={accel}", NASTY if number == 6 else "seed=1")
        jobs.append(write_job(folder, number, *overrides, result=None if failed else result, **error))
    (folder / "1" / "trace of stage é.json").write_text("{}")
    assert compare(jobs, folder, logger="quiet") == 1
    return folder


def test_json_has_everything(sweep: Path) -> None:
    content = json.loads((sweep / "comparison.json").read_text(encoding="utf-8"))
    assert content["schema"] == 1
    jobs = content["jobs"]
    assert [job["eager_job"] for job in jobs] == [0, 0, 0, 0, 4, 4, 4, None]
    assert jobs[3]["figures"][0]["speed_up"] == 10 / 7
    assert jobs[6]["others"] == [NASTY]
    assert jobs[7]["error"] == "MemoryError: <device>"
    assert jobs[1]["traces"] == ["1/trace of stage é.json"]


def test_csv_has_one_line_a_job_and_stage(sweep: Path) -> None:
    with open(sweep / "comparison.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["job"], line["stage"]) for line in lines] == [
        *((str(job), stage) for job in range(7) for stage in ("request", *STAGES)),
        ("7", "request"),
    ]
    assert lines[-1]["error"] == "MemoryError: <device>"
    assert lines[-1]["p50_ms"] == ""
    assert float(lines[3]["p50_ms"]) == 9.0
    assert lines[18]["overrides"].endswith(NASTY)


def test_markdown_tables_keep_their_columns(sweep: Path) -> None:
    text = (sweep / "comparison.md").read_text(encoding="utf-8")
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.M)]
    assert len(tables) == 3  # the jobs, and the stages of two models
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert len(tables[0]) == 2 + 8
    assert [len(table) for table in tables[1:]] == [2 + 4 * 3, 2 + 3 * 3]
    assert "<script>" not in text
    assert "## Not accelerated" in text


@pytest.mark.parametrize(
    "text",
    [
        "TypeError: Net.__init__() got an unexpected keyword argument 'max_len'",
        "_now_ ~~never~~ a|b <b> &lt; &#65; C:\\\\| `x` [y](z)",
        "one\r\nand\rmore",
    ],
)
def test_markdown_shows_any_text_as_it_is(text: str, tmp_path: Path) -> None:
    jobs = [write_job(tmp_path, number, "accel=eager", f"a={text}"[: 2 + 99 * number]) for number in (0, 1)]
    compare(jobs, tmp_path, logger="quiet")
    renderer = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    page = renderer.render((tmp_path / "comparison.md").read_text(encoding="utf-8"))
    cells = [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", page, re.S)]
    assert cells[6 + 4] == " ".join(f"a={text}".splitlines())


def test_page_is_small_and_asks_for_nothing(sweep: Path) -> None:
    page = (sweep / "comparison.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 100_000
    assert "<script>alert(1)" not in page
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    links = [unquote(link) for link in re.findall(r'href="([^"]*)"', page)]
    assert len(links) == 9
    assert all((sweep / link).exists() for link in links)


@pytest.fixture
def page(sweep: Path) -> Iterator[Any]:
    """The page in a browser without network; a script error or a request fails the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    browser_file = next(filter(None, map(shutil.which, names)), None)
    if browser_file is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed")
    problems: list[str] = []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_file, args=["--no-sandbox"])
        opened = browser.new_page(offline=True)
        opened.on("console", lambda message: problems.append(message.text))
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("request", lambda request: problems.append(request.url))
        opened.goto((sweep / "comparison.html").as_uri())
        yield opened
        browser.close()
    assert [problem for problem in problems if not problem.endswith("/comparison.html")] == []


def shown(page: Any, column: int) -> list[str]:
    """The cells of a column in rows that can be seen, from above."""
    script = "(rows, n) => rows.filter(r => r.checkVisibility()).map(r => r.cells[n]?.innerText ?? '')"
    cells: list[str] = page.locator("tbody tr").evaluate_all(script, column)
    return cells


def test_page_sorts_by_any_column_both_ways(page: Any) -> None:
    assert shown(page, 0) == list("01234567")  # whole requests; the failed job is always there
    p50 = page.get_by_role("columnheader", name="p50")
    p50.get_by_role("button").click()
    assert p50.get_attribute("aria-sort") == "ascending"
    assert shown(page, 6) == ["7.00", "8.00", "9.00", "10.0", "18.0", "19.0", "20.0", ""]
    assert shown(page, 0)[-1] == "7"
    p50.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert p50.get_attribute("aria-sort") == "descending"
    assert shown(page, 0) == ["4", "5", "6", "0", "1", "2", "3", "7"]
    page.get_by_role("columnheader", name="accel", exact=True).get_by_role("button").click()
    assert p50.get_attribute("aria-sort") is None
    assert shown(page, 3)[:2] == ["eager", "eager"]


def test_page_filters_by_words_and_stage(page: Any) -> None:
    page.get_by_label("Filter").fill("LTX2 fused")
    assert shown(page, 0) == ["6", "7"]
    assert page.locator("#shown").inner_text() == "2 of 22 rows"
    page.get_by_label("Filter").fill("")
    page.get_by_label("Stage").select_option("denoising")
    assert set(shown(page, 5)) == {"denoising", "MemoryError: <device>"}
    page.get_by_label("Stage").select_option("all")
    assert len(shown(page, 0)) == 22


def test_page_draws_every_job_and_follows_the_colour_scheme(page: Any) -> None:
    charts = page.get_by_role("img")
    assert charts.count() == 2 + 1 + 2 + 2  # ladders (one more for job 6's prompt), stacks, scatters
    assert page.locator("#ladder ~ figure rect").count() == 7
    assert page.locator("#memory ~ figure circle").count() == 7
    first = (
        page.locator("#ladder ~ figure")
        .first.locator("rect")
        .evaluate_all("bars => bars.map(bar => bar.getBoundingClientRect().width)")
    )
    assert first == sorted(first, reverse=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) != light
