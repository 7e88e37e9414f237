"""The page of a plan in real headless Chromium: no errors, hover, collapse, zoom, click, keys, both themes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from meshwright.compiler.pipeline.measured import MeasuredStep, RankSpans, Span
from meshwright.compiler.plan.plan import Plan
from meshwright.compiler.search.predict import simulate_plan

from tests.support.browser import chromium, opened
from tests.support.large_plan import large_plan, small_plan

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return small_plan(schedule="zb-h1", microbatches=8)


def measured(plan: Plan) -> MeasuredStep:
    """A step as it would be measured if every action took a tenth longer."""
    ranks = []
    for stage, row in enumerate(simulate_plan(plan).timeline):
        spans = tuple(Span(str(a).removeprefix(str(stage)), 1.1 * s, 1.1 * e, 0.0, 0.1 * (e - s)) for s, e, a in row)
        ranks += [RankSpans(device, stage, spans, 2**30) for device in plan.stages[stage].devices]
    return MeasuredStep.of(plan.model, ranks)


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())


def test_a_reader_can_use_every_section(plan: Plan, tmp_path: Path) -> None:
    other = replace(plan, prediction=replace(plan.prediction, step_s=2 * plan.prediction.step_s))
    path = tmp_path / "plan.html"
    plan.to_html(path, trace=measured(plan), others=[other])
    with opened(path) as (page, said):
        # hover: an action says what it is
        page.locator("#timeline-chart").scroll_into_view_if_needed()
        box = page.locator("#timeline-chart").bounding_box()
        page.mouse.move(box["x"] + 90, box["y"] + 70)
        page.wait_for_function(
            "document.querySelector('#timeline-chart').innerText.includes('forward of microbatch 0')"
        )
        assert "measured below" in text(page, "#timeline-words")
        # zoom: buttons, keys and the wheel narrow the window
        width = "() => meshwrightPage.view()[1] - meshwrightPage.view()[0]"
        whole = page.evaluate(width)
        page.click("[data-view=in]")
        half = page.evaluate(width)
        assert half == pytest.approx(whole / 2, rel=0.02)
        page.focus("#timeline-chart")
        page.keyboard.press("+")
        assert page.evaluate(width) == pytest.approx(half / 2, rel=0.02)
        before = page.evaluate("meshwrightPage.view()[0]")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("meshwrightPage.view()[0]") < before
        page.keyboard.press("ArrowDown")
        page.keyboard.press(".")
        assert text(page, "#timeline-readout").startswith("Stage 1: ")
        page.mouse.move(box["x"] + 400, box["y"] + 70)
        page.keyboard.down("Control")
        narrow = page.evaluate(width)
        page.mouse.wheel(0, -400)
        page.keyboard.up("Control")
        page.wait_for_function(f"({width})() < {narrow}")
        page.click("[data-view=all]")
        assert page.evaluate(width) == pytest.approx(whole)
        # collapse: a layer opens to its modules and closes again; a click on it and on its rows says more
        first = page.locator("#tree > details").first
        while first.locator(".leaf").count() == 0:
            first.locator("details:not([open]) > summary").or_(first.locator("> summary")).last.click(
                position={"x": 4, "y": 8}
            )
            page.wait_for_timeout(20)  # a part is built when it has opened
        assert first.evaluate("x => x.open")
        first.locator(".leaf button").first.click()
        assert "per device" in text(page, "#panel")
        first.locator("summary button").first.click()
        assert "Stage 0" in text(page, "#panel")
        assert "Why" in text(page, "#panel")
        first.locator("> summary").click(position={"x": 4, "y": 8})
        assert not first.evaluate("x => x.open")
        # a keyboard alone gets there too
        first.locator("> summary").focus()
        page.keyboard.press("Enter")
        assert first.evaluate("x => x.open")
        # click: another plan, another stage, another theme
        page.locator("#choices-table button").nth(1).click()
        assert "gap" in text(page, "#choice")
        page.select_option("#memory-stage", "1")
        page.click("#theme")
        assert page.evaluate("document.documentElement.classList.contains('dark')")
        for summary in page.locator("section > details > summary").all():
            summary.click()
        assert "limit" in text(page, "#memory-table")
        assert "backward input" in text(page, "#seconds-table")
        assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_why_idle_devices_and_virtual_stages_are_shown(tmp_path: Path, scheme: str) -> None:
    plan = small_plan(strategy="pp2", schedule="zb-v", microbatches=4)
    plan.to_html(tmp_path / "plan.html", graph=plan.graph)
    with opened(tmp_path / "plan.html", scheme) as (page, said):
        assert page.locator(".device.idle").count() == 2
        assert "do nothing" in text(page, "#idle")
        page.locator("#tree button").first.click()
        assert "recompute of blocks.0" in text(page, "#panel")
        assert "chosen" in text(page, "#panel")
        assert "virtual stage" in text(page, "#tree")
        assert page.evaluate("document.documentElement.classList.contains('dark')") == (scheme == "dark")
        assert said == []


def test_names_of_a_model_are_text(plan: Plan, tmp_path: Path) -> None:
    name = "</script><b id=bad onclick=alert(1)>x</b>"
    document = plan.to_json()
    document["layers"] = [f"{name}{k}" for k in range(len(plan.layers))]
    document["prediction"]["notes"] = [name]
    document["cluster"]["name"] = name
    hostile = Plan.from_json(document)
    hostile.to_html(tmp_path / "plan.html")
    with opened(tmp_path / "plan.html") as (page, said):
        assert page.locator("#bad").count() == 0
        assert name in text(page, "#notes")
        assert name in text(page, "#tree")
        assert said == []
    (tmp_path / "notebook.html").write_text(f"<!doctype html><p id=own>notebook</p>{hostile._repr_html_()}")
    with opened(tmp_path / "notebook.html", frame=True) as (frame, said):
        assert frame.locator("#bad").count() == 0
        assert name in text(frame, "#notes")
        assert (
            frame.evaluate("(() => { try { return String(parent.document); } catch { return 'closed'; } })()")
            == "closed"
        )
        assert said == []


def test_the_largest_plan_opens_in_two_seconds(tmp_path: Path) -> None:
    """96 layers × 1,024 devices × 1,024 microbatches, in seconds of the browser's main thread."""
    large_plan().to_html(tmp_path / "plan.html")
    with opened(tmp_path / "plan.html") as (page, said):
        metrics = page.context.new_cdp_session(page)
        metrics.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.reload()
        page.wait_for_function("document.documentElement.dataset.ready === '1'")
        spent = {one["name"]: one["value"] for one in metrics.send("Performance.getMetrics")["metrics"]}
        assert 0 < spent["TaskDuration"] < 2
        page.click("[data-view=middle]")
        page.wait_for_function("meshwrightPage.view()[1] - meshwrightPage.view()[0] < 1e6")
        items = page.evaluate("Object.values(meshwrightPage.items()).reduce((sum, list) => sum + list.length, 0)")
        assert 0 < items < 20_000
        assert said == []
