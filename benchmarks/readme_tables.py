# SPDX-License-Identifier: Apache-2.0
"""Renders the performance table of README.md from the results that the other scripts left.

    python benchmarks/readme_tables.py [--write]

Without ``--write`` it prints the section; with it, the text between ``<!-- performance:begin -->`` and
``<!-- performance:end -->`` in README.md is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- performance:begin -->", "<!-- performance:end -->"


def load(name: str) -> dict[str, Any]:
    path = HERE / "results" / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing; run benchmarks/{name}.py first")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def render() -> str:
    """The section between the markers."""
    kernels, generation, checkpoint = map(load, ("cpu_kernels", "generate_speed", "large_checkpoint_memory"))
    rows = [
        *_element_rows(kernels),
        *_linear_rows(kernels),
        _generation_row(generation),
        _checkpoint_row(checkpoint),
    ]
    table = ["| work | mxquant | beside |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([_introduction(kernels), "", *table, "", _limits(kernels)])


def _introduction(kernels: dict[str, Any]) -> str:
    machine, versions, size = kernels["machine"], kernels["versions"], kernels["size"]
    return (
        f"{kernels['threads']} cores of an {machine['cpu']} with AVX-512, torch {versions['torch'].partition('+')[0]}. "
        f"Matrices are {size} x {size}, bf16 and `--scale ue5m3 --block 16`; caches are cleared before each call, "
        "contenders take turns, medians are compared. From `benchmarks/results/cpu_kernels.json`, "
        "`generate_speed.json` and `large_checkpoint_memory.json`; "
        "this section is written by `python benchmarks/readme_tables.py --write`."
    )


def _element_rows(kernels: dict[str, Any]) -> list[list[str]]:
    found = {row["work"]: row for row in kernels["elements"]}
    names = {
        "quantize absmax, avx512": "quantize, rule `absmax`",
        "quantize search, avx512": "quantize, rule `search` (default)",
        "dequantize, avx512": "dequantize to bf16",
    }
    return [
        [
            text,
            f"{found[name]['elements_per_second'] / 1e9:.1f} G weights/s",
            f"{found[name]['ratio_to_copy']:.2f}x the speed of `tensor.copy_`",
        ]
        for name, text in names.items()
        if name in found
    ]


def _linear_rows(kernels: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"linear, {row['m']} row{'s' if row['m'] > 1 else ''}{', AVX2 only' if row['level'] == 'avx2' else ''}",
            f"{_time(row['packed_us'])}",
            f"{row['ratio']:.2f}x the speed of dense `F.linear`",
        ]
        for row in kernels["linear"]
        if row["level"] == "avx512" or row["m"] == 1
    ]


def _generation_row(generation: dict[str, Any]) -> list[str]:
    return [
        f"`generate`, {generation['model']}, batch 1",
        f"{generation['packed_tokens_per_second']:.0f} tokens/s",
        f"{generation['ratio']:.2f}x dense bf16 ({generation['dense_tokens_per_second']:.0f} tokens/s)",
    ]


def _checkpoint_row(checkpoint: dict[str, Any]) -> list[str]:
    whole, work = (checkpoint[key] / checkpoint["copy_seconds"] for key in ("wall_seconds", "work_seconds"))
    memory = checkpoint["peak_rss_anon_bytes"] / 1e9
    return [
        f"`mxquant quantize`, {checkpoint['parameters'] / 1e9:.1f} billion parameters",
        f"{checkpoint['wall_seconds']:.1f} s, {memory:.2f} GB of memory",
        f"{whole:.2f}x the time of copying its files; {work:.2f}x without starting Python and planning",
    ]


def _limits(kernels: dict[str, Any]) -> str:
    limits, copy = kernels["limits"], next(row for row in kernels["elements"] if row["work"] == "copy")
    best = max(row["gflops"] for row in kernels["linear"])
    overhead = kernels["overhead_us"]
    return (
        f"`tensor.copy_` moves {copy['elements_per_second'] * 4 / 1e9:.0f} GB/s here, and `{limits['instruction']}` "
        f"on registers alone does {limits['instruction_flops'] / 1e9:.0f} GFLOP/s, of which linear reaches {best:.0f}. "
        f"Calling a packed layer costs {overhead['packed']:.1f} µs, a dense one {overhead['dense']:.1f} µs."
    )


def _time(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.0f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the section in README.md")
    args = parser.parse_args()
    section = render()
    if not args.write:
        print(section)
        return
    text = README.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"README.md needs one {BEGIN} and one {END}")
    before, rest = text.split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{section}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
