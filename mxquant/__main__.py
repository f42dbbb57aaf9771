"""``python -m mxquant``: the same as the command ``mxquant``."""

from __future__ import annotations

from mxquant.cli.main import main

if __name__ == "__main__":
    main(prog_name="mxquant")
