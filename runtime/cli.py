"""Commands that use a bundle: generate, inspect. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from semspec.runtime.bundle import WeightClass
    from semspec.runtime.config import SpecConfig
    from semspec.runtime.llm import Delta
    from semspec.runtime.stats import Summary

__all__ = ["generate", "inspect"]


@click.command(short_help="Answer a prompt with the models of a bundle.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template.")
@click.option("--system", help="System message of the chat.")
@click.option("--max-tokens", type=int, help="At most this many new tokens.")
@click.option("--temperature", type=float, help="0 is greedy; more is more varied.")
@click.option("--top-k", type=int, help="Only the k likeliest tokens; 0 is off.")
@click.option("--top-p", type=float, help="The likeliest tokens that hold this share of the mass; 1 is off.")
@click.option(
    "--min-p", type=float, help="Tokens of at least this share of the likeliest's chance; 0 is off."
)
@click.option(
    "--repetition-penalty", type=float, help="Above 1: what was said becomes less likely; 1 is off."
)
@click.option(
    "--presence-penalty", type=float, help="Taken from the logit of every id of the answer; 0 is off."
)
@click.option("--frequency-penalty", type=float, help="The same for each time it was written; 0 is off.")
@click.option("--seed", type=int, help="Same seed, same output.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="Id that ends the answer.")
@click.option(
    "--mode", type=click.Choice(["lossless", "autoregressive"]), help="How to decode.  [default: lossless]"
)
@click.option(
    "--draft", type=click.Choice(["model", "ngram", "none"]), help="Who drafts.  [default: model, if any]"
)
@click.option("--num-draft-tokens", type=int, help="Most tokens of a draft.  [default: 4]")
@click.option("--block", is_flag=True, help="Judge a draft as a block: keeps at least as many of its tokens.")
@click.option("--logprobs", is_flag=True, help="With --json: each token's log-probability under the target.")
@click.option("--backend", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@click.option("--verify", is_flag=True, help="Check the hash of every file first.")
@click.option("--stats", is_flag=True, help="Print counts and times on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout instead of the text.")
def generate(
    bundle: Path,
    prompt: str,
    raw: bool,
    system: str | None,
    mode: str | None,
    draft: str | None,
    num_draft_tokens: int | None,
    block: bool,
    backend: str,
    threads: int | None,
    verify: bool,
    stats: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer PROMPT with the models of BUNDLE; a PROMPT of - is read from standard input, less a final newline.

    The chat template is applied unless --raw. Sampling options not given here are the model's own
    (generation_config.json in the bundle). Drafts change the speed, never the answer: --draft none decodes with
    the target alone.
    """
    from dataclasses import replace

    from semspec.runtime.errors import ConfigError
    from semspec.runtime.llm import LLM

    if raw and system is not None:
        raise ConfigError("--system belongs to a chat and --raw is plain text: give one of them")
    text = _read_stdin() if prompt == "-" else prompt
    given = {name: value for name, value in sampling.items() if value not in (None, ())}
    spec = _spec(mode, draft, num_draft_tokens, block)
    with LLM(bundle, spec=spec, backend=backend, threads=threads, verify=verify) as llm:
        params = replace(llm.default_sampling, **given)
        if not raw and not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{bundle} has no chat template; add --raw to continue plain text")
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        deltas = llm.stream(text, params) if raw else llm.stream_chat(messages, params)
        summary = _print_json(deltas) if as_json else _print_text(deltas)
    if stats:
        for name, value in _stats(summary).items():
            click.echo(f"{name}: {value}", err=True)


def _spec(mode: str | None, draft: str | None, num_draft_tokens: int | None, block: bool) -> SpecConfig:
    """The options as settings. Raises ConfigError where they contradict each other."""
    from semspec.runtime.config import SpecConfig
    from semspec.runtime.errors import ConfigError

    if draft == "none" or mode == "autoregressive":
        if mode == "lossless" or draft in ("model", "ngram") or num_draft_tokens is not None or block:
            raise ConfigError(
                "without drafts (--draft none, --mode autoregressive) there is nothing to judge or limit"
            )
        return SpecConfig(mode="autoregressive")
    given: dict[str, Any] = {"draft": draft, "num_draft_tokens": num_draft_tokens}
    return SpecConfig(block=block, **{name: value for name, value in given.items() if value is not None})


def _print_text(deltas: Iterator[Delta]) -> Summary:
    for delta in deltas:
        click.echo(delta.text, nl=False)
    click.echo()
    return delta.stats


