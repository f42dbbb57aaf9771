"""Number formats, schemes and presets: one row a format, its specification cited.

Plain Python; importing this module does not import torch.

Words used here: an *element* is one 4-, 6- or 8-bit number; a *block* is the group of elements
that shares one *block scale*; an optional fp32 *global scale* divides the block scales of a whole
tensor. The value of an element is always ``element * fl32(block_scale / global_scale)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from mxquant.errors import SchemeError


@dataclass(frozen=True)
class ElementFormat:
    """A signed minifloat without infinities in use: ``sign | exponent | mantissa``.

    ``max_code`` is the magnitude code of the largest finite value; larger magnitudes saturate to
    it. Codes above it (fp8's NaN and infinities) are never produced.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    source: str

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, which subnormals share."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest value."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    def magnitude(self, code: int) -> float:
        """Value of a code without its sign bit."""
        return _minifloat(code, self.mantissa_bits, self.bias)

    def value(self, code: int) -> float:
        """Value of a full code, sign included (code 2^(bits-1) is -0.0)."""
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        return sign * self.magnitude(code & (2 ** (self.bits - 1) - 1))

    @cached_property
    def max(self) -> float:
        return self.magnitude(self.max_code)


@dataclass(frozen=True)
class ScaleFormat:
    """An unsigned format of block scales.

    Coded formats (``bits == 8``) have codes ``0 .. max_code``; the codes above are NaN or unused.
    ``e8m0`` has no zero: its code 0 is 2^-127. ``bf16`` and ``fp32`` scales are stored as floats.

    ``default_rule`` is the one for weights, see docs/scale-rules.md. ``plain_rule`` needs the block's largest
    magnitude only: what compressed-tensors and arXiv 2601.19026 use, and cheap enough for activations.
    """

    name: str
    bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    has_zero: bool
    rules: tuple[str, ...]
    default_rule: str
    plain_rule: str
    source: str

    @property
    def coded(self) -> bool:
        return self.bits == 8

    @property
    def min_exponent(self) -> int:
        return 1 - self.bias

    @property
    def exponent_only(self) -> bool:
        return self.coded and self.mantissa_bits == 0

    def value(self, code: int) -> float:
        """Value of a code (coded formats); NaN above ``max_code`` unless decoding is defined there."""
        if self.exponent_only:
            return math.ldexp(1.0, code - self.bias) if code <= self.max_code else math.nan
        if code in _NAN_CODES[self.name]:
            return math.nan
        return _minifloat(code, self.mantissa_bits, self.bias)

    @cached_property
    def max(self) -> float:
        return self.value(self.max_code) if self.coded else math.inf

    @cached_property
    def min_positive(self) -> float:
        """The smallest scale above zero."""
        return self.value(1 if self.has_zero else 0) if self.coded else 0.0

    @cached_property
    def min_normal(self) -> float:
        """Scales below this one have lost mantissa bits (zero for formats that never do)."""
        return math.ldexp(1.0, self.min_exponent) if self.coded and self.has_zero else 0.0


def _minifloat(code: int, mantissa_bits: int, bias: int) -> float:
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent == 0:
        return math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)


_OCP = "OCP Microscaling Formats (MX) v1.0"
_OFP8 = "OCP 8-bit Floating Point (OFP8) v1.0"

ELEMENTS: dict[str, ElementFormat] = {
    f.name: f
    for f in (
        ElementFormat("fp4_e2m1", 2, 1, 1, 0x07, f"{_OCP}, section 5.3.3"),
        ElementFormat("fp6_e2m3", 2, 3, 1, 0x1F, f"{_OCP}, section 5.3.2"),
        ElementFormat("fp6_e3m2", 3, 2, 3, 0x1F, f"{_OCP}, section 5.3.2"),
        ElementFormat("fp8_e4m3", 4, 3, 7, 0x7E, _OFP8),
        ElementFormat("fp8_e5m2", 5, 2, 15, 0x7B, _OFP8),
    )
}

_FLOAT_SCALE_RULES = ("absmax", "absmax-nonzero", "ceil", "four-over-six", "search")
_E8M0_RULES = ("floor", "ceil", "even", "rceil", "oas", "search")
_UE5M3 = "arXiv 2601.19026; CUDA and AMD definitions (0xFF = NaN, no infinity)"

