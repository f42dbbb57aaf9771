# SPDX-License-Identifier: Apache-2.0
"""Does memory stay bounded, whatever the model's size? Quantizes a large random checkpoint.

    python benchmarks/large_checkpoint_memory.py --billions 4

Makes a Llama-shaped bf16 checkpoint of random numbers, runs ``mxquant quantize`` on it in a process
of its own, and watches that process from outside: anonymous memory (RssAnon) is what it needs;
mapped files (RssFile) are page cache that the system takes back at will. Exits with 1 if the peak
of RssAnon reaches ``--limit-gb``. Needs about twice the checkpoint's size on disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import describe, print_table, write_json

from mxquant.checkpoint.layout import INDEX_NAME, OutputTensor
from mxquant.checkpoint.writer import ShardWriter, index_json, plan_shards, shard_names

# Random numbers made once; tensors are cut from it at different places and scaled differently.
BLOCK_ELEMENTS = 1 << 24
SAMPLE_SECONDS = 0.02
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama with grouped-query attention and tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128

    @classmethod
    def of(cls, billions: float) -> Shape:
        """About that many parameters; 4 gives 36 layers of width 2560, as common 4B models have."""
        factor = (billions / 4) ** (1 / 3)
        hidden = 128 * max(1, round(20 * factor))
        heads = 4 * max(1, round(8 * factor))
        shape = cls(hidden, 128 * round(3.8 * hidden / 128), 1, heads, heads // 4, 256 * round(593.5 * factor))
        one_layer = sum(t.parameters for t in shape.layer(0))
        embedding = shape.vocabulary * shape.hidden
        layers = max(1, round((billions * 1e9 - embedding) / one_layer))
        return cls(hidden, shape.intermediate, layers, heads, shape.kv_heads, shape.vocabulary)

    def layer(self, number: int) -> list[OutputTensor]:
        """The tensors of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "input_layernorm": (self.hidden,),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
        }
        return [OutputTensor(f"model.layers.{number}.{k}.weight", "BF16", v) for k, v in shapes.items()]

    def tensors(self) -> list[OutputTensor]:
        """All tensors of the model; the head is the embedding and has none of its own."""
        embedding = OutputTensor("model.embed_tokens.weight", "BF16", (self.vocabulary, self.hidden))
        layers = [t for number in range(self.layers) for t in self.layer(number)]
        return [embedding, *layers, OutputTensor("model.norm.weight", "BF16", (self.hidden,))]

    def config(self) -> dict[str, Any]:
        """``config.json`` of the model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--billions", type=float, default=4.0, help="parameters (default 4)")
    parser.add_argument("--shards", type=int, default=4, help="files of the checkpoint (default 4)")
    parser.add_argument("--limit-gb", type=float, default=3.0, help="fail from this peak on (default 3)")
    parser.add_argument("--dir", type=Path, help="where to work (default: the system's temporary folder)")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint and the output")
    parser.add_argument("--no-copy", action="store_true", help="do not time a plain copy for comparison")
    parser.add_argument("--json", type=Path, default=RESULTS / "large_checkpoint_memory.json")
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="after --: options of mxquant quantize (default --scale ue5m3 --block 16)",
    )
    args = parser.parse_args()
    args.options = [o for o in args.options if o != "--"] or ["--scale", "ue5m3", "--block", "16"]
    return args


def check_disk(folder: Path, checkpoint_bytes: int, with_copy: bool) -> None:
    """Stop if the disk is too small for the checkpoint and its copy, or its output."""
    needed = checkpoint_bytes * (2.02 if with_copy else 1.5)
    free = shutil.disk_usage(folder).free
    if free < needed:
        sys.exit(f"{folder}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; choose another --dir")


def make_checkpoint(folder: Path, shape: Shape, shards: int) -> None:
    """Write a random checkpoint, one tensor at a time."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(BLOCK_ELEMENTS, generator=generator).mul_(0.02).to(torch.bfloat16)
    tensors = shape.tensors()
    layout = split_evenly(tensors, shards)
    for name, members in zip(shard_names(len(layout)), layout, strict=True):
        writer = ShardWriter(folder / name, members)
        for tensor in members:
            write_random(writer, tensor, block)
        writer.finish()
    if len(layout) > 1:
        (folder / INDEX_NAME).write_text(index_json(layout))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))


def split_evenly(tensors: list[OutputTensor], shards: int) -> list[list[OutputTensor]]:
    """The tensors in order, in ``shards`` files of about the same size (fewer for a small model)."""
    limit = sum(t.nbytes for t in tensors) // shards
    while len(layout := plan_shards([[t] for t in tensors], limit)) > shards:
        limit += limit // 100 + 1
    return layout