def _print_json(deltas: Iterator[Delta]) -> Summary:
    pieces = list(deltas)
    answer: dict[str, Any] = {
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [token for piece in pieces for token in piece.token_ids],
        "finish_reason": pieces[-1].finish_reason,
        "stats": _stats(pieces[-1].stats),
    }
    if logprobs := [value for piece in pieces for value in piece.logprobs]:
        answer["logprobs"] = logprobs
    click.echo(json.dumps(answer))
    return pieces[-1].stats


def _read_stdin() -> str:
    """All of standard input as UTF-8, whatever the locale; the newline that echo adds is not part of a prompt."""
    from semspec.runtime.errors import ConfigError

    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text ({error}); convert it first") from None
    return text.removesuffix("\n").removesuffix("\r")


def _stats(summary: Any) -> dict[str, Any]:
    from dataclasses import asdict

    def rounded(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rounded(item) for key, item in value.items()}
        return round(value, 3) if isinstance(value, float) else value

    return {name: rounded(value) for name, value in asdict(summary).items()}


@click.command(short_help="Show what is in a bundle.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Check the hash of every file.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON line.")
def inspect(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show the models, graphs, precisions and measured quality in BUNDLE."""
    from semspec.runtime.bundle import ROLES, Bundle

    opened = Bundle.open(bundle, verify=verify)
    if as_json:
        click.echo(json.dumps(json.loads(opened.manifest.to_json())))
        return
    total = sum(entry.size for entry in opened.manifest.files.values())
    checked = "hashes checked" if verify else "sizes checked, hashes not (--verify)"
    click.echo(f"{bundle}: {len(opened.manifest.files)} files, {_mib(total)}, {checked}")
    boundary = opened.manifest.boundary
    click.echo(f"segments end at: {boundary.kind}, {boundary.min_tokens} to {boundary.max_tokens} tokens")
    for role in [role for role in ROLES if role in opened.manifest.models]:
        click.echo(f"\n{role}: {opened.model(role).name}")
        for name, value in _model_rows(opened, role):
            click.echo(f"  {name:<12} {value}")


def _model_rows(bundle: Any, role: str) -> list[tuple[str, str]]:
    model = bundle.model(role)
    size = sum(entry.size for name, entry in bundle.manifest.files.items() if name.startswith(f"{role}/"))
    names = {"source": "from", "sha256": "sha256", "licence": "licence"}
    rows = [(name, model.source.get(key) or "not stated") for name, key in names.items()]
    rows.append(("size", _mib(size)))
    rows += [(name, value) for name, value in model.precision.items()]
    for name, graph in model.graphs.items():
        sizes = f"context {graph.max_context}, {graph.n_layers} layers, width {graph.width}"
        rows.append(("graph", f"{name}: {sizes}"))
        rows.append(("  pooled", _states(graph.pooled_layers)))
        rows.append(("  hidden", _states(graph.hidden_layers)))
    rows += [("weights", line) for line in _weight_lines(model.weights)]
    rows.append(("quality", quality_line(model.quality)))
    return rows


def _weight_lines(weights: Mapping[str, WeightClass]) -> list[str]:
    """A line for each kind of matrix, and one for all."""
    lines = []
    for kind, own in weights.items():
        schemes = ", ".join(f"{count} x {name}" for name, count in own.schemes.items())
        bits = 8 * own.n_bytes / own.n_weights
        size = f"{bits:5.2f} bits, {_mib(own.n_bytes):>10}"
        lines.append(f"{kind:<16} {size}, error {own.error:.3f} of its {own.error_of}: {schemes}")
    if weights:
        n_bytes = sum(own.n_bytes for own in weights.values())
        n_weights = sum(own.n_weights for own in weights.values())
        lines.append(f"{'all':<16} {8 * n_bytes / n_weights:5.2f} bits, {_mib(n_bytes):>10}")
    return lines


def _states(indices: Sequence[int]) -> str:
    return f"states {', '.join(map(str, indices))}" if indices else "none"


def quality_line(quality: Mapping[str, Any]) -> str:
    """The gate's figures in a line; what to do for better ones where there is something."""
    from semspec.runtime.errors import BundleError

    if not quality:
        return "not measured (exported with --verify off)"
    perplexity = ""
    better = f"; better: --precision {quality['better']}" if quality.get("better") else ""
    try:
        if "perplexity" in quality:  # bundles of earlier versions were not asked
            found, exact = quality["perplexity"], quality["reference_perplexity"]
            perplexity = f", perplexity {found:.2f} ({exact:.2f} in fp32)"
        return (
            f"{quality['grade']}: mean KL {quality['kl']:.3g} nats, top-1 {quality['top1']:.3f}{perplexity}, "
            f"least cosine {quality['cosine']:.3f} over {quality['tokens']} tokens; bits equal at every cut{better}"
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(
            f"the quality figures in the manifest are damaged ({error!r}); export again"
        ) from None


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"
