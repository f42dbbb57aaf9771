"""Text that every Python ships, split into a training and a held-out part.

A document is one topic of `pydoc_data.topics`, or the docstrings of one standard library module
laid out the way the topics are (a signature, then its indented text). Sources are parsed, never
imported: importing some modules opens browsers or prints poems.

The split is by name, so that it is the same on every Python. Names are hashed by *group* (a
topic, or a top-level package), because neighbours within a package repeat each other. Whatever
still occurs twice is kept once, and the held-out part is read first: it stays whole, and the
training part loses its copies. The text differs a little from one Python to the next;
`provenance()` says which one is being read.
"""

import ast
import hashlib
import platform
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

# Tests and demos hold little prose; the others are not the standard library's own text.
_SKIPPED = {"test", "tests", "idlelib", "turtledemo", "pydoc_data", "__pycache__"}

# The share is that of groups. The salt was picked, before any training, for a held-out part that
# has topics as well as modules, and only modules that Python 3.11 to 3.14 all have.
_HELDOUT_SHARE = 0.07
_SALT = "mxquant-176"

# Shorter paragraphs ("Example:", "Changed in version 3.9.") are common phrases, not copies.
_COPY_LENGTH = 40

_Named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documents(split: Split) -> list[str]:
    """The documents of one part, in a fixed order.

    No docstring, and no paragraph of 40 characters or more, occurs twice in the two parts
    together. Raises `ValueError` for a split that is neither "train" nor "heldout".
    """
    if split not in ("train", "heldout"):
        raise ValueError(f'split must be "train" or "heldout", not {split!r}')
    return list(_read(split)[0])


def heldout_text() -> str:
    """The held-out documents as one text, separated by blank lines: the `builtin` eval text."""
    return "\n\n".join(_read("heldout")[0])


def provenance() -> dict[str, str]:
    """Which text this is: the running Python's version and the SHA-256 of the held-out text."""
    digest = hashlib.sha256(heldout_text().encode("utf-8")).hexdigest()
    return {"python": platform.python_version(), "heldout_sha256": digest}


@cache
def _read(split: Split) -> tuple[tuple[str, ...], frozenset[str]]:
    """The documents of one part, and the keys of all that was seen up to its end."""
    seen = set() if split == "heldout" else set(_read("heldout")[1])
    texts = []
    for pieces in _sources(split):
        fresh = [text for head, body in pieces if (text := _layout(head, _fresh(body, seen)))]
        if fresh:  # most often a module without docstrings
            texts.append("\n\n".join(fresh))
    return tuple(texts), frozenset(seen)


def _sources(split: Split) -> Iterator[list[tuple[str, str]]]:
    """The (heading, text) pairs of every document of one part, topics first, then by name."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        if _split_of(f"topic:{name}") == split:
            yield [("", topics[name])]
    # Name by name: a walk of the whole folder would enter `site-packages`.
    for name in sorted(sys.stdlib_module_names):
        if _split_of(_group(name)) == split:
            yield from (_docstrings(module, path) for module, path in _modules(name))


def _modules(name: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, source) of a top-level module, or of all the modules of a package."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [root / f"{name}.py", *(root / name).rglob("*.py")]
    modules = {path.relative_to(root).with_suffix("").parts: path for path in paths}
    for parts, path in sorted(modules.items()):
        if not _SKIPPED.intersection(parts) and path.is_file():
            yield ".".join(parts).removesuffix(".__init__"), path


def _group(package: str) -> str:
    """What is split as one: `_pydecimal`, `_decimal` and `decimal` tell the same story."""
    return re.sub(r"^_(py)?_?", "", package)


def _split_of(group: str) -> Split:
    """The part that a group belongs to: a hash of its name against the held-out share."""
    digest = hashlib.sha256(f"{_SALT}/{group}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "heldout" if share < _HELDOUT_SHARE else "train"


def _docstrings(module: str, path: Path) -> list[tuple[str, str]]:
    """(signature, docstring) of a module and all it defines, in the order of the source."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # templates and deliberately broken files

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _Named):
                if docstring := ast.get_docstring(child):
                    yield _signature(child, prefix), docstring
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.stmt, ast.excepthandler)):
                yield from visit(child, prefix)  # definitions under `if` and `try`

    return [(f"module {module}", ast.get_docstring(tree) or ""), *visit(tree, "")]


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> str:
    """`class Name(Base)` or `Class.method(self, x=1)`."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {prefix}{node.name}({bases})" if bases else f"class {prefix}{node.name}"
    return f"{prefix}{node.name}({ast.unparse(node.args)})"


def _layout(heading: str, body: str) -> str:
    """A heading and its text, indented by three spaces as in the topics; "" without text."""
    if not body or not heading:
        return body
    return f"{heading}\n\n{textwrap.indent(body, '   ')}"


def _fresh(text: str, seen: set[str]) -> str:
    """The text without the paragraphs that `seen` holds, or "" if it is there as a whole.

    Adds its own to `seen`. White space does not count: topics quote each other indented.
    """
    whole = " ".join(text.split())
    if whole in seen:
        return ""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        key = " ".join(paragraph.split())
        if len(key) < _COPY_LENGTH or key not in seen:
            kept.append(paragraph.rstrip())
        seen.add(key)
    seen.add(whole)
    return "\n\n".join(kept)
