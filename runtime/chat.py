"""The chat template: messages -> prompt text.

A chat template is a program that came with the weights, so it runs in the metered sandbox (sandbox.py),
which is set up as transformers does: the same template gives the same text. Does not know tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from semspec.runtime.errors import BundleError
from semspec.runtime.sandbox import MAX_WORK, Meter, compile_template

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """One template, compiled when it is first used: a broken one harms nobody who does not chat.

    Renders one chat at a time; calls from other threads wait.
    """

    def __init__(self, source: str, *, name: str = "chat_template.jinja", max_work: int = MAX_WORK) -> None:
        self.source = source
        self.name = name
        self._meter = Meter(max_work)
        self._compiled: jinja2.Template | None = None
        self._lock = threading.Lock()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages`. `tools` and `documents` are None unless given.

        Raises BundleError, naming the template and where known the line: it does not compile, fails, calls
        raise_exception, reaches for Python's internals, or exceeds a limit of the sandbox.

        >>> ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}").render(
        ...     [{"role": "user", "content": "Hi"}]
        ... )
        'user: Hi. '
        """
        values = {"tools": None, "documents": None, **variables}
        values.update(messages=messages, add_generation_prompt=add_generation_prompt)
        with self._lock:
            self._meter.restart()
            try:
                if self._compiled is None:
                    self._compiled = compile_template(self.source, self.name, self._meter)
                return self._meter.join(self._compiled.generate(values))
            except Exception as error:  # whatever a foreign program may raise
                raise BundleError(self._describe(error)) from error

    def _describe(self, error: Exception) -> str:
        line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
        trace = error.__traceback__
        while trace is not None:  # jinja2 shows its frames as lines of the template; the innermost counts
            if trace.tb_frame.f_code.co_filename == self.name:
                line = trace.tb_lineno
            trace = trace.tb_next
        where = self.name if line is None else f"{self.name}, line {line}"
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        problem = " ".join(str(error).split())[:300] or "failed"
        refused = type(error) is jinja2.TemplateError  # raised by the template's own raise_exception
        repair = (
            "change the messages" if refused else "mend the template, or give plain text instead of messages"
        )
        return f"chat template {where}: {kind}{problem.rstrip('.')}; {repair}"
