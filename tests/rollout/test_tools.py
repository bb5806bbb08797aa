"""Tools: schemas, running calls, what the model is told, and threads."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image

from agentrl.errors import EpisodeDone, ToolDefinitionError
from agentrl.rollout.calling import is_async
from agentrl.rollout.results import MAX_CHARACTERS, render, tool_message, truncate
from agentrl.rollout.threads import Threads
from agentrl.rollout.tools import Tool, ToolRunner, make_tools
from agentrl.types import ToolCall, ToolResult
from tests.waiting import LONG, eventually, wait_until


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


def tool(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Give a test's function without arguments the docstring that tools need."""
    function.__doc__ = "A tool."
    for name, value in options.items():
        setattr(function, name, value)
    return function


def run(threads: Threads, functions: list[Callable[..., Any]], *calls: ToolCall) -> list[ToolResult]:
    return asyncio.run(ToolRunner(threads).run(calls, make_tools(functions)))


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(f"id-{name}", name, arguments)


def answer(threads: Threads, function: Callable[..., Any], **arguments: Any) -> ToolResult:
    (result,) = run(threads, [function], call(function.__name__, **arguments))
    return result


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return a + b


async def add_later(a: int, b: int = 2) -> int:
    """Add two numbers after a while.

    Args:
        a: The first number.
        b: The second number.
    """
    await asyncio.sleep(0)
    return a + b


class Adder:
    """Adds a fixed number."""

    async def __call__(self, a: int) -> int:
        """Add ten.

        Args:
            a: The number.
        """
        await asyncio.sleep(0)
        return a + 10

    async def method(self, a: int) -> int:
        """Add twenty.

        Args:
            a: The number.
        """
        return a + 20


# Schemas


def test_schema_is_that_of_transformers() -> None:
    from transformers.utils import get_json_schema

    assert Tool.from_function(add).schema == get_json_schema(add)


def test_schema_of_a_partial_hides_what_it_fixes() -> None:
    schema = Tool.from_function(functools.partial(add, b=3)).schema["function"]
    assert schema["name"] == "add"
    assert list(schema["parameters"]["properties"]) == ["a"]
    assert list(Tool.from_function(functools.partial(add, 1)).schema["function"]["parameters"]["properties"]) == ["b"]


def test_schema_of_a_callable_object_reads_its_call() -> None:
    schema = Tool.from_function(Adder()).schema["function"]
    assert (schema["name"], schema["description"]) == ("Adder", "Add ten.")


def test_tool_without_docstring_is_refused_by_name() -> None:
    def silent(a: int) -> int:
        return a

    with pytest.raises(ToolDefinitionError, match="the tool 'silent' of the environment Game has no docstring"):
        Tool.from_function(silent, owner="Game")


def test_tool_without_hints_is_refused_naming_the_arguments() -> None:
    def untyped(a, b: int, c):  # type: ignore[no-untyped-def]
        """Do.

        Args:
            a: One.
            b: Two.
            c: Three.
        """

    with pytest.raises(ToolDefinitionError, match=r"'untyped' has no type hint for the argument\(s\) 'a', 'c'"):
        Tool.from_function(untyped)


def test_tool_with_undescribed_arguments_is_refused_naming_them() -> None:
    def vague(a: int, b: int) -> int:  # noqa: D417
        """Do.

        Args:
            a: One.
        """
        return a + b

    with pytest.raises(ToolDefinitionError, match=r"'vague' does not describe the argument\(s\) 'b'"):
        Tool.from_function(vague)


def test_tool_whose_calls_cannot_be_written_is_refused() -> None:
    def many(*values: int) -> None:
        """Do."""

    def more(**values: int) -> None:
        """Do."""

    def positional(a: int, /) -> None:
        """Do.

        Args:
            a: One.
        """

    def generator() -> Iterator[int]:
        """Do."""
        yield 1

    def custom(a: ToolCall) -> None:
        """Do.

        Args:
            a: One.
        """

    for function, wrong in [
        (many, r"`\*values: 'int'`"),
        (more, r"`\*\*values: 'int'`"),
        (positional, "'a' by position only"),
        (generator, "yields"),
        (custom, "cannot be described"),
        (lambda: 1, "needs a name"),
    ]:
        with pytest.raises(ToolDefinitionError, match=wrong):
            Tool.from_function(function)


