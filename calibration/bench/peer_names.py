"""Peers by name, such as `llama-lookup:4`: library, sort of drafts and, after the colon, most tokens of a draft.

It knows what each needs to be installed; it imports none of them. How they are asked is peers.py's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from semspec.calibration.bench.records import Mode
from semspec.runtime.errors import ConfigError

__all__ = ["PEERS", "PeerKind", "PeerName", "check_installed", "parse_peer", "parse_peers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """One row of the table of peers.

    library: what runs it, a key of workers.serve.ENGINES. modules: what must be importable, with the package that
    brings it. drafts: `model`, `ngram`, or None for plain decoding; longest: most tokens of a draft.
    """

    name: str
    library: str
    modules: Mapping[str, str]
    drafts: str | None = None
    longest: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerName:
    """A peer as asked for. n_draft: most tokens of a draft, None for the library's own default."""

    kind: PeerKind
    n_draft: int | None = None

    def __str__(self) -> str:
        return self.kind.name if self.n_draft is None else f"{self.kind.name}:{self.n_draft}"


GENAI = {
    "onnxruntime_genai": "onnxruntime-genai",
    "onnx_ir": "onnx-ir",
    "torch": "torch",
    "transformers": "transformers",
}
LLAMA = {"llama_cpp": "llama-cpp-python"}
TRANSFORMERS = {"torch": "torch", "transformers": "transformers"}

PEERS: Mapping[str, PeerKind] = {
    kind.name: kind
    for kind in (
        PeerKind(name="genai", library="genai", modules=GENAI),
        PeerKind(name="genai-draft", library="genai", modules=GENAI, drafts="model", longest=16),
        PeerKind(name="genai-ngram", library="genai", modules=GENAI, drafts="ngram", longest=16),
        PeerKind(name="llama", library="llama", modules=LLAMA),
        PeerKind(name="llama-lookup", library="llama", modules=LLAMA, drafts="ngram"),
        PeerKind(name="transformers", library="transformers", modules=TRANSFORMERS),
        PeerKind(name="transformers-assisted", library="transformers", modules=TRANSFORMERS, drafts="model"),
        PeerKind(name="transformers-lookup", library="transformers", modules=TRANSFORMERS, drafts="ngram"),
    )
}


def parse_peer(text: str) -> PeerName:
    """The peer of that name. Raises ConfigError for another, and for a length that is none.

    >>> str(parse_peer("llama-lookup:4")), parse_peer("genai").n_draft
    ('llama-lookup:4', None)
    """
    known, colon, length = text.strip().partition(":")
    if known not in PEERS:
        raise ConfigError(
            f"unknown peer {text!r}; known: {', '.join(PEERS)}, with a draft length as in llama-lookup:4"
        )
    kind = PEERS[known]
    if not colon:
        return PeerName(kind=kind)
    if kind.drafts is None or not (
        length.isascii() and length.isdigit() and 1 <= int(length) <= kind.longest
    ):
        allowed = ", ".join(f"{one.name} 1 to {one.longest}" for one in PEERS.values() if one.drafts)
        raise ConfigError(
            f"a draft length is a whole number after a peer that drafts ({allowed}); got {text!r}"
        )
    return PeerName(kind=kind, n_draft=int(length))


def parse_peers(names: Sequence[str]) -> list[Mode]:
    """Peers as modes of a run, in the order named. Raises as parse_peer; ConfigError for one named twice."""
    peers = [str(parse_peer(name)) for name in names]
    for index, name in enumerate(peers):
        if name in peers[:index]:
            raise ConfigError(f"the peer {name} is named twice")
    return [Mode(name=name, exact=False, spec=None) for name in peers]


def check_installed(names: Sequence[PeerName]) -> None:
    """Raise ConfigError, with the command that repairs it, for the first peer that lacks a package."""
    for name in names:
        lacking = [package for module, package in name.kind.modules.items() if not _is_there(module)]
        if lacking:
            packages = " ".join(lacking)
            raise ConfigError(f"the peer {name} needs {packages}; install it with: pip install {packages}")


def _is_there(module: str) -> bool:
    """Whether it could be imported, without doing so."""
    try:
        return find_spec(module) is not None
    except ValueError:  # something imported under that name that no file was found for
        return False
