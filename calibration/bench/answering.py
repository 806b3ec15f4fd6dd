"""Who answers in a run: the bundle, opened as each mode's user would open it, and peers. Opened when first asked, kept.

A mode that drafts with the draft model answers on engines that give up the cores while they wait; all others on
engines that do not, as without a draft model nobody else wants the cores. So where a run has both, the target is in
memory twice. A peer has a process of its own, which waits for its turn without using a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType

from semspec.calibration.bench.answers import is_correct
from semspec.calibration.bench.peer_names import parse_peer
from semspec.calibration.bench.peers import Peer, PeerAnswer, open_peer
from semspec.calibration.bench.records import Cell, Mode, Problem, Result
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import ConfigError
from semspec.runtime.judging import Judge
from semspec.runtime.llm import LLM
from semspec.runtime.records import Progress
from semspec.runtime.stats import peak_mib
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["INSTRUCTION", "Answerers", "chat_of"]

INSTRUCTION = "Think it through step by step. End with the final answer alone inside \\boxed{}."


def chat_of(problem: Problem) -> list[dict[str, str]]:
    """What is asked: the question, and where its answer will be looked for the instruction to box one."""
    content = problem.question if problem.answer is None else f"{problem.question}\n\n{INSTRUCTION}"
    return [{"role": "user", "content": content}]


class Answerers:
    """Opens on demand what answers in the modes of a run, and closes all at its end. A context manager.

    on_progress: told of what is made for peers.
    """

    def __init__(
        self, bundle: Path, *, backend: str, threads: int | None, on_progress: Progress | None = None
    ) -> None:
        self._bundle, self._backend, self._threads = bundle, backend, threads
        self._on_progress = on_progress
        self._opened = Bundle.open(bundle)
        self.tokenizer = Tokenizer.open(self._opened.tokenizer)
        self._max_context = self._opened.model("target").graphs["cpu"].max_context
        self._llms: dict[bool, LLM] = {}
        self._peers: dict[str, Peer] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Answerers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def peers(self) -> Sequence[Peer]:
        """Those open by now."""
        return tuple(self._peers.values())

    def check_prompt(self, problem: Problem) -> None:
        """Raise ConfigError for a problem that the context cannot hold."""
        n_tokens = len(self.tokenizer.encode_chat(chat_of(problem)))
        if n_tokens > self._max_context:
            raise ConfigError(
                f"problem {problem.id!r} has {n_tokens} tokens and the context holds {self._max_context}; leave it "
                f"out, or export with a larger --max-context"
            )

    def answer(self, mode: Mode, problem: Problem, cell: Cell, sampling: SamplingParams) -> Result:
        """Answer once, with nothing remembered of earlier answers; judged after the clock has stopped."""
        if mode.spec is None:
            return self._ask_peer(mode, problem, cell, sampling)
        return self._ask_llm(mode, mode.spec, problem, cell, sampling)

    def _ask_llm(
        self, mode: Mode, spec: SpecConfig, problem: Problem, cell: Cell, sampling: SamplingParams
    ) -> Result:
        llm = self._llm(spec)
        llm.target.rewind(0)
        if llm.draft is not None:
            llm.draft.rewind(0)
        judge = _judge(mode, llm.tokenizer)
        started = perf_counter()
        deltas = list(llm.stream_chat(chat_of(problem), sampling, spec=spec, judge=judge))
        seconds = perf_counter() - started
        stats = deltas[-1].stats
        text, finish_reason = "".join(delta.text for delta in deltas), str(deltas[-1].finish_reason)
        return Result(
            cell=cell,
            text=text,
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=finish_reason,
            correct=_correct(problem, text, finish_reason),
            seconds=seconds,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            ttft_ms=stats.ttft_ms,
            tpot_ms=stats.tpot_ms,
            phase_ms=stats.phase_ms,
            num_rounds=stats.num_rounds,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
            n_from_draft=sum(delta.n_from_draft for delta in deltas),
            n_lossy=stats.num_lossy_tokens,
            peak_mib=peak_mib(),
        )

    def _ask_peer(self, mode: Mode, problem: Problem, cell: Cell, sampling: SamplingParams) -> Result:
        """The clock runs over what ours runs over: template and ids, the answer, its text; and the way there."""
        peer = self._peer(mode)
        peer.forget()
        started = perf_counter()
        ids = self.tokenizer.encode_chat(chat_of(problem))
        # where the context of ours is full, an answer ends
        most = min(sampling.max_tokens, self._max_context - len(ids) + 1)
        found = peer.generate(ids, replace(sampling, max_tokens=most), n_draft=parse_peer(mode.name).n_draft)
        text = self._text(found.token_ids)
        seconds = perf_counter() - started
        return Result(
            cell=cell,
            text=text,
            token_ids=found.token_ids,
            finish_reason=found.finish_reason,
            correct=_correct(problem, text, found.finish_reason),
            seconds=seconds,
            prompt_tokens=len(ids),
            generated_tokens=len(found.token_ids),
            ttft_ms=None if found.ttft_s is None else 1000 * found.ttft_s,
            tpot_ms=_tpot_ms(found),
            phase_ms={},
            num_rounds=found.rounds,
            num_draft_tokens=found.drafted,
            num_accepted_draft_tokens=found.accepted,
            n_from_draft=found.accepted,
            peak_mib=peer.peak_mib,
        )

    def _text(self, ids: Sequence[int]) -> str:
        """A peer may write an id for which the model has a row and the tokenizer no token: that says nothing."""
        return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])

    def _llm(self, spec: SpecConfig) -> LLM:
        pair = _uses_draft(spec)
        if pair not in self._llms:
            opened_as = spec if pair else SpecConfig(mode="autoregressive")
            llm = LLM(self._bundle, spec=opened_as, backend=self._backend, threads=self._threads)
            self._llms[pair] = self._stack.enter_context(llm)
        return self._llms[pair]

    def _peer(self, mode: Mode) -> Peer:
        """One process for all draft lengths of a peer."""
        kind = parse_peer(mode.name).kind
        if kind.name not in self._peers:
            opening = open_peer(kind.name, self._bundle, threads=self._threads, on_progress=self._on_progress)
            self._peers[kind.name] = self._stack.enter_context(opening)
        return self._peers[kind.name]


def _uses_draft(spec: SpecConfig) -> bool:
    """Whether a mode needs the draft model open."""
    return spec.mode != "autoregressive" and spec.draft == "model"


def _judge(mode: Mode, tokenizer: Tokenizer) -> Judge | None:
    return None if mode.control is None else mode.control.prepare(tokenizer)


def _tpot_ms(found: PeerAnswer) -> float | None:
    """Mean time of a token after the first."""
    later = len(found.token_ids) - 1
    if found.ttft_s is None or not later:
        return None
    return 1000 * max(found.seconds - found.ttft_s, 0.0) / later


def _correct(problem: Problem, text: str, finish_reason: str) -> bool | None:
    """None where the data has no answer."""
    if problem.answer is None:
        return None
    return is_correct(text, problem.answer, whole=finish_reason != "length")
