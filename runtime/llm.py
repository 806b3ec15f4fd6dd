"""LLM: a bundle opened for use. Text in, text out; everything below works on ids."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from semspec.runtime.backends import check_backend, open_backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError
from semspec.runtime.loop import decode_autoregressive
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats, Step
from semspec.runtime.stats import Ledger, Summary
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Delta", "Prompt"]

Prompt: TypeAlias = "str | Sequence[int]"
Message: TypeAlias = "Mapping[str, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer. token_ids holds the end id where one ended it; text does not show it.

    finish_reason: `stop` (an end id) or `length` (max_tokens, or the context is full).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of an answer as it is written: whole characters only, so text may be empty or long.

    finish_reason is None until the last piece. stats are those of the answer so far.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stats: Summary


class LLM:
    """The models of one bundle on one backend. A context manager; one request at a time, from one thread.

    bundle: the folder semspec-export wrote. backend: `cpu` or `cuda`; a missing one is an error, never another
    one. threads: CPU threads, None for one a core. verify: check the hash of every file first.

    Raises ConfigError (unknown backend), BundleError and BackendError when opened.
    """

    def __init__(
        self, bundle: str | Path, *, backend: str = "cpu", threads: int | None = None, verify: bool = False
    ) -> None:
        check_backend(backend)
        self.bundle = Bundle.open(Path(bundle), verify=verify)
        self.tokenizer = Tokenizer.open(self.bundle.tokenizer)
        self.default_sampling = SamplingParams.from_generation_config(self.tokenizer.generation)
        graph = self.bundle.graph_file("target", backend)
        spec = self.bundle.model("target").graphs[backend]
        self.target = CachedModel(open_backend(backend, threads=threads), graph, spec)
        self._n_requests = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the engines. Safe to call twice."""
        self.target.close()

    def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Completion:
        """Continue plain text, or token ids. sampling: None takes the bundle's own defaults.

        Raises ConfigError for a prompt that is empty or fills the context.
        """
        return _collect(self.stream(prompt, sampling))

    def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, **variables: Any
    ) -> Completion:
        """Answer a conversation: {"role": ..., "content": ...} each. variables: for the chat template.

        Raises BundleError when the model has no chat template or it fails.
        """
        return _collect(self.stream_chat(messages, sampling, **variables))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """As generate, piece by piece; the pieces joined are its text. May be left before its end.

        Tokens are computed as pieces are taken. Going on after another request began raises ConfigError: there
        is one memory.
        """
        return self._stream(self._ids(prompt), sampling or self.default_sampling)

    def stream_chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, **variables: Any
    ) -> Iterator[Delta]:
        """As chat, piece by piece."""
        ids = self.tokenizer.encode_chat(messages, **variables)
        return self._stream(ids, sampling or self.default_sampling)

    def states(self, prompt: Prompt, layers: Sequence[int] | None = None) -> dict[int, Floats]:
        """Hidden states of a text, index -> (S, E); 0 is the embedding, the last is after the final norm.

        layers: of those exported with --hidden-layers, None for all. Raises ConfigError for others.
        """
        ids = self._ids(prompt)
        wanted = self.target.spec.hidden_layers if layers is None else tuple(layers)
        if not wanted:
            raise ConfigError("this bundle returns no hidden states; export again with --hidden-layers")
        self._n_requests += 1
        self.target.rewind(0)
        found = self.target.forward(ids, hidden=wanted)
        return {index: state.copy() for index, state in found.hidden.items()}

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, bytes | bytearray):
            raise ConfigError("a prompt is text or token ids, got bytes; decode them first")
        ids = [operator.index(token) for token in prompt]
        for token in ids:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise ConfigError(f"token id must be in 0..{self.tokenizer.vocab_size - 1}, got {token}")
        return ids

    def _stream(self, ids: Sequence[int], params: SamplingParams) -> Iterator[Delta]:
        self._n_requests += 1
        request = self._n_requests
        ledger = Ledger()
        text = self.tokenizer.stream(ids)
        for step in self._steps(ids, params, ledger):
            piece = text.push(step.ids) + (text.finish() if step.finish_reason else "")
            yield Delta(
                text=piece,
                token_ids=step.ids,
                finish_reason=step.finish_reason,
                stats=ledger.summary(),
            )
            if step.finish_reason is None and request != self._n_requests:
                raise ConfigError(
                    "another request on this LLM began before this one ended; finish one before the next, "
                    "or open the bundle twice"
                )

    def _steps(self, ids: Sequence[int], params: SamplingParams, ledger: Ledger) -> Iterator[Step]:
        return decode_autoregressive(
            self.target,
            ids,
            params,
            vocab_size=self.tokenizer.vocab_size,
            end_ids=self.tokenizer.eos_ids,
            ledger=ledger,
        )


def _collect(deltas: Iterator[Delta]) -> Completion:
    pieces = list(deltas)
    last = pieces[-1]
    assert last.finish_reason is not None
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finish_reason=last.finish_reason,
        stats=last.stats,
    )