# Names


def test_f10_two_tools_of_one_name_are_refused_naming_both() -> None:
    def other(a: int) -> int:
        """Do.

        Args:
            a: One.
        """
        return a

    other.__name__ = "add"
    with pytest.raises(ToolDefinitionError, match=r"'add'.*function add at.*other"):
        make_tools([add, other])


@pytest.mark.parametrize("name", ["reset", "get_reward", "close"])
def test_f10_a_tool_named_like_a_hook_is_refused(name: str) -> None:
    with pytest.raises(ToolDefinitionError, match=f"cannot be called '{name}'"):
        make_tools([tool(lambda: 1, __name__=name)])


def test_h05_partials_and_callable_objects_get_distinct_names(threads: Threads) -> None:
    tools = make_tools([functools.partial(add, b=1), Adder(), functools.partial(add, b=5)])
    assert list(tools) == ["add", "Adder", "add_2"]
    assert tools["add_2"].schema["function"]["name"] == "add_2"
    (result,) = asyncio.run(ToolRunner(threads).run([call("add_2", a=1)], tools))
    assert result.content == "6"


# Running


def test_f01_sync_and_async_in_any_form_give_values_in_call_order(threads: Threads) -> None:
    adder = Adder()
    functions = [add, add_later, adder, adder.method, functools.partial(add_later, b=30)]
    names = ["add", "add_later", "Adder", "method", "add_later_2"]
    results = run(threads, functions, *(call(name, a=1) for name in names))
    assert [result.content for result in results] == ["3", "3", "11", "21", "31"]
    assert not any(result.failed for result in results)


def test_f01_is_async_sees_through_partials_and_objects() -> None:
    adder = Adder()
    for function in (add_later, adder, adder.method, functools.partial(functools.partial(adder), a=1)):
        assert is_async(function)
    for function in (add, Adder, functools.partial(add), print):
        assert not is_async(function)


def test_f01_a_sync_wrapper_around_an_async_tool_is_awaited(threads: Threads) -> None:
    @functools.wraps(add_later)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return add_later(*args, **kwargs)

    assert answer(threads, wrapper, a=1).content == "3"


def test_f02_exceptions_of_tools_become_text_and_count_as_failed(threads: Threads) -> None:
    def raising(error: BaseException) -> Callable[..., Any]:
        def fail() -> None:
            raise error

        return tool(fail, __name__="fail")

    for error, text in [
        (ValueError("boom"), "Error: ValueError: boom"),
        (KeyError(3), "Error: KeyError: 3"),
        (TimeoutError(), "Error: TimeoutError"),
        (SystemExit(2), "Error: SystemExit: 2"),
        (StopIteration(), "Error: RuntimeError: coroutine raised StopIteration"),
    ]:
        result = answer(threads, raising(error))
        assert (result.content, result.failed, result.done) == (text, True, False)


def test_f02_an_async_tool_that_cancels_itself_fails_alone(threads: Threads) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    results = run(threads, [tool(cancelled), add], call("cancelled"), call("add", a=1))
    assert [result.failed for result in results] == [True, False]


def test_keyboard_interrupt_passes_through(threads: Threads) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(threads, tool(interrupt))


