"""The errors semspec raises on purpose. The commands print them as one line; anything else is a bug.

    SemspecError
    ├── ConfigError        a setting is out of range or unknown
    ├── SourceError        a checkpoint, GGUF file, recipe or download is missing, broken or unsupported
    ├── BundleError        a bundle is missing, incomplete, of another format, or changed since it was written
    ├── BackendError       an engine is missing, refuses a graph, or computes something unusable
    ├── PairError          target and draft do not share a vocabulary
    └── CalibrationError   probes or thresholds cannot be made from, or do not belong to, what was given

A message names the thing, the value found, what is allowed, and the repair.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BundleError",
    "CalibrationError",
    "ConfigError",
    "PairError",
    "SemspecError",
    "SourceError",
]


class SemspecError(Exception):
    """Base of every error semspec raises on purpose."""


class ConfigError(SemspecError, ValueError):
    """A setting is out of range or unknown."""


class SourceError(SemspecError):
    """A checkpoint, GGUF file, recipe or download is missing, broken or unsupported."""


class BundleError(SemspecError):
    """A bundle is missing, incomplete, of another format, or changed since it was written."""


class BackendError(SemspecError):
    """An engine is missing, refuses a graph, or computes something unusable."""


class PairError(SemspecError):
    """Target and draft do not share a vocabulary."""


class CalibrationError(SemspecError):
    """Probes or thresholds cannot be made from, or do not belong to, what was given."""
