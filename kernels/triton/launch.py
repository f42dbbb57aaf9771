"""One kernel launch as a value, so that the same one can be run here or compiled for any chip."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass
class Launch:
    """``kernel[grid](**arguments, **constants, **options)``.

    ``arguments``: tensors, None (an absent tensor) and ints, by parameter name. ``constants``: the
    ``tl.constexpr`` parameters. ``threads``: of one program, whatever the chip's warp. ``options``:
    ``num_stages``, ``enable_fp_fusion``.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    threads: int
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch on the current stream of the arguments' device."""
        with self._device():
            self.kernel[self.grid](**self.arguments, **self.constants, **self._options(bool(torch.version.hip)))

    def compile(self, target: GPUTarget) -> Any:
        """The compiled kernel for a chip that need not be here; specialized as a launch would be."""
        signature, constants, attributes = {}, dict(self.constants), {}
        for index, name in enumerate(self.kernel.arg_names):
            if name in self.constants:
                signature[name] = "constexpr"
                continue
            value = self.arguments[name]
            if value is None or (isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, int):
                signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            else:
                signature[name] = _POINTERS[value.dtype]
            # Torch allocates on 256 bytes or more; a launch checks the address it gets.
            if not isinstance(value, int | None) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=self._options(target.backend == "hip"))

    def _options(self, amd: bool) -> dict[str, Any]:
        options = {**self.options, "num_warps": self.threads // (64 if amd else 32)}
        if amd and "num_stages" in options:
            options["num_stages"] = min(options["num_stages"], 2)  # loads wait in registers there
        return options

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        # Triton launches on the current device, whatever its arguments' device is.
        tensor = next(v for v in self.arguments.values() if isinstance(v, torch.Tensor))
        if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
            return contextlib.nullcontext()
        return torch.cuda.device(tensor.device)
