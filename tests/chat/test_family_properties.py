"""Random conversations with every family and random byte-level tokenizers: rows and prefixes hold, calls are read."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from agentrl.chat.families import recognise
from tests.chat.family_rounds import (
    assert_exact,
    assert_read,
    assert_reasoning_kept,
    play_rounds,
    renderer,
    thoughts,
)
from tests.chat.members import TOOL_USERS

# Without what some templates cannot write (LFM2 a quote in an argument) or take off (Gemma white space at the ends).
WORDS = st.text("abcxyz ÉÀé.:{}東🙂", min_size=1, max_size=12).filter(lambda text: text == text.strip())
CALLS = st.one_of(
    st.tuples(st.just("add"), st.fixed_dictionaries({"a": st.integers(-99, 99), "b": st.integers(-99, 99)})),
    st.tuples(
        st.just("look_up"),
        st.fixed_dictionaries({"word": WORDS, "tags": st.lists(WORDS, max_size=2)}, optional={"deep": st.booleans()}),
    ),
)


FIRST = {member.family: member for member in reversed(TOOL_USERS)}
MEMBERS = [  # those that have a relative here as slow tests
    pytest.param(member, id=member.name, marks=[] if member is FIRST[member.family] else [pytest.mark.slow])
    for member in TOOL_USERS
]


@pytest.mark.parametrize("member", MEMBERS)
@settings(max_examples=2, phases=[Phase.generate])
@given(data=st.data())
def test_rows_of_random_conversations_are_exact_for_every_family(member, data):
    """The row is one full render of the template in use, and has what was sampled; each suffix goes on from it."""
    bridge = renderer(member, seed=TOOL_USERS.index(member))
    turns = st.tuples(st.just("") | WORDS, st.lists(CALLS, min_size=1, max_size=3 if member.parallel else 1))
    thought = data.draw(st.sampled_from(thoughts(member)))
    system, rounds = data.draw(st.none() | WORDS), data.draw(st.lists(turns, max_size=3))
    episode = play_rounds(member, bridge, thought, system, rounds)
    assert_exact(episode)
    assert_read(episode)
    if thought is not None:
        assert_reasoning_kept(episode, recognise(member.source).format.reasoning.field, thought)
