"""``mxquant bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxquant.cli.common import handle_errors, output_console, write_json
from mxquant.cli.options import SCHEME_HELP, scheme_from, scheme_options
from mxquant.schemes.formats import QuantScheme

if TYPE_CHECKING:
    import torch

    from mxquant.evals.speed import Ceilings, Shape, Speed

_EPILOG = f"""\b
Examples:
  mxquant bench --shape 1,14336,4096 --shape 16,14336,4096
  mxquant bench meta-llama/Llama-3-8B --format nvfp4 --plot roofline.png
  mxquant bench meta-llama/Llama-3-8B --scale ue5m3 --block 16 --explain --device cuda

{SCHEME_HELP}"""


class _Shape(click.ParamType):
    name = "shape"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        parts = str(value).split(",")
        if len(parts) != 3 or not all(p.strip().isdigit() and int(p) for p in parts):
            self.fail(f"{value!r} is not M,N,K, e.g. 1,14336,4096", param, ctx)
        return tuple(int(p) for p in parts)


@click.command("bench", epilog=_EPILOG, context_settings={"max_content_width": 120})
@click.argument("model", required=False)
@click.option(
    "--shape",
    "shapes",
    type=_Shape(),
    multiple=True,
    metavar="M,N,K",
    help="Rows of activations, output features, input features.",
)
@click.option("--rows", default="1,16", show_default=True, metavar="M,M,...", help="Rows of activations for MODEL.")
@scheme_options
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Dtype of the activations and of the dense weight.",
)
@click.option(
    "--device", default="auto", show_default=True, help="Device: cpu, cuda, ...; auto uses CUDA if available."
)
@click.option("--explain", is_flag=True, help="Only show which kernel runs each layer, and why.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the results to this file as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Plot a roofline: .png, .pdf or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@handle_errors
def bench_command(model: str | None, shapes: tuple[tuple[int, int, int], ...], **options: Any) -> None:
    """Benchmark packed linear layers against dense ones and the machine's limits.

    The shapes are those of MODEL's linear layers (its config is enough) or of --shape. Ceilings are measured:
    the bandwidth of a copy, a large dense product, and on CPUs the instruction that the kernels multiply with.
    Caches are cleared before each call. The error is that of the product with the dequantized weight, so it
    says how exact the kernel is, not the format.
    """
    import torch

    from mxquant.evals import speed
    from mxquant.evals.models import pick_device
    from mxquant.presentation.picture import check_format

    if not model and not shapes:
        raise click.UsageError("pass MODEL or --shape M,N,K")
    if options["plot"]:
        check_format(options["plot"])
    scheme, dtype = scheme_from(options) or QuantScheme(), getattr(torch, options["dtype"])
    device = torch.device(options["device"]) if options["explain"] and options["device"] != "auto" else None
    device = device or pick_device(options["device"])
    rows = _rows(options["rows"])
    jobs = [(speed.Shape("", n, k), m) for m, n, k in shapes]
    if model:
        jobs += [(shape, m) for shape in speed.model_shapes(model) for m in rows]
    if options["explain"]:
        found = [row for shape, m in jobs for row in speed.explain_shapes([shape], [m], scheme, dtype, device)]
        write_json({"scheme": scheme.name, "layers": found}) if options["as_json"] else _print_reasons(found)
        return
    top = speed.measure_ceilings(dtype, device)
    results = [speed.measure(s.name, m, s.n, s.k, scheme, dtype, device, top) for s, m in jobs]
    record = _record(results, top, scheme.name, options["dtype"], device)
    if options["output"]:
        import json

        options["output"].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options["plot"]:
        speed.plot_roofline(results, top, options["plot"], f"{scheme.text}, {record['device']}")
    if options["as_json"]:
        write_json(record)
    else:
        _print_table(scheme, jobs, results, top, record)


def _rows(text: str) -> list[int]:
    parts = text.split(",")
    if not all(p.strip().isdigit() and int(p) for p in parts):
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1,16", param_hint="--rows")
    return [int(p) for p in parts]


def _record(results: list[Speed], top: Ceilings, scheme: str, dtype: str, device: torch.device) -> dict[str, Any]:
    import platform

    import torch

    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "scheme": scheme,
        "dtype": dtype,
        "copy_bandwidth": top.bandwidth,
        "dense_flops": top.flops,
        "instruction": top.instruction,
        "instruction_flops": top.instruction_flops,
        "results": [r.to_dict() for r in results],
    }


def _print_table(
    scheme: QuantScheme,
    jobs: list[tuple[Shape, int]],
    results: list[Speed],
    top: Ceilings,
    record: dict[str, Any],
) -> None:
    from mxquant.presentation.table import Table

    title = f"{scheme.text}, {record['dtype']} on {record['device']}"
    right = ("M", "N", "K", "packed", "dense", "speedup", "TFLOP/s", "GB/s", "of ceiling", "error")
    table = Table.of(title, ("layer", "served by"), right)
    for (shape, _), r in zip(jobs, results, strict=True):
        name = shape.name + (f" (x{shape.count})" if shape.count > 1 else "")
        numbers = (f"{1e6 * r.seconds:.0f} us", f"{1e6 * r.dense_seconds:.0f} us", f"{r.speedup:.2f}x")
        rates = (f"{r.flops / 1e12:.3g}", f"{r.bandwidth / 1e9:.3g}", f"{r.of_ceiling:.0%}", f"{r.error:.1e}")
        table.add(name, r.served_by, str(r.m), str(r.n), str(r.k), *numbers, *rates)
    output_console().print(table)
    ceilings = [f"copy {top.bandwidth / 1e9:.3g} GB/s", f"dense product {top.flops / 1e12:.3g} TFLOP/s"]
    if top.instruction_flops:
        ceilings.append(f"{top.instruction} on registers {top.instruction_flops / 1e12:.3g} TFLOP/s")
    output_console().print(f"Ceilings: {', '.join(ceilings)}.")


def _print_reasons(found: list[dict[str, Any]]) -> None:
    from mxquant.presentation.table import Table

    table = Table.of("Kernel of each layer", ("layer", "served by", "why"), ("M", "N", "K", "count"))
    for row in found:
        numbers = (str(row[key]) for key in ("rows", "n", "k", "count"))
        table.add(row["name"], row["served_by"], row["why"], *numbers)
    output_console().print(table)
