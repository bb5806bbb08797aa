"""Which template is used with tools: the own one, that of the family, a repaired one, or none."""

import pytest
from tokenizers import AddedToken

from agentrl.chat.prefix import first_break
from agentrl.chat.renderer import Renderer
from agentrl.chat.repair import Origin, exact_template, forking_template, prove
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from agentrl.testing.tokenizers import fix_tokenizer, qwen_like_tokenizer

GROUPED = fix_tokenizer("grouped").chat_template


def template(source, tokenizer=None):
    return Template(tokenizer or fix_tokenizer(), source, {})


def changed(old, new, source=GROUPED):
    assert old in source
    return template(source.replace(old, new))


@pytest.mark.parametrize("name", ["t0", "grouped"])
def test_an_exact_template_is_used_as_it_is(name):
    own = template(fix_tokenizer(name).chat_template)
    assert exact_template(own).origin is Origin.OWN
    assert exact_template(own).template is own


def test_a_template_that_forgets_reasoning_is_repaired_and_keeps_what_was_sampled_c02():
    """The row is that of the same template without the forgetting, which is prefix-preserving."""
    forgetting = template(fix_tokenizer("think").chat_template)
    choice = exact_template(forgetting)
    assert choice.origin is Origin.REPAIRED
    assert "message 1 (assistant)" in choice.problem
    tokenizers = {name: fix_tokenizer(name) for name in ("think", "grouped")}
    rows = {}
    for name, tokenizer in tokenizers.items():
        renderer = Renderer(tokenizer, tools=True)
        row = renderer.prompt_ids([{"role": "user", "content": "q"}], [{}])
        for text in ('<think>why</think>go<call>{"name": "f", "arguments": {}}</call>', "<think>r</think>ok"):
            sampled = tokenizer.encode(f"{text}<e>")
            turn = renderer.parse(sampled, [{}])
            results = [{"role": "tool", "name": "f", "tool_call_id": c.id, "content": "5"} for c in turn.calls]
            row += sampled
            row += renderer.suffix_ids(sampled[-1], turn.message, results, [{}]) if results else []
        rows[name] = row
    assert rows["think"] == rows["grouped"]


def test_a_think_block_that_only_the_last_turn_gets_is_repaired_b06():
    own = changed(
        "{{- '<b>' + message.role + '|' + content",
        "{%- set first = '<think>\n\n</think>\n\n' if loop.last and message.role == 'assistant' else '' -%}"
        "{{- '<b>' + message.role + '|' + first + content",
    )
    assert exact_template(own).origin is Origin.REPAIRED


def test_a_template_that_drops_earlier_results_is_refused_with_the_message_and_both_renderings_b09():
    forgetful = changed(
        "{{- '<r>' + message.content + '</r>' -}}",
        "{{- '<r>' + (message.content if loop.index > messages|length - 2 else 'old') + '</r>' -}}",
    )
    with pytest.raises(TemplateError, match=r"message \d \(tool\)") as caught:
        exact_template(forgetful)
    assert "before: …'" in str(caught.value)
    assert "after:  …'" in str(caught.value)


def test_a_template_whose_glue_depends_on_the_round_is_refused():
    """Its suffix for the stand-in conversation would be silently wrong in the second round."""
    counting = changed("{{- '<r>' + message.content", "{{- '<r>' + (loop.index | string) + message.content")
    with pytest.raises(TemplateError, match="depends on the conversation before it"):
        exact_template(counting)


def test_a_template_that_changes_the_question_is_refused_b09():
    moving = changed(
        "{{- '<b>' + message.role + '|' + content",
        (
            "{%- if message.role == 'user' and messages|length > 3 -%}"
            "{%- set content = 'long: ' + content -%}{%- endif -%}"
            "{{- '<b>' + message.role + '|' + content"
        ),
    )
    with pytest.raises(TemplateError, match=r"\(user\) changes"):
        exact_template(moving)


def test_a_tokenizer_that_joins_the_end_of_a_turn_with_what_follows_is_refused():
    """In text all is well; the ids of the row would not be those of the whole."""
    tokenizer = fix_tokenizer("grouped")
    assert prove(template(GROUPED, tokenizer)).problem is None
    tokenizer.add_tokens([AddedToken("<e><b>user<r>", normalized=False)])
    assert "joins what follows" in prove(template(GROUPED, tokenizer)).problem


def test_a_family_s_training_template_comes_before_a_repair():
    """An own template that is not exact and whose family is known: rows are those of the family."""
    tokenizer = qwen_like_tokenizer()
    exact = tokenizer.chat_template
    tokenizer.chat_template = exact.replace(
        "{%- if reasoning is string or quiet -%}", "{%- if (reasoning is string and loop.last) or quiet -%}"
    )
    assert tokenizer.chat_template != exact
    choice = Renderer(tokenizer, tools=True).choice
    assert (choice.origin, choice.family) == (Origin.FAMILY, "Qwen3")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "tool", "content": "5"},
    ]
    assert first_break(choice.template.render, messages, None) is None


@pytest.mark.parametrize("choose", [exact_template, forking_template])
@pytest.mark.parametrize("wanted", ["single", "system first"])
def test_a_template_that_raises_on_an_ordinary_conversation_is_refused_with_its_reason(wanted, choose):
    """When it is chosen, not in the middle of a rollout."""
    guards = {
        "single": "{%- for m in messages if (m.tool_calls or [])|length > 1 -%}"
        "{{ raise_exception('one call!') }}{%- endfor -%}",
        "system first": "{%- if messages[0].role != 'system' -%}{{ raise_exception('no system') }}{%- endif -%}",
    }
    with pytest.raises(TemplateError, match=r"one call!|no system"):
        choose(template(guards[wanted] + GROUPED))


@pytest.mark.parametrize("quiet", [False, True])
def test_chat_template_kwargs_reach_every_render(quiet):
    """Prompt, suffix and generation prompt alike."""
    tokenizer = qwen_like_tokenizer()
    renderer = Renderer(tokenizer, tools=True, template_kwargs={"enable_thinking": not quiet})
    prompt = tokenizer.decode(renderer.prompt_ids([{"role": "user", "content": "q"}], [{}]))
    turn = renderer.parse(tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'), [{}])
    results = [{"role": "tool", "name": "f", "tool_call_id": turn.calls[0].id, "content": "5"}]
    for content in ("5", "6"):  # rendered, then from the skeleton
        suffix = renderer.suffix_ids(tokenizer.eos_token_id, turn.message, [{**results[0], "content": content}], [{}])
        assert tokenizer.decode(suffix).endswith("<think>\n\n</think>\n\n") is quiet
    assert prompt.endswith("<think>\n\n</think>\n\n") is quiet
