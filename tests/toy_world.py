"""ToyWorld: a target and a draft whose segments are enumerated, so how likely a meaning is is known, not estimated.

    situation (the prompt) -> class, with chance masses[situation, class] -> wording, with the role's own share -> ids

Both models write wording after wording, token by token, by the law that follows from these chances; what they say does
not change the situation. All of it holds at temperature 1 with nothing filtered.

    >>> world = ToyWorld([[0.75, 0.25]], [[0.5, 0.5]], [["12 so", "12 it is so"], ["13 so"]])
    >>> ids = world.ids("12 it is so")
    >>> world.class_of(ids), world.mass("target", ids), world.mass("draft", ids), world.overlap()
    (0, 0.75, 0.5, 0.75)
    >>> law = world.segment_law("target")
    >>> [round(law[world.ids(text)], 3) for text in ("12 so", "12 it is so", "13 so")]
    [0.5, 0.25, 0.25]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from one_pass import read_segment
from scripted import ScriptedModel

from semspec.calibration.equivalence import Bools
from semspec.calibration.records import Context, Sample
from semspec.calibration.writing import Written, write_segments
from semspec.runtime.config import SamplingParams
from semspec.runtime.records import Floats
from semspec.runtime.segments import Boundary, Segmenter

Ids: TypeAlias = tuple[int, ...]
Masses: TypeAlias = npt.NDArray[np.float64]

NEWLINE, STOP = 0, 1  # ids
END = "<end>"  # a word that stops the answer
NEVER = -100.0  # a logit: no chance at all (runtime/sampling.py), but finite
PLAIN = SamplingParams(temperature=1, top_p=1)
WIDTH = 6  # E


class ToyWorld:
    """target_masses, draft_masses: (S, C), the chance of each class in each situation; rows sum to 1.

    wordings: class -> texts of words with a blank between; a newline ends each, but one whose last word is <end> is
    ended by that. None: plain_wordings(C). shares: role -> how likely a class's first, second, .. wording is, as far as
    there are so many, scaled to 1; the target prefers the first (2 to 1 over the next), the draft the last.

    States (K, E) = (2, 6), of the row that predicts the next token: in layer 0, entry 0, the chance, expected over what
    may still follow, that the model says the class of the segment it is in; with normal noise of deviation `noise`.
    All other entries, and layer 1, are noise of deviation 1.
    """

    def __init__(
        self,
        target_masses: npt.ArrayLike,
        draft_masses: npt.ArrayLike,
        wordings: Sequence[Sequence[str]] | None = None,
        *,
        shares: dict[str, Sequence[float]] | None = None,
        max_context: int = 512,
        noise: float = 0.05,
    ) -> None:
        self._masses = {
            "target": np.atleast_2d(np.asarray(target_masses, np.float64)),
            "draft": np.atleast_2d(np.asarray(draft_masses, np.float64)),
        }
        self.n_situations, self.n_classes = self._masses["target"].shape
        assert self._masses["draft"].shape == (self.n_situations, self.n_classes)
        assert all(np.allclose(masses.sum(axis=1), 1) for masses in self._masses.values())
        texts = plain_wordings(self.n_classes) if wordings is None else wordings
        assert len(texts) == self.n_classes
        self.max_context, self._noise = max_context, noise
        words = dict.fromkeys(word for text in chain.from_iterable(texts) for word in text.split(" "))
        cases = [f"Case {_letters(number)}:" for number in range(self.n_situations)]
        self.pieces = ["\n", "", *cases, *(f" {word}" for word in words if word != END)]
        self._id_of = {piece: token for token, piece in enumerate(self.pieces)}
        self.wordings = [[self.ids(text) for text in of_class] for of_class in texts]
        self._class_of = {ids: number for number, of_class in enumerate(self.wordings) for ids in of_class}
        assert len(self._class_of) == sum(map(len, self.wordings)), "no two wordings are alike"
        self._shares = {role: _shares(self.wordings, role, (shares or {}).get(role)) for role in self._masses}
        self._tries = {
            (role, situation): _trie(self.segment_law(role, situation))
            for role in self._masses
            for situation in range(self.n_situations)
        }
        self._told = {
            (role, situation): self._expected(role, situation)
            for role in self._masses
            for situation in range(self.n_situations)
        }

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def longest(self) -> int:
        """Tokens of the longest wording: a cap that cuts none."""
        return max(map(len, self._class_of))

    def model(self, role: str) -> ScriptedModel:
        """A new one, with nothing remembered. role: `target` or `draft`."""
        return ScriptedModel(
            lambda context: self._logits(role, context),
            max_context=self.max_context,
            state=lambda context: self._state(role, context),
        )

    def prompt(self, situation: int = 0) -> Ids:
        """Two tokens: the situation, and a newline, after which a segment begins."""
        return (2 + situation, NEWLINE)

    def segmenter(self, cap: int | None = None) -> Segmenter:
        """By lines; a stop ends one too. cap: None for one that cuts no wording."""
        boundary = Boundary(kind="newline", min_tokens=1, max_tokens=cap or self.longest)
        return Segmenter(boundary, self.token_bytes, [STOP])

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode()

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in ids)

    def ids(self, text: str) -> Ids:
        """Of a wording, written as for the constructor."""
        words = text.split(" ")
        ends = words[-1] == END
        return (
            *(self._id_of[f" {word}"] for word in words[: -1 if ends else None]),
            STOP if ends else NEWLINE,
        )

    def class_of(self, ids: Sequence[int]) -> int:
        """Of a whole wording; KeyError for anything else, such as one that a cap cut."""
        return self._class_of[tuple(ids)]

    def masses(self, role: str, situation: int = 0) -> Masses:
        """(C,): mu_T or mu_D."""
        return self._masses[role][situation]

    def mass(self, role: str, ids: Sequence[int], situation: int = 0) -> float:
        """What an exact probe says of a segment: the chance that the model says something meaning this."""
        return float(self._masses[role][situation, self.class_of(ids)])

    def overlap(self, situation: int = 0) -> float:
        """beta: the mean of min(1, mu_T / mu_D) over the draft's segments."""
        return float(np.minimum(self.masses("target", situation), self.masses("draft", situation)).sum())

    def round_law(self, situation: int = 0) -> Masses:
        """(C,): the classes that one round of the published rule lets out, with exact scores: what is rejected is
        replaced by a plain segment of the target."""
        target, draft = self.masses("target", situation), self.masses("draft", situation)
        law: Masses = np.minimum(target, draft) + (1 - self.overlap(situation)) * target
        return law

    def segment_law(self, role: str, situation: int = 0) -> dict[Ids, float]:
        """Chance of every wording, those without any left out."""
        chances = {
            ids: float(mass * share)
            for mass, of_class, shares in zip(
                self.masses(role, situation), self.wordings, self._shares[role], strict=True
            )
            for ids, share in zip(of_class, shares, strict=True)
        }
        return {ids: chance for ids, chance in chances.items() if chance > 0}

    def draw(self, role: str, rng: np.random.Generator, situation: int = 0) -> Ids:
        """A segment by its law, without a model."""
        law = self.segment_law(role, situation)
        return list(law)[int(rng.choice(len(law), p=np.array([*law.values()]) / sum(law.values())))]

    def collect(
        self,
        n_draft: int,
        n_target: int,
        rng: np.random.Generator,
        *,
        situations: Sequence[int] | None = None,
    ) -> list[tuple[Context, tuple[Sample, ...]]]:
        """What a Collection would give: one context a situation, questions `q0`, `q1`, ..; samples as
        calibration/collect.py has them: greedy ones first, the draft's read by the target too."""
        models = {role: self.model(role) for role in self._masses}
        found = []
        for number, situation in enumerate(range(self.n_situations) if situations is None else situations):
            prompt = self.prompt(situation)
            context = Context(
                id=f"q{number}/prompt", question=f"q{number}", ids=prompt, answer=None, written_by="nobody"
            )
            samples = []
            for author, n in (("draft", n_draft), ("target", n_target)):
                chances = [None, *(np.random.default_rng(rng.integers(1 << 62)) for _ in range(n))]
                written = write_segments(
                    models[author],
                    prompt,
                    chances,
                    segmenter=self.segmenter(),
                    sampling=PLAIN,
                    n_ids=self.vocab_size,
                )
                samples += [
                    self._sample(context, author, place == 0, one, models["target"])
                    for place, one in enumerate(written)
                ]
            found.append((context, tuple(samples)))
        return found

    def _sample(
        self, context: Context, author: str, greedy: bool, written: Written, target: ScriptedModel
    ) -> Sample:
        readings = {author: written.reading}
        if author == "draft":
            readings["target"] = read_segment(target, context.ids, written.ids, n_ids=self.vocab_size)
        return Sample(
            context=context.id,
            author=author,
            greedy=greedy,
            ids=written.ids,
            text=self.text(written.ids),
            readings=readings,
        )

    def _logits(self, role: str, context: Ids) -> Floats:
        situation, begun = _begun(context)
        follows = self._tries[role, situation].get(begun, {NEWLINE: 1.0})  # off every wording: the line ends
        logits = np.full(self.vocab_size, NEVER, np.float32)
        logits[list(follows)] = np.log(np.fromiter(follows.values(), np.float64) / sum(follows.values()))
        return logits

    def _state(self, role: str, context: Ids) -> Floats:
        situation, begun = _begun(context)
        rng = np.random.default_rng((*role.encode(), *context))
        state = rng.standard_normal((2, WIDTH)).astype(np.float32)
        told = self._told[role, situation].get(begun, 0.0)
        state[0, 0] = told + self._noise * rng.standard_normal()
        return state

    def _expected(self, role: str, situation: int) -> dict[Ids, float]:
        """Begun segment -> expected chance of the class it will be of, over how the model itself goes on; where it
        never goes on, over all wordings alike."""
        masses, law = self.masses(role, situation), self.segment_law(role, situation)
        found: dict[Ids, float] = {}
        for begun in {ids[:n] for ids in self._class_of for n in range(len(ids))}:
            able = [ids for ids in self._class_of if ids[: len(begun)] == begun]
            weights = np.array([law.get(ids, 0.0) for ids in able])
            weights = weights if weights.sum() else np.ones(len(able))
            values = [masses[self._class_of[ids]] for ids in able]
            found[begun] = float(np.average(values, weights=weights))
        return found


