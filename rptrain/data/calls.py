"""Tool calls and declarations of tools, as OpenAI, LLaMA-Factory and tables write them."""

import re
from typing import Any

from rptrain.data.notes import key_of
from rptrain.data.values import is_blank, json_of, list_of, object_of, text_of

CALLS = key_of("calls")
THOUGHT = re.compile(r"\s*(<(think|thinking|thought|reasoning)>.*?</\2>)\s*", re.DOTALL)
OTHER_ARGUMENTS = ("parameters", "args", "kwargs", "input")


def calls_of(message: dict[str, Any], notes: set[str]) -> list[dict[str, Any]]:
    """The calls of a message, which loses `tool_calls` and `function_call`, OpenAI's older key for a single call."""
    several, one = message.pop("tool_calls", None), message.pop("function_call", None)
    if isinstance(several, str):
        several = None if is_blank(several) else list_of({"tool_calls": several}, "tool_calls")
    if several and not isinstance(several, list):
        raise ValueError("`tool_calls` is not a list")
    if is_blank(one):
        return [call_of(call, notes) for call in several or ()]
    if several:
        raise ValueError("a message has both `tool_calls` and `function_call`: keep one of them")
    notes.add(CALLS)
    return [call_of(one, notes)]


def call_of(call: Any, notes: set[str]) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI writes JSON text, which templates would quote again."""
    call = object_of(call)
    function = object_of(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError("a tool call is not an object with a `function`")
    text_of(function, "name")
    outer = call if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": _arguments(function, notes)}}


def _arguments(function: dict[str, Any], notes: set[str]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        if other := next((key for key in OTHER_ARGUMENTS if not is_blank(function.get(key))), None):
            raise ValueError(f"a tool call has `{other}` instead of `arguments`: rename it")
        if arguments != "":
            notes.add(CALLS)
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json_of(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("the `arguments` of a tool call are not an object")
    return arguments


def written_calls(text: str, notes: set[str]) -> tuple[str, list[dict[str, Any]]] | None:
    """The thought and the calls of a ShareGPT `function_call`: JSON, which a thought in tags may precede.

    None if the text is not JSON.
    """
    thought = found[1] if (found := THOUGHT.match(text)) else ""
    try:
        said = json_of(text[found.end() :] if found else text)
    except ValueError:
        return None
    if thought:
        notes.add(CALLS)
    return thought, [call_of(call, notes) for call in (said if isinstance(said, list) else [said])]


def tools_of(row: dict[str, Any], notes: set[str]) -> list[dict[str, Any]] | None:
    """The tools that a row declares under `tools`, or under OpenAI's older `functions`; None without any."""
    tools, functions = row.get("tools"), row.get("functions")
    if not is_blank(tools):
        return _declared(list_of(row, "tools"), notes) or None
    if tools and tools != "[]":
        notes.add(CALLS)
    if is_blank(functions) or not (functions := _functions(row)):
        return None
    notes.add(CALLS)
    return _declared(functions, notes)


def tools_beside(row: dict[str, Any], notes: set[str]) -> list[dict[str, Any]] | None:
    """The tools of an instruction, whose key `tools` may also hold something else, such as names."""
    try:
        return tools_of(row, notes)
    except ValueError:
        notes.add(key_of("ignored_key", "tools"))
        return None


def _functions(row: dict[str, Any]) -> list[Any]:
    """The declarations under `functions`; empty if something else is there."""
    try:
        functions = [object_of(function) for function in list_of(row, "functions")]
    except ValueError:
        return []
    return functions if all(isinstance(function, dict) and "name" in function for function in functions) else []


def _declared(tools: list[Any], notes: set[str]) -> list[dict[str, Any]]:
    declared = []
    for tool in tools:
        if is_blank(tool):
            continue
        made = object_of(tool)
        if not isinstance(made, dict):
            raise ValueError("`tools` has something that is not an object")
        outer = made if "function" in made else {"type": "function", "function": made}
        function = object_of(outer["function"])
        if isinstance(function, dict) and outer.get("type") == "function" and is_blank(function.get("name")):
            raise ValueError("`tools` has a function without a `name`")
        if isinstance(function, dict) and isinstance(function.get("parameters"), str):
            parameters = object_of(function["parameters"])
            if isinstance(parameters, dict):
                notes.add(key_of("json_text", "parameters"))
                function = {**function, "parameters": parameters}
        declared.append({**outer, "function": function})
    return declared
