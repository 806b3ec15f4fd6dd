"""Do target and draft belong together: the bundle's one tokenizer, and what both vocabularies must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from semspec.export.checkpoint import Checkpoint
from semspec.export.vocabulary import write_tokenizer
from semspec.runtime.errors import PairError
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["check_vocabularies", "write_tokenizers"]


def write_tokenizers(folder: Path, checkpoints: Mapping[str, Checkpoint]) -> Tokenizer:
    """The target's tokenizer becomes the bundle's; a draft's must know the same ids."""
    for role, checkpoint in checkpoints.items():
        write_tokenizer(checkpoint.path, folder / f"tokenizer-{role}", config=checkpoint.config)
    (folder / "tokenizer-target").rename(folder / "tokenizer")
    tokenizer = Tokenizer.open(folder / "tokenizer")
    if "draft" in checkpoints:
        other = folder / "tokenizer-draft"
        check_vocabularies(tokenizer, Tokenizer.open(other))
        for file in other.iterdir():
            file.unlink()
        other.rmdir()
    return tokenizer


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """Every id that the draft's tokenizer has must mean the same bytes in the target's, which may have more.

    Rows without a token are padding and do not matter. Raises PairError naming the first id that differs.
    """
    for token_id in range(draft.vocab_size):
        ours = target.token_bytes(token_id) if token_id < target.vocab_size else b""
        theirs = draft.token_bytes(token_id)
        if ours != theirs:
            raise PairError(
                f"target and draft do not share a vocabulary: id {token_id} is {_text(ours)} in the target and "
                f"{_text(theirs)} in the draft; choose a draft of the target's family"
            )


def _text(token: bytes) -> str:
    """A token as text, or as bytes where it is a part of a character; an id may have none."""
    if not token:
        return "unused"
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)
