"""Headless Chromium for the tests of pages: Debian's package, or whatever $CHROMIUM names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["chromium", "opened"]


def chromium() -> str | None:
    """The path of a browser; None where there is none, or nothing to drive it with."""
    if find_spec("playwright") is None:
        return None
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def opened(path: Path, scheme: str = "light", frame: bool = False) -> Iterator[tuple[Any, list[str]]]:
    """(the page of a file that is ready, what its console and its errors say) without any network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1300, "height": 900}, color_scheme=scheme, offline=True)
        page, said = context.new_page(), list[str]()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.goto(path.as_uri())
        inner = page.frames[-1] if frame else page
        inner.wait_for_function("document.documentElement.dataset.ready === '1'")
        try:
            yield (inner if frame else page), said
        finally:
            browser.close()
