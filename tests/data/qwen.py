"""Chat templates that behave as those of Qwen3.5, 3.6 and 3.8 do, for text alone."""

# Thoughts before the last question are left out; the last reply always has tags of a thought, in which there may be
# nothing. The generation prompt opens a thought, or has an empty one. Results of tools are in turns of the user.
_TEMPLATE = """\
{%- macro written(content) %}
{%- if content is string %}{{ content }}
{%- elif content is none or content is undefined %}
{%- else %}{% for part in content %}{{ part.text if 'text' in part else raise_exception('not a text') }}{% endfor %}
{%- endif %}
{%- endmacro %}
{%- if not messages %}{{ raise_exception('no messages') }}{% endif %}
{%- set first = EFFORT + written(messages[0].content) | trim if messages[0].role == 'system' else EFFORT %}
{%- if tools %}
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\n<tool_call>\\n<function=name>\\n<parameter=name>\\nvalue\\n</parameter>' }}
{{- '\\n</function>\\n</tool_call>' }}
{{- ('\\n\\n' + first if first else '') + '<|im_end|>\\n' }}
{%- elif first or messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}
{%- set content = written(m.content) | trim %}
{%- if m.role == 'user' and not (content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
{%- set ns.query = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- if ns.query < 0 %}{{ raise_exception('no user query found') }}{% endif %}
{%- for m in messages %}
{%- set content = written(m.content) | trim %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('the system message is not the first') }}{% endif %}
{%- elif m.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif SPLITS and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if KEEPS or loop.index0 > ns.query %}{{ '<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{%- set call = call.function or call %}
{{- ('\\n\\n' if content else '') if loop.first else '\\n' }}
{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in (call.arguments or {}) | items %}
{{- '<parameter=' + key + '>\\n' + VALUE + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ raise_exception('unexpected role') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + (PROMPT) }}{% endif %}"""
_OPEN, _EMPTY = "'<think>\\n'", "'<think>\\n\\n</think>\\n\\n'"
_JSON = "(value | string if value is string else value | tojson)"
_PYTHON = "(value | tojson if value is mapping or (value is sequence and value is not string) else value | string)"


def _template(keeps: str, value: str, prompt: str, splits: str = "true", effort: str = "''") -> str:
    made = _TEMPLATE.replace("KEEPS", keeps).replace("VALUE", value).replace("PROMPT", prompt)
    return made.replace("SPLITS", splits).replace("EFFORT", effort)


QWEN3_5 = _template("false", _PYTHON, f"{_EMPTY} if enable_thinking is false else {_OPEN}")
QWEN3_5_SMALL = _template("false", _PYTHON, f"{_OPEN} if enable_thinking is true else {_EMPTY}")  # 0.8B and 2B
QWEN3_6 = _template("preserve_thinking is true", _JSON, f"{_EMPTY} if enable_thinking is false else {_OPEN}")
# Keeps earlier thoughts, does not look for thoughts in contents, and asks for an effort.
QWEN3_8 = _template(
    "(preserve_thinking is undefined or preserve_thinking is true)",
    _JSON,
    f"{_EMPTY} if enable_thinking is false else {_OPEN}",
    "false",
    "'think well\\n\\n'",
)
