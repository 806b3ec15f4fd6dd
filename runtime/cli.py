"""Commands that use a bundle: generate, inspect. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from semspec.runtime.bundle import Bundle, WeightClass
    from semspec.runtime.config import SpecConfig
    from semspec.runtime.llm import Delta
    from semspec.runtime.stats import Summary
    from semspec.runtime.tokenizer import TextStream

__all__ = ["COLOURS", "generate", "inspect"]

WAYS = ["lossless", "autoregressive", "semantic", "combined"]
COLOURS = {"target": None, "draft": "green", "draft, lossy": "yellow"}
RISK_WORDS = {"meaning": "mean what no sample of the target means", "answer": "spoil the answer"}


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
@click.option("--mode", type=click.Choice(WAYS), help="How to decode.  [default: lossless]")
@click.option(
    "--draft", type=click.Choice(["model", "ngram", "none"]), help="Who drafts.  [default: model, if any]"
)
@click.option("--num-draft-tokens", type=int, help="Most tokens of a draft.  [default: 4]")
@click.option(
    "--block",
    is_flag=True,
    default=None,
    help="Judge a draft as a block: keeps at least as many of its tokens.",
)
@click.option("--preset", help="semantic: calibrated, paper or strict.  [default: calibrated]")
@click.option(
    "--risk", type=float, help="Share of kept segments that may mean something else.  [default: 0.1]"
)
@click.option("--ratio-floor", type=float, help="paper, strict: refuse a segment with a smaller ratio.")
@click.option(
    "--greedy-accept/--random-accept", default=None, help="paper, strict: from ratio 1 on, or by chance."
)
@click.option(
    "--keep-prefix/--discard-prefix", default=None, help="Keep a refused segment's exact part, or not."
)
@click.option(
    "--top2", is_flag=True, default=None, help="Keep what is among the target's two likeliest tokens."
)
@click.option(
    "--bonus", is_flag=True, default=None, help="A token of the target's behind every kept segment."
)
@click.option("--exact-inside/--plain-inside", default=None, help="How the target writes its own segments.")
@click.option("--thinking", help="What the end of thoughts changes: exact, discard or ignore.")
@click.option(
    "--adaptive", help="When drafts stop early: off, confidence (default of combined) or acceptance."
)
@click.option("--min-confidence", type=float, help="Of adaptive confidence.  [default: 0.65]")
@click.option("--max-segments", type=int, help="Most segments drafted before the target looks.  [default: 1]")
@click.option("--max-lossy-fraction", type=float, help="Most of the answer that may be lossy.  [default: 1]")
@click.option("--logprobs", is_flag=True, help="With --json: each token's log-probability under the target.")
@click.option(
    "--backend",
    default="cpu",
    show_default=True,
    help="cpu, cuda, tensorrt or tensorrt-rtx for built plans, or auto, the best that is here.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@click.option("--verify", is_flag=True, help="Check the hash of every file first.")
@click.option("--stats", is_flag=True, help="Print counts and times on stderr, and each judged draft.")
@click.option("--color", is_flag=True, help="Show who wrote what: green is the draft's, yellow lossy.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout instead of the text.")
def generate(
    bundle: Path,
    prompt: str,
    raw: bool,
    system: str | None,
    backend: str,
    threads: int | None,
    verify: bool,
    stats: bool,
    color: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Answer PROMPT with the models of BUNDLE; a PROMPT of - is read from standard input, less a final newline.

    The chat template is applied unless --raw. Sampling options not given here are the model's own
    (generation_config.json in the bundle). Drafts change the speed, never the answer: --draft none decodes with
    the target alone. The modes semantic and combined, and they alone, give other answers.
    """
    from dataclasses import fields, replace

    from semspec.runtime.config import SamplingParams
    from semspec.runtime.errors import ConfigError
    from semspec.runtime.llm import LLM

    if raw and system is not None:
        raise ConfigError("--system belongs to a chat and --raw is plain text: give one of them")
    if color and as_json:
        raise ConfigError("--color marks text and --json prints none: give one of them")
    text = _read_stdin() if prompt == "-" else prompt
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    sampling = {field.name: given.pop(field.name) for field in fields(SamplingParams) if field.name in given}
    with LLM(bundle, spec=_spec(given), backend=backend, threads=threads, verify=verify) as llm:
        if llm.backend_why:
            click.echo(f"backend {llm.backend}: {llm.backend_why}", err=True)
        params = replace(llm.default_sampling, **sampling)
        if not raw and not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{bundle} has no chat template; add --raw to continue plain text")
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        ids = llm.tokenizer.encode(text) if raw else llm.tokenizer.encode_chat(messages)
        notes: list[str] = []
        deltas = _noted(llm.stream(ids, params), notes)
        shown = llm.tokenizer.stream(ids) if color else None
        summary = _print_json(deltas) if as_json else _print_text(deltas, shown)
    if stats:
        for line in notes:
            click.echo(line, err=True)
        for name, value in _stats(summary).items():
            click.echo(f"{name}: {value}", err=True)


def _spec(given: dict[str, Any]) -> SpecConfig:
    """The options as settings. Raises ConfigError where they contradict each other."""
    from semspec.runtime.config import SpecConfig
    from semspec.runtime.errors import ConfigError

    if given.get("draft") == "none" or given.get("mode") == "autoregressive":
        alone = {"draft": "none", "mode": "autoregressive"}
        if any(alone.get(name) != value for name, value in given.items()):
            raise ConfigError(
                "without drafts (--draft none, --mode autoregressive) there is nothing to judge or limit"
            )
        return SpecConfig(mode="autoregressive")
    return SpecConfig(**given)


