"""Make ``from_pretrained`` know our checkpoints without anyone importing mxquant.

transformers has no entry points for quantization methods, but PyTorch calls those of the group
``torch.backends`` when it is imported. Ours installs an import hook: once
``transformers.quantizers.auto`` has been imported, our config and quantizer are registered there.
Nothing else is imported until then. ``MXQUANT_AUTOLOAD=0`` turns the hook off.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_TARGET = "transformers.quantizers.auto"


def install() -> None:
    """Install the hook (or register at once if transformers is there already). Never raises."""
    if os.environ.get("MXQUANT_AUTOLOAD", "1").lower() in ("0", "false", "no", "off"):
        return
    if _is_imported():
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _is_imported() -> bool:
    """Whether the target has been imported to its end."""
    module = sys.modules.get(_TARGET)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _register() -> None:
    try:
        from mxquant.transformers import register

        register()
    except Exception as error:  # import torch and import transformers must survive us
        warnings.warn(
            f"mxquant could not register with transformers, so its checkpoints will not load: {error!r}", stacklevel=2
        )


class _Finder:
    """Finds the target like everyone else would, and adds a step after its execution."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == _TARGET:
            self._retire()
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
            return spec
        if _is_imported():  # its import had begun when this hook was installed
            self._retire()
            _register()
        return None

    def _retire(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader:
    """Stands in for the target's loader until the target has been executed."""

    def __init__(self, inner: Any):
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _register()
