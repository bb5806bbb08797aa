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
        Segment(0, 8),
        Segment(8, 16, before=8, parent=0),
        Segment(16, 17, before=16, parent=1),
        Segment(17, 19, before=16, parent=1),
        Segment(19, 20, before=8, parent=0),
        Segment(20, 21),
    ]
    assert packing.places[3] == (range(8), range(8, 16), range(17, 19))
    assert [read(packing, place) for place in packing.places] == sequences


def test_short_beginnings_get_no_segment():
    sequences = [[1] * (_WORTH - 1) + [2], [1] * (_WORTH - 1) + [3]]
    assert pack(sequences, share=True).segments == [Segment(0, 8), Segment(8, 16)]


def test_equal_sequences_stand_once_only_where_they_may():
    sequences = [[*range(10)]] * 3
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
