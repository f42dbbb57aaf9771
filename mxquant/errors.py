"""The exceptions users are meant to read. Each message names the thing and the way out."""

from __future__ import annotations


class MXQuantError(Exception):
    """Base class of every error that the library raises on purpose."""


class SchemeError(MXQuantError, ValueError):
    """A number format, block shape, rule or recipe that does not exist or does not fit."""


class WeightError(MXQuantError, ValueError):
    """A tensor that cannot be quantized, e.g. because it holds NaN."""


class CheckpointError(MXQuantError, ValueError):
    """A checkpoint that is missing, broken, unsupported or already quantized."""


class AdapterError(MXQuantError, ValueError):
    """An adapter that packed layers cannot carry, or cannot be merged with."""


class TheoryError(MXQuantError, ValueError):
    """A question that the theory of quantization errors cannot answer, e.g. a negative sigma."""


class MissingPackageError(MXQuantError, ImportError):
    """A package that only some commands need is not installed; see ``mxquant/extras.py``."""


class PlanError(MXQuantError, ValueError):
    """A quantization plan with problems; ``problems`` lists them all."""

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))