def _noted(deltas: Iterator[Delta], notes: list[str]) -> Iterator[Delta]:
    """The same, and a note for each draft that a judge saw."""
    from dataclasses import asdict

    for delta in deltas:
        if delta.judged is not None:
            notes.append(f"{delta.rule}: {json.dumps(_rounded(asdict(delta.judged)))}")
        yield delta


def _print_text(deltas: Iterator[Delta], text: TextStream | None) -> Summary:
    """text: the answer's ids as characters, where authors are shown."""
    from semspec.runtime.authors import Authors

    authors = None if text is None else Authors(text)
    for delta in deltas:
        if authors is None:
            click.echo(delta.text, nl=False)
            continue
        counts = {"n_from_draft": delta.n_from_draft, "n_lossy": delta.n_lossy}
        for author, characters in authors.split(delta.text, delta.token_ids, **counts):
            click.echo(click.style(characters, fg=COLOURS[author]), nl=False, color=True)
    click.echo()
    return delta.stats


def _print_json(deltas: Iterator[Delta]) -> Summary:
    from dataclasses import asdict

    pieces = list(deltas)
    answer: dict[str, Any] = {
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [token for piece in pieces for token in piece.token_ids],
        "finish_reason": pieces[-1].finish_reason,
        "stats": _stats(pieces[-1].stats),
    }
    if logprobs := [value for piece in pieces for value in piece.logprobs]:
        answer["logprobs"] = logprobs
    if judged := [piece.judged for piece in pieces if piece.judged is not None]:
        answer["judged"] = [_rounded(asdict(one)) for one in judged]
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


def _stats(summary: Summary) -> dict[str, Any]:
    from dataclasses import asdict

    return {name: _rounded(value) for name, value in asdict(summary).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value


@click.command(short_help="Show what is in a bundle.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Check the hash of every file.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest, and the probes, as one JSON line.")
def inspect(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show the models, graphs, precisions, measured quality and probes in BUNDLE."""
    from semspec.runtime.bundle import ROLES, Bundle

    opened = Bundle.open(bundle, verify=verify)
    if as_json:
        click.echo(json.dumps({**json.loads(opened.manifest.to_json()), **_probes_json(opened)}))
        return
    total = sum(entry.size for entry in opened.manifest.files.values())
    checked = "hashes checked" if verify else "sizes checked, hashes not (--verify)"
    click.echo(f"{bundle}: {len(opened.manifest.files)} files, {_mib(total)}, {checked}")
    boundary = opened.manifest.boundary
    ids = f" {', '.join(map(str, boundary.ids))}" if boundary.ids else ""
    click.echo(
        f"segments end at: {boundary.kind}{ids}, {boundary.min_tokens} to {boundary.max_tokens} tokens"
    )
    for role in [role for role in ROLES if role in opened.manifest.models]:
        click.echo(f"\n{role}: {opened.model(role).name}")
        for name, value in _model_rows(opened, role):
            click.echo(f"  {name:<12} {value}")
    click.echo()
    for line in _probe_lines(opened):
        click.echo(line)


def _probes_json(bundle: Bundle) -> dict[str, Any]:
    """The probes that count, where there are some. Raises as read_probes."""
    from semspec.runtime.probes import latest_probes, read_probes

    folder = latest_probes(bundle)
    if folder is None:
        return {}
    return {"probes": {"folder": folder.name, **json.loads(read_probes(bundle, folder).to_json())}}


def _probe_lines(bundle: Bundle) -> Iterator[str]:
    """What calibration left. Raises BundleError where it is damaged."""
    from semspec.runtime.errors import CalibrationError
    from semspec.runtime.probes import latest_probes, read_probes

    folder = latest_probes(bundle)
    if folder is None:
        yield "probes: none (semspec calibrate makes them)"
        return
    try:
        found = read_probes(bundle, folder)
    except CalibrationError as error:
        yield f"probes: not usable with this bundle: {error}"
        return
    made = f"made on backend {found.backend}" if found.backend else "trained elsewhere"
    if found.temperature is not None:
        made += f", of samples at temperature {found.temperature:g}, top-p {found.top_p:g}"
    yield f"probes: {folder.relative_to(bundle.path)}, {made}"
    for name in found.names:
        graph = found.graphs[name]
        read = [f"{_states(graph.layers)} of the {graph.role}"] if graph.layers else []
        read += [", ".join(graph.features)] if graph.features else []
        yield f"  {name:<12} {graph.file}, {graph.size / 1024:.1f} KiB: reads {'; '.join(read)}"
    if found.ratio is not None:
        accepts, overlap = found.ratio.mean_acceptance, found.ratio.overlap
        yield f"  {'ratio':<12} would accept {accepts:.2f} where the models agree on {overlap:.2f}"
    if found.risks:
        yield f"  {'risks':<12} of segments that {RISK_WORDS[found.risk_of]}"
    for point in found.risks:
        yield (
            f"  {'risk':<12} {point.risk:g}: score from {point.threshold:.4f}, keeps {point.coverage:.0%} of drafted "
            f"tokens, observed {point.observed:.3f}, bound {point.upper:.3f}"
        )


def _model_rows(bundle: Bundle, role: str) -> list[tuple[str, str]]:
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