def write_random(writer: ShardWriter, tensor: OutputTensor, block: torch.Tensor) -> None:
    """Fill one tensor: norms with ones, the rest from ``block``, at its own offsets and scale."""
    if len(tensor.shape) == 1:
        writer.write(tensor.name, torch.ones(tensor.shape, dtype=torch.bfloat16))
        return
    generator = torch.Generator().manual_seed(sum(tensor.name.encode()) * tensor.parameters % 2**31)
    done = 0
    while done < tensor.parameters:
        count = min(tensor.parameters - done, BLOCK_ELEMENTS // 4)
        start = int(torch.randint(BLOCK_ELEMENTS - count + 1, (1,), generator=generator))
        scale = 0.25 + 2 * float(torch.rand(1, generator=generator))
        writer.write(tensor.name, block[start : start + count] * scale, 2 * done)
        done += count


def watch(command: list[str], output: Path, log: Path) -> dict[str, Any]:
    """Run a command; its wall time and the peaks of its memory, seen from outside."""
    began = time.perf_counter()
    peaks = {"RssAnon": 0, "RssFile": 0}
    samples = 0
    with open(output, "w") as stdout, open(log, "w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        while process.poll() is None:
            for name, value in memory_of(process.pid).items():
                peaks[name] = max(peaks[name], value)
            samples += 1
            time.sleep(SAMPLE_SECONDS)
    wall = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"mxquant quantize failed with {process.returncode}:\n{log.read_text()}")
    return {
        "wall_seconds": wall,
        "peak_rss_anon_bytes": peaks["RssAnon"],
        "peak_rss_file_bytes": peaks["RssFile"],
        "samples": samples,
    }


def memory_of(pid: int) -> dict[str, int]:
    """Resident memory in bytes, anonymous and of mapped files; nothing once the process is gone."""
    found = {}
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith(("RssAnon:", "RssFile:")):
                    name, value = line.split()[:2]
                    found[name.rstrip(":")] = 1024 * int(value)
    except OSError:
        pass
    return found


def time_copy(source: Path, target: Path) -> float:
    """Seconds of a plain copy of the folder, which is removed again."""
    began = time.perf_counter()
    shutil.copytree(source, target)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Make, copy, quantize; all figures as data."""
    about, shape = describe(), Shape.of(args.billions)
    parameters = sum(t.parameters for t in shape.tensors())
    source, out = work / "dense", work / "quantized"
    check_disk(work, 2 * parameters, not args.no_copy)
    source.mkdir()
    print(f"making {parameters / 1e9:.3f} B parameters ({2 * parameters / 1e9:.2f} GB) ...", flush=True)
    began = time.perf_counter()
    make_checkpoint(source, shape, args.shards)
    made = time.perf_counter() - began
    copied = None if args.no_copy else time_copy(source, work / "copy")
    print(f"mxquant quantize {' '.join(args.options)} ...", flush=True)
    command = [sys.executable, "-m", "mxquant.cli.main", "quantize", str(source), "-o", str(out), "--json"]
    figures = watch([*command, *args.options], work / "report.json", work / "quantize.log")
    report = json.loads((work / "report.json").read_text())
    return {
        **about,
        "options": args.options,
        "shape": vars(shape),
        "parameters": parameters,
        "shards": len(list(source.glob("*.safetensors"))),
        "bytes_before": sum(f.stat().st_size for f in source.glob("*.safetensors")),
        "bytes_after": sum(f.stat().st_size for f in out.glob("*.safetensors")),
        "bits_per_weight": report["bits_per_weight"],
        "make_seconds": made,
        "copy_seconds": copied,
        **figures,
        "work_seconds": report["seconds"],
        "parameters_per_second": parameters / report["seconds"],
        "parameters_per_second_of_process": parameters / figures["wall_seconds"],
        "limit_bytes": int(args.limit_gb * 1e9),
        "within_limit": figures["peak_rss_anon_bytes"] < args.limit_gb * 1e9,
    }


def print_results(result: dict[str, Any]) -> None:
    copied = result["copy_seconds"]
    rows = [
        ["parameters", f"{result['parameters'] / 1e9:.3f} B in {result['shards']} shards"],
        ["size before", f"{result['bytes_before'] / 1e9:.2f} GB"],
        ["size after", f"{result['bytes_after'] / 1e9:.2f} GB"],
        ["bits per quantized weight", f"{result['bits_per_weight']:.3f}"],
        ["plain copy of the input", "-" if copied is None else f"{copied:.1f} s"],
        ["read, quantize, write", f"{result['work_seconds']:.1f} s"],
        ["whole process", f"{result['wall_seconds']:.1f} s"],
        ["speed (read, quantize, write)", f"{result['parameters_per_second'] / 1e6:.1f} M parameters/s"],
        ["peak RssAnon", f"{result['peak_rss_anon_bytes'] / 1e9:.3f} GB ({result['samples']} samples)"],
        ["limit", f"{result['limit_bytes'] / 1e9:.1f} GB: {'kept' if result['within_limit'] else 'EXCEEDED'}"],
    ]
    print()
    print_table(["what", "value"], rows)


def main() -> None:
    args = parse_args()
    parent = args.dir or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="large-checkpoint-", dir=parent))
    try:
        result = run(args, work)
    finally:
        if args.keep:
            print(f"kept in {work}")
        else:
            shutil.rmtree(work)
    print_results(result)
    write_json(args.json, result)
    sys.exit(0 if result["within_limit"] else 1)


if __name__ == "__main__":
    main()
