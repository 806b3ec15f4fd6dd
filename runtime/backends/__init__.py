"""Backends: one file for each engine, chosen by name, imported only when chosen."""

from __future__ import annotations

from importlib import import_module

from semspec.runtime.backends.base import Backend
from semspec.runtime.errors import ConfigError

__all__ = ["AUTO", "BACKENDS", "check_backend", "open_backend"]

_MODULES = {"cpu": "ort", "cuda": "ort", "tensorrt": "trt", "tensorrt-rtx": "trt"}
BACKENDS = tuple(_MODULES)
AUTO = "auto"  # the best of those that a bundle and this machine have: opening.py chooses


def check_backend(name: str, *, or_auto: bool = False) -> None:
    """Raises ConfigError for a name that no backend has; imports no engine. or_auto: AUTO will do as well."""
    names = (AUTO, *BACKENDS) if or_auto else BACKENDS
    if name not in names:
        raise ConfigError(f"backend must be one of {', '.join(names)}, got {name!r}")


def open_backend(name: str, *, threads: int | None = None, spin: bool = True) -> Backend:
    """The backend called `name`; nothing else is tried when it is missing.

    threads: CPU threads of each engine, None for one a core. spin: whether idle threads keep their core
    (switch off where two engines share cores). Raises ConfigError for an unknown name or no threads,
    BackendError when the engine cannot be imported or lacks the device.
    """
    check_backend(name)
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, or None for one a core, got {threads}")
    module = import_module(f"semspec.runtime.backends.{_MODULES[name]}")
    backend: Backend = module.create(name, threads=threads, spin=spin)
    return backend
