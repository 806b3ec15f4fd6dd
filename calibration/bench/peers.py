"""Peers: other engines that answer the same questions with the same weights, each in a process of its own.

    with open_peer("genai", bundle) as peer:               # or genai-draft:4, llama, llama-lookup, transformers, ..
        answer = peer.generate(ids, SamplingParams(max_tokens=64))
        answer.token_ids, answer.seconds, answer.ttft_s    # nothing is remembered in the next answer
        logits = peer.logits(ids)                          # (S, V) float32, row i follows ids[: i + 1]
        peer.peak_mib, peer.versions, peer.made

Where a peer cannot do the very same: llama cuts by top_k and top_p before it divides by the temperature; transformers
rounds the weights to bfloat16 where the processor multiplies that, which is faster; all draw other random numbers than
we do, and give ids that the tokenizer lacks a chance.

It knows what each reads and how it is asked. It imports none of their libraries: what they do happens behind
wire.py, in workers/.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from semspec.calibration.bench.machine import count_cores
from semspec.calibration.bench.originals import (
    Made,
    find_original,
    make_genai,
    make_genai_pair,
    make_hf,
    quiet_environment,
)
from semspec.calibration.bench.peer_names import PeerKind, PeerName, check_installed, parse_peer
from semspec.calibration.bench.wire import Wire
from semspec.export.cache import cache_root
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Floats, Progress
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["Peer", "PeerAnswer", "open_peer"]

OPEN_S = 1800.0  # limits, after which a peer counts as hung: reading its weights,
FORGET_S = 120.0
ANSWER_S = 300.0  # an answer, and what each of its tokens adds
TOKEN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """An answer. token_ids: with the id that ended it. seconds, ttft_s: by the clock of the peer's process, from the
    prompt's ids to the last and the first id. finish_reason: `stop` or `length`. rounds (passes of the target after
    the prompt), drafted and accepted: what the library tells of its drafts, None where it tells nothing."""

    token_ids: tuple[int, ...]
    seconds: float
    ttft_s: float | None
    finish_reason: str
    rounds: int | None
    drafted: int | None
    accepted: int | None


class Peer:
    """A peer in its process, open. See open_peer."""

    def __init__(
        self,
        name: PeerName,
        wire: Wire,
        opened: Mapping[str, Any],
        stop_ids: frozenset[int],
        made: Made | None,
    ) -> None:
        self.name, self.made = name, made
        self.versions: Mapping[str, str] = dict(opened["versions"])
        self.peak_mib = float(opened["peak_mib"])
        self._wire, self._stop_ids = wire, stop_ids

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._wire.pid

    def generate(
        self, ids: Sequence[int], sampling: SamplingParams, n_draft: int | None = None
    ) -> PeerAnswer:
        """Continue the prompt. n_draft: in place of the name's.

        The answer ends where ours would: at the bundle's end ids, stop_token_ids and max_tokens. Nothing of an
        earlier one is remembered. Raises ConfigError for sampling that peers are not asked for; BackendError where
        the peer fails, dies or hangs.
        """
        _check_sampling(sampling)
        stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._stop_ids)
        found = self._wire.ask(
            "generate",
            limit_s=ANSWER_S + TOKEN_S * sampling.max_tokens,
            ids=[int(token) for token in ids],
            max_tokens=sampling.max_tokens,
            stop_ids=sorted(stop),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed or 0,
            n_draft=n_draft if n_draft is not None else self.name.n_draft,
        )
        self.peak_mib = float(found["peak_mib"])
        return PeerAnswer(
            token_ids=tuple(found["ids"]),
            seconds=found["seconds"],
            ttft_s=found["ttft_s"],
            finish_reason=found["finish_reason"],
            rounds=found["rounds"],
            drafted=found["drafted"],
            accepted=found["accepted"],
        )

    def forget(self) -> None:
        """Drop what the last answer left in the peer's memory, so that the next need not pay for it."""
        self._wire.ask("forget", limit_s=FORGET_S)

    def logits(self, ids: Sequence[int]) -> Floats:
        """(S, V) float32: row i is what the peer's target thinks of the id after ids[: i + 1].

        Made by one pass over all ids from an empty cache. Raises BackendError as generate.
        """
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "logits.npy"
            found = self._wire.ask(
                "logits",
                limit_s=ANSWER_S + TOKEN_S * len(ids),
                ids=[int(token) for token in ids],
                out=str(out),
            )
            self.peak_mib = float(found["peak_mib"])
            logits: Floats = np.load(out, allow_pickle=False)
        return logits