class SameClass:
    """The true relation: texts of one class."""

    name = "same-class"

    def __init__(self, world: ToyWorld) -> None:
        self._class_of = {world.text(ids): world.class_of(ids) for of in world.wordings for ids in of}

    def related(self, texts: Sequence[str]) -> Bools:
        classes = np.array([self._class_of[text] for text in texts], np.int64)
        same: Bools = classes[:, None] == classes[None]
        return same


def plain_wordings(n_classes: int) -> list[list[str]]:
    """Three for each class, of 4, 5 and 7 tokens, whose first word is a number that says which class it is."""
    return [
        [f"{10 + number} {rest}" for rest in ("it is", "is the result", "is the result of it")]
        for number in range(n_classes)
    ]


def scattered_masses(
    n_situations: int, n_classes: int, seed: int = 0, *, agreement: float = 0.5, zeros: float = 0.2
) -> tuple[Masses, Masses]:
    """Masses (S, C) of target and draft. agreement: the draft's are so much the target's, else its own; zeros: how
    often the target never says a class."""
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.full(n_classes, 0.7), n_situations)
    never = rng.random(target.shape) < zeros
    never[np.arange(n_situations), target.argmax(axis=1)] = False
    target = np.where(never, 0.0, target)
    target /= target.sum(axis=1, keepdims=True)
    own = rng.dirichlet(np.full(n_classes, 0.7), n_situations)
    return target, agreement * target + (1 - agreement) * own


