"""Chat templates: the same text as transformers, and no harm from hostile ones."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hostile_templates import ENDLESS, INTERNALS
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from semspec.export.vocabulary import write_tokenizer
from semspec.runtime.chat import ChatTemplate
from semspec.runtime.errors import BundleError
from semspec.runtime.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]
TURNS = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": 'Grüße, 你好 "quoted"\n  indented'},
    {"role": "assistant", "content": "Hello 'there'."},
    {"role": "user", "content": "123 👩‍🚀?"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <city>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
        ],
    },
    {"role": "tool", "content": "cold"},
]

# Constructs of real templates.
FEATURES = {
    "blocks are trimmed": "  {% for m in messages %}\n    {{ m.content }}\n  {% endfor %}\nend\n",
    "json": "{{ messages|tojson }} {{ messages[0]|tojson(indent=2) }} {{ tools|tojson }}",
    "json options": (
        "{{ {'b': 1, 'a': 'ü'}|tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}"
    ),
    "loop facts": (
        "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ loop.revindex }}{{ loop.last }}"
        "{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem.role if loop.nextitem }} {% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(seen=false, text='') %}{% for m in messages if m.role != 'system' %}"
        "{% set ns.seen = true %}{% set ns.text = ns.text + m.role ~ '|' ~ loop.index %}{% endfor %}"
        "{{ ns.seen }}{{ ns.text }}"
    ),
    "macros": (
        "{% macro show(m, end='.') %}{{ m.role }}{{ end }}{{ caller() if caller }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}{% call show(messages[0]) %}called{% endcall %}"
    ),
    "recursion": (
        "{% for m in [{'n': 1, 'l': [{'n': 2}, {'n': 3}]}] recursive %}{{ m.n }}{{ loop(m.l) if m.l }}{% endfor %}"
    ),
    "strings": (
        "{{ messages[0].content.strip().split(' ')[-1].replace('k', 'K') }}{{ ', '.join(['a', 'b']) }}"
        "{{ 'x' * 3 }}{{ '%s: %5.1f' % ('a', 2) }}{{ '{} {:>4}'.format(1, 'b') }}{{ '%s'|format(3) }}"
        "{{ messages|map(attribute='role')|join('-') }}"
    ),
    "filters": (
        "{{ messages|length }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
        "{{ 'a b'|title|upper|trim }}{{ none|default('d', true) }}{{ {'b': 1, 'a': 2}|dictsort|first }}"
        "{{ 'a\nb'|indent(2, first=true) }}{{ [3, 1, 2]|sort|reverse|list }}{{ 'abc'|list }}"
        "{{ messages[0].items()|list|length }}{{ 7|string ~ 8 }}{{ '<&>'|escape }}{{ 'abcdef'|truncate(3) }}"
    ),
    "tests": (
        "{{ tools is defined }}{{ tools is none }}{{ nothing is defined }}{{ messages is iterable }}"
        "{{ messages[0] is mapping }}"
    ),
    "numbers": "{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 10 }}{{ 7 / 2 }}{{ 1 + 2 - 3 }}{{ -5 }}{{ 3.5|round|int }}",
    "slices": (
        "{% for m in messages[1:] %}{{ m.role[:2] }}{% endfor %}{{ messages[-1]['role'] }}"
        "{{ messages[::-1][0].role }}"
    ),
    "undefined": "[{{ nothing }}][{{ messages[0].nothing }}]{{ documents }}",
    "set block": "{% set text %}{{ messages[0].role }}\n{% endset %}{{ text * 2 }}{{ text|length }}",
    "date": "{{ strftime_now('%Y') }}",
}


def rendered_by_transformers(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    texts, _ = render_jinja_template([list(messages)], chat_template=template, **variables)
    return str(texts[0])


@pytest.mark.parametrize("feature", FEATURES)
def test_template_renders_as_in_transformers(feature: str) -> None:
    """The model was trained on transformers' text: every construct must give the same characters."""
    template = FEATURES[feature]
    ours = ChatTemplate(template).render(TURNS, add_generation_prompt=True, tools=[WEATHER])
    assert ours == rendered_by_transformers(template, TURNS, tools=[WEATHER], add_generation_prompt=True)
    assert ours


def test_date_is_today() -> None:
    """Some templates tell the model the date; it is the one thing that makes two renderings differ."""
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(HI) in {
        str(datetime.now().year + n) for n in (-1, 0)
    }


