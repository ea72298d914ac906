"""HTML for notebooks: text is escaped, and empty parts are left out."""

from __future__ import annotations

from pathlib import PurePath

from footplate.core import html

HOSTILE = "<script>alert('1')</script>\"&"
ESCAPED = "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&quot;&amp;"


def test_every_text_is_escaped():
    parts = (
        html.facts({HOSTILE: HOSTILE}),
        html.grid([HOSTILE], [[HOSTILE]]),
        html.notes([HOSTILE]),
        html.preformatted(HOSTILE),
        html.link(PurePath(HOSTILE)),
    )
    text = html.card(HOSTILE, *parts)
    assert "<script" not in text
    assert text.count(ESCAPED) == 8


def test_values_that_are_missing_have_no_line():
    assert "cause" not in html.facts({"state": "RUNNING", "cause": "", "ended": None})
    assert "0" in html.facts({"steps": 0})
    assert html.card("Trainer", html.facts({}), html.notes([])) == "<div>\n<strong>Trainer</strong>\n</div>"


def test_the_page_decides_on_colors():
    text = html.card("a", html.facts({"b": 1}), html.grid(["c"], [["d"]]), html.progress(1, 2))
    assert "color" not in text
    assert "background" not in text
