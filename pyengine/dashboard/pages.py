"""The pages, by NiceGUI: it serves them, holds each one's web socket, and calls back every second.

What changes is sent as HTML of whole sections; the page's own script (static/page.js) changes only what differs, so
that a focus, a selection and a scrolled table stay. The playground is that script's as well: it asks the API as any
client.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from fastapi import FastAPI
from nicegui import app as nicegui_app
from nicegui import ui

from pyengine.cli import installed_version
from pyengine.dashboard import story
from pyengine.dashboard.feed import EVERY, Feed
from pyengine.gateway.recent import Record
from pyengine.gateway.request import RequestError
from pyengine.gateway.service import Service
from pyengine.scheduler.explanation import Explanation

PATH = "/dashboard"
STATIC = Path(__file__).parent / "static"

#: Of each section: the id of what is in it, its title, how the links at the top call it, and what it shows.
TITLES = (
    (
        "requests",
        "Requests",
        "Requests",
        "the latest of this gateway; each leads to its timeline, and why it went there",
    ),
    ("workers", "Workers", "Workers", "who computes"),
    ("nodes", "Nodes", "Nodes", "whose memory and SSD keep KV"),
    ("tiers", "Where prompt tokens were found", "Tiers", "since the workers started; the nearer, the cheaper"),
    ("transfers", "Transfers", "Transfers", "blocks of KV that went from one place to another"),
    ("hot", "Hot prefixes", "Hot", "reused most just now; a hit is worth half after a minute"),
    ("promises", "Objectives", "Objectives", "answers within the latency that was promised"),
    ("refusals", "Refused and failed", "Refused", "since the start"),
)


def build(service: Service) -> FastAPI:
    """An application that has the pages below PATH. Once in a process: NiceGUI is one for all of it."""
    feed = Feed(service)
    nicegui_app.add_static_files("/static", STATIC)

    @ui.page("/", title="pyengine")
    async def overview() -> None:
        models, shown = await feed.look()
        _page(_overview(shown, models))

        async def update() -> None:
            nonlocal shown
            _, fresh = await feed.look()
            changed = {name: html for name, html in fresh.items() if shown.get(name) != html}
            if changed:
                shown = fresh
                ui.run_javascript(f"pyengine.show({json.dumps(changed)})")

        ui.timer(EVERY, update)

    @ui.page("/requests/{number:path}", title="pyengine: a request")
    async def request(number: str) -> None:
        shown = await _story(service, number)
        _page(_request(number, shown))

        async def update() -> None:
            fresh = await _story(service, number)
            if fresh != shown:
                shown.clear()
                shown.update(fresh)
                ui.run_javascript(f"pyengine.show({json.dumps(fresh)})")

        record = service.recent.find(number)
        if record is not None and not record.end:
            ui.timer(EVERY, update)

    outer = FastAPI(openapi_url=None)
    ui.run_with(
        outer,
        mount_path=PATH,
        title="pyengine",
        dark=None,
        tailwind=False,
        favicon=STATIC / "icon.svg",
        show_welcome_message=False,
    )
    return outer


def _page(body: str) -> None:
    ui.add_head_html(
        f'<link rel="stylesheet" href="{PATH}/static/style.css"><script src="{PATH}/static/page.js" defer></script>'
        '<meta name="color-scheme" content="light dark">'
    )
    # What comes from outside has been escaped where it became HTML.
    ui.html(body, sanitize=False).classes("all")


def _header(state: str, links: str) -> str:
    return (
        f'<a class="skip" href="#main">To the content</a><header><a class="name" href="{PATH}/">pyengine</a>'
        f'<span id="state">{state}</span><nav aria-label="sections">{links}</nav></header>'
    )


def _overview(shown: dict[str, str], models: tuple[str, ...]) -> str:
    links = "".join(f'<a href="#{name}-title">{escape(short)}</a>' for name, _, short, _ in TITLES)
    links += '<a href="#playground-title">Playground</a>'
    parts = "".join(
        f'<section class="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title" tabindex="-1">{escape(title)} '
        f'<small>{escape(hint)}</small></h2><div class="wide" id="{name}" role="region" tabindex="0" '
        f'aria-label="{escape(title)}">{shown[name]}</div></section>'
        for name, title, _, hint in TITLES
    )
    foot = f"<footer>pyengine {escape(installed_version())}. This page only looks: it changes nothing.</footer>"
    head = f'<div class="tiles" id="head">{shown["head"]}</div>'
    return f'{_header(shown["state"], links)}<div id="main" class="main">{head}{parts}{_playground(models)}</div>{foot}'


def _playground(models: tuple[str, ...]) -> str:
    options = "".join(f"<option>{escape(name)}</option>" for name in models)
    return (
        '<section class="playground" aria-labelledby="playground-title">'
        '<h2 id="playground-title" tabindex="-1">Playground '
        "<small>asks the API as any client; the conversation stays in this page</small></h2>"
        '<div id="talk" role="log" aria-live="polite" aria-label="conversation"></div>'
        '<form id="ask"><label for="text">Message</label><textarea id="text" rows="3" required '
        'placeholder="What is the capital of France?"></textarea><div class="row">'
        f'<label>Model <select id="model">{options}</select></label>'
        '<label>Tokens at most <input id="most" type="number" min="1" max="100000" value="200"></label>'
        '<label>Temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.7"></label>'
        '<label id="key-label" hidden>API key <input id="key" type="password" autocomplete="off"></label>'
        '<button type="submit" id="send">Send</button><button type="button" id="stop" disabled>Stop</button>'
        '<button type="button" id="anew">New conversation</button></div></form></section>'
    )


async def _story(service: Service, number: str) -> dict[str, str]:
    """The inside of a request's sections; without any if it is not remembered."""
    record = service.recent.find(number)
    if record is None:
        return {}
    made = {"facts": story.facts(record)}
    for at, choice in enumerate(record.choices):
        made[f"timeline-{at}"] = story.timeline(choice)
    explanation = await _explained(service, record)
    made["why"] = story.why(explanation)
    return made


async def _explained(service: Service, record: Record) -> Explanation | None:
    try:
        return await service.explain(record.choices[0].id)
    except RequestError:
        return None


def _request(number: str, shown: dict[str, str]) -> str:
    back = f'<a href="{PATH}/">All requests</a>'
    title = f"<h1>Request <code>{escape(number)}</code></h1>"
    if not shown:
        text = "This gateway remembers its latest 200 requests, and has none of this name."
        return f'{_header("", back)}<div id="main" class="main">{title}<p class="nothing">{text}</p></div>'
    lines = [name for name in shown if name.startswith("timeline-")]
    parts = "".join(
        f"<section><h2>{'Timeline' if len(lines) == 1 else f'Timeline of answer {at + 1}'}</h2>"
        f'<div id="{name}">{shown[name]}</div></section>'
        for at, name in enumerate(lines)
    )
    reason = f'<section><h2>Why here</h2><div id="why">{shown["why"]}</div></section>'
    list_of_facts = f'<dl id="facts">{shown["facts"]}</dl>'
    return f'{_header("", back)}<div id="main" class="main">{title}{list_of_facts}{parts}{reason}</div>'
