# SPDX-License-Identifier: Apache-2.0
"""What a measured number depends on: the machine, the versions and the command that made it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGES = ("mxquant", "torch", "transformers", "safetensors")


def describe(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Machine, versions, command and date of this run, ready for JSON."""
    return {
        "machine": machine(),
        "versions": versions(packages),
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, and the memory."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """The command line, folders cut off absolute paths: where things lie is nobody else's business."""
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *(_shorten(word) for word in sys.argv[1:])]
    return shlex.join(["python", *words])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result file and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\nwritten to {path}")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A plain table: first column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def _shorten(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and value.startswith(os.sep):
        return f"{option}={Path(value).name}"
    return Path(word).name if word.startswith(os.sep) else word


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
