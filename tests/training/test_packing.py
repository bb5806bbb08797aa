"""What sequences begin with in common stands once, and nothing else is lost or added."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from agentrl.training.packing import _WORTH, Packing, Segment, pack


def read(packing: Packing, place: tuple[range, ...]) -> list[int]:
    return [packing.ids[at] for at in chain(*place)]


def test_a_tree_of_beginnings():
    prompt, call = [1] * _WORTH, [2] * _WORTH
    sequences = [prompt + call + [3], [9], [*prompt, 4], prompt + call + [5, 6], prompt + call, []]
    packing = pack(sequences, share=True)
    assert packing.ids == [*prompt, *call, 3, 5, 6, 4, 9]
    assert packing.segments == [
        Segment(0, 16),
        Segment(16, 32, before=16, parent=0),
        Segment(32, 33, before=32, parent=1),
        Segment(33, 35, before=32, parent=1),
        Segment(35, 36, before=16, parent=0),
        Segment(36, 37),
    ]
    assert packing.places[3] == (range(16), range(16, 32), range(33, 35))
    assert [read(packing, place) for place in packing.places] == sequences


def test_a_beginning_gets_a_segment_for_the_tokens_that_it_saves():
    """One of 5 tokens saves 10 among three sequences and 20 among five; of two sequences one must have 16."""
    ends = [[2], [3], [4], [5], [6]]
    assert len(pack([[1] * 5 + end for end in ends[:3]], share=True).segments) == 3
    assert len(pack([[1] * 5 + end for end in ends], share=True).segments) == 6
    assert len(pack([[1] * 15 + end for end in ends[:2]], share=True).segments) == 2
    assert len(pack([[1] * 16 + end for end in ends[:2]], share=True).segments) == 3


def test_some_share_a_long_beginning_of_which_a_short_one_is_common_to_all():
    sequences = [[1, 2], [1] * 20 + [3], [1], [1] * 20 + [4]]
    packing = pack(sequences, share=True)
    assert packing.segments[1] == Segment(2, 22)
    assert len(packing.segments) == 5
    assert [read(packing, place) for place in packing.places] == sequences


def test_equal_sequences_stand_once_only_where_they_may():
    sequences = [[*range(_WORTH)]] * 3
    assert pack(sequences, share=True).ids == sequences[0]
    assert pack(sequences, share=False).ids == sequences[0] * 3


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_come_back_and_segments_follow_their_parents(seed):
    draw = random.Random(seed)
    sequences: list[list[int]] = []
    for _ in range(12):
        stem = draw.choice(sequences)[: draw.randrange(40)] if sequences and draw.random() < 0.7 else []
        sequences.append(stem + [draw.randrange(2) for _ in range(draw.randrange(30))])
    packing = pack(sequences, share=True)
    assert [read(packing, place) for place in packing.places] == sequences
    assert [segment.stop for segment in packing.segments[:-1]] == [segment.start for segment in packing.segments[1:]]
    stretches = {(s.start, s.stop): s for s in packing.segments}
    for place in packing.places:
        parent, before = None, 0
        for stretch in place:  # each goes on where its parent ends
            segment = stretches[stretch.start, stretch.stop]
            assert (segment.before, segment.parent) == (before, parent)
            parent, before = packing.segments.index(segment), segment.length
