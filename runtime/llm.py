"""LLM: a bundle opened for use. Text in, text out; everything below works on ids."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from semspec.runtime.backends import check_backend
from semspec.runtime.backends.base import Backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.chooser import Processor
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import ConfigError
from semspec.runtime.judging import Judge
from semspec.runtime.loop import decode
from semspec.runtime.model import CachedModel
from semspec.runtime.opening import model_file, open_engine
from semspec.runtime.records import Floats, Judged
from semspec.runtime.requests import Requests, wants_draft
from semspec.runtime.stats import Summary
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Delta", "Prompt"]

Prompt: TypeAlias = "str | Sequence[int]"
Message: TypeAlias = "Mapping[str, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of an answer as it is written: whole characters only, so text may be empty or long.

    The first n_from_draft of its ids were written by the draft; the last n_lossy of these need not follow the target's
    law. rule: what kept them (records.Step). finish_reason is None until the last piece. stats are those of the answer
    so far. logprobs: of each id, where SamplingParams.logprobs asks for them. judged: where a judge spoke, what of the
    draft it kept and why.
    """

    text: str
    token_ids: tuple[int, ...]
    n_from_draft: int
    n_lossy: int
    rule: str
    finish_reason: str | None
    stats: Summary
    logprobs: tuple[float, ...] = ()
    judged: Judged | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer. token_ids ends with the token that completed a stop; text ends before the stop.

    finish_reason: `stop` (an end id or a stop string) or `length` (max_tokens, or the context is full). judged: of
    every draft that a judge saw.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Summary
    logprobs: tuple[float, ...] = ()
    judged: tuple[Judged, ...] = ()


class LLM:
    """The models of one bundle on one backend. A context manager; one request at a time, from one thread.

    bundle: the folder semspec-export wrote. spec: how to decode, None for `lossless` with the bundle's draft, or
    with n-grams where it has none; the draft model is opened only where this uses it. backend: `cpu` or `cuda`, or
    `tensorrt` or `tensorrt-rtx` for plans that semspec build made; a missing one is an error, never another one;
    `auto`: see opening.open_engine, `backend` and `backend_why` tell what was taken.
    threads: CPU threads, None for one a core. verify: check the hash of every file first.

    Raises ConfigError (unknown backend), BundleError, BackendError, and for a semantic mode CalibrationError, when
    opened.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        spec: SpecConfig | None = None,
        backend: str = "cpu",
        threads: int | None = None,
        verify: bool = False,
    ) -> None:
        check_backend(backend, or_auto=True)
        self.bundle = Bundle.open(Path(bundle), verify=verify)
        self.tokenizer = Tokenizer.open(self.bundle.tokenizer)
        self.default_sampling = SamplingParams.from_generation_config(self.tokenizer.generation)
        self.spec = spec or SpecConfig()
        pair = wants_draft(self.spec, "draft" in self.bundle.manifest.models)
        roles = ("target", "draft") if pair else ("target",)
        # two engines that share cores must not keep them busy while they wait
        engine, self.backend_why = open_engine(self.bundle, roles, backend, threads=threads, spin=not pair)
        self.backend = engine.name
        self.target = _open_model(self.bundle, "target", engine)
        self.draft = _open_model(self.bundle, "draft", engine) if pair else None
        self._requests = Requests(self.bundle, self.tokenizer, engine, self.draft)
        self._n_requests = 0
        try:
            self._requests.prepare(self.spec)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the engines. Safe to call twice."""
        self._requests.close()
        self.target.close()
        if self.draft is not None:
            self.draft.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        processors: Sequence[Processor] = (),
        judge: Judge | None = None,
    ) -> Completion:
        """Continue plain text, or token ids; one text, not several.

        sampling: None takes the bundle's own defaults. spec: another way to decode for this request; a draft model
        must have been opened with the LLM. processors: see chooser.Processor; they are told every token of this
        answer and must be fresh. judge: see judging.Judge; goes with mode `judged` and with no other. Raises
        ConfigError for a prompt that is empty or fills the context, and for settings that do not fit.
        """
        return _collect(self.stream(prompt, sampling, spec=spec, processors=processors, judge=judge))

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        processors: Sequence[Processor] = (),
        judge: Judge | None = None,
        **variables: Any,
    ) -> Completion:
        """Answer a conversation: {"role": ..., "content": ...} each. variables: for the chat template.

        What an earlier turn has in common with this one is not read again. Raises BundleError when the model has
        no chat template or it fails, else as generate.
        """
        given: Mapping[str, Any] = {"spec": spec, "processors": processors, "judge": judge, **variables}
        return _collect(self.stream_chat(messages, sampling, **given))

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        processors: Sequence[Processor] = (),
        judge: Judge | None = None,
    ) -> Iterator[Delta]:
        """As generate, piece by piece; the pieces joined are its text. May be left before its end.

        Tokens are computed as pieces are taken. Going on after another request began raises ConfigError: there
        is one memory.
        """
        return self._stream(self._ids(prompt), sampling, spec, processors, judge)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        processors: Sequence[Processor] = (),
        judge: Judge | None = None,
        **variables: Any,
    ) -> Iterator[Delta]:
        """As chat, piece by piece."""
        ids = self.tokenizer.encode_chat(messages, **variables)
        return self._stream(ids, sampling, spec, processors, judge)

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
        if any(isinstance(token, str) for token in prompt):
            raise ConfigError("one prompt at a time: give a text or token ids, not a list of texts")
        ids = [operator.index(token) for token in prompt]
        for token in ids:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise ConfigError(f"token id must be in 0..{self.tokenizer.vocab_size - 1}, got {token}")
        return ids

    def _stream(
        self,
        ids: Sequence[int],
        sampling: SamplingParams | None,
        spec: SpecConfig | None,
        processors: Sequence[Processor],
        judge: Judge | None,
    ) -> Iterator[Delta]:
        params = sampling or self.default_sampling
        request = self._requests.make(ids, params, spec or self.spec, processors, judge)
        model = self._requests.open_draft() if request.alone else self.target
        self._n_requests += 1
        number = self._n_requests
        for step in decode(model, request):
            yield Delta(
                text=step.text,
                token_ids=step.ids,
                n_from_draft=step.n_from_draft,
                n_lossy=step.n_lossy,
                rule=step.rule,
                finish_reason=step.finish_reason,
                stats=request.ledger.summary(),
                logprobs=step.logprobs,
                judged=step.judged,
            )
            if step.finish_reason is None and number != self._n_requests:
                raise ConfigError(
                    "another request on this LLM began before this one ended; finish one before the next, "
                    "or open the bundle twice"
                )


def _open_model(bundle: Bundle, role: str, engine: Backend) -> CachedModel:
    file, spec = model_file(bundle, role, engine)
    # verification needs the target's rows to be those of single steps; a draft's proposals are judged as they come
    return CachedModel(engine, file, spec, same_bits=role == "target")


def _collect(deltas: Iterator[Delta]) -> Completion:
    pieces = list(deltas)
    last = pieces[-1]
    assert last.finish_reason is not None
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finish_reason=last.finish_reason,
        stats=last.stats,
        logprobs=tuple(value for piece in pieces for value in piece.logprobs),
        judged=tuple(piece.judged for piece in pieces if piece.judged is not None),
    )
