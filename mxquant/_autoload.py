"""Make ``from_pretrained`` know our checkpoints, and PEFT our layers, without anyone importing mxquant.

transformers has no entry points for quantization methods, but PyTorch calls those of the group
``torch.backends`` when it is imported. Ours installs import hooks: once
``transformers.quantizers.auto`` has been imported, our config and quantizer are registered there,
and once PEFT's LoRA has been, it learns of packed layers. Nothing else is imported until then.
``MXQUANT_AUTOLOAD=0`` turns the hooks off.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def install() -> None:
    """Install the hooks (or register at once with what is there already). Never raises."""
    if os.environ.get("MXQUANT_AUTOLOAD", "1").lower() in ("0", "false", "no", "off"):
        return
    waiting = {finder.target for finder in sys.meta_path if isinstance(finder, _Finder)}
    for target, step in _STEPS.items():
        if _is_imported(target):
            step()
        elif target not in waiting:
            sys.meta_path.insert(0, _Finder(target, step))


def _is_imported(target: str) -> bool:
    """Whether the target has been imported to its end."""
    module = sys.modules.get(target)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _register() -> None:
    try:
        from mxquant.transformers import register

        register()
    except Exception as error:  # import torch and import transformers must survive us
        warnings.warn(
            f"mxquant could not register with transformers, so its checkpoints will not load: {error!r}", stacklevel=2
        )


def _register_adapters() -> None:
    try:
        from mxquant.transformers.lora import install as install_adapters

        install_adapters()
    except Exception as error:  # import peft must survive us
        warnings.warn(
            f"mxquant could not register with PEFT, so packed layers take no adapters: {error!r}", stacklevel=2
        )


# What to do when a module has been imported.
_STEPS: dict[str, Callable[[], None]] = {
    "transformers.quantizers.auto": _register,
    "peft.tuners.lora.model": _register_adapters,
}


class _Finder:
    """Finds the target like everyone else would, and adds a step after its execution."""

    def __init__(self, target: str, step: Callable[[], None]):
        self.target, self._step = target, step

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == self.target:
            self._retire()
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._step)  # type: ignore[assignment]
            return spec
        if _is_imported(self.target):  # its import had begun when this hook was installed
            self._retire()
            self._step()
        return None

    def _retire(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader:
    """Stands in for the target's loader until the target has been executed."""

    def __init__(self, inner: Any, step: Callable[[], None]):
        self._inner, self._step = inner, step

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._step()
