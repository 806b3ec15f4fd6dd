"""Chat templates that no model should come with (case D54): what they try, by name."""

from __future__ import annotations

__all__ = ["ENDLESS", "INTERNALS"]

GROW = "{% set ns = namespace(s='x', l=['x'], n=3) %}{% for i in range(99) %}@{% endfor %}"
INTERNALS = {
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ (''|attr('__class__')).__mro__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('touch MARKER').read() }}",
    "joiner": "{{ joiner.__init__.__globals__.os.popen('touch MARKER').read() }}",
    "namespace": "{{ namespace.__init__.__globals__.os.popen('touch MARKER').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('touch MARKER').read() }}",
    "template itself": "{{ self.__init__.__globals__ }}",
    "globals by item": "{{ cycler['__init__']['__globals__']['os'].popen('touch MARKER').read() }}",
    "str.format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "str.format by filter": "{{ ('{0.__class__.__mro__}'|attr('format'))('') }}|{{ nothing.x }}",
    "map": "{{ (['']|map(attribute='__class__')|first).__mro__ }}",
    "change of the messages": "{{ messages.append(1) }}",
    "include": "{% include '/etc/hostname' %}",
    "import": "{% import 'os' as os %}",
}
ENDLESS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "plus": GROW.replace("@", "{% set ns.s = ns.s + ns.s %}"),
    "tilde": GROW.replace("@", "{% set ns.s = ns.s ~ ns.s %}"),
    "set block": GROW.replace("@", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"),
    "times": "{{ 'x' * 10**9 }}",
    "times in steps": "{{ ('x' * 1000000) * 1000000 }}",
    "list times": "{{ [1] * 10**9 }}",
    "power": "{{ 10**10**8 }}",
    "squares": GROW.replace("@", "{% set ns.n = ns.n * ns.n %}"),
    "list of itself": GROW.replace("@", "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
    "list of itself as json": GROW.replace("@", "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l|tojson }}",
    "list of itself in capitals": GROW.replace("@", "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l|upper }}",
    "namespace as text": "{% set ns = namespace(s='x') %}{{ ns }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "center": "{{ 'x'|center(10**9) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format computed width": "{{ '{:{w}}'.format(1, w='1000000000') }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "replace": "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "replace method": "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
    "join": "{{ ('x' * 1000000)|join('y' * 1000000) }}",
    "join method": "{{ ('y' * 1000000).join('x' * 1000000) }}",
    "indent": "{{ ('\n' * 1000000)|indent(1000000) }}",
    "json indent": "{{ [1]|tojson(indent=10000000) }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "time": "{{ strftime_now('%1000000000d') }}",
    "macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    # Each call makes two more.
    "macro twice of itself": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(80) }}"
    ),
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "nested parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "nested blocks": "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
    "slices": GROW.replace("@", "{% set ns.l = ns.l + [ns.s[i:]] %}").replace("s='x'", "s='x' * 4000000"),
    "lists of letters": GROW.replace("@", "{% set ns.l = ns.l + [ns.s|list] %}").replace(
        "s='x'", "s='x' * 4000000"
    ),
    "bytes": "{{ 'x'.encode().ljust(10**9) }}",
    "bytes of a number": "{{ (1).to_bytes(10**9) }}",
    "remainder": "{{ ('f' * 4000000)|int(base=16) % (('e' * 2000000)|int(base=16)) }}",
    "json separators": "{{ [[1] * 1000]|tojson(separators=('x' * 100000, 'y')) }}",
    "json indent by place": "{{ [1]|tojson(false, 1000000) }}",
    "open parentheses": "{{ ('%(' * 1000000) % 1 }}",
    "long source": "x" * 5_000_000,
}
