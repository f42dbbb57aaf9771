"""What the lines of a task's file become before lm-eval sees them.

Nothing is written: the rows live in memory, so there is no cache of `datasets` to grow or to go stale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mxquant.errors import MXQuantError
from mxquant.evals.text import read_utf8

# An unfinished sentence at the end of a HellaSwag context, which lm-eval has as `ctx_b`.
_UNFINISHED = re.compile(r"(?<=[.!?]) (?=[a-z][^.!?]*$)")


def names() -> list[str]:
    """The tasks that a file can be given to."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def definition(name: str) -> Path:
    """The YAML file of a task of ``names``."""
    return Path(__file__).with_name(f"{name}.yaml")


def hellaswag(path: str, **ignored: Any) -> dict[str, Any]:
    """HellaSwag's validation rows in the columns that lm-eval's preprocessing reads.

    A line has ``endings`` (four texts), ``label`` (the right one's index, a number or its digit) and
    the context: ``activity_label``, ``ctx_a`` and ``ctx_b`` as published, or all of it as ``ctx``,
    ``"Canoeing: Two women sit in a canoe. they"``. lm-eval capitalizes ``ctx_b``, which is where an
    unfinished last sentence of ``ctx`` begins.
    """
    return _dataset("validation", path, _hellaswag_row)


def lambada(path: str, **ignored: Any) -> dict[str, Any]:
    """LAMBADA's rows: a line has a ``text``, whose last word is to be guessed."""
    return _dataset("test", path, _lambada_row)


def _hellaswag_row(line: dict[str, Any]) -> dict[str, Any]:
    endings, label = line["endings"], int(line["label"])
    if not (isinstance(endings, list) and len(endings) > 1 and all(isinstance(e, str) and e for e in endings)):
        raise ValueError("endings is not a list of texts")
    if not 0 <= label < len(endings):
        raise ValueError(f"label {label} is not the index of one of {len(endings)} endings")
    if "ctx_a" in line:
        context = {key: _text(line, key) for key in ("activity_label", "ctx_a", "ctx_b")}
    else:
        activity, colon, rest = _text(line, "ctx").partition(": ")
        if not colon:
            raise ValueError("ctx does not begin with an activity and a colon, as in 'Canoeing: Two women'")
        start, *unfinished = _UNFINISHED.split(rest)
        context = {"activity_label": activity, "ctx_a": start, "ctx_b": "".join(unfinished)}
    return {**context, "endings": endings, "label": label}


def _lambada_row(line: dict[str, Any]) -> dict[str, Any]:
    text = _text(line, "text")
    if not all(text.rpartition(" ")[::2]):
        raise ValueError("text has no last word after a space")
    return {"text": text}


def _text(line: dict[str, Any], key: str) -> str:
    if not isinstance(line[key], str):
        raise ValueError(f"{key} is not a text")
    return line[key]


def _dataset(split: str, path: str, row: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {split: Dataset.from_list(list(_rows(Path(path), row)))}


def _rows(path: Path, row: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    number = 0
    for number, text in enumerate(_read(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("not a JSON object")
            yield row(line)
        except KeyError as error:
            raise MXQuantError(f"{path}, line {number}: there is no {error}") from error
        except (ValueError, TypeError) as error:
            raise MXQuantError(f"{path}, line {number}: {error}") from error


def _read(path: Path) -> str:
    text = read_utf8(path, "task", "--tasks NAME=FILE takes a JSONL file")
    if not text.strip():
        raise MXQuantError(f"task file {path} is empty")
    return text
