"""semspec: export language models into one bundle, and decode with it on your own device.

from semspec import LLM
with LLM("bundle") as llm:
    print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
"""

from __future__ import annotations

from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import (
    BackendError,
    BundleError,
    CalibrationError,
    ConfigError,
    PairError,
    SemspecError,
    SourceError,
)
from semspec.runtime.llm import LLM, Completion, Delta
from semspec.runtime.stats import Summary

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BackendError",
    "BundleError",
    "CalibrationError",
    "Completion",
    "ConfigError",
    "Delta",
    "PairError",
    "SamplingParams",
    "SemspecError",
    "SourceError",
    "SpecConfig",
    "Summary",
    "__version__",
]
