"""docs/environment.md lists the environment variables of mxquant that the code names, no more and no fewer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"_?MXQUANT_[A-Z_]+")


def named_in(tree: ast.Module) -> set[str]:
    """String constants that are the name of a variable of ours."""
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text for text in strings if NAME.fullmatch(text)}


def variables(*folders: str) -> set[str]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert files
    return set().union(*(named_in(ast.parse(path.read_bytes(), str(path))) for path in files))


def documented() -> dict[str, list[str]]:
    """Variable -> its row (values, default, meaning) on the page."""
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row[1:] for row in rows if NAME.fullmatch(row[0].strip("`"))}


def test_the_page_lists_every_variable_that_the_code_names():
    assert variables("mxquant", "cli", "evals", "kernels", "tests") == set(documented())


@pytest.mark.parametrize("name", sorted(documented()))
def test_each_variable_has_values_and_a_meaning(name):
    values, _, meaning = documented()[name]
    assert values
    assert meaning


def test_a_variable_that_only_prose_names_is_not_one():
    name = NAME.pattern[2:10] + "OTHER"  # put together, so that this file does not name a variable
    assert not named_in(ast.parse(f"'{name}=1 does nothing.'"))
    assert named_in(ast.parse(f"os.environ.get('{name}')")) == {name}
