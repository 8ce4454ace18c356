"""A chat template is a program of a stranger: it reaches nothing, and ends in one error where it would loop or grow."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hf_helpers import tokenizer
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_rl.model import template_limits
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import conversation_of
from megatron_rl.model.template_limits import BoundedEnvironment, TemplateUnbounded
from megatron_rl.model.tokenizer import HuggingFaceTokenizer

MESSAGES = [{"role": "user", "content": "a b\tc\n" * 300}] * 100
GROWING = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = NEXT %}{% endfor %}"


def growing(start: str, following: str, end: str = "") -> str:
    return GROWING.replace("START", start).replace("NEXT", following) + end


ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f() %}{% for i in range(9999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [(messages[0].content * 500)[1:]] %}{% endfor %}",
)
LARGE = (
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**99999 }}",
    "{{ [1] * 10**9 }}",
    growing("'0123456789'", "ns.s ~ ns.s"),
    growing("'0123456789'", "ns.s + ns.s"),
    growing("'0123456789'", "[ns.s, ns.s] | join"),
    growing("'0123456789'", "''.join([ns.s, ns.s])"),
    growing("'0123456789'", "(ns.s, ns.s) | map('string') | join"),
    growing("'0123456789'", "'%s%s' % (ns.s, ns.s)"),
    growing("'0123456789'", "'{0}{0}'.format(ns.s)"),
    growing("7", "ns.s * ns.s"),
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + growing("'0123456789'", "f(ns.s)"),
    "{% set ns = namespace(s='0123456789') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% endfor %}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, messages | length) }}",
    "{{ messages | tojson(indent=10**6) }}",
    "{% set s = messages[0].content * 100 %}{{ s.replace('a', s) }}",
    "{% set s = messages[0].content * 100 %}{{ s | replace('a', s) }}",
    "{% set s = messages[0].content * 1000 %}{{ s | indent(100000) }}",
    "{{ messages[0].content.expandtabs(100000) }}",
)
LISTS_OF_LISTS = tuple(
    growing("['a']", "[ns.s, ns.s]", end) for end in ("{{ ns.s }}", "{{ 'a' ~ ns.s }}", "{{ ns.s | tojson }}")
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "LIMIT_S", 0.3)
    monkeypatch.setattr(template_limits, "MOST", 2**20)


def rendered(template: str, kind: type[ImmutableSandboxedEnvironment] = BoundedEnvironment) -> str:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    return environment.from_string(template).render(messages=MESSAGES)


@pytest.mark.parametrize("templates", [ENDLESS, LARGE, LISTS_OF_LISTS], ids=["endless", "large", "lists of lists"])
def test_a_template_without_bounds_ends_in_one_error(templates: tuple[str, ...], quick: None) -> None:
    for template in templates:
        with pytest.raises((TemplateUnbounded, RecursionError, OverflowError)):  # the last one: of the sandbox's range
            pytest.fail(f"{template} wrote {len(rendered(template))} characters")


def test_parts_of_an_expression_inside_another_are_counted_before_they_are_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_limits, "MOST_IN_ALL", 2**20)
    joined = " ~ ".join(["x"] * 200)  # 50 MB
    for expression in (joined, f"'a' ~ ({joined})", f"('a' ~ ({joined}))[1:]"):
        template = BoundedEnvironment().from_string(
            "{% set x = 'a' * 250000 %}{{ EXPRESSION }}".replace("EXPRESSION", expression)
        )
        tracemalloc.start()
        try:
            with pytest.raises(TemplateUnbounded):
                template.render()
            assert tracemalloc.get_traced_memory()[1] < 2**23
        finally:
            tracemalloc.stop()


def test_a_template_reaches_nothing_of_python() -> None:
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(SecurityError):
            rendered(template)
    assert "class" not in rendered("{{ '{0.__class__}'.format(messages) }}")


ORDINARY = (
    "{% macro f(x) %}{{ x | string }}{% endmacro %}{{ f(5000000000) }} {{ dict(a=7000000) | tojson }} "
    "{{ nothing | default(9000000) }} {% set ns = namespace(n=8000000) %}{{ ns.n * 3 }} {{ 'a' in 'abc' }}",
    "{% for m in messages[:3] if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.content[:3] }}"
    "{{ '' if loop.last else ', ' }}{{ loop.previtem is defined }}{% else %}none{% endfor %}",
    "{% for x in nothing %}{{ x }}{% else %}empty{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}",
    "{{ messages[0] | tojson | length }} {{ 'a,b'.split(',') | join('-') }}"
    " {{ 'x' ~ 1 ~ 'y' }} {{ '%s-%3d' % ('a', 3) }}",
    "{{ '{:>5}'.format(3) }} {{ messages | map(attribute='role') | unique | list }} {{ [1] + [2] }} {{ 2 ** 10 % 7 }}",
    "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.role | upper %}{% endfor %}{{ ns.t }}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{% set b %}{{ f(1) }}{% endset %}{{ b | indent(2) | trim }}",
    "{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    "{{ messages[-1].content.strip()[-1] }}",
)


def test_ordinary_templates_write_what_they_write_without_limits() -> None:
    for template in ORDINARY:
        assert rendered(template) == rendered(template, ImmutableSandboxedEnvironment), template


def test_a_models_own_template_is_bounded_and_named_by_the_error(quick: None) -> None:
    for template, why in ((ENDLESS[0], "it takes more than 0.3 s"), (LARGE[1], "it writes a text of more than")):
        loaded: Any = tokenizer()
        loaded.chat_template = template
        with pytest.raises(ValueError, match=f"the model's chat template refuses the messages: {why}"):
            Chat(HuggingFaceTokenizer(loaded)).text(conversation_of([{"role": "user", "content": "Hello"}]))
