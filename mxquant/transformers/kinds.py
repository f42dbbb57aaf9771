"""``Kind``: what a parameter of a model is, and what may become of it."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What a parameter is, by the name that reports use.

    ``quantized``: whether it is quantized unless a rule says otherwise; ``nameable``: whether a rule can
    have it quantized; ``expected``: whether it is usually dense, so that no report has to
    mention it.
    """

    quantized: bool
    nameable: bool
    expected: bool

    def __new__(cls, text: str, quantized: bool = False, nameable: bool = False, expected: bool = True) -> Kind:
        kind = str.__new__(cls, text)
        kind._value_ = text
        kind.quantized, kind.nameable, kind.expected = quantized, nameable, expected
        return kind

    LINEAR = "linear", True, True, False
    EXPERTS = "experts", True, True, False
    HEAD = "output head", False, True
    # A linear layer that the model's class wants in fp32, such as what picks the tokens of sparse attention.
    KEPT = "linear kept in fp32", False, True
    # A linear layer that sees images or sound, or brings them to the language model's width.
    OUTSIDE = "linear outside the language model", False, True
    OUTSIDE_OTHER = "outside the language model"
    EMBEDDING = "embedding"
    ROUTER = "router"
    NORM = "norm"
    BIAS = "bias"
    CONVOLUTION = "convolution"
    # A, D, the step dt and what a mixer holds without a layer.
    STATE_SPACE = "state space"
    # The model writes to it, or reads it without calling its layer.
    HANDLED = "weight that the model handles itself"
    OTHER = "other parameter", False, False, False
    # Of tensors in files: no parameter of the model, or one that its class does without.
    BUFFER = "buffer"
    IGNORED = "ignored"
    UNKNOWN = "unknown", False, False, False
