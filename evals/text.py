"""The texts that perplexity is measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxquant.errors import MXQuantError
from mxquant.evals.hub import ensure_quick_failure
from mxquant.extras import needs

WIKITEXT2 = "wikitext2"
BUILTIN = "builtin"
_WIKITEXT2_SOURCE = ("Salesforce/wikitext", "wikitext-2-raw-v1")


@dataclass(frozen=True)
class EvalText:
    """A text with its name; ``note`` says what else one must know to find the same text again."""

    name: str
    text: str
    note: str = ""

    @property
    def sha256(self) -> str:
        """SHA-256 of the text's UTF-8 bytes, in hexadecimal."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def to_dict(self) -> dict[str, str | int]:
        return {"name": self.name, "sha256": self.sha256, "characters": len(self.text), "note": self.note}


def load_text(name: str | Path) -> EvalText:
    """The text called ``name``: ``"wikitext2"``, ``"builtin"`` or the path of a UTF-8 file.

    ``wikitext2`` is the test split of WikiText-2 (raw) from the hub, its rows joined by blank
    lines, as GPTQ and most work since evaluate it. ``builtin`` is documentation that the running
    Python ships and that the bundled model never saw. A file with one of these two names is
    reached as ``./wikitext2``. Raises ``MXQuantError`` if the text is missing, unreadable or empty.
    """
    if name == WIKITEXT2:
        text = EvalText(WIKITEXT2, _wikitext2(), "test split of wikitext-2-raw-v1, rows joined by blank lines")
    elif name == BUILTIN:
        text = _builtin()
    else:
        path = Path(name).expanduser()
        text = EvalText(str(name), read_utf8(path, "text", f"--text takes a file, {WIKITEXT2} or {BUILTIN}"))
    if not text.text.strip():
        raise MXQuantError(f"text {text.name} is empty; give a file with text in it by --text FILE")
    return text


def load_texts(names: Sequence[str | Path]) -> list[EvalText]:
    """Several texts. Raises ``MXQuantError`` if two are the same, by whatever names."""
    found: list[EvalText] = []
    for name in names:
        text = load_text(name)
        if (same := next((other for other in found if other.sha256 == text.sha256), None)) is not None:
            what = "is given twice" if same.name == text.name else f"is the same as {same.name}"
            raise MXQuantError(f"text {text.name} {what}")
        found.append(text)
    return found


def _wikitext2() -> str:
    ensure_quick_failure()
    needs(f"--text {WIKITEXT2}", "datasets", extra="eval")
    try:
        import datasets

        rows = datasets.load_dataset(*_WIKITEXT2_SOURCE, split="test")["text"]
    except Exception as error:  # the hub's client raises dozens of types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MXQuantError(
            f"cannot get WikiText-2 from the hub ({reason}); use --text FILE with a text of your own, or --text builtin"
        ) from error
    return "\n\n".join(rows)


def _builtin() -> EvalText:
    from mxquant.bundled.text import heldout_text, provenance

    return EvalText(BUILTIN, heldout_text(), f"documentation of Python {provenance()['python']}")


def read_utf8(path: Path, kind: str, option: str) -> str:
    """A file's text. Raises ``MXQuantError`` in words of the ``kind`` of file; ``option`` says what takes one."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise MXQuantError(f"no {kind} file {path}; {option}") from error
    except UnicodeDecodeError as error:
        raise MXQuantError(f"{kind} file {path} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise MXQuantError(f"cannot read {kind} file {path}: {error.strerror}") from error
