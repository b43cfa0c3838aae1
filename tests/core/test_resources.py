from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import agentlightning as agl
from agentlightning.resources import read_resources

PROXY = agl.ProxyLLM(endpoint="http://gateway:1/v1", model="m")


def test_a_proxy_url_has_the_attempt_before_the_version() -> None:
    assert PROXY.get_base_url("ro-1", "at-1") == "http://gateway:1/rollout/ro-1/attempt/at-1/v1"
    bare = agl.ProxyLLM(endpoint="http://gateway:1/", model="m")
    assert bare.get_base_url("ro-1", "at-1") == "http://gateway:1/rollout/ro-1/attempt/at-1"
    assert PROXY.get_base_url() == "http://gateway:1/v1"


@pytest.mark.parametrize("ids", [("ro-1", None), (None, "at-1")])
def test_a_rollout_id_without_an_attempt_id_and_the_reverse_are_refused(ids: tuple[str | None, str | None]) -> None:
    with pytest.raises(ValueError, match="together"):
        PROXY.get_base_url(*ids)


def test_an_api_key_is_not_shown_in_the_repr() -> None:
    assert "secret" not in repr(agl.LLM(endpoint="e", model="m", api_key="secret"))


def test_a_plain_string_is_an_f_string_prompt() -> None:
    assert read_resources({"prompt": "Hi {name}"}) == {"prompt": agl.PromptTemplate("Hi {name}")}
    assert agl.PromptTemplate("Hi {name}, {x:>5.1f}{{}}").format(name="Ann", x=1.25) == "Hi Ann,   1.2{}"


@pytest.mark.parametrize("template", ["{x.__class__}", "{x[0]}", "{0}", "{}", "{x!r.y}", "{x:>99999999}", "{y}", "{"])
def test_an_f_string_prompt_can_only_insert_named_values(template: str) -> None:
    with pytest.raises(agl.ConfigError):
        agl.PromptTemplate(template).format(x=[1])


def test_a_jinja_prompt_is_sandboxed() -> None:
    loop = agl.PromptTemplate("{% for n in names %}{{ n }};{% endfor %}", "jinja")
    assert loop.format(names=["a", "b"]) == "a;b;"
    for template in ("{{ ''.__class__.__mro__ }}", "{{ missing }}", "{{ names.append(1) }}", "{% if %}"):
        with pytest.raises(agl.ConfigError, match="cannot be rendered"):
            agl.PromptTemplate(template, "jinja").format(names=[])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for n in names %}{{ loop.index }}/{{ loop.length }}{{ n }} {% endfor %}", "1/2a 2/2b "),
        (
            "{{ task.question }}{{ task['question'] }}{% for k, v in task.items() %}{{ k }}={{ v }}{% endfor %}",
            "qqquestion=q",
        ),
        ("{{ names|map('upper')|join('-') }} {{ 'a'~names[0]~1 }} {{ 3*4+2**3 }} {{ '%s'%'y' }}", "A-B aa1 20 y"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{% set t %}hi{% endset %}{{ t|upper }}", "<1>HI"),
        ("{% set s = namespace(n=0) %}{% for x in range(4) %}{% set s.n = s.n + x %}{% endfor %}{{ s.n }}", "6"),
        (
            "{% with a=' x ' %}{{ a.strip() }}{% endwith %}{{ task|tojson }}{{ 'a' if 'a' in names else 'b' }}",
            'x{"question": "q"}a',
        ),
        (
            "{{ 500|tojson }} {{ 'In (May) 2024 %s' % 'a' }} {{ 'In 2024 %s'|format('a') }}",
            "500 In (May) 2024 a In 2024 a",
        ),
        ("{{ '%.2f %5d' % (2.345, 500) }} {{ '%(a)s' % {'a': 'b'} }} {{ 2.345|round(2) }}", "2.35   500 b 2.35"),
    ],
)
def test_a_jinja_prompt_can_use_loops_filters_macros_and_variables(template: str, text: str) -> None:
    assert agl.PromptTemplate(template, "jinja").format(names=["a", "b"], task={"question": "q"}) == text


