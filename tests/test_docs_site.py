"""The site of the documentation: built without a warning, complete, and without another host's help."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import builder
import edgebundle
from benchmarks.dashboard.browser import Browser
from tests.needs import needed
from tests.patience import PROGRAM_PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
# What a browser fetches by itself.
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """Build it as `make docs` does: with -W, links to missing pages and headings are errors."""
    (recipe,) = re.findall(r"-m sphinx (.*) dist/docs$", (ROOT / "Makefile").read_text(), re.MULTILINE)

    def write(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # a build that failed: Sphinx would not repeat its warnings
        command = [sys.executable, "-m", "sphinx", *recipe.split(), str(folder)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PROGRAM_PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return shared_file("docs", write)


class Links(HTMLParser):
    """Collects what a page fetches, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.linked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and FETCHED.get(tag) == name:
                self.fetched.append(value)
            if value and (tag, name) == ("a", "href"):
                self.linked.append(value)


def test_site_is_complete_and_needs_no_other_host(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    for source in (ROOT / "docs").glob("*.md"):
        assert f"docs/{source.stem}.html" in pages
    assert "url=README.html" in pages["index.html"]
    for name, page in pages.items():
        links = Links()
        links.feed(page)
        assert [url for url in links.fetched if urlsplit(url).netloc] == [], name
        for url in links.linked:
            parts = urlsplit(url)
            if parts.scheme in ("http", "https"):
                assert re.fullmatch(r"[a-z0-9.-]+\.[a-z]{2,}", parts.netloc), f"{name}: {url}"
            elif not parts.netloc and parts.path:
                assert (site / name).parent.joinpath(parts.path).exists(), f"{name}: {url}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)[\s'\"]*(https?:)?//", style.read_text()), style.name


def test_reference_has_every_public_name(site: Path) -> None:
    client = (site / "docs/reference/client.html").read_text()
    for name in edgebundle.__all__:
        assert f'id="edgebundle.{name}"' in client or f'id="edgebundle.errors.{name}"' in client, name
    compiler = (site / "docs/reference/builder.html").read_text()
    for name in builder.__all__:
        assert f'id="builder.{name}"' in compiler, name
    assert "deadline_s" in client
    executor = (site / "docs/reference/executor.html").read_text()
    assert "GraphModule.set_input" in executor


def test_links_name_pages_and_not_files(site: Path) -> None:
    for path in (site / "docs").glob("*.html"):
        assert not re.findall(r">[\w./-]+\.md</span></a>", path.read_text()), path.name


def test_words_are_found(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    for word in ("letterbox", "keyr", "submit"):  # stems
        assert re.search(rf'\b{word}\b"?:', index), word


async def test_examples_wrap_and_commands_are_copied(site: Path) -> None:
    async with Browser(needed("chromium", "chromium-browser", "google-chrome")) as page:
        await page.size(1280, 800)
        for name in ("README", "docs/your-detector"):
            await page.open((site / f"{name}.html").as_uri())
            await page.until("document.querySelectorAll('.highlight .copy').length > 2")
            examples = "[...document.querySelectorAll('.highlight pre')]"
            cut = await page.run(f"{examples}.filter((e) => e.scrollWidth > e.clientWidth).length")
            assert cut == 0, name
        await page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        await page.run("document.querySelector('.highlight .copy').click()")
        first, second = str(await page.until("window.copied")).split("\n")
        assert first.startswith("edgebundle compile yolox_nano.onnx ")
        assert second == "edgebundle run yolox.bundle --inputs street.jpg --draw drawn.jpg"
