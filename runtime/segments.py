"""Boundary rules: where a segment ends. A bundle names one; the modes that work on segments follow it."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.runtime.errors import ConfigError

__all__ = ["BOUNDARY_KINDS", "Boundary"]

BOUNDARY_KINDS = ("blank-line", "newline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where a segment ends: at a blank line, or at the first newline at or after `min_tokens`; at the cap anyway.

    A larger `min_tokens` or `max_tokens` (the cap) makes segments longer: fewer target passes, more at stake
    in each decision. Source: newline 12/64 was measured on small chat models, blank-line 500 is the paper's.
    Raises ConfigError for an unknown kind or numbers out of order.
    """

    kind: str = "newline"
    min_tokens: int = 12
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if self.kind not in BOUNDARY_KINDS:
            raise ConfigError(f"boundary kind must be one of {', '.join(BOUNDARY_KINDS)}, got {self.kind!r}")
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"min_tokens must be between 1 and max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
