"""The engines' Python modules: which is installed, in which release, what it compiles for. Loaded nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from semspec.runtime.errors import BackendError, ConfigError
from semspec.runtime.plans import ENGINES

__all__ = ["Library", "open_library"]

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
EXTRAS = {"tensorrt": "tensorrt", "tensorrt-rtx": "rtx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An installed engine. trt: its module."""

    engine: str
    version: str
    trt: ModuleType

    @property
    def compiles_for(self) -> tuple[str, ...]:
        """Capabilities that can be named; () where it compiles for the GPU at hand and no other."""
        if self.engine == "tensorrt":
            return ()
        names = self.trt.ComputeCapability.__members__
        return tuple(f"{name[2:-1]}.{name[-1]}" for name in names if name.startswith("SM"))


def open_library(engine: str) -> Library:
    """The module of an engine. Raises ConfigError for an unknown one, BackendError where it cannot be imported."""
    if engine not in ENGINES:
        raise ConfigError(f"backend of plans must be one of {', '.join(ENGINES)}, got {engine!r}")
    try:
        trt = import_module(MODULES[engine])
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: its installer's stub
        repair = f"install it with: pip install 'semspec[{EXTRAS[engine]}]'"
        if engine == "tensorrt":
            repair += " (on Jetson it comes with JetPack: make the environment with --system-site-packages)"
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BackendError(f"backend {engine!r} cannot be imported ({first}); {repair}") from None
    return Library(engine=engine, version=str(trt.__version__), trt=trt)
