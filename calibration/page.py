"""What the HTML pages of all reports have in common: their head, pictures, tables and facts.

A page is one file that asks for nothing else: no script, no picture or style outside it. All text given is escaped
here. It knows HTML; it knows nothing of what is reported.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from semspec.calibration.drawing import DPI

__all__ = ["facts", "figure", "head", "paragraph", "split_interval", "table", "write_page"]

MOST_WORDS = 12  # of a list among the facts
SHOWN_DPI = DPI / 2


def write_page(path: Path, lines: Iterable[str]) -> None:
    """Write the page, replacing an earlier one at once. Raises OSError; then nothing has changed."""
    page = "\n".join(lines) + "\n"
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_bytes(page.encode("utf-8", errors="backslashreplace"))
    unfinished.replace(path)


def head(title: str) -> str:
    """All before the first line of the page; `</body></html>` ends it."""
    return HEAD.replace("TITLE", escape(title))


def paragraph(words: str, look: str = "") -> str:
    """look: one of the classes `size`, `note`, `finding`."""
    return f"<p class='{look}'>{escape(words)}</p>" if look else f"<p>{escape(words)}</p>"


def figure(title: str, png: bytes, caption: str) -> str:
    """A PNG within the page under a heading, at half its size in dots: sharp on dense screens."""
    width, height = struct.unpack(">II", png[16:24])
    data = base64.b64encode(png).decode("ascii")
    size = f"width='{width * SHOWN_DPI / DPI:.0f}' height='{height * SHOWN_DPI / DPI:.0f}'"
    alt = f"{escape(title)}, the numbers are in the table"
    picture = f"<img alt='{alt}' {size} src='data:image/png;base64,{data}'>"
    caption = f"<figcaption>{escape(caption)}</figcaption>"
    return f"<h2>{escape(title)}</h2><figure>{picture}{caption}</figure>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Iterator[str]:
    """A table; the first `words` columns are words, the others numbers. An interval in a cell, and what stands in
    parentheses in a head, go to a smaller line."""
    yield "<div class='wide'><table><thead><tr>"
    yield "".join(f"<th{_look(place < words)}>{_split(name, ' (')}</th>" for place, name in enumerate(heads))
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = (f"<td{_look(place < words)}>{split_interval(cell)}</td>" for place, cell in enumerate(row))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def split_interval(cell: str) -> str:
    """The interval on a line of its own, smaller."""
    return _split(cell, " [")


def facts(content: Mapping[str, Any], *, drop: str = "") -> Iterator[str]:
    """A table of names and JSON values, objects within named `outer / inner`. drop: an outer name not to be shown."""
    yield "<table class='words origin'><tbody>"
    for name, value in _flat(content, ""):
        short = name.removeprefix(f"{drop} / ").replace("_", " ")
        yield f"<tr><th>{escape(short)}</th><td class='words'>{escape(value)}</td></tr>"
    yield "</tbody></table>"


def _split(text: str, mark: str) -> str:
    value, found, rest = text.partition(mark)
    return escape(value) + (f"<small>{mark.strip()}{escape(rest)}</small>" if found else "")


def _look(words: bool) -> str:
    return " class='words'" if words else ""


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Names and values of a JSON value, objects within it named `outer / inner`; long lists are cut short."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name} / {key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for place, inner in enumerate(value, 1):
            yield from _flat(inner, name if len(value) == 1 else f"{name} {place}")
    elif isinstance(value, list | tuple):
        words = [_word(inner) for inner in value] or [_word(None)]
        yield (
            name,
            ", ".join(words if len(words) <= MOST_WORDS else [*words[:MOST_WORDS], f".. ({len(words)})"]),
        )
    else:
        yield name, _word(value)


def _word(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #111; background: #fff;
  max-width: 1000px; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.6em; margin: 0; } h2 { font-size: 1.2em; margin: 1.8em 0 .4em; }
p { margin: .5em 0; } .size, .note, figcaption { color: #444; font-size: .9em; } .note { margin: .2em 0; }
.finding { font-size: 1.15em; font-weight: 600; margin: .8em 0 1em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85em; font-variant-numeric: tabular-nums; }
th, td { padding: .3em .5em; text-align: right; vertical-align: top; border-bottom: 1px solid #ddd; }
th { font-weight: 600; white-space: nowrap; } thead th { border-bottom: 2px solid #333; }
td.words, th.words, .words th, .modes th:nth-child(-n+2) { text-align: left; }
small { display: block; color: #444; white-space: nowrap; }
figure { margin: 0; } img { max-width: 100%; height: auto; display: block; }
dt { font-weight: 600; float: left; clear: left; width: 7em; } dd { margin: 0 0 .25em 7.5em; }
td:not(.words) { white-space: nowrap; } .origin td { overflow-wrap: anywhere; }
</style></head><body>"""
