"""Models from a Hugging Face hub or a mirror of it, through huggingface_hub and its own cache.

It knows which files of a repository are data that semspec reads. Pickled weights and Python files are never
asked for, whatever a repository holds. HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN mean what they mean
everywhere.
"""

from __future__ import annotations

import glob
import sys
from pathlib import Path

from semspec.export.recipes import HubSource
from semspec.runtime.errors import SourceError
from semspec.runtime.records import Progress

__all__ = ["fetch_hub"]

FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "LICENSE*", "LICENCE*", "NOTICE*")
# Sub-folders and consolidated files repeat the weights in the format of another program.
NOT_FILES = ("*/*", "consolidated*")


def fetch_hub(source: HubSource, on_progress: Progress | None = None) -> Path:
    """The local folder with the safetensors of the repository, or the local copy of its one GGUF file.

    huggingface_hub draws its own bars; on_progress only tells that it began. Raises SourceError: nothing
    cached and no connection, no such repository, revision or file, access not granted, no safetensors in it.
    Not guaranteed: that a folder cached by an interrupted run is whole when there is no connection (the
    checkpoint reader names the missing shard); that files are plain: in the hub's cache they are links.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise SourceError(
            f"{source} needs huggingface_hub, which cannot be imported ({error}); "
            "install it with: pip install 'semspec[export]'"
        ) from error
    if on_progress:
        on_progress(f"download {source}", 0, 0)
    wanted = list(FILES) if source.file is None else [glob.escape(source.file)]
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                source.id,
                revision=source.revision,
                allow_patterns=wanted,
                ignore_patterns=list(NOT_FILES) if source.file is None else None,
            )
        )
    except _failures() as error:
        raise SourceError(f"{source}: {_explain(error)}") from error
    if source.file is not None:
        if not (folder / source.file).is_file():
            raise SourceError(f"{source}: no such file in the repository (or not in the local hub cache)")
        return folder / source.file
    if not any(folder.glob("*.safetensors")):
        raise SourceError(
            f"{source} has no safetensors weights, the only ones read from a hub folder; "
            "name another repository, or one GGUF file as hub:org/name/file.gguf"
        )
    return folder


def _failures() -> tuple[type[Exception], ...]:
    """What a hub download raises for reasons outside the program: its own errors, HTTP's, the disk's."""
    from huggingface_hub import errors

    # Version 0.x speaks through requests, whose errors are OSErrors; 1.x through httpx, 2.x through httpx2.
    transports = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    kinds: list[type[Exception]] = [module.HTTPError for module in transports]
    return (OSError, errors.HfHubHTTPError, errors.HFValidationError, *kinds)


def _explain(error: Exception) -> str:
    """One line: what happened and what to do about it."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "access must be granted first: accept the licence on its page and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no such revision on the hub; write org/name@REVISION with a branch, tag or commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "no such repository on the hub (or it is private: set HF_TOKEN), "
            "and no local file or folder of that name"
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectionError):
        return (
            "not in the local hub cache, and the hub cannot be reached; "
            "check the connection, HF_HUB_OFFLINE and HF_ENDPOINT, or give a local folder"
        )
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"the download failed: {first_line}; run again to go on with it"