def test_cancelling_the_rollout_passes_through(threads: Threads) -> None:
    async def wait() -> None:
        await asyncio.sleep(600)

    async def main() -> None:
        runner = ToolRunner(threads)
        for calls in ([call("wait")], [call("wait")] * 2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(runner.run(calls, make_tools([tool(wait)])), 0.01)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "the argument 'a' is missing"),
        ({"a": 1, "c": 2}, "there is no argument 'c'"),
        ({"a": "1"}, "the argument 'a' must be integer, not '1'"),
        ({"a": True}, "the argument 'a' must be integer, not True"),
        ({"a": 1.5}, "the argument 'a' must be integer, not 1.5"),
        ({"a": None}, "the argument 'a' must be integer, not None"),
    ],
)
def test_f02_wrong_arguments_are_explained_and_the_tool_is_not_run(
    threads: Threads, arguments: dict[str, Any], text: str
) -> None:
    result = answer(threads, add, **arguments)
    assert result.failed
    assert isinstance(result.content, str)
    assert result.content.startswith(f"Error: add: {text}")
    assert result.content.endswith("It takes: a (integer), b (integer)")


def test_arguments_that_fit_are_passed_unchanged(threads: Threads) -> None:
    class Colour(Enum):
        RED = "red"

    def take(i: int, n: float, t: str | int, o: list[str] | None, c: Colour, m: Literal["x", 1], d: int = 5) -> str:
        """Take.

        Args:
            i: Integer.
            n: Number.
            t: Text or integer.
            o: List or nothing.
            c: Colour.
            m: Mode.
            d: Has a default.
        """
        return repr((i, n, t, o, c, m, d))

    take.__annotations__["c"] = Colour
    arguments = {"i": 3.0, "n": 1, "t": "t", "o": None, "c": "red", "m": 1, "d": None}
    assert answer(threads, take, **arguments).content == "(3.0, 1, 't', None, 'red', 1, None)"
    assert "must be one of 'red', not 'blue'" in str(answer(threads, take, **arguments | {"c": "blue"}).content)


def test_an_unknown_tool_is_named_with_those_that_exist(threads: Threads) -> None:
    (result,) = run(threads, [add, add_later], call("subtract"))
    assert result.content == "Error: there is no tool named 'subtract'; the tools are: add, add_later"
    assert result.failed


def test_an_unreadable_call_is_answered_with_its_error(threads: Threads) -> None:
    (result,) = run(threads, [add], ToolCall("1", "", error="the arguments are no JSON"))
    assert (result.content, result.failed) == ("Error: the arguments are no JSON", True)


def test_a_huge_wrong_argument_is_not_echoed(threads: Threads) -> None:
    assert len(answer(threads, add, a="x" * 10_000).content) < 200


def test_episode_done_keeps_its_text_and_the_other_results(threads: Threads) -> None:
    def finish() -> None:
        raise EpisodeDone("won")

    def leave() -> None:
        raise EpisodeDone

    results = run(threads, [add, tool(finish), tool(leave)], call("add", a=1), call("finish"), call("leave"))
    assert [(r.content, r.done, r.failed) for r in results] == [
        ("3", False, False),
        ("won", True, False),
        ("", True, False),
    ]


def test_all_calls_of_all_rollouts_run_at_once(threads: Threads) -> None:
    at_once = threading.Barrier(64 * 3)  # opens only when every call is in its thread

    def meet() -> str:
        at_once.wait(LONG)
        return "met"

    async def main() -> list[list[ToolResult]]:
        tools = make_tools([tool(meet)])
        return await asyncio.gather(*(ToolRunner(threads).run([call("meet")] * 3, tools) for _ in range(64)))

    assert {result.content for results in asyncio.run(main()) for result in results} == {"met"}


def test_results_come_in_call_order_whichever_is_ready_first(threads: Threads) -> None:
    order: list[str] = []

    async def slow() -> str:
        await eventually(lambda: order)
        order.append("slow")
        return "slow"

    async def fast() -> str:
        order.append("fast")
        return "fast"

    results = run(threads, [tool(slow), tool(fast)], call("slow"), call("fast"))
    assert order == ["fast", "slow"]
    assert [result.content for result in results] == ["slow", "fast"]


