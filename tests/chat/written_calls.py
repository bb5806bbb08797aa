"""Calls as models write them, one function a syntax: independent of the readers, checked against templates."""

import json

from agentrl.chat.formats import CallSyntax


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def tool_schemas(calls):
    """Schemas that give each argument the type of its value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A tool.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": names.get(type(value), "null"), "description": "It."}
                        for key, value in arguments.items()
                    },
                },
            },
        }
        for name, arguments in calls
    ]


def hermes(calls):
    return "\n".join(f'<tool_call>\n{{"name": {dumps(n)}, "arguments": {dumps(a)}}}\n</tool_call>' for n, a in calls)


def _xml_value(value):
    return dumps(value) if isinstance(value, dict | list) else str(value)


def xml(calls):
    def one(name, arguments):
        body = "".join(f"<parameter={k}>\n{_xml_value(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(calls, glue="\n"):
    def one(name, arguments):
        pairs = [
            f"<arg_key>{k}</arg_key>{glue}<arg_value>{v if isinstance(v, str) else dumps(v)}</arg_value>{glue}"
            for k, v in arguments.items()
        ]
        return f"<tool_call>{name}{glue}{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm_4_7(calls):
    return glm(calls, glue="")


def _deepseek(calls, one):
    body = "\n".join(f"<｜tool▁call▁begin｜>{one(*call)}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseek(calls):
    return _deepseek(calls, lambda n, a: f"function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```")


def deepseek_v31(calls):
    return _deepseek(calls, lambda n, a: f"{n}<｜tool▁sep｜>{dumps(a)}")


def llama(calls):
    return "; ".join(f'{{"name": "{n}", "parameters": {dumps(a)}}}' for n, a in calls)


def llama_tagged(calls):
    return "<|python_tag|>" + llama(calls)


def _python_value(value):
    if isinstance(value, str):
        return dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_python_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dumps(k)}: {_python_value(v)}" for k, v in value.items()) + "}"
    return str(value)


def _python_call(name, arguments):
    return f"{name}({', '.join(f'{k}={_python_value(v)}' for k, v in arguments.items())})"


def pythonic(calls):
    return "[" + ", ".join(_python_call(*call) for call in calls) + "]"


def lfm2(calls):
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def python_tags(calls):
    return "<code>\n" + "\n".join(_python_call(*call) for call in calls) + "\n</code>"


def mistral(calls):
    return "[TOOL_CALLS]" + dumps([{"name": n, "arguments": a, "id": "aB3dEfGh1"} for n, a in calls])


def mistral_args(calls):
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def mistral_ids(calls):
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]aB3dEfGh1[ARGS]{dumps(a)}" for n, a in calls)


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>" for n, a in calls
    )


def harmony_role(calls):
    return "<|start|>assistant".join(
        f" to=functions.{n}<|channel|>commentary json<|message|>{dumps(a)}<|call|>" for n, a in calls
    )


def beam(calls):
    def body(arguments):
        return "".join(
            f'<rfl:parameter name="{k}">\n{_xml_value(v) if v is not None else "null"}\n</rfl:parameter>'
            for k, v in arguments.items()
        )

    return "<|end|><|start|>assistant".join(
        f" to={n}<|channel|>analysis <|constrain|>xml<|message|>{body(a)}" for n, a in calls
    )


def cohere(calls):
    listed = [{"tool_call_id": str(i), "tool_name": n, "parameters": a} for i, (n, a) in enumerate(calls)]
    return f"<|START_ACTION|>{dumps(listed)}<|END_ACTION|>"


def phi(calls):
    return f"<|tool_call|>{dumps([{'name': n, 'arguments': a} for n, a in calls])}<|/tool_call|>"


def _gemma_value(value, quote):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(item, quote) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma_value(v, quote)}" for k, v in value.items()) + "}"
    return dumps(value)


def gemma(calls):
    return "".join(
        f"<|tool_call>call:{n}{_gemma_value(a, chr(60) + chr(124) + chr(34) + '|>')}<tool_call|>" for n, a in calls
    )


def function_gemma(calls):
    return "".join(f"<start_function_call>call:{n}{_gemma_value(a, '<escape>')}<end_function_call>" for n, a in calls)


WRITERS = {
    hermes: CallSyntax.HERMES,
    xml: CallSyntax.XML,
    glm: CallSyntax.GLM,
    glm_4_7: CallSyntax.GLM,
    deepseek: CallSyntax.DEEPSEEK,
    deepseek_v31: CallSyntax.DEEPSEEK,
    llama: CallSyntax.LLAMA,
    llama_tagged: CallSyntax.LLAMA,
    pythonic: CallSyntax.PYTHONIC,
    lfm2: CallSyntax.LFM2,
    python_tags: CallSyntax.PYTHON_TAGS,
    mistral: CallSyntax.MISTRAL,
    mistral_args: CallSyntax.MISTRAL,
    mistral_ids: CallSyntax.MISTRAL,
    harmony: CallSyntax.HARMONY,
    harmony_role: CallSyntax.HARMONY,
    beam: CallSyntax.BEAM,
    cohere: CallSyntax.COHERE,
    phi: CallSyntax.PHI,
    gemma: CallSyntax.GEMMA,
    function_gemma: CallSyntax.FUNCTION_GEMMA,
}
"""All writers, and the syntax that reads what each writes."""
