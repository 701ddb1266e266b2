"""Chat templates that escape, fail, take long or are no templates."""

from collections.abc import Iterator

from benchmarks.bad_inputs.case import GENERATE, TRAIN, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import deleted, directory, fifo, link, text, values

AREA = "templates"
FILE, TOKENIZER = "model/chat_template.jinja", "model/tokenizer_config.json"
TURNS = "{% for message in messages %}{{ message.content }}{% endfor %}"

# By name: templates that reach for Python, do not parse, fail, or do not write the conversation.
TEXTS: dict[str, str] = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('touch hacked') }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('touch hacked').read() }}",
    "filter for attributes": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "format for attributes": "{{ '{0.__class__.__mro__}'.format('') }}",
    "map for attributes": "{{ messages|map(attribute='__class__')|list }}",
    "include": "{% include '../../outside/secret.txt' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch hacked') }}",
    "extends": "{% extends '/etc/passwd' %}",
    "self": "{{ self.__init__.__globals__ }}",
    "namespace": "{% set x = namespace() %}{% set x.__class__ = 1 %}",
    "raise_exception": "{{ raise_exception('\x1b[31mno') }}",
    "tojson": "{{ cycler|tojson }}",
    "change of the messages": "{{ messages.append({'role': 'user', 'content': 'x'}) }}" + TURNS,
    "syntax": "{% if %}",
    "open block": "{% for message in messages %}",
    "unknown function": "{{ nosuch(messages) }}",
    "empty": "",
    "constant": "hello",
    "range of 10**9": "{% for i in range(10**9) %}x{% endfor %}",
    "recursion": "{% macro a(x) %}{{ a(x + 1) }}{% endmacro %}{{ a(1) }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep filters": "{{ 'a'" + "|upper" * 20000 + " }}",
    "division by zero": "{{ 1 / 0 }}",
    "unknown key": "{{ messages[99].content }}",
    "half a character": "{{ '\\ud800' }}" + TURNS,
    "loops within loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + TURNS,
    "power": "{{ 10 ** 10 ** 10 }}",
    "3 GB of text": "{{ 'a' * (3 * 10**9) }}",
    "million paragraphs": "{{ lipsum(n=10**6) }}",
    "200 MB of output": "{{ 'a' * (2 * 10**8) }}" + TURNS,
}
TRAINED = (*TEXTS,)[:26]  # with the numbers 511, 512, ...
EITHER = {"map for attributes", "change of the messages", "empty", "constant", "half a character"}
GENERATED: tuple[tuple[int, str, Outcome], ...] = (
    (537, "classes", "refused"),
    (538, "globals of cycler", "refused"),
    (539, "syntax", "refused"),
    (540, "include", "refused"),
    (541, "range of 10**9", "refused"),
    (542, "recursion", "refused"),
    (543, "unknown key", "refused"),
    (544, "unknown function", "refused"),
    (545, "division by zero", "refused"),
    (546, "deep parentheses", "refused"),
    (547, "empty", "either"),
    (548, "half a character", "refused"),
)
HEAVY = (
    (549, "loops within loops"),
    (550, "power"),
    (551, "3 GB of text"),
    (552, "million paragraphs"),
    (553, "200 MB of output"),
)


def in_config(template: object) -> tuple[Edit, ...]:
    """A template in tokenizer_config.json in place of the file."""
    return deleted(FILE), values(TOKENIZER, {"chat_template": template})


CONFIGURED: tuple[tuple[int, str, object], ...] = (
    (731, "table", {"a": TURNS}),
    (732, "list of text", [TURNS]),
    (733, "number", 5),
    (734, "list without a default", [{"name": "tool_use", "template": TURNS}]),
    (735, "null", None),
    (736, "escape sequence", "{{ raise_exception('\x1b[31mno\x07') }}"),
)
TWO = "{{ raise_exception('two') if messages|length < 2 }}" + TURNS


def cases() -> Iterator[Case]:
    for number, name in enumerate(TRAINED, 511):
        expected: Outcome = "either" if name in EITHER else "refused"
        yield Case(number, AREA, f"training: {name}", TRAIN, expected, (text(FILE, TEXTS[name]),), "template")
    for number, name, expected in GENERATED:
        yield Case(number, AREA, f"generating: {name}", GENERATE, expected, (text(FILE, TEXTS[name]),), "template")
    for number, name in HEAVY:
        yield Case(number, AREA, f"training: {name}", TRAIN, edits=(text(FILE, TEXTS[name]),), names="template")
    for number, name, template in CONFIGURED:
        named = "tokenizer" if number == 732 else "template"
        yield Case(number, AREA, f"in the tokenizer's config: {name}", TRAIN, edits=in_config(template), names=named)
    binary = (text(FILE, bytes(range(256))),)
    yield Case(737, AREA, "training: bytes", TRAIN, edits=binary)
    yield Case(738, AREA, "generating: bytes", GENERATE, edits=binary)
    yield Case(739, AREA, "training: a pipe", TRAIN, edits=(fifo(FILE),))
    yield Case(740, AREA, "training: a folder", TRAIN, "either", (directory(FILE),))
    outside = link(FILE, "../../outside/secret.txt")
    yield Case(741, AREA, "training: a link outside", TRAIN, "either", (outside,))
    given = (*TRAIN, "data.chat_template=f.jinja")
    yield Case(742, AREA, "given: a pipe", given, edits=(fifo("f.jinja"),), names="f.jinja")
    escape = text("f.jinja", "{{ raise_exception('\x1b[31mno\x07') }}")
    yield Case(743, AREA, "given: escape sequence", given, edits=(escape,), names="template")
    needs_two = (text(FILE, TWO),)
    asks = (*TRAIN, "eval.questions=3")
    yield Case(763, AREA, "questions: two messages needed", asks, "either", needs_two, "template")
    yield Case(764, AREA, "generating: two messages needed", GENERATE, "either", needs_two, "template")