def test_sync_methods_of_one_instance_take_turns_in_call_order(threads: Threads) -> None:
    class Counter:
        total = 0

        def inc(self, step: int) -> int:
            """Increment.

            Args:
                step: How far.
            """
            before = self.total
            time.sleep(0.002)
            self.total = before + step
            return self.total

    counter, other = Counter(), Counter()
    unbound = Tool.from_function(counter.inc)
    tools = {"inc": unbound.bind(counter), "inc_other": unbound.bind(other)}
    calls = [call("inc", step=step) for step in (1, 2, 3)] + [call("inc_other", step=7)]
    results = asyncio.run(ToolRunner(threads).run(calls, tools))
    assert [result.content for result in results] == ["1", "3", "6", "7"]


def test_seconds_measure_the_tool_not_the_wait_for_its_turn(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync methods of one instance take turns."""
    clock = [0.0]
    monkeypatch.setattr("agentrl.rollout.tools.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Bed:
        def rest(self) -> None:
            """Rest."""
            clock[0] += 5.0

    bed = Bed()
    tools = {"rest": Tool.from_function(bed.rest).bind(bed)}
    results = asyncio.run(ToolRunner(threads).run([call("rest")] * 2, tools))
    assert [result.seconds for result in results] == [5.0, 5.0]


def test_tool_message() -> None:
    result = ToolResult(ToolCall("c1", "add"), "3")
    assert tool_message(result) == {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"}


# What the model sees


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ({"a": 1}, '{"a": 1}'),
        ([1, 2], "[1, 2]"),
        ((1, None), "[1, null]"),
        ([], "[]"),
        (b"\xff\x00", "\ufffd\x00"),
        (3.5, "3.5"),
        (True, "True"),
        ("", ""),
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (torch.tensor(2), "2"),
        (np.arange(3), "[0, 1, 2]"),
        ({"a": np.int64(3), "b": np.arange(2)}, '{"a": 3, "b": [0, 1]}'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ({"when": Literal}, '{"when": "typing.Literal"}'),
    ],
)
def test_f03_every_kind_of_result_is_text(value: Any, text: str) -> None:
    assert render(value) == text


def test_f03_a_huge_result_is_cut_and_says_so() -> None:
    for huge in (
        "x" * 2_000_000,
        b"x" * 2_000_000,
        ["x" * 2_000_000],
        [{"type": "text", "text": "x" * 2_000_000}],
    ):
        text = render(huge)
        assert isinstance(text, str)
        assert len(text) < MAX_CHARACTERS + 50
        assert text.endswith("characters left out]")


def test_f03_a_result_that_cannot_print_itself_is_a_failure(threads: Threads) -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("mute")

    result = answer(threads, tool(lambda: Mute(), __name__="mute"))
    assert (result.content, result.failed) == ("Error: RuntimeError: mute", True)


def test_f03_a_structure_that_contains_itself_is_text() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert render(loop) == "[[...]]"


def test_f04_results_keep_real_characters() -> None:
    assert render({"r": "café 東京 🙂"}) == '{"r": "café 東京 🙂"}'


def test_f04_lone_surrogates_cannot_reach_the_tokenizer() -> None:
    text = render("a\ud83d")
    assert isinstance(text, str)
    text.encode()


def test_images_stay_blocks_and_text_blocks_become_text() -> None:
    image = Image.new("RGB", (2, 2))
    block = {"type": "image", "image": image}
    text = {"type": "text", "text": "a"}
    assert render(image) == [block]
    assert render([image, text]) == [block, text]
    assert render([block, text]) == [block, text]
    assert render([text, text]) == "aa"
    assert render([{"type": "image", "id": 7}]) == '[{"type": "image", "id": 7}]'  # data, not a block


def test_a_block_alone_is_content_too():
    """Not JSON that describes a picture; a dict that is no block stays JSON."""
    image = Image.new("RGB", (2, 2))
    assert render({"type": "image", "image": image}) == [{"type": "image", "image": image}]
    assert render({"type": "text", "text": "a"}) == "a"
    assert render({"type": "image", "id": 7}) == '{"type": "image", "id": 7}'
    assert render({"type": "text", "text": 7}) == '{"type": "text", "text": 7}'


def test_e05_truncation_cuts_the_side_it_says() -> None:
    text = "x" * 100 + "Final: 7"
    assert truncate(text, 32, "left") == "[76 characters left out]" + text[-32:]
    assert truncate(text, 32, "right") == text[:32] + "[76 characters left out]"
    assert truncate(text, 0, "left") == "[108 characters left out]"
    assert truncate(text, 108, "left") == text
    with pytest.raises(ValueError, match="side"):
        truncate(text, 5, "middle")  # type: ignore[arg-type]


# Threads


def test_f08_threads_appear_with_the_first_sync_call_and_go_at_closing() -> None:
    for _ in range(5):
        before = set(threading.enumerate())
        threads = Threads()
        assert set(threading.enumerate()) <= before
        assert asyncio.run(threads.run(add, 1)) == 3
        [started] = set(threading.enumerate()) - before
        threads.close()
        threads.close()
        wait_until(lambda thread=started: not thread.is_alive())


def test_f08_async_tools_start_no_thread(threads: Threads) -> None:
    before = set(threading.enumerate())
    assert answer(threads, add_later, a=1).content == "3"
    assert set(threading.enumerate()) <= before


def test_f06_tools_run_from_any_thread_and_loop(threads: Threads) -> None:
    def use() -> list[Any]:
        return [result.content for result in run(threads, [add, add_later], call("add", a=1), call("add_later", a=1))]

    async def inside_a_running_loop() -> list[Any]:
        return await asyncio.to_thread(use)

    results = [use(), use(), asyncio.run(inside_a_running_loop())]
    worker = threading.Thread(target=lambda: results.append(use()))
    worker.start()
    worker.join()
    assert results == [["3", "3"]] * 4


def test_threads_are_reused(threads: Threads) -> None:
    async def main() -> int:
        before = set(threading.enumerate())
        for _ in range(50):
            await threads.run(add, 1)
        return len(set(threading.enumerate()) - before)

    assert asyncio.run(main()) == 1


def test_more_calls_than_threads_wait_for_one() -> None:
    threads = Threads(max_threads=2)
    running: list[int] = []
    most: list[int] = []

    def count() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.005)
        running.pop()

    async def main() -> None:
        await asyncio.gather(*(threads.run(count) for _ in range(8)))

    asyncio.run(main())
    threads.close()
    assert len(most) == 8
    assert max(most) <= 2


def test_a_cancelled_call_that_has_not_begun_never_begins() -> None:
    threads = Threads(max_threads=1)
    gate, ran = threading.Event(), []

    async def main() -> None:
        first = asyncio.create_task(threads.run(gate.wait))
        second = asyncio.create_task(threads.run(ran.append, 1))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0)
        gate.set()
        await first

    asyncio.run(main())
    threads.close()
    assert not ran


def test_sync_calls_see_the_callers_context(threads: Threads) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def main() -> str:
        variable.set("mine")
        return await threads.run(variable.get)

    assert asyncio.run(main()) == "mine"


def test_a_hung_tool_keeps_neither_closing_nor_the_process(tmp_path: Any) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import asyncio, threading\n"
        "import agentrl.rollout.threads as module\n"
        "module.CLOSE_SECONDS = 0.1\n"
        "threads = module.Threads()\n"
        "begun = threading.Event()\n"
        "def hang():\n"
        "    begun.set()\n"
        "    threading.Event().wait()\n"
        "async def main():\n"
        "    hanging = asyncio.create_task(threads.run(hang))\n"
        "    await asyncio.to_thread(begun.wait)\n"
        "    hanging.cancel()\n"
        "    await asyncio.wait([hanging])\n"
        "    print('given up')\n"
        "asyncio.run(main())\n"
        "threads.close()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert done.stdout == "given up\n"
    assert "gave up waiting for hang, which was at" in done.stderr


def test_calls_after_closing_start_new_threads() -> None:
    threads = Threads()
    for _ in range(2):
        assert asyncio.run(threads.run(add, 1, 2)) == 3
        threads.close()
