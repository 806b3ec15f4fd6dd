"""A jinja2 sandbox with a meter, for templates that came from strangers.

Knows what a template may do and how much of it. jinja2's immutable sandbox keeps templates away from
Python's internals and from changing what they are given; the meter stops those that only want to keep the
machine busy. Does not know chats (chat.py).

Not guaranteed: there is no clock. Work is counted in loop rounds, calls, filters and characters made, which
ends an endless template within seconds; a single operation is not interrupted, and lists that share their
parts (a list of itself, fifty times over) can still be made slow to compare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["MAX_TEXT", "MAX_WORK", "Meter", "compile_template"]

MAX_TEXT = 1 << 22
"""Characters in one piece, output included: about a million tokens."""

MAX_WORK = 3_000_000
"""Steps of one rendering: a loop round, a call, a filter, an item of a list made, or 64 characters made."""

_CHARACTERS_A_STEP = 64
_MAX_INTEGER_BITS = 256
_MAX_FORMAT_WIDTH = 9999
_MAX_FORMAT_PATTERN = 10_000

# No chat template pads, wraps or links; each of these makes long text out of a short one.
# Bytes are no text: what makes them is refused too.
_REFUSED_METHODS = frozenset(
    {"center", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill", "encode", "to_bytes"}
)
_REFUSED_FILTERS = ("center", "pprint", "sum", "urlize", "wordwrap", "xmlattr")
_REFUSED_GLOBALS = ("lipsum",)

# Filters that hand their value on without writing it as text.
_PLAIN_FILTERS = frozenset({
    "attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length",
    "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
    "sort", "unique",
})  # fmt: skip


def compile_template(source: str, name: str, meter: Meter) -> jinja2.Template:
    """Compile `source`; everything the template will do is counted by `meter`.

    Raises jinja2.TemplateError, or what Python's compiler raises for code nested too deeply.
    """
    if len(source) > MAX_TEXT:
        raise SecurityError(f"is {len(source)} characters long; at most {MAX_TEXT} are compiled")
    environment = _Environment(meter)
    tree = _SendThroughMeter().visit(environment.parse(source, filename=name))
    code = environment.compile(tree, filename=name)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


class Meter:
    """Counts the work of one rendering. Every method raises SecurityError for what is too much."""

    def __init__(self, max_work: int = MAX_WORK) -> None:
        self._max_work = max_work
        self._left = max_work

    def restart(self) -> None:
        self._left = self._max_work

    def work(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"needs more than {self._max_work} steps; it may be endless")

    def text(self, n_characters: int) -> None:
        """Ask for room for one piece of text, best before it is made."""
        if n_characters > MAX_TEXT:
            raise SecurityError(f"makes a text of more than {MAX_TEXT} characters")
        self.work(1 + n_characters // _CHARACTERS_A_STEP)

    def items(self, n_items: int) -> None:
        """The same for a list."""
        if n_items > MAX_TEXT:
            raise SecurityError(f"makes a list of more than {MAX_TEXT} items")
        self.work(1 + n_items)

    def made(self, value: Any) -> Any:
        """`value`, counted by its size."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, (list, tuple, dict, set)):
            self.items(len(value))
        return value

    def integers(self, values: Iterable[Any]) -> None:
        """Widths, counts and the like."""
        if any(isinstance(value, int) and abs(value) > MAX_TEXT for value in values):
            raise SecurityError(f"passes a number above {MAX_TEXT} where a width or a count may be meant")

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.work()
            yield item

    def join(self, parts: Iterable[str]) -> str:
        """Join parts that are made while they are joined."""
        kept: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            if length > MAX_TEXT:
                self.text(length)
            kept.append(part)
        self.text(length)
        return "".join(kept)

    def string(self, value: Any) -> str:
        """str(value), measured first."""
        if isinstance(value, str):
            self.text(len(value))
            return value
        self.measure(value)
        return str(value)

    def measure(self, value: Any) -> int:
        """About how many characters `value` takes as text, its parts included."""
        length, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, Namespace):
                raise SecurityError("writes a namespace as text")
            if isinstance(item, str):
                length += len(item)
            elif isinstance(item, Mapping):
                waiting.extend((*item.keys(), *item.values()))
            elif isinstance(item, Iterable) and hasattr(item, "__len__"):
                waiting.extend(item)
            length += 8
            if length + len(waiting) > MAX_TEXT:
                break
        self.text(length + len(waiting))
        return length