SCALES: dict[str, ScaleFormat] = {
    f.name: f
    for f in (
        ScaleFormat("e8m0", 8, 0, 127, 0xFE, False, _E8M0_RULES, "even", "even", f"{_OCP}, section 5.4.1"),
        ScaleFormat("e4m3", 8, 3, 7, 0x7E, True, _FLOAT_SCALE_RULES, "search", "absmax", f"{_OFP8}, unsigned use"),
        ScaleFormat("ue5m3", 8, 3, 15, 0xFE, True, _FLOAT_SCALE_RULES, "search", "absmax", _UE5M3),
        # The paper's scripts keep exponent 31 free, so their largest scale is 61440.
        ScaleFormat("ue5m3-61440", 8, 3, 15, 0xF7, True, _FLOAT_SCALE_RULES, "search", "absmax", _UE5M3),
        ScaleFormat("bf16", 16, 7, 127, 0, True, ("absmax",), "absmax", "absmax", "bfloat16, for studies"),
        ScaleFormat("fp32", 32, 23, 127, 0, True, ("absmax",), "absmax", "absmax", "IEEE 754 binary32, for studies"),
    )
}


def scale_rules() -> list[str]:
    """The scale rules of all scale formats."""
    return sorted({rule for fmt in SCALES.values() for rule in fmt.rules})


_NAN_CODES: dict[str, range | tuple[int, ...]] = {
    # The unsigned use of E4M3 has 7 bits; a set sign bit is never written, so it decodes to NaN.
    "e4m3": range(0x7F, 0x100),
    "ue5m3": (0xFF,),
    "ue5m3-61440": (0xFF,),
}

