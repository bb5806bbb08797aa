"""The kept part of a command's output, against slicing the whole."""

from __future__ import annotations

from hypothesis import given, strategies

from agentrl.envs.sandbox.output import Output


@given(parts=strategies.lists(strategies.binary(max_size=30), max_size=20), half=strategies.integers(1, 40))
def test_the_first_and_the_last_half_are_kept(parts: list[bytes], half: int) -> None:
    output = Output(2 * half)
    for part in parts:
        output.write(part)
    whole = b"".join(parts)
    assert output.size == len(whole)
    assert output.truncated == (len(whole) > 2 * half)
    if len(whole) <= 2 * half:
        assert output.text() == whole.decode("utf-8", "replace")
    else:
        head, middle, tail = whole[:half], len(whole) - 2 * half, whole[-half:]
        expected = [head.decode("utf-8", "replace"), tail.decode("utf-8", "replace")]
        assert output.text() == f"\n[... {middle} bytes left out ...]\n".join(expected)


def test_memory_stays_bounded() -> None:
    output = Output(1000)
    for _ in range(1000):
        output.write(b"x" * 5000)
    assert len(output._head) + sum(map(len, output._tail)) <= 2000
