"""The command group. Subcommands are imported when they run, so that ``--help`` is instant."""

from __future__ import annotations

import importlib

import click

from mxquant import __version__
from mxquant.cli import quiet_imports

# command -> one line of help; its module is mxquant.cli.<command>, its function <command>.
_COMMANDS = {
    "quantize": "Quantize a checkpoint's weights to a 4-bit block-scaled format.",
    "eval": "Measure perplexity, divergence from a baseline and downstream tasks.",
    "diagnose": "Recommend formats for a model, and mix them within a bit budget.",
    "sweep": "Evaluate a model in many formats, and find where smaller blocks are worse.",
    "train": "Train in FP4 with one or more recipes, and compare their losses.",
    "bench": "Benchmark packed linear layers against dense ones and the machine's limits.",
    "dequantize": "Convert a quantized checkpoint to a dense one.",
    "card": "Rewrite an output's model card with measured quality; push it to the hub.",
    "generate": "Generate text from a prompt, with packed weights.",
    "inspect": "Show what is in a checkpoint: formats, bits per weight, histograms of scales and codes.",
    "verify": "Check a checkpoint for faults.",
    "theory": "Compute the expected error of schemes, and where smaller blocks are worse.",
    "env": "Show versions, the processor and the kernels in use.",
    "completion": "Print a shell completion script for bash, zsh or fish.",
    "demo": "Quantize a small bundled model in four formats, evaluate and compare.",
}

_EPILOG = """\b
Examples:
  mxquant demo
  mxquant quantize meta-llama/Llama-3-8B --scale ue5m3 --block 16
  mxquant eval ./Llama-3-8B-fp4-ue5m3-b16 --baseline meta-llama/Llama-3-8B
"""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        return getattr(importlib.import_module(f"mxquant.cli.{name}"), f"{name}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mxquant")
def main() -> None:
    """4-bit block-scaled quantization (MXFP4, NVFP4, UE5M3) for Hugging Face language models."""
    quiet_imports.install()


if __name__ == "__main__":
    main()
