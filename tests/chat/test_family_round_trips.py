"""Whole episodes with every model whose template is at hand, and the table of the documentation made from them."""

import pytest

from agentrl.chat.families import recognise
from tests.chat.family_rounds import (
    DOCS,
    assert_exact,
    assert_read,
    assert_reasoning_kept,
    documented,
    equals_own_render,
    play,
    table,
    thoughts,
)
from tests.chat.members import TOOL_USERS

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


def test_the_own_render_was_compared_for_most_models():
    compared = [equals_own_render(member, play(member, thoughts(member)[0], False).messages) for member in TOOL_USERS]
    assert compared.count(True) > 15


def test_the_table_of_the_documentation_is_current():
    """Stale? `python -m tests.chat.family_rounds` writes it anew."""
    assert documented(DOCS.read_text(encoding="utf-8"))[1].strip() == table().strip()
