"""Packages that only some commands need, and which ``pip install`` brings each.

pyproject.toml has the extras: ``eval`` (lm-eval, datasets, scipy), ``plot`` (matplotlib), ``theory`` (scipy),
``gguf`` and ``peft``.
"""

from __future__ import annotations

from importlib.util import find_spec

from mxquant.errors import MissingPackageError


def needs(what: str, *packages: str, extra: str) -> None:
    """Raise ``MissingPackageError`` unless all ``packages``, by their import names, are installed.

    ``what`` is an option or a command, as the user typed it; it begins the message. Nothing is imported.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        which = f"the package {missing[0]}" if len(missing) == 1 else f"the packages {' and '.join(missing)}"
        raise MissingPackageError(f'{what} needs {which}: pip install "mxquant[{extra}]"')