@contextmanager
def open_peer(
    name: str | PeerName,
    bundle: Path,
    *,
    work: Path | None = None,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Iterator[Peer]:
    """A peer with the weights that the bundle was exported from, in a process that ends with the block.

    work: where what it reads is made and kept (a Hugging Face folder in fp32, genai's own export), None for
    `peers` in semspec's cache; made once for the same weights. threads: of the processor, None for one a core.

    Raises ConfigError: an unknown peer, a package that is not installed, weights that are gone or others, a peer
    that drafts with a model where the bundle has none. BackendError: the peer cannot open its model.
    """
    peer = parse_peer(name) if isinstance(name, str) else name
    check_installed([peer])
    opened = Bundle.open(bundle)
    if peer.kind.drafts == "model" and "draft" not in opened.manifest.models:
        raise ConfigError(
            f"the peer {peer} drafts with a model and {bundle} has no draft; leave the peer out"
        )
    folder = (work or cache_root() / "peers").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    model, draft, made = _make(peer.kind, opened, folder, on_progress)
    cores = threads or count_cores()
    command = [sys.executable, "-m", "semspec.calibration.bench.workers.serve", peer.kind.library]
    environment = {**quiet_environment(), "OMP_NUM_THREADS": str(cores), "PYTHONSAFEPATH": "1"}
    with Wire(str(peer), command, environment, folder) as wire:
        found = wire.ask(
            "open",
            limit_s=OPEN_S,
            model=str(model),
            draft=None if draft is None else str(draft),
            drafts=peer.kind.drafts,
            threads=cores,
            max_context=opened.model("target").graphs["cpu"].max_context,
        )
        stop_ids = Tokenizer.open(opened.tokenizer).eos_ids
        yield Peer(peer, wire, found, stop_ids, made)


def _make(
    kind: PeerKind, bundle: Bundle, work: Path, on_progress: Progress | None
) -> tuple[Path, Path | None, Made | None]:
    """What the peer reads, of target and draft, and what its own export cost."""
    drafts = kind.drafts == "model"
    if kind.library == "llama":
        path = find_original(bundle, "target", on_progress)
        if path.suffix.lower() != ".gguf":
            raise ConfigError(
                f"the peer {kind.name} reads GGUF and the target came from {path}; leave the peer out"
            )
        return path, None, None
    if kind.library == "transformers":
        folders = [make_hf(bundle, role, work, on_progress) for role in ("target", "draft")[: 1 + drafts]]
        return folders[0], folders[1] if drafts else None, None
    target, made = make_genai(bundle, "target", work, on_progress)
    if not drafts:
        return target, None, made
    draft, more = make_genai(bundle, "draft", work, on_progress)
    both = replace(
        made,
        seconds=made.seconds + more.seconds,
        peak_mib=max(made.peak_mib, more.peak_mib),
        n_bytes=made.n_bytes + more.n_bytes,
    )
    return make_genai_pair(target, draft), draft, both


def _check_sampling(sampling: SamplingParams) -> None:
    """Peers are asked for what all of them have."""
    plain = SamplingParams()
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "logprobs"):
        if getattr(sampling, name) != getattr(plain, name):
            raise ConfigError(f"peers are not asked for {name}; leave it at {getattr(plain, name)!r}")
