"""Templates that cannot be used, calls that are not read back, episodes without room, memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentrl.checks.findings import Status
from agentrl.checks.memory import GIB, Sizes, check_memory, estimate
from agentrl.checks.model import check_model
from agentrl.checks.policy import random_value
from agentrl.rollout.schemas import tool_schema
from agentrl.testing.tokenizers import fix_tokenizer, qwen_like_tokenizer
from tests.checks.test_environment import TASKS, Good


def findings(tokenizer, factory=Good, *, length=512, context=4096):
    found = check_model(tokenizer, factory, TASKS[::4], max_completion_length=length, max_context=context)
    return {finding.check: finding for finding in found}


@pytest.mark.parametrize("tokenizer", [qwen_like_tokenizer("qwen3"), qwen_like_tokenizer("compact"), fix_tokenizer()])
def test_a_good_template_passes(tokenizer):
    found = findings(tokenizer)
    assert {f.status for f in found.values()} == {Status.PASS}, found
    assert found.keys() == {"template", "parsing", "context"}
    assert "8 random calls of 1 tools" in found["parsing"].seen


def _broken(template: str) -> dict:
    tokenizer = qwen_like_tokenizer("compact")
    tokenizer.chat_template = template
    tokenizer.response_template = None
    return findings(tokenizer)


TURN = """\
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}"""


def template(turn: str = TURN, tools: str = "{{ tools | tojson if tools }}") -> str:
    """A good template; the broken ones differ from it in one thing."""
    return (
        f"<|im_start|>system\n{tools}<|im_end|>\n"
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{turn}<|im_end|>\n{{% endfor %}}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    )


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        ("", "has no chat template"),
        ("{% for m in messages %}{{ m.content }", "no Jinja template: line 1"),
        ("{{ raise_exception('not today') }}", "TemplateError: not today"),
        (template(tools=""), "does not show tool definitions"),
        (template("{{ m.content or '' }}"), "does not show names of called tools, arguments of tool calls"),
        (template(TURN.replace("{{ call.function.name }}", "f")), "does not show names of called tools"),
        (template("{% if m.role != 'tool' %}" + TURN + "{% endif %}"), "does not show tool results"),
        ("{{ messages | length }}" + template(), "the rendering of message 0 (system) changes"),
        (template("{{ '[last]' if loop.last }}" + TURN), "changes when the conversation goes on"),
    ],
    ids=[
        *("there is none", "bad syntax", "raises", "no tools", "no calls", "no names", "no results"),
        *("counts messages", "marks the last turn"),
    ],
)
def test_templates_that_cannot_be_used_are_refused_with_the_reason(broken, seen):
    found = _broken(broken)["template"]
    assert (found.status, seen in found.seen) == (Status.FAIL, True), found


def test_the_template_that_the_broken_ones_differ_from_is_good():
    assert {f.status for f in _broken(template()).values()} == {Status.PASS}


def test_prompts_and_results_that_leave_no_room_are_found():
    short = findings(qwen_like_tokenizer("compact"), context=20)
    assert (short["context"].status, "shorten the prompt" in short["context"].advice) == (Status.FAIL, True)
    tight = findings(qwen_like_tokenizer("compact"), length=4090)
    assert tight["context"].status is Status.WARN
    assert "max_completion_length to at most" in tight["context"].advice

    class Talks(Good):
        def add(self, n: int) -> str:
            """Add.

            Args:
                n: How much.
            """
            return "talk " * 200

    loud = findings(qwen_like_tokenizer("compact"), Talks)
    assert (loud["context"].status, "fewer words" in loud["context"].advice) == (Status.WARN, True)


SCHEMAS = [
    {"type": "integer"},
    {"type": "integer", "minimum": 3, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 20},
    {"type": "integer", "maximum": -7},
    {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "boolean"},
    {"type": ["string", "null"]},
    {"enum": ["left", "right"]},
    {"const": 3},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}, "required": ["a"]},
]


@given(st.sampled_from(SCHEMAS), st.integers(0, 10**6))
def test_random_values_are_what_the_schema_allows(schema, seed):
    assert Draft202012Validator(schema).is_valid(random_value(schema, random.Random(seed)))


def test_random_values_fit_the_schemas_that_functions_get():
    def move(x: int, where: str | None = None, ways: list[int] | None = None) -> None:
        """Move.

        Args:
            x: How far.
            where: Where to.
            ways: Which ways.
        """

    parameters = tool_schema(move, "move")["function"]["parameters"]
    for seed in range(50):
        assert Draft202012Validator(parameters).is_valid(random_value(parameters, random.Random(seed)))


def test_memory_is_that_of_the_formula():
    """Llama 3 8B in float32, by hand: 32 layers, 4096 hidden, 8 heads of 128, 128256 words, 8 rows of 512."""
    sizes = Sizes(8 * 10**9, 8 * 10**9, 32, 4096, 1024, 128256, 4096, 4096, reference=True)
    memory = estimate(sizes)
    assert (memory.weights, memory.gradients, memory.optimizer, memory.reference) == (
        32 * 10**9,
        32 * 10**9,
        64 * 10**9,
        32 * 10**9,
    )
    assert memory.cache == 2 * 32 * 1024 * 4 * 4096
    assert memory.activations == (32 + 17) * 4096 * 4096 * 4
    assert memory.logits == 16 * 2**26
    assert check_memory(sizes, 80 * GIB).status is Status.WARN
    assert check_memory(sizes, 300 * GIB).status is Status.PASS
    assert "no GPU" in check_memory(sizes, None).seen
