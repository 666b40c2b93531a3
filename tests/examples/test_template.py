# SPDX-License-Identifier: Apache-2.0
"""The small template renderer: Jinja's answers where it renders, an error where it cannot."""

import pytest

from attnrt.examples.generate.template import TemplateError, render

MESSAGES = [{"role": "user"}, {"role": "bot"}]
FIRST = "{% for m in ms %}{% if loop.first and m.role != 'system' %}S{% endif %}{{ m['role'] }}{% endfor %}"
CASES = [
    ("a{{ x }}b", "a3b"),
    ("{% for m in ms %}{{ m['role'] + '\n' }}{% if not loop.last %},{% endif %}{% endfor %}", "user\n,bot\n"),
    ("{% if x == 1 %}one{% elif x in pair or empty %}some{% else %}none{% endif %}.", "some."),
    ("{% if x == 1 %}one{% elif x not in pair or empty %}some{% else %}none{% endif %}.", "none."),
    (FIRST, "Suserbot"),
    ("x {%- if pair -%} y {%- endif -%} z{# no #}!", "xyz!"),
]


@pytest.mark.parametrize("source, expected", CASES)
def test_renders_as_jinja(source, expected):
    variables = {"x": 3, "pair": [2, 3], "empty": "", "ms": MESSAGES}
    assert render(source, variables) == expected
    jinja2 = pytest.importorskip("jinja2")
    assert jinja2.Template(source).render(**variables) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{% endmacro %}",
        "{{ f(1) }}",
        "{{ x | trim }}",
        "{% if x %}y",
        "{{ __import__('os') }}",
        "{% endfor %}",
    ],
)
def test_refuses_what_it_does_not_know(source):
    with pytest.raises(TemplateError):
        render(source, {"x": " a "})