def _begun(context: Ids) -> tuple[int, Ids]:
    """The situation, and what stands behind the last newline or stop."""
    ends = [place for place, token in enumerate(context) if token in (NEWLINE, STOP)]
    return context[0] - 2, context[ends[-1] + 1 :] if ends else (STOP,)


def _trie(law: dict[Ids, float]) -> dict[Ids, dict[int, float]]:
    """Begun segment -> next token -> its weight."""
    found: dict[Ids, dict[int, float]] = {}
    for ids, chance in law.items():
        for place, token in enumerate(ids):
            follows = found.setdefault(ids[:place], {})
            follows[token] = follows.get(token, 0.0) + chance
    return found


def _shares(
    wordings: Sequence[Sequence[Ids]], role: str, given: Sequence[float] | None
) -> list[npt.NDArray[np.float64]]:
    """Of each class, the share of each of its wordings."""
    found = []
    for of_class in wordings:
        n = len(of_class)
        falling = 0.5 ** np.arange(n)
        values = np.array(given[:n]) if given else falling if role == "target" else falling[::-1]
        assert len(values) == n and values.sum() > 0
        found.append(values / values.sum())
    return found


def _letters(number: int) -> str:
    """A name without digits: a, b, .., z, ba, bb, .."""
    return ("" if number < 26 else _letters(number // 26)) + "abcdefghijklmnopqrstuvwxyz"[number % 26]
