"""Whole episodes with every model whose template is at hand, and the table of the documentation made from them."""

import json
import re

import pytest

from agentrl.chat.families import FAMILIES, recognise
from agentrl.chat.prefix import call_id, tool_call
from agentrl.errors import TemplateError
from tests.chat.family_rounds import (
    BEGIN,
    CALLS,
    DOCS,
    END,
    SCHEMAS,
    assert_exact,
    assert_images_shown,
    assert_read,
    assert_read_as_written,
    assert_reasoning_kept,
    encode,
    equals_own_render,
    play,
    renderer,
    rows_when_forked,
    table,
    thoughts,
)
from tests.chat.growth import seconds_of
from tests.chat.members import NOT_AT_HAND, TOOL_USERS
from tests.docs import tables

every_tool_user = pytest.mark.parametrize("member", TOOL_USERS, ids=lambda member: member.name)


@every_tool_user
@pytest.mark.parametrize("parallel", [False, True], ids=["one call", "several calls"])
def test_three_turns_with_tools_are_exact_and_read_as_written(member, parallel):
    if parallel and not member.parallel:
        pytest.skip("the model ends its turn after one call")
    for thought in thoughts(member):
        episode = play(member, thought, parallel)
        assert_exact(episode)
        assert_read(episode)
        if thought is not None:
            assert_reasoning_kept(episode, recognise(member.source).format.reasoning.field, thought)
        assert equals_own_render(member, episode.messages) is not False


@every_tool_user
def test_each_turn_of_a_forked_episode_is_sampled_from_what_the_own_template_makes(member):
    try:
        renderer(member, "fork")
    except TemplateError:
        pytest.skip("the own template cannot be used, which is said when the trainer is made")
    for thought in thoughts(member):
        assert rows_when_forked(member, thought) in (1, 2, 3)


def test_a_turn_that_the_own_template_cannot_write_stays_in_its_row():
    """GPT-OSS raises on text and reasoning beside a call: no episode may end for it, and nothing sampled is lost."""
    [member] = [member for member in TOOL_USERS if member.name == "GPT-OSS"]
    own, messages = renderer(member, "fork").choice.template, play(member, "because", False).messages
    with pytest.raises(TemplateError, match="content"):
        own.render(messages, SCHEMAS, False)
    assert rows_when_forked(member, "because") == 1


@every_tool_user
def test_rendering_takes_time_in_proportion_to_the_turns(member):
    """Eight times the rounds take about eight times as long, not sixty-four times."""

    def seconds(rounds):
        messages = [{"role": "user", "content": "How much?"}]
        for number in range(rounds):
            messages.append({"role": "assistant", "content": "Hm.", "tool_calls": [tool_call(number, "add", {"a": 3})]})
            messages.append({"role": "tool", "name": "add", "tool_call_id": call_id(number), "content": "7"})
        return seconds_of(lambda: renderer(member).choice.template.render(messages, SCHEMAS, True))

    assert seconds(128) < 25 * seconds(16) + 0.01


@pytest.mark.parametrize(
    ("ids", "answered"),
    [
        (["aB3dE5gH9", "Zz0000000"], ["aB3dE5gH9", "Zz0000000"]),
        (["aB3dE5gH9", "aB3dE5gH9"], [call_id(0), call_id(1)]),  # which result answers which call must be clear
        (["aB3", "é23456789"], [call_id(0), call_id(1)]),  # Mistral's templates raise on such
    ],
)
@pytest.mark.parametrize("version", ["Mistral (v7)", "Mistral (v11)"])
def test_results_name_the_calls_as_the_model_did(version, ids, answered):
    [member] = [member for member in TOOL_USERS if member.name == version]
    bridge = renderer(member)
    template = bridge.choice.template
    made = [{**tool_call(number, "add", {"a": number}), "id": name} for number, name in enumerate(ids)]
    question = [{"role": "user", "content": "How much?"}]
    turn = {"role": "assistant", "content": "", "tool_calls": made}
    text = template.render([*question, turn], SCHEMAS, False).removeprefix(template.render(question, SCHEMAS, True))
    sampled = encode(bridge, text)
    read = bridge.parse(sampled, SCHEMAS)
    results = [{"role": "tool", "name": "add", "tool_call_id": call.id, "content": "7"} for call in read.calls]
    suffix = bridge._tokenizer.decode(bridge.suffix_ids(sampled[-1], read.message, results, SCHEMAS))
    assert suffix == "".join(f"[TOOL_RESULTS]{name}[TOOL_CONTENT]7[/TOOL_RESULTS]" for name in answered)


def command_r7b():
    [member] = [member for member in TOOL_USERS if member.name == "Cohere 2 (Command R7B)"]
    return member


@pytest.mark.parametrize(
    ("written", "answered"),
    [
        (["5", "6"], ["5", "6"]),  # as the model counts
        (["1", "1"], ["3", "4"]),  # which result answers which call must be clear: as the rollout counts
        (["one", "two"], ["3", "4"]),
    ],
)
def test_results_of_command_r7b_name_the_number_of_their_call(written, answered):
    """What follows a turn depends on how many calls came before it, which the template of the suffix does not see."""
    bridge = renderer(command_r7b())
    listed = [{"tool_call_id": number, "tool_name": "add", "parameters": {"a": 1, "b": 2}} for number in written]
    sampled = encode(bridge, f"<|START_ACTION|>{json.dumps(listed)}<|END_ACTION|><|END_OF_TURN_TOKEN|>")
    read = bridge.parse(sampled, SCHEMAS, first_call=3)
    results = [{"role": "tool", "name": "add", "tool_call_id": call.id, "content": "3"} for call in read.calls]
    suffix = bridge._tokenizer.decode(bridge.suffix_ids(sampled[-1], read.message, results, SCHEMAS))
    assert re.findall(r'"tool_call_id": "(\w+)"', suffix) == answered


def test_calls_with_foreign_ids_are_numbered_as_the_own_template_of_command_r7b_does():
    member = command_r7b()
    messages = [{"role": "user", "content": "q"}]
    for ids in (["abc", "toolu_7"], ["x"]):
        made = [{**tool_call(0, "add", {"a": 1}), "id": name} for name in ids]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        messages += [{"role": "tool", "name": "add", "tool_call_id": name, "content": name} for name in ids]
    own, ours = member.template, renderer(member).choice.template
    assert ours.render(messages, SCHEMAS, True) == own.render(messages, SCHEMAS, True)


@pytest.mark.parametrize("member", [m for m in TOOL_USERS if m.images], ids=lambda member: member.name)
def test_images_show_in_questions_and_in_results(member):
    assert_images_shown(member)


@pytest.mark.parametrize("name", NOT_AT_HAND)
def test_calls_of_models_whose_templates_are_not_at_hand_are_read(name):
    [family] = [family for family in FAMILIES if family.name == name]
    assert_read_as_written(family.format, CALLS)


def test_the_own_render_was_compared_for_most_models():
    compared = [equals_own_render(member, play(member, thoughts(member)[0], False).messages) for member in TOOL_USERS]
    assert compared.count(True) > 15


def test_the_table_of_the_documentation_is_current():
    """Stale? `python -m tests.chat.family_rounds` writes it anew."""
    assert tables.split(DOCS.read_text(encoding="utf-8"), BEGIN, END)[1].strip() == table().strip()
