"""``MXQuantConfig``: what ``quantization_config`` is, in ``config.json`` and in ``from_pretrained``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from mxquant.checkpoint.formats.native import QUANT_METHOD, ModuleTable, parse_config
from mxquant.schemes.activations import NONE, SAME, ActivationScheme
from mxquant.schemes.formats import QuantScheme
from mxquant.schemes.recipe import QuantRecipe

_SCHEME_FIELDS = tuple(QuantScheme.__dataclass_fields__)
_FILE_FIELDS = ("format_version", "mxquant_version", "schemes", "modules", "kv_cache")


class MXQuantConfig(QuantizationConfigMixin):
    """How a model is to be quantized while it is loaded, or how a checkpoint is quantized already.

    To quantize a dense checkpoint on the fly::

        AutoModelForCausalLM.from_pretrained("org/name", quantization_config=MXQuantConfig(scale="ue5m3", block=16))

    Parameters
    ----------
    element, scale, block, global_scale, scale_rule, rounding : fields of :class:`mxquant.QuantScheme`;
        those left out take its defaults, or those of ``preset``; see :meth:`mxquant.QuantScheme.merge`.
    preset : name of a scheme (``"mxfp4"``, ``"nvfp4"``, ...).
    seed : chooses the random bits of stochastic rounding.
    include, exclude : regular expressions on module names: what to quantize only, what to keep dense.
    recipe : a :class:`mxquant.QuantRecipe`, its ``to_dict()`` form, or the path of its YAML file.
        A scheme given beside it is the one of layers that no rule names.
    activations : what the inputs of quantized layers are rounded to as the model runs: ``"same"`` (as
        the layer's weight), a scheme such as ``"e4m3+token/16"`` (:class:`mxquant.ActivationScheme`), or None.
    kv_cache : a scheme for keys and values, or None.
    format_version, mxquant_version, schemes, modules : what a quantized checkpoint says of itself,
        see :mod:`mxquant.checkpoint.formats.native`; not for callers.
    foreign : the ``quantization_config`` of a checkpoint in another format whose weights are to stay
        packed; set by :func:`mxquant.load`.

    Raises ``SchemeError`` for formats that do not exist and ``CheckpointError`` for a checkpoint
    description that this version cannot read.
    """

    def __init__(
        self,
        element: str | None = None,
        scale: str | None = None,
        block: int | tuple[int, int] | None = None,
        global_scale: bool | None = None,
        scale_rule: str | None = None,
        rounding: str | None = None,
        *,
        preset: str | None = None,
        seed: int = 0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        recipe: QuantRecipe | Mapping[str, Any] | str | Path | None = None,
        activations: ActivationScheme | Mapping[str, Any] | str | None = None,
        kv_cache: ActivationScheme | Mapping[str, Any] | str | None = None,
        format_version: int | None = None,
        mxquant_version: str | None = None,
        schemes: dict[str, Any] | None = None,
        modules: list[dict[str, Any]] | None = None,
        foreign: dict[str, Any] | None = None,
    ):
        self.quant_method: Any = QUANT_METHOD
        self.element, self.scale, self.scale_rule, self.rounding = element, scale, scale_rule, rounding
        self.block = list(block) if isinstance(block, tuple) else block
        self.global_scale, self.preset, self.seed = global_scale, preset, seed
        self.include = [include] if isinstance(include, str) else list(include)
        self.exclude = [exclude] if isinstance(exclude, str) else list(exclude)
        self.recipe = None if recipe is None else _read_recipe(recipe).to_dict()
        self.activations = activations if activations is None or activations == SAME else _text(activations)
        scheme = ActivationScheme.read(kv_cache)
        self.kv_cache = scheme.to_dict() if scheme else None
        self.format_version, self.mxquant_version = format_version, mxquant_version
        self.schemes, self.modules = schemes, modules
        self.foreign = foreign
        if self.describes_checkpoint:
            parse_config(self.to_dict())
        elif foreign is None:
            self.quant_recipe()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """A config from its ``to_dict()`` form; see the base class for ``return_unused_kwargs``."""
        fields = {k: v for k, v in config_dict.items() if k != "quant_method"}
        if "format_version" in fields or "modules" in fields:
            parse_config(config_dict)  # a newer version is named before its unknown fields are
            fields = {k: v for k, v in fields.items() if k in _FILE_FIELDS}
        config = cls(**fields)
        return (config, kwargs) if return_unused_kwargs else config

    @property
    def describes_checkpoint(self) -> bool:
        """Whether this is the description of a quantized checkpoint rather than a wish."""
        return self.format_version is not None or self.modules is not None

    def table(self) -> ModuleTable:
        """The quantized modules of the checkpoint. Raises ``CheckpointError`` if it names none."""
        return parse_config(self.to_dict())

    def quant_recipe(self) -> QuantRecipe:
        """What to quantize on the fly, and how."""
        given = {f: getattr(self, f) for f in _SCHEME_FIELDS if getattr(self, f) is not None}
        if self.preset is not None:
            given["preset"] = self.preset
        recipe = QuantRecipe() if self.recipe is None else QuantRecipe.from_dict(self.recipe)
        if given or self.recipe is None:
            recipe = replace(recipe, default=QuantScheme.from_dict(given))
        if self.activations is not None:
            recipe = replace(recipe, activations=self.activations)
        if self.kv_cache is not None:
            recipe = replace(recipe, kv_cache=self.kv_cache_scheme)
        return replace(recipe, include=(*recipe.include, *self.include), exclude=(*recipe.exclude, *self.exclude))

    @property
    def kv_cache_scheme(self) -> ActivationScheme | None:
        """The scheme of keys and values."""
        if self.kv_cache is None and self.recipe is not None:
            return QuantRecipe.from_dict(self.recipe).kv_cache
        return ActivationScheme.read(self.kv_cache)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable; what is not set is left out."""
        fields = copy.deepcopy(self.__dict__)
        if self.describes_checkpoint:
            return {k: fields[k] for k in ("quant_method", *_FILE_FIELDS) if k != "kv_cache" or fields[k]}
        return {k: v for k, v in fields.items() if v is not None and v != [] and (k != "seed" or v)}


def _text(activations: ActivationScheme | Mapping[str, Any] | str) -> str:
    scheme = ActivationScheme.read(activations)
    return scheme.text if scheme else NONE


def _read_recipe(recipe: QuantRecipe | Mapping[str, Any] | str | Path) -> QuantRecipe:
    if isinstance(recipe, QuantRecipe):
        return recipe
    return QuantRecipe.from_file(recipe) if isinstance(recipe, str | Path) else QuantRecipe.from_dict(recipe)