class _SendThroughMeter(NodeTransformer):
    """Loops, `~` and slices, which an environment cannot watch, become filters, which it can."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "metered_rounds")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "metered_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "metered_slice") if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - declared as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' settings, filters and globals; metered, and without what only pads or wraps text."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self, meter: Meter) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=meter.string,
        )
        self._meter = meter
        self.concat = meter.join  # type: ignore[method-assign]  # how jinja2 lets it be replaced
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        for name in _REFUSED_GLOBALS:
            del self.globals[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: self._counted(name, function) for name, function in self.filters.items()}
        self.filters["metered_rounds"] = meter.rounds
        self.filters["metered_slice"] = meter.made
        self.filters["metered_concat"] = lambda parts: meter.join(map(meter.string, parts))
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        refused = isinstance(obj, (str, int)) and attr in _REFUSED_METHODS
        return not refused and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(self._meter, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._meter.work()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(obj, LoopContext):  # {% for ... recursive %}
            args = tuple(self._meter.rounds(items) for items in args)
        elif isinstance(text, str):
            self._meter.integers((*args, *kwargs.values()))
            if method.__name__ == "join":
                args = tuple(list(items) for items in args)
                _check_join(self._meter, args[0] if args else (), text)
            elif method.__name__ in _CHECKS:
                _CHECKS[method.__name__](self._meter, text, *args, **kwargs)
        return self._meter.made(super().call(context, obj, *args, **kwargs))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts, and checks what it is given first; jinja2's marks on it are kept."""
        n_hidden = int(hasattr(function, "jinja_pass_arg"))  # the context or environment comes first

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            hidden, value, given = args[:n_hidden], args[n_hidden], args[n_hidden + 1 :]
            self._meter.work()
            self._meter.integers((*given, *kwargs.values()))
            if name == "join":
                value = list(value)
            if name not in _PLAIN_FILTERS:
                self._meter.measure(value)
            if name in _CHECKS:
                _CHECKS[name](self._meter, value, *given, **kwargs)
            return self._meter.made(function(*hidden, value, *given, **kwargs))

        return counted


def _check_operation(meter: Meter, operator: str, left: Any, right: Any) -> None:
    sides = (left, right)
    size = sum(len(side) for side in sides if hasattr(side, "__len__"))
    numbers = [side for side in sides if isinstance(side, int)]
    if operator == "%" and isinstance(left, str):
        _check_format(meter, left, right)
    elif operator == "*" and numbers:
        size *= max(numbers[0], 0)
    if len(numbers) == 2:
        factor = abs(right) if operator == "**" else 1
        if left.bit_length() * factor + right.bit_length() > _MAX_INTEGER_BITS:
            raise SecurityError(f"computes a number of more than {_MAX_INTEGER_BITS} bits")
    if any(isinstance(side, str) for side in sides):
        meter.text(size)
    else:
        meter.items(size)


def _check_format(meter: Meter, pattern: Any, *args: Any, **kwargs: Any) -> None:
    """Both kinds: `%5d` and `{:5}`."""
    if len(str(pattern)) > _MAX_FORMAT_PATTERN:
        raise SecurityError(f"formats with a pattern of more than {_MAX_FORMAT_PATTERN} characters")
    text = str(pattern).replace("{{", "").replace("}}", "").replace("%%", "")
    fields = re.findall(r"%(?:\([^)]*\))?[-#0 +]*[\d.*]*|\{[^}]*\}?", text)
    widths = [int(digits) for field in fields for digits in re.findall(r"\d+", field)]
    if (
        any("*" in field or "{" in field[1:] for field in fields)
        or max(widths, default=0) > _MAX_FORMAT_WIDTH
    ):
        raise SecurityError(f"formats with a computed width or one above {_MAX_FORMAT_WIDTH}")
    meter.text(len(text) + len(fields) * meter.measure((args, kwargs)) + sum(widths))


def _check_replace(meter: Meter, text: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    n_places = str(text).count(str(old))
    meter.text(len(str(text)) + n_places * len(str(new)))


def _check_indent(meter: Meter, text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    n_lines = str(text).count("\n") + 1
    meter.text(len(str(text)) + n_lines * (width if isinstance(width, int) else len(str(width))))


def _check_join(meter: Meter, parts: Any, glue: Any = "", attribute: Any = None) -> None:
    meter.text(meter.measure(parts) + len(parts) * len(str(glue)))


def _check_to_json(
    meter: Meter,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    between = sum(map(len, separators or ())) + (indent if isinstance(indent, int) else len(indent or ""))
    meter.text(meter.measure(value) * (1 + between))


_CHECKS: Mapping[str, Callable[..., None]] = {
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "tojson": _check_to_json,
}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': no HTML escaping, and the options of json.dumps."""
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    """The local time of this machine: the one thing that makes two renderings differ."""
    if len(pattern) > 200 or re.search(r"\d{3}", pattern):
        raise SecurityError("formats the time with more than 200 characters or a width above 99")
    return datetime.now().strftime(pattern)
