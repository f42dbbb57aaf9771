"""Packages that only some commands need. pyproject.toml says which extra brings which."""

from __future__ import annotations

from importlib.util import find_spec

from mxquant.errors import MissingPackageError, MXQuantError


def needs(what: str, *packages: str, extra: str, error: type[MXQuantError] = MissingPackageError) -> None:
    """Raise ``error`` unless all ``packages``, by their import names, are installed. Imports none of them.

    ``what`` is the command, option or file that needs them, and begins the message; ``extra`` is what pip
    takes in brackets, e.g. ``"eval"`` or ``"eval,plot"``.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        which = f"the package{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        raise error(f"{what} needs {which}: pip install 'mxquant[{extra}]'")