def check_against_transformers(
    folder: Path, chats: Sequence[tuple[Sequence[Mapping[str, Any]], dict[str, Any]]]
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.open(folder)
    for messages, variables in chats:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **variables
            )
            assert ours.render_chat(messages, add_generation_prompt=prompt, **variables) == expected
            ids = theirs.apply_chat_template(list(messages), add_generation_prompt=prompt, **variables)
            assert ours.encode_chat(messages, add_generation_prompt=prompt, **variables) == ids
            assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_smollm2_chat_equals_transformers(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Text and ids of the real template, with and without a system message."""
    write_tokenizer(smollm2_gguf, tmp_path, config={"eos_token_id": 2})
    check_against_transformers(tmp_path, [(HI, {}), (TURNS, {})])


@pytest.mark.slow
def test_qwen_chat_equals_transformers(tmp_path: Path) -> None:
    """The longest real template at hand: tools, tool calls and their answers."""
    from semspec.export.recipes import load_recipe
    from semspec.export.sources import fetch

    write_tokenizer(
        fetch(load_recipe("qwen2.5-coder-0.5b").target), tmp_path, config={"eos_token_id": 151645}
    )
    chats: list[tuple[Sequence[Mapping[str, Any]], dict[str, Any]]] = [
        (HI, {}),
        (TURNS, {}),
        (TURNS, {"tools": [WEATHER]}),
        (CALLS, {"tools": [WEATHER]}),
    ]
    check_against_transformers(tmp_path, chats)


@pytest.mark.parametrize("attempt", INTERNALS)
def test_template_does_not_reach_python(
    attempt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D54: with plain jinja2 each of these reads a file, or runs a command and leaves a marker."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match=r"^chat template evil\.jinja, line 1: ") as caught:
        ChatTemplate(INTERNALS[attempt], name="evil.jinja").render(HI)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == [] and len(HI) == 1  # noqa: PTH208


@pytest.mark.parametrize("attempt", ENDLESS)
def test_endless_template_is_stopped(attempt: str) -> None:
    """D54: time and size are limited; each of these would otherwise take the machine's memory, or hours."""
    with pytest.raises(BundleError, match=r"^chat template ") as caught:
        ChatTemplate(ENDLESS[attempt], max_work=200_000).render(HI)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_endless_templates_fit_in_little_memory() -> None:
    """D54: they are refused before the memory is taken: all of them again, in 1 GiB of address space."""
    script = """
        import resource

        from hostile_templates import ENDLESS
        from semspec.runtime.chat import ChatTemplate
        from semspec.runtime.errors import BundleError

        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
        for name, template in ENDLESS.items():
            try:
                ChatTemplate(template).render([{"role": "user", "content": "Hi"}])
            except BundleError as error:
                assert "MemoryError" not in str(error), (name, error)
        """
    if not Path("/proc/self/statm").exists():
        pytest.skip("address space is limited through /proc, which this system lacks")
    folders = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, env={**os.environ, "PYTHONPATH": folders}
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\nb\n{% if %}", "line 3: Expected an expression, .*; mend the template"),
        (
            "a\n{{ raise_exception('roles must\nalternate.') }}",
            "line 2: roles must alternate; change the messages",
        ),
        ("\n\n{{ nothing.at_all }}", "line 3: 'nothing' is undefined; mend the template"),
        ("{{ messages[0].content + 1 }}", "line 1: TypeError: .*; mend the template"),
        (
            "{% macro m(x) %}\n{{ x.y.z }}{% endmacro %}\n{{ m(messages) }}",
            "line 2: 'list object' has no attribute 'y'",
        ),
    ],
)
def test_failing_template_names_itself_and_the_line(template: str, message: str) -> None:
    """D54: the author of a template needs the line; everybody else what to do instead."""
    with pytest.raises(BundleError, match=message) as caught:
        ChatTemplate(template).render(HI)
    assert "\n" not in str(caught.value)


def test_long_chat_is_within_the_limits(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The limits are for programs gone wild, not for books: 2,000 turns of 1,000 characters."""
    write_tokenizer(smollm2_gguf, tmp_path, config={})
    template = (tmp_path / "chat_template.jinja").read_text(encoding="utf-8")
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"{n} " + "word " * 200} for n in range(2000)]
    assert ChatTemplate(template).render(turns) == rendered_by_transformers(
        template, turns, add_generation_prompt=True
    )


def test_template_can_be_used_by_threads_and_after_a_failure() -> None:
    """A server shares it; one request that fails must not spend the work of the next."""
    template = ChatTemplate("{% for m in messages %}{{ m.content ~ m.content }}{% endfor %}", max_work=5000)
    with pytest.raises(BundleError, match="more than 5000 steps"):
        template.render(HI * 9000)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: template.render([{"content": str(n)}]), range(200)))
    assert texts == [str(n) * 2 for n in range(200)]
