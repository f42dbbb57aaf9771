"""The tables of speed in the documentation are those of the results in benchmarks/results."""

from __future__ import annotations

import pytest
from performance_tables import SECTIONS, replaced


@pytest.mark.parametrize(("name", "page"), SECTIONS, ids=lambda value: str(getattr(value, "name", value)))
def test_a_section_is_what_the_script_writes(name, page):
    text = page.read_text(encoding="utf-8")
    assert replaced(text, name, SECTIONS[name, page]()) == text


def test_a_page_without_the_markers_is_refused():
    with pytest.raises(SystemExit, match="one <!-- peers:begin -->"):
        replaced("no markers", "peers", "text")
