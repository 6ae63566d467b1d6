"""Goal: the pages of names are complete: docs/fields.md is what the code says, docs/python.md has all public ones."""

from __future__ import annotations

import msgspec

import pyengine
from pyengine.gateway import fields
from pyengine.gateway.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

from .pages import ROOT

KINDS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def test_the_page_is_what_the_code_says() -> None:
    """To write it anew: python -m pyengine.gateway.fields > docs/fields.md."""
    assert (ROOT / "docs/fields.md").read_text() == fields.document()


def test_every_field_has_its_meaning_and_no_other() -> None:
    _, schemas = msgspec.json.schema_components(KINDS, ref_template="{name}")
    named = {(kind, name) for kind, schema in schemas.items() for name in schema["properties"]}
    assert {name for _, name in named} <= fields.MEANINGS.keys()
    assert {name for name in fields.MEANINGS if "." not in name} <= {name for _, name in named}
    assert {name for name in fields.MEANINGS if "." in name} <= {f"{kind}.{name}" for kind, name in named}


def test_every_public_name_is_on_the_python_page() -> None:
    page = (ROOT / "docs/python.md").read_text()
    assert [name for name in pyengine.__all__ if f":: pyengine.{name}\n" not in page] == []
