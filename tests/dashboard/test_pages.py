"""Goal: in a browser the dashboard shows a live cluster, a request's story and a playground; it is usable on a phone,
by keyboard and in the dark, and only looks. Method: Debian's Chromium, driven by Playwright, before real processes with
the fake backend. A machine without Chromium skips this, saying so; CI has it.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from bench.server import Server
from tests.system.conftest import complete, fake_server, prompt
from tests.system.test_tenants import add

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None and not os.environ.get("CI"):
    pytest.skip("no Chromium here: apt-get install chromium", allow_module_level=True)

#: Seconds, generous: what takes longer never comes.
PATIENCE = 60.0
LIGHT: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--nodes", "2", "--prefill", "1", "--decode", "1", "--slo-ttft", "60", "--slo-tbt", "60")
    with fake_server(tmp_path_factory.mktemp("dashboard"), *flags) as running:
        for seed in (1, 1, 1, 2):
            complete(running, prompt(100, seed), 8)
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Browser, server: Server) -> Iterator[Callable[..., Page]]:
    """Opens a page below the dashboard; what goes wrong in any of them fails the test."""
    wrong: list[str] = []
    contexts = []

    def open_page(path: str = "", **more: Any) -> Page:
        context = browser.new_context(**{**LIGHT, **more})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if is_bug(message) else None)
        page.on("request", lambda asked: None if asked.url.startswith(local(server)) else wrong.append(asked.url))
        page.goto(f"{server.base}/dashboard{path}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, f"errors, or requests to elsewhere: {wrong}"


def is_bug(message: ConsoleMessage) -> bool:
    """An answer of 400 is told to the console as well."""
    return message.type == "error" and "the server responded with a status of 4" not in message.text


def local(server: Server) -> tuple[str, ...]:
    return (server.base, server.base.replace("http", "ws", 1), "data:", "blob:")


def within(page: Page, what: str, *texts: str) -> None:
    for text in texts:
        expect(page.locator(f"#{what}")).to_contain_text(text, timeout=PATIENCE * 1000)


def test_every_section_shows_the_live_cluster(opened: Callable[..., Page], server: Server) -> None:
    page = opened()
    within(page, "state", "fake", "serving")
    within(page, "workers", "prefill-0", "decode-0", "node-1", "up")
    within(page, "nodes", "node-0", "blocks")
    within(page, "requests", "length", "prefill-0 → decode-0")
    within(page, "tiers", "worker's pages", "computed")
    within(page, "transfers", "shm", "out")
    within(page, "hot", "96", "node-")
    within(page, "promises", "100.0 %")
    within(page, "refusals", "Nothing was refused")
    before = page.locator("#requests tbody tr").count()
    complete(server, prompt(40, 3), 4, extra_unknown=1)
    expect(page.locator("#requests tbody tr")).to_have_count(before + 1, timeout=PATIENCE * 1000)
    refused = httpx2.post(f"{server.base}/v1/completions", json={"model": "fake", "prompt": "x", "timeout": 1e-6})
    assert refused.status_code >= 400
    expect(page.locator("#refusals tbody tr")).not_to_have_count(0, timeout=PATIENCE * 1000)


def test_a_request_tells_its_story(opened: Callable[..., Page], server: Server) -> None:
    page = opened()
    body = {"model": "fake", "prompt": prompt(50, 5), "max_tokens": 6, "ignore_eos": True}
    headers = {"X-Request-Id": "a/story"}
    assert httpx2.post(f"{server.base}/v1/completions", json=body, headers=headers).status_code == 200
    page.locator("#requests tbody a", has_text="a/story").click()
    within(page, "timeline-0", "prefill", "handoff", "decode", "kept")
    within(page, "why", "prefill-0 prefills, decode-0 decodes", "queue", "in DRAM", "free pages", "kvcache-centric")
    assert page.locator("#timeline-0 svg rect").count() >= 6
    assert page.locator(".candidates tbody tr").count() == 2
    page.goto(page.url.rsplit("/", 1)[0] + "/nobody")
    expect(page.locator("#main")).to_contain_text("has none of this name")


def test_the_playground_talks_by_keyboard_alone(opened: Callable[..., Page]) -> None:
    page = opened()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "text":
            break
    assert page.evaluate("document.activeElement.id") == "text"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", "focus is seen"
    page.keyboard.type("Hello")
    page.fill("#most", "12")
    page.focus("#text")
    page.keyboard.press("Control+Enter")
    note = page.locator(".turn.note")
    expect(note).to_contain_text("12 tokens", timeout=PATIENCE * 1000)
    assert len(page.locator(".turn.assistant").inner_text()) > 0
    note.locator("a").click()
    within(page, "timeline-0", "decode")


def test_the_playground_stops_and_says_what_failed(opened: Callable[..., Page], server: Server) -> None:
    page = opened()
    page.fill("#text", "Go on for ever")
    page.fill("#most", "20000")
    page.click("#send")
    expect(page.locator(".turn.assistant")).not_to_be_empty(timeout=PATIENCE * 1000)
    page.click("#stop")
    expect(page.locator(".turn.note")).to_contain_text("stopped", timeout=PATIENCE * 1000)
    expect(page.locator("#send")).to_be_enabled()
    page.click("#anew")
    expect(page.locator(".turn")).to_have_count(0)
    page.evaluate("document.getElementById('temperature').removeAttribute('min')")
    page.fill("#temperature", "-1")
    page.fill("#text", "Hello")
    with page.expect_response("**/v1/chat/completions") as answered:
        page.click("#send")
    assert answered.value.status == 400
    expect(page.locator(".turn.note")).to_contain_text("temperature", timeout=PATIENCE * 1000)


def test_what_has_the_focus_keeps_it_while_the_page_changes(opened: Callable[..., Page], server: Server) -> None:
    page = opened()
    within(page, "requests", "length")
    page.locator("#requests tbody a").first.focus()
    page.evaluate(
        "window.changes = 0; new MutationObserver(() => changes++).observe("
        "document.getElementById('requests'), {subtree: true, childList: true, characterData: true})"
    )
    complete(server, prompt(30, 4), 2)
    page.wait_for_function("changes > 2", timeout=PATIENCE * 1000)
    assert page.evaluate("document.activeElement.closest('#requests') !== null")


@pytest.mark.parametrize("width", [375, 768])
def test_nothing_is_cut_off_on_a_narrow_screen(opened: Callable[..., Page], width: int) -> None:
    page = opened(viewport={"width": width, "height": 780}, has_touch=True)
    within(page, "requests", "length")
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        beyond = page.evaluate(
            "[...document.querySelectorAll('.all *')].filter(one => { const at = one.getBoundingClientRect(); return "
            f"at.right > {width} + 1 && !one.closest('.wide, nav, .skip') }}).map(one => one.outerHTML.slice(0, 80))"
        )
        assert not beyond, beyond
        if "/requests/" not in page.url:
            page.locator("#requests tbody a").first.click()
            within(page, "why", "prefill-0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(opened: Callable[..., Page], scheme: str) -> None:
    """Contrast of 4.5 to 1 (WCAG 2 AA) of every text to what is behind it."""
    page = opened(color_scheme=scheme)
    within(page, "requests", "length")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, background[4:-1].split(","))) < 64) is (scheme == "dark")
    assert page.evaluate(CONTRAST) == []
    page.locator("#requests tbody a").first.click()
    within(page, "why", "prefill-0")
    assert page.evaluate(CONTRAST) == []


def test_it_only_looks_and_what_it_needs_is_here(server: Server) -> None:
    """No other method does anything, and no address of another origin is loaded (`opened` sees to the latter)."""
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert httpx2.request(method, f"{server.base}/dashboard/").status_code in (404, 405), method
    assert httpx2.get(f"{server.base}/dashboard", follow_redirects=False).headers["location"] == "/dashboard/"


def test_who_may_not_watch_sees_nothing(tmp_path: Path) -> None:
    """Keys: the page, what it loads and its web socket need one of scope watch; a browser asks for it as a password."""
    api, watch, operator = (add(tmp_path, "somebody", scope) for scope in ("api", "watch", "all"))
    flags = ("--both", "1", "--dram-bytes", "32MiB")
    with Server(*flags, model="fake", backend="fake", state_dir=tmp_path, key=operator) as server:
        for address in ("/dashboard/", "/dashboard/static/page.js", "/dashboard/requests/x"):
            told = [httpx2.get(server.base + address, headers=headers) for headers in ({}, basic(api), basic(watch))]
            assert [answer.status_code for answer in told] == [401, 403, 200], address
            assert told[0].headers["www-authenticate"].startswith("Basic")
        socket = server.base + "/dashboard/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
        }
        for more in ({}, basic(api), {**basic(watch), "Origin": "https://evil.example"}):
            assert httpx2.get(socket, headers={**upgrade, **more}).status_code == 403, more


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()}


#: Elements whose own text has less contrast than 4.5 to what is behind it (WCAG 2's formula).
CONTRAST = """() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return {r, g, b, a}; };
  const light = ({r, g, b}) => [r, g, b].map((one) => one / 255)
    .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const color = parse(getComputedStyle(one).backgroundColor);
      if (color.a > 0.99) return color;
    }
    return {r: 255, g: 255, b: 255, a: 1};
  };
  return [...document.querySelectorAll(".all *")].filter((one) => {
    if (![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) return false;
    if (one.closest("svg, .skip, :disabled, [hidden]")) return false;
    const [dark, bright] = [light(parse(getComputedStyle(one).color)), light(behind(one))].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05) < 4.5;
  }).map((one) => one.outerHTML.slice(0, 100));
}"""