@pytest.mark.parametrize("formats", ["| format(doc)", "% doc"])
def test_a_jinja_prompt_formats_a_long_text_once(formats: str) -> None:
    doc = "x" * 300_000
    template = agl.PromptTemplate("{{ '%s costs 5%%, 6%%, 7%%, 8%%, 9%%' " + formats + " }}", "jinja")
    assert template.format(doc=doc) == f"{doc} costs 5%, 6%, 7%, 8%, 9%"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 }}" * 200_000,
        "{{ " + "1+" * 700_000 + "1 }}",
        "{% if 1 %}" * 140_000,
        "{{ 'x' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '%(a)9999d' % {'a': 1} }}",
        "{{ '%.*f' % (999999999, 1) }}",
        "{{ (('%(a)s' * 20000) % {'a': 'x' * 20000})|length }}",
        "{{ ('%(a)s' * 20000)|format(a='x' * 20000)|length }}",
        "{{ (('%(a).999f' * 200000) % {'a': 1})|length }}",
        "{{ (('%(a)f' * 200000) % {'a': 1e308})|length }}",
        "{% set n = 2**4900 %}{% set m = n*n %}{{ [m] * 150000 }}",
        "{% set n = 2**4900 %}{% set m = n*n %}{{ ('%s' % ([m] * 150000,))|length }}",
        "{% set n = 2**4900 %}{% set m = n*n %}{{ ([m] * 150000)|tojson|length }}",
        "{% set n = 2**4900 %}{% set m = n*n %}{{ [{m: 1}] * 120000 }}",
        "{{ 5|round(-5000000) }}",
        "{{ 1|round(3000000, 'floor') }}",
        "{{ [1]|tojson(indent=9999999) }}",
        "{{ 'x'|center(999999999) }}",
        "{{ 'a\nb'|indent(999999999) }}",
        "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
        "{{ range(99999)|join('x' * 99999) }}",
        "{{ range(99999)|map('replace', '', 'x' * 99999)|list }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [[1]] recursive %}{{ loop(x) }}{% endfor %}",
        "{% set s = namespace(x='x') %}{% for i in range(50) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "{% set s = namespace(x='x') %}{% for i in range(50) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{% set a = [1] %}{% set b = [1] %}" + "{% set a = [a, a] %}{% set b = [b, b] %}" * 50 + "{{ a == b }}",
        "{% set b = range(99999)|list %}{% for i in range(99999) %}{{ -1 in b }}{% endfor %}",
        "{% set t %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
        "{{ lipsum(n=99999) }}",
    ],
)
def test_a_jinja_prompt_that_would_take_long_or_become_huge_is_refused(template: str) -> None:
    began = time.thread_time()
    with pytest.raises(agl.ConfigError, match="cannot be rendered"):
        agl.PromptTemplate(template, "jinja").format()
    assert time.thread_time() - began < 10, "about a second on an idle machine"


@pytest.mark.parametrize(
    "template",
    [
        "{{ it.secret }}",
        "{{ it['secret'] }}",
        "{{ it|attr('secret') }}",
        "{{ [it]|map(attribute='secret')|join }}",
        "{{ '{0.secret}'.format(it) }}",
        "{{ call() }}",
        "{{ names.__class__ }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
    ],
)
def test_a_jinja_prompt_cannot_read_attributes_or_call_functions(template: str) -> None:
    it = SimpleNamespace(secret="the secret")
    with pytest.raises(agl.ConfigError, match="cannot be rendered"):
        agl.PromptTemplate(template, "jinja").format(it=it, call=lambda: it.secret, names=[])


def test_resources_keep_their_types_in_json() -> None:
    class Dial(agl.Resource):
        resource_type: Literal["dial"] = "dial"
        value: float

    update = agl.ResourcesUpdate(
        resources_id="rs-1",
        create_time=0.0,
        update_time=0.0,
        version=1,
        resources={"llm": PROXY, "prompt": agl.PromptTemplate("hi"), "dial": Dial(value=2.0)},
    )
    assert agl.ResourcesUpdate.model_validate_json(update.model_dump_json()) == update


@pytest.mark.parametrize(
    "wrong", [3, {"resource_type": "nonsense"}, {"resource_type": "prompt_template"}, {"template": "hi"}, None]
)
def test_a_value_that_is_not_a_resource_is_refused_with_its_name(wrong: Any) -> None:
    with pytest.raises(agl.ConfigError, match="resource 'x'"):
        read_resources({"x": wrong})


def test_an_unknown_template_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"engine 'jinjja'. Did you mean 'jinja'\? Known: f-string, jinja"):
        agl.PromptTemplate("Hi", engine="jinjja")


def test_the_error_about_json_in_a_template_shows_how_to_escape_braces() -> None:
    with pytest.raises(agl.ConfigError, match=r"write \{\{ and \}\} for literal braces"):
        agl.PromptTemplate('Answer like {"answer": 1}.').format(answer="2")
    assert agl.PromptTemplate('Answer like {{"answer": 1}}.').format() == 'Answer like {"answer": 1}.'


@pytest.mark.parametrize("value", [None, {}])
def test_a_value_that_does_not_support_its_format_specification_is_a_configuration_error(value: Any) -> None:
    with pytest.raises(agl.ConfigError, match="unsupported format string"):
        agl.PromptTemplate("{question:>5}").format(question=value)


@pytest.mark.parametrize(
    ("parameters", "needed"),
    [
        ({"temperature": -1}, "at least 0"),
        ({"top_p": 0}, "above 0"),
        ({"max_tokens": 1.5}, "a whole number"),
        ({"extra_body": {"top_k": -5}}, "top_k = -5"),
    ],
    ids=["temperature", "top_p", "max_tokens", "extra_body"],
)
def test_a_sampling_parameter_that_no_server_accepts_is_refused(parameters: dict[str, Any], needed: str) -> None:
    with pytest.raises(ValueError, match=needed):
        agl.LLM(endpoint="http://127.0.0.1:8000/v1", model="m", sampling_parameters=parameters)
    accepted = {"temperature": None, "n": 1, "stop": ["x"], "extra_body": {"top_k": -1}}
    assert agl.LLM(endpoint="http://127.0.0.1:8000/v1", model="m", sampling_parameters=accepted).model == "m"
