"""The page in a real browser: it loads, chats, draws, says nothing in the console, and fits a narrow screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Running, Start
from tests.server.fakes import Script
from tests.support import chromium

pytestmark = pytest.mark.skipif(chromium.found() is None, reason="needs chromium or google-chrome on PATH")

WIDTHS = {"wide": 1200, "narrow": 360}
ANSWER = "document.querySelector('.assistant p')?.textContent"
# Of each part of the answer: its text, the draft it is said to be of, how it is underlined, and its colour.
PARTS = """[...document.querySelectorAll('.assistant p span')].map((part) => {
  const style = getComputedStyle(part);
  return [part.textContent, part.dataset.draft || "", style.textDecorationLine, style.textDecorationColor,
    style.backgroundColor]; })"""
SET = "[...document.querySelectorAll('#drafts li')].map((item) => item.innerText.trim().replace(/\\s*\\n\\s*/g, ' | '))"
INK = """(() => { const canvas = document.getElementById('line');
  return canvas.width ? canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data
    .reduce((ink, value, at) => ink + (at % 4 === 3 && value > 0), 0) : 0; })()"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(params=list(WIDTHS))
def page(request: pytest.FixtureRequest, server: Running, tmp_path: Path) -> Iterator[chromium.Browser]:
    server.engine.script = Script(["Hello", " <b>there</b>", "."])
    with chromium.Browser(tmp_path, WIDTHS[request.param]) as browser:
        browser.open(f"http://127.0.0.1:{server.port}/")
        yield browser


def ask(page: chromium.Browser, text: str) -> None:
    page.run("document.getElementById('question').focus()")
    page.call("Input.insertText", text=text)
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")


def test_the_page(page: chromium.Browser, server: Running) -> None:
    server.engine.batch()
    ask(page, "hi")
    page.until("document.querySelector('.assistant .notes')?.textContent", lambda text: bool(text) and text != "…")
    assert page.run(ANSWER) == "Hello <b>there</b>."  # and no markup
    # The draft guessed all tokens of a piece but the last.
    parts = page.run(PARTS)
    assert [part[:2] for part in parts] == [
        ["Hell", "code"], ["o", ""], [" <b>there</b", "code"], [">.", ""],
    ]  # fmt: skip
    guessed, own = ({tuple(part[2:]) for part in parts if bool(part[1]) is drafted} for drafted in (True, False))
    assert len(guessed) == 1
    assert len(own) == 1
    (line, colour, ground), (no_line, _colour, no_ground) = *guessed, *own
    assert line == "underline"
    assert no_line == "none"
    assert ground != no_ground == "rgba(0, 0, 0, 0)"
    legend = "[...document.querySelectorAll('#legend .token')].find((mark) => mark.dataset.draft === 'code')"
    assert page.until(f"{legend} && getComputedStyle({legend}).textDecorationColor") == colour
    assert page.run(SET) == ["ngram no weights | in memory", "code no weights | in memory", "maths | on storage"]
    assert page.until(INK) > 100  # the time line is drawn
    assert "accepted 75% of 8 guesses" in page.run("document.querySelector('.assistant .notes').textContent")
    assert page.until("document.getElementById('model').textContent") == "tiny, context 512"
    assert page.run(OVERFLOW) <= 0
    assert page.complaints == []


def test_long_words_and_settings_fit(page: chromium.Browser, server: Running) -> None:
    server.engine.script = Script(["x" * 400, "\n\n", "| a " * 60])
    ask(page, "y" * 300)
    page.until("document.querySelector('.assistant .notes')?.textContent", lambda text: bool(text) and text != "…")
    page.run("document.getElementById('more').open = true")
    assert page.run(OVERFLOW) <= 0
    wide = (
        "[...document.querySelectorAll('body *')].filter((each) => each.getBoundingClientRect().right > innerWidth + 1)"
    )
    assert page.run(f"{wide}.map((each) => each.tagName + '#' + each.id)") == []
    assert page.complaints == []


def test_the_key_is_asked_for(start: Start, tmp_path: Path) -> None:
    server = start(api_key="secret")
    with chromium.Browser(tmp_path) as page:
        page.open(f"http://127.0.0.1:{server.port}/")
        ask(page, "hi")
        page.until("document.querySelectorAll('.assistant .notes.wrong').length")
        assert page.run("document.activeElement.id") == "key"
        page.call("Input.insertText", text="secret")
        page.run("document.getElementById('key').dispatchEvent(new Event('change'))")
        ask(page, "hi")
        page.until("[...document.querySelectorAll('.assistant p')].at(-1).textContent === 'Hello there.'")
