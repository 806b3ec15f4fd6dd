"""Relations between texts by name, opened for a calibration, and a journal of what they said.

Neural relations take minutes over a collection: what was asked once is written down, so that a run that was killed
asks only what is left. The relations themselves are equivalence.py's and equivalence_neural.py's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from semspec.calibration.encoders import PairEncoder, SentenceEncoder, encoder_sha256
from semspec.calibration.equivalence import Bools, Equivalence, Exact, Numbers
from semspec.calibration.equivalence_neural import MINILM_LIMIT, Embed, Nli
from semspec.runtime.errors import CalibrationError, ConfigError

__all__ = ["NEURAL", "RELATIONS", "Asked", "Relation", "open_relation"]

RELATIONS = ("exact", "numbers", "embed", "nli")
NEURAL = ("embed", "nli")
MINILM = "all-minilm-l6-v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Which texts count as the same: one of RELATIONS, and what a neural one reads with.

    encoder: hub id or folder. limit: of `embed`'s cosine, 0 for the one fitted for all-MiniLM-L6-v2. pooling: of
    `embed`'s encoder, empty for what its folder says. Raises ConfigError for what does not go together.
    """

    name: str = "numbers"
    encoder: str = ""
    limit: float = 0.0
    pooling: str = ""

    def __post_init__(self) -> None:
        if self.name not in RELATIONS:
            raise ConfigError(f"equivalence must be one of {', '.join(RELATIONS)}, got {self.name!r}")
        if self.name in NEURAL and not self.encoder:
            raise ConfigError(
                f"{self.name} reads with an encoder, and none was named; give its hub id or folder as --encoder"
            )
        if self.name not in NEURAL and self.encoder:
            raise ConfigError(
                f"{self.name} reads without an encoder; leave --encoder out, or ask for embed or nli"
            )
        if self.name != "embed" and (self.limit or self.pooling):
            raise ConfigError(f"a limit and a pooling go with embed, not with {self.name}; leave them out")
        if self.name == "embed" and not self.limit and MINILM not in self.encoder.lower():
            raise ConfigError(
                f"the limit of {self.encoder} is not known: {MINILM_LIMIT} was fitted for all-MiniLM-L6-v2; give "
                "--encoder-limit, the least cosine of two texts that say the same"
            )

    def describe(self) -> dict[str, str | float]:
        """All that its answers depend on, the encoder by the sha256 of its files. Fetches the encoder."""
        said: dict[str, str | float] = {name: value for name, value in asdict(self).items() if value}
        if self.encoder:
            said["encoder_sha256"] = encoder_sha256(self.encoder)
            said["encoder"] = Path(self.encoder).name  # where it lies is this machine's business
        if self.name == "embed":
            said["limit"] = self.limit or MINILM_LIMIT
        return said


@contextmanager
def open_relation(relation: Relation, *, threads: int | None = None) -> Iterator[Equivalence]:
    """Closed at the end. Raises what the encoder raises (encoders.py)."""
    with ExitStack() as stack:
        if relation.name == "embed":
            sentences = SentenceEncoder.open(
                relation.encoder, pooling=relation.pooling or None, threads=threads
            )
            stack.callback(sentences.close)
            yield Embed(sentences, limit=relation.limit or MINILM_LIMIT)
        elif relation.name == "nli":
            pairs = PairEncoder.open(relation.encoder, threads=threads)
            stack.callback(pairs.close)
            yield Nli(pairs, pairs.labels)
        else:
            yield Exact() if relation.name == "exact" else Numbers()


class Asked:
    """A relation that writes down what it says, in the file `path`, a line an answer. A context manager.

    Same questions in the same order, same bytes. A line that a kill tore is asked again. Raises CalibrationError for
    a file that is damaged, and for one that cannot be written.
    """

    def __init__(self, relation: Equivalence, path: Path) -> None:
        self._relation, self._path = relation, path
        self._answers = _read_answers(path)
        try:
            self._file = path.open("ab", buffering=0)  # nothing is left to be written when it is closed
        except OSError as error:
            raise _unwritable(path, error) from None

    @property
    def name(self) -> str:
        """Of the relation."""
        return self._relation.name

    def __enter__(self) -> Asked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def related(self, texts: Sequence[str]) -> Bools:
        """See Equivalence."""
        key = hashlib.sha256(json.dumps(list(texts)).encode("ascii")).hexdigest()
        if key not in self._answers:
            found = self._relation.related(texts)
            rows = ["".join("01"[int(same)] for same in row) for row in found]
            line = json.dumps([key, rows]).encode("ascii") + b"\n"
            try:
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            except OSError as error:
                raise _unwritable(self._path, error) from None
            self._answers[key] = found
        return self._answers[key]


def _read_answers(path: Path) -> dict[str, Bools]:
    """Texts' key -> (n, n). Half a line at the end is cut off."""
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unwritable(path, error) from None
    found = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            key, rows = json.loads(line)
            related = np.array([[letter == "1" for letter in row] for row in rows], np.bool_)
            found[str(key)] = related.reshape(len(rows), len(rows))
        except (ValueError, TypeError, RecursionError):
            raise CalibrationError(
                f"{path}, line {number} is damaged; remove the file and run the same command again"
            ) from None
    return found


def _unwritable(path: Path, error: OSError) -> CalibrationError:
    return CalibrationError(
        f"{path}: cannot be written: {error.strerror or error}; repair that and run the same command again"
    )