ROUNDINGS = ("nearest", "stochastic")
MAX_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class QuantScheme:
    """Everything about one tensor's number format.

    Parameters
    ----------
    element : name in ``ELEMENTS``, e.g. ``"fp4_e2m1"``.
    scale : name in ``SCALES``, e.g. ``"ue5m3"``.
    block : ``n >= 2`` for 1 x n blocks along the input features, or ``(rows, columns)`` for tiles
        of the weight ``[out_features, in_features]``. Partial blocks at the edges are legal.
    global_scale : whether the tensor also has one fp32 scale (see module docstring).
    scale_rule : how a block scale follows from its block; ``None`` takes the format's default.
        The rules are described in :mod:`mxquant.codec.scaling`.
    rounding : ``"nearest"`` (ties to even) or ``"stochastic"``.

    Raises ``SchemeError`` for anything that does not exist or does not fit together.
    """

    element: str = "fp4_e2m1"
    scale: str = "ue5m3"
    block: int | tuple[int, int] = 16
    global_scale: bool = False
    scale_rule: str | None = None
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        _check_choice("element format", self.element, ELEMENTS)
        _check_choice("scale format", self.scale, SCALES)
        _check_choice("rounding", self.rounding, ROUNDINGS)
        object.__setattr__(self, "block", _normalize_block(self.block))
        if self.global_scale not in (True, False):
            raise SchemeError(f"global_scale {self.global_scale!r} must be true or false")
        object.__setattr__(self, "global_scale", bool(self.global_scale))
        fmt = SCALES[self.scale]
        if self.scale_rule is None:
            object.__setattr__(self, "scale_rule", fmt.default_rule)
        if self.scale_rule not in fmt.rules:
            raise SchemeError(
                f"scale rule {self.scale_rule!r} does not exist for {self.scale} scales; "
                f"choose from {', '.join(fmt.rules)}"
            )
        if self.scale_rule == "four-over-six" and self.element != "fp4_e2m1":
            raise SchemeError(
                f"scale rule 'four-over-six' is defined for fp4_e2m1 elements only, not for {self.element}; "
                "use 'search' instead"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> QuantScheme:
        """The scheme called ``name`` in ``PRESETS``, with ``changes`` as :meth:`merge` applies them."""
        _check_choice("preset", name, PRESETS)
        return PRESETS[name].merge(**changes)

    def merge(self, **changes: Any) -> QuantScheme:
        """This scheme with some fields changed: what options, texts, YAML and ``MXQuantConfig`` all mean.

        Fields that are left out or None keep their values, with one exception. A ``scale`` that is given, even
        this scheme's own, starts afresh: unless ``global_scale`` and ``scale_rule`` are given with it, there is
        no global scale, and the rule is the scale format's default. So NVFP4 with ``scale="ue5m3"`` is
        ``ue5m3/16``, which needs no global scale, and MXFP4 with ``scale="e4m3"`` is ``e4m3/32``.

        Raises ``SchemeError`` for fields that do not exist and values that do not fit together.
        """
        unknown = set(changes) - set(self.__dataclass_fields__)
        if unknown:
            raise SchemeError(
                f"unknown scheme field {', '.join(sorted(map(str, unknown)))}; "
                f"choose from {', '.join(self.__dataclass_fields__)}"
            )
        given = {name: value for name, value in changes.items() if value is not None}
        if "scale" in given:
            given = {"global_scale": False, "scale_rule": None, **given}
        return replace(self, **given)

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """The scheme that a text such as ``ue5m3/16``, ``e4m3+global/8/absmax`` or ``nvfp4`` stands for.

        Parts between slashes, in any order, each kind once: a preset to start from, an element, a scale
        (``+global`` adds a global scale), a block, a scale rule, a rounding. They are changes of the preset, or
        of ``QuantScheme()``, as :meth:`merge` applies them.
        """
        return _parse(text)

    @cached_property
    def text(self) -> str:
        """The short text that :meth:`parse` reads back, e.g. ``ue5m3/16``, ``nvfp4`` or ``nvfp4/absmax``.

        It says scale and block, or the preset that has them, and what else is not the default. Nothing is lost, so
        operators carry their scheme as this string.
        """
        return self.spelled()

    def spelled(self, *, block: bool = True, rule: bool | None = None, preset: bool = True) -> str:
        """:attr:`text`, with parts of it left out or added; what is left out, ``parse`` cannot know.

        Parameters
        ----------
        block : whether the block is said.
        rule : whether the scale rule is said; None says it where it is not the scale format's default. Where
            schemes are compared, True keeps a difference of rules from passing for one of formats.
        preset : whether the name of a preset may stand for its element, scale, block and global scale.
        """
        parts = []
        if preset and block and (found := self._preset_name()):
            parts = [found]
        else:
            parts = [self.element] if self.element != "fp4_e2m1" else []
            parts += [self.scale_text, *([self.block_text] if block else [])]
        if rule or (rule is None and self.scale_rule != self.scale_format.default_rule):
            parts.append(str(self.scale_rule))
        return "/".join(parts if self.rounding == "nearest" else [*parts, self.rounding])

    def _preset_name(self) -> str | None:
        """The preset that is this scheme but for rule and rounding, which a text says beside it."""
        own = (self.element, self.scale, self.block, self.global_scale)
        for name, p in PRESETS.items():
            if own == (p.element, p.scale, p.block, p.global_scale):
                return name
        return None

    @property
    def name(self) -> str:
        """:attr:`text` in the form for file names, e.g. ``fp4-ue5m3-b16``, ``nvfp4`` or ``nvfp4-absmax``.

        Output folders and the keys of JSON reports and configurations are called so. People read and type the text.
        """
        parts = self.text.split("/")
        if parts[0] not in PRESETS and parts[0] not in ELEMENTS:
            parts.insert(0, "fp4")
        return "-".join(f"b{part}" if part[0].isdigit() else part for part in parts)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What of a scheme a reader must know; how scales were chosen and elements rounded is not part of it."""
        return self.element, self.scale, self.block, self.global_scale

    @property
    def element_format(self) -> ElementFormat:
        return ELEMENTS[self.element]

    @property
    def scale_format(self) -> ScaleFormat:
        return SCALES[self.scale]

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns of one block."""
        return self.block if isinstance(self.block, tuple) else (1, self.block)

    @property
    def block_text(self) -> str:
        return "x".join(map(str, self.block)) if isinstance(self.block, tuple) else str(self.block)

    @property
    def scale_text(self) -> str:
        """The scale as it is typed, e.g. ``e4m3+global``."""
        return self.scale + ("+global" if self.global_scale else "")

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the block scales of a weight ``[out_features, in_features]``."""
        return tuple(-(-s // b) for s, b in zip(shape, self.block_shape, strict=True))  # type: ignore[return-value]

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape in bytes of the packed elements: rows are padded to whole bytes."""
        return shape[0], packed_row_bytes(shape[1], self.element_format.bits)

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Bytes of a packed weight: elements, block scales and global scale."""
        rows, columns = self.packed_shape(shape)
        scale_rows, scale_columns = self.scale_shape(shape)
        scales = scale_rows * scale_columns * self.scale_format.bits // 8
        return rows * columns + scales + (4 if self.global_scale else 0)

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits per weight of a tensor of this shape, padding and scales included."""
        return 8 * self.nbytes(shape) / (shape[0] * shape[1])

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["block"] = list(self.block) if isinstance(self.block, tuple) else self.block
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> QuantScheme:
        """Inverse of :meth:`to_dict`; also changes of a scheme, see :meth:`merge`.

        ``{"preset": name, ...changes}`` starts from a preset, other fields alone from ``QuantScheme()``.
        """
        changes = dict(fields)
        preset = changes.pop("preset", None)
        return (cls() if preset is None else cls.preset(preset)).merge(**{str(key): v for key, v in changes.items()})


def scheme_fields(text: str) -> dict[str, Any]:
    """What a scheme's text says, and nothing that it leaves open, in the form of :meth:`QuantScheme.from_dict`."""
    fields: dict[str, Any] = {}
    for part in text.strip().split("/"):
        said = _part_fields(part)
        if not said:
            raise SchemeError(
                f"scheme {text!r}: {part!r} is not a preset ({', '.join(PRESETS)}), element ({', '.join(ELEMENTS)}), "
                f"scale ({', '.join(SCALES)}), block, rule or rounding; "
                "write for example ue5m3/16 or e4m3+global/8/absmax"
            )
        twice = sorted(set(said) & set(fields))
        if twice:
            raise SchemeError(f"scheme {text!r} gives the {twice[-1].replace('_', ' ')} twice; remove one")
        fields |= said
    return fields


def _part_fields(part: str) -> dict[str, Any]:
    """The fields that one part of a text stands for; none for a part that means nothing."""
    scale, plus, _ = part.partition("+")
    if part in PRESETS:
        return {"preset": part}
    if part in ELEMENTS:
        return {"element": part}
    if scale in SCALES and part in (scale, f"{scale}+global"):
        return {"scale": scale, "global_scale": bool(plus)}
    if part in ROUNDINGS:
        return {"rounding": part}
    if part in scale_rules():
        return {"scale_rule": part}
    return {"block": parse_block(part)} if part[:1].isdigit() else {}


@lru_cache(maxsize=1024)  # operators parse their scheme in each call
def _parse(text: str) -> QuantScheme:
    return QuantScheme.from_dict(scheme_fields(text))


def packed_row_bytes(columns: int, bits: int) -> int:
    """Bytes of one packed row: 2 fp4 codes in a byte, 4 fp6 codes in 3, 1 fp8 code in one."""
    if bits == 6:
        return -(-columns // 4) * 3
    return -(-columns * bits // 8)


def parse_block(text: str | int | tuple[int, int]) -> int | tuple[int, int]:
    """``"16"`` -> 16 and ``"32x32"`` -> (32, 32), the way block shapes are typed."""
    if isinstance(text, str):
        parts = text.lower().split("x")
        if not 1 <= len(parts) <= 2 or not all(p.strip().isdigit() for p in parts):
            raise SchemeError(f"block {text!r} is neither a length such as 16 nor a tile such as 32x32")
        numbers = tuple(int(p) for p in parts)
        return _normalize_block(numbers[0] if len(numbers) == 1 else numbers)
    return _normalize_block(text)


def _normalize_block(block: Any) -> int | tuple[int, int]:
    if isinstance(block, str):
        return parse_block(block)
    if isinstance(block, list | tuple):
        if len(block) != 2 or not all(isinstance(b, int) and not isinstance(b, bool) and b >= 1 for b in block):
            raise SchemeError(f"block {block!r} must be a length or two positive numbers (rows, columns)")
        rows, columns = block
        if rows == 1:
            return _normalize_block(columns)
        if rows * columns < 2:
            raise SchemeError(f"block {block!r} must hold at least two elements")
        return _limited((rows, columns), rows * columns)
    if not isinstance(block, int) or isinstance(block, bool) or block < 2:
        raise SchemeError(f"block {block!r} must be a length of at least 2 or a tile (rows, columns)")
    return _limited(block, block)


def _limited(block: Any, elements: int) -> Any:
    """Rows are padded to whole blocks while they are worked on, so blocks without a limit would fill the memory."""
    if elements > MAX_BLOCK_ELEMENTS:
        raise SchemeError(f"block {block!r} has more than {MAX_BLOCK_ELEMENTS} elements")
    return block


def _check_choice(what: str, value: Any, choices: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        raise SchemeError(f"unknown {what} {value!r}; choose from {', '.join(choices)}")


# Their scale rules are the defaults of their scale formats. The bytes that compressed-tensors writes are those
# of ``nvfp4/absmax`` and ``mxfp4/even``.
PRESETS: dict[str, QuantScheme] = {
    "mxfp4": QuantScheme("fp4_e2m1", "e8m0", 32),
    "nvfp4": QuantScheme("fp4_e2m1", "e4m3", 16, global_scale=True),
    "mxfp8": QuantScheme("fp8_e4m3", "e8m0", 32),
    "mxfp6": QuantScheme("fp6_e2m3", "e8m0", 32),
}
