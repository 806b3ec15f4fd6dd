"""Authors: who wrote which characters of an answer, from its pieces. It knows text and ids; it knows no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from semspec.runtime.stopping import TextSource

__all__ = ["AUTHORS", "Authors"]

AUTHORS = ("target", "draft", "draft, lossy")
"""`draft`: written by the draft, and as the target's own law has it; `draft, lossy`: kept by another rule."""


class Authors:
    """Of one answer. text: its ids in, its characters out (Tokenizer.stream of the prompt).

    A character is its last byte's token's. What a piece does not show, such as the beginning of what may become a stop
    string, is told with the piece that does.
    """

    def __init__(self, text: TextSource) -> None:
        self._text = text
        self._waiting: list[tuple[str, str]] = []  # (author, characters) that no piece has shown yet

    def split(
        self, text: str, ids: Sequence[int], *, n_from_draft: int, n_lossy: int
    ) -> Iterator[tuple[str, str]]:
        """(author, characters) whose characters joined are `text`. The rest as llm.Delta has it."""
        for place, token in enumerate(ids):
            exact = place < n_from_draft - n_lossy
            author = AUTHORS[1 if exact else 2] if place < n_from_draft else AUTHORS[0]
            self._waiting.append((author, self._text.push((token,))))
        while text:
            # what is held back until the end, half a character, has no token of its own
            author, characters = self._waiting.pop(0) if self._waiting else (AUTHORS[0], text)
            shown, rest = characters[: len(text)], characters[len(text) :]
            if rest:
                self._waiting.insert(0, (author, rest))
            if shown:
                yield author, shown
            text = text[len(shown) :]
