# SPDX-License-Identifier: Apache-2.0
"""Renders the tables of speed in the documentation from the results that the other scripts left.

    python benchmarks/performance_tables.py [--write]

Without ``--write`` it prints the sections; with it, the text between ``<!-- NAME:begin -->`` and
``<!-- NAME:end -->`` is replaced: ``performance`` in docs/cpu-kernels.md, ``peers`` in README.md.
A test compares both with the results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent


def load(name: str) -> dict[str, Any]:
    path = HERE / "results" / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing; run benchmarks/{name}.py first")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def render_kernels() -> str:
    """The section of docs/cpu-kernels.md."""
    kernels, generation = load("cpu_kernels"), load("generate_speed")
    rows = [*_element_rows(kernels), *_linear_rows(kernels), _generation_row(generation)]
    table = ["| work | mxquant | beside |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([_introduction(kernels), "", *table, "", _limits(kernels)])


def _introduction(kernels: dict[str, Any]) -> str:
    machine, versions, size = kernels["machine"], kernels["versions"], kernels["size"]
    return (
        f"{kernels['threads']} cores of an {machine['cpu']} with AVX-512, torch {versions['torch'].partition('+')[0]}. "
        f"Matrices are {size} x {size}, bf16 and `--scale ue5m3 --block 16`; caches are cleared before each call, "
        "contenders take turns, medians are compared. From `benchmarks/results/cpu_kernels.json` and "
        "`generate_speed.json`; this section is written by `python benchmarks/performance_tables.py --write`."
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


def render_peers() -> str:
    """The section of README.md: quantizing a checkpoint, beside other programs and a copy."""
    peers, large = load("quantize_vs_peers"), load("large_checkpoint_memory")
    found, machine = peers["contenders"], peers["machine"]
    versions = {name: found[name]["versions"] for name in ("ours", "llmcompressor", "torchao")}
    ours, llmcompressor, torchao = (
        f"{versions[name][package]}"
        for name, package in (("ours", "mxquant"), ("llmcompressor", "llmcompressor"), ("torchao", "torchao"))
    )
    rows = [
        ("folder to folder, NVFP4, `absmax`", "ours-nvfp4", "llmcompressor", None),
        ("folder to folder, `ue5m3/16`, `search` (the default)", "ours", None, None),
        ("bf16 to NVFP4 in memory, `absmax`", "ours-cast", None, "torchao"),
    ]
    table = [
        f"| work | mxquant {ours} | llm-compressor {llmcompressor} | torchao {torchao} |",
        "|---|---|---|---|",
        *(
            f"| {work} | {' | '.join(_seconds(found[name]) if name else '' for name in names)} |"
            for work, *names in rows
        ),
    ]
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct ({peers['parameters'] / 1e6:.1f} M parameters, bf16), {machine['cores']} cores of "
            f"an {machine['cpu']}, torch {peers['versions']['torch'].partition('+')[0]}, {peers['date']}; median of "
            f"{peers['repeats']} runs, without imports. llm-compressor by `model_free_ptq` with `NVFP4A16`, torchao by "
            "`NVFP4Tensor.to_nvfp4`. From `benchmarks/results/quantize_vs_peers.json`; this section is written by "
            "`python benchmarks/performance_tables.py --write`.",
            "",
            *table,
            "",
            f"A plain copy of the folder takes {_seconds(found['copy'])}. A checkpoint of "
            f"{large['parameters'] / 1e9:.1f} billion parameters ({large['bytes_before'] / 1e9:.1f} GB) takes "
            f"{large['wall_seconds']:.1f} s with `--scale ue5m3 --block 16`, of which {large['work_seconds']:.1f} s "
            "are the work after starting Python and planning, and at most "
            f"{large['peak_rss_anon_bytes'] / 1e9:.2f} GB of memory; copying its files takes "
            f"{large['copy_seconds']:.1f} s (`benchmarks/results/large_checkpoint_memory.json`).",
        ]
    )


def _seconds(contender: dict[str, Any]) -> str:
    return f"{contender['seconds']['median']:.2f} s"


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


SECTIONS = {
    ("performance", ROOT / "docs" / "cpu-kernels.md"): render_kernels,
    ("peers", ROOT / "README.md"): render_peers,
}


def replaced(text: str, name: str, section: str) -> str:
    """A page with the text between the markers of a section replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"the page needs one {begin} and one {end}")
    return f"{text.partition(begin)[0]}{begin}\n{section}\n{end}{text.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the sections in the documentation")
    args = parser.parse_args()
    for (name, page), render in SECTIONS.items():
        if args.write:
            page.write_text(replaced(page.read_text(encoding="utf-8"), name, render()), encoding="utf-8")
        else:
            print(render(), end="\n\n")


if __name__ == "__main__":
    main()
