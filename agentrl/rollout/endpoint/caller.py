"""One program's requests, answered by the policy within the limits of its episode."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from agentrl.errors import TemplateError
from agentrl.rollout.endpoint.recording import Placement, Recording
from agentrl.rollout.endpoint.wire import ApiError, ChatRequest, Completion, to_openai
from agentrl.rollout.limits import Progress, binding_limit, reached
from agentrl.rollout.stage import Stage
from agentrl.types import FinishReason, Limit, Message, Sample, Task


class Caller:
    """Answers the requests of one program; used on the engine's loop only.

    Args:
        stage: What all episodes share.
        task: What the program has to do.
        session: What its generator sessions are named after.

    Attributes:
        recording: Its rows.
        limit: The limit that refused or cut its last request, None where that was answered whole.
        over: Set when nothing more can come of the program: the run was cancelled, or (with an exception) the
            generator broke.
    """

    def __init__(self, stage: Stage, task: Task, session: str) -> None:
        self.stage = stage
        self.task = task
        self.recording = Recording(stage.renderer, session)
        self.limit: Limit | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = False
        self._asked = 0
        self._under_way: set[asyncio.Task[Completion]] = set()

    def start(self, request: ChatRequest) -> asyncio.Task[Completion]:
        """Answer a request in a task, which may be cancelled: then nothing of the request is recorded."""
        answering = asyncio.create_task(self._complete(request))
        self._under_way.add(answering)
        answering.add_done_callback(self._under_way.discard)
        return answering

    async def close(self) -> None:
        """End what is under way; later requests are refused."""
        self._closed = True
        for answering in self._under_way:
            answering.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        if self.over.done() and not self.over.cancelled():
            self.over.exception()  # seen, whether or not the episode waits for it
        for session in self.recording.sessions:
            self.stage.generator.release(session)

    async def _complete(self, request: ChatRequest) -> Completion:
        if self._closed or self.stage.cancelled.is_set():
            if not self.over.done():
                self.over.set_result(None)
            raise ApiError("This rollout is over.", status=403, code="rollout_over")
        try:
            place = self.recording.place(request.messages, request.tools)
        except TemplateError as error:
            raise ApiError(f"The chat template cannot render the messages: {error}", param="messages") from error
        try:
            return await self._answer(request, place)
        except BaseException:
            self.recording.abandon(place)
            raise

    async def _answer(self, request: ChatRequest, place: Placement) -> Completion:
        limits = self.stage.limits
        spent = self.recording.spent + place.added
        progress = Progress(prompt_length=len(place.ids) - spent, completion_length=spent)
        if (limit := reached(limits, progress)) is not None:
            self.limit = limit
            raise _too_long(limit, len(place.ids), spent, limits.max_context, limits.max_completion_length)
        params = self.stage.turn_params(self.task, self._asked, progress)
        left = params.max_tokens
        if request.max_tokens:
            params = replace(params, max_tokens=min(left, request.max_tokens))
        self._asked += 1
        began = time.monotonic()
        try:
            with self.stage.asking:
                sample = await self.stage.generator.sample(place.session, place.ids, params)
        except Exception as error:
            if not self.over.done():
                self.over.set_exception(error)
            raise ApiError(f"The generator broke: {error}", status=500) from error
        message = self._read(sample, place)
        self.recording.commit(place, sample, message, time.monotonic() - began)
        cut = sample.finish is FinishReason.LENGTH and params.max_tokens == left
        progress.completion_length += len(sample.ids)
        self.limit = binding_limit(limits, progress) if cut else None
        return Completion(request, to_openai(message), sample, len(place.ids))

    def _read(self, sample: Sample, place: Placement) -> Message:
        """What the program is told. Calls that cannot be read, that were cut off or that no tool was offered for
        come as text: the program tells the model off in its own way.
        """
        renderer = self.stage.renderer
        called = any(message.get("tool_calls") for message in place.messages)
        parsed = renderer.parse(sample.ids, place.tools, first_call=self.recording.calls if called else 0)
        unusable = not place.tools or sample.finish is FinishReason.LENGTH or any(call.error for call in parsed.calls)
        if parsed.calls and unusable:
            return {"role": "assistant", "content": renderer.text(sample.ids)}
        return parsed.message


def _too_long(limit: Limit, read: int, spent: int, context: int | None, completion: int | None) -> ApiError:
    """The error that programs know how to deal with: they shorten their conversation, or end."""
    if limit is Limit.CONTEXT:
        text = f"This model's maximum context length is {context} tokens, of which the messages take {read}."
    else:
        text = f"The rollout's completion budget is {completion} tokens, of which {spent} are spent."
    return ApiError(text, code="context_length_exceeded", param="messages")
