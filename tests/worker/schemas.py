"""Random JSON schemas whose values are short, so that any walk through one ends."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "name", "größe", 'q"uote', "back\\slash", "{brace", "日本", "👍"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-99, 99),
        st.integers(0, 40),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(NAMES, st.integers(-5, 5), st.none()), min_size=1, max_size=4),
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"}, {"const": {"x": ["}"]}}]),
)


def _wider(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def object_of(properties: dict[str, Any], needed: set[str]) -> dict[str, Any]:
        required = [name for name in properties if name in needed]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(object_of, st.dictionaries(NAMES, inner, max_size=3), st.sets(NAMES)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(LEAVES, _wider, max_leaves=6)
