"""semspec: export two language models into one bundle, and decode with it on your own device."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
