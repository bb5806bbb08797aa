"""`agentrl rollout`: how well a model does in an environment, without training."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.mistakes import mistakes

if TYPE_CHECKING:
    from agentrl.chat.renderer import Renderer
    from agentrl.cli.policies import Policy
    from agentrl.rollout.evaluation import Estimate, Evaluation
    from agentrl.types import Task

BAR = 30
"""Characters of the longest bar."""

Env = Annotated[
    str | None,
    typer.Option(help="module:Class, file.py:Class, openenv:URL, ors:NAME, harbor:DIR or gym:ID.", show_default=False),
]
Tool = Annotated[list[str] | None, typer.Option(help="Function as a tool, module:function; may be repeated.")]
Model = Annotated[str, typer.Option(help="A model's folder or its name on the hub.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def rollout(
    model: Model,
    env: Env = None,
    dataset: Annotated[str | None, typer.Option(help="Tasks: a file, a folder or a name on the hub.")] = None,
    tool: Tool = None,
    reward: Annotated[list[str] | None, typer.Option(help="Reward function, module:function; may be repeated.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Sample from this vLLM server; --model is then its tokenizer.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The server says messages, no ids; --model is its name there.")
    ] = False,
    served_model: Annotated[
        str | None, typer.Option(help="The server's name for the model, if it has several.")
    ] = None,
    episodes: Annotated[int, typer.Option("--episodes", "-n", help="How many to play.")] = 32,
    group: Annotated[int, typer.Option(help="Episodes of each task: the largest k of pass@k.")] = 4,
    success: Annotated[float, typer.Option(help="An episode passes with this reward.")] = 1.0,
    max_completion_length: Annotated[int, typer.Option(help="Most tokens after the prompt.")] = 1024,
    max_tool_calling_iterations: Annotated[int | None, typer.Option(help="Most tool rounds.")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    chat_template_kwargs: Annotated[str, typer.Option(help="JSON, for the chat template.")] = "{}",
    reasoning: Annotated[str, typer.Option(help="`keep` or `fork`, as in training.")] = "keep",
    dtype: Annotated[str, typer.Option(help="Of a model in this process.")] = "auto",
    seed: Annotated[int, typer.Option(help="Decides tasks and sampling.")] = 42,
    out: Annotated[Path | None, typer.Option(help="Keep the episodes in this folder, for view and replay.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play episodes and report reward, pass@k, outcomes and cost. Exits with 1 if no episode could be scored."""
    settings: dict[str, Any] = {
        "max_completion_length": max_completion_length,
        "max_tool_calling_iterations": max_tool_calling_iterations,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "reasoning": reasoning,
        "seed": seed,
    }
    with mistakes():
        if chat:
            _check_chat(base_url, served_model, chat_template_kwargs, reasoning)
        settings["chat_template_kwargs"] = json_object(chat_template_kwargs, "--chat-template-kwargs")
        evaluation = _evaluate(
            settings,
            model=model,
            env=env,
            dataset=dataset,
            tools=tool or [],
            rewards=reward or [],
            server=base_url,
            chat=chat,
            served=served_model,
            dtype=dtype,
            episodes=episodes,
            group=group,
            success=success,
            out=out,
        )
    typer.echo(json.dumps(as_plain(evaluation), indent=2) if as_json else as_text(evaluation, out))
    raise typer.Exit(0 if evaluation.scored else 1)


def _evaluate(
    settings: dict[str, Any],
    *,
    model: str,
    env: str | None,
    dataset: str | None,
    tools: Sequence[str],
    rewards: Sequence[str],
    server: str | None,
    chat: bool,
    served: str | None,
    dtype: str,
    episodes: int,
    group: int,
    success: float,
    out: Path | None,
) -> Evaluation:
    from agentrl.cli.data import load_rows
    from agentrl.cli.environments import load_callable, load_environment, tasks_of
    from agentrl.cli.policies import chat_policy, local_policy, served_policy
    from agentrl.errors import ConfigurationError
    from agentrl.generation.base import SamplingParams
    from agentrl.rollout.engine import RolloutEngine
    from agentrl.rollout.evaluation import evaluate
    from agentrl.rollout.journal.journal import Journal
    from agentrl.rollout.limits import Limits

    if env is None and (dataset is None or not rewards):
        raise ConfigurationError("name an environment (--env), or prompts (--dataset) and a reward (--reward)")
    if served is not None and server is None:
        raise ConfigurationError("--served-model goes with --base-url")
    if not 1 <= group <= episodes:
        raise ConfigurationError(f"--group {group}: expected 1 to {episodes}, the number of episodes")
    factory = None if env is None else load_environment(env)
    functions = [load_callable(name) for name in rewards]
    offered = [load_callable(name) for name in tools]
    rows = tasks_of(factory, episodes // group) if dataset is None else load_rows(dataset)
    tasks = make_tasks(rows, episodes // group, group, settings["seed"])
    if chat and server is not None:
        generator = renderer = chat_policy(server, model)
    else:
        policy = local_policy(model, dtype=dtype) if server is None else served_policy(server, model, served=served)
        generator, renderer = policy.generator, _renderer(policy, settings, tools=factory is not None or bool(offered))
    journal = None if out is None else Journal(out)
    if journal is not None:
        journal.begin_run({"algorithm": "rollout", "model": model, "environment": env, "config": settings})
        journal.open_window(kind="eval", step=0)
    engine = RolloutEngine(
        generator,
        renderer,
        tools=offered,
        environments=factory,
        limits=Limits(
            max_completion_length=settings["max_completion_length"],
            max_context=generator.max_context,
            max_tool_iterations=settings["max_tool_calling_iterations"],
        ),
        sampling=SamplingParams(1, **{name: settings[name] for name in ("temperature", "top_p", "top_k")}),
        journal=journal,
    )
    began = time.perf_counter()
    try:
        if engine.environments is not None:
            engine.environments.check_columns(tasks[0].columns)
        trajectories = engine.run(tasks)
        names, matrix = _rewards(engine, functions, trajectories)
        seconds = time.perf_counter() - began
        if journal is not None:
            journal.add_rewards(trajectories, names, matrix)
        engine.release(trajectories)
    finally:
        engine.close()
        generator.close()
        if journal is not None:
            journal.close()
    totals = []
    for trajectory, row in zip(trajectories, matrix, strict=True):
        given = [value for value in (*row, *(trajectory.turn_rewards or ())) if value is not None]
        totals.append(sum(given) if given and trajectory.outcome.is_signal else None)
    evaluation = evaluate(trajectories, totals, seconds=seconds, success=success)
    if chat:  # a message counts as one token in these rows
        return replace(evaluation, cost=replace(evaluation.cost, prompt_tokens=None, other_tokens=None))
    return evaluation


def _renderer(policy: Policy, settings: dict[str, Any], *, tools: bool) -> Renderer:
    from agentrl.chat.renderer import Renderer

    return Renderer(
        policy.processing_class,
        template_kwargs=settings["chat_template_kwargs"],
        tools=tools,
        eos_ids=policy.eos_ids,
        reasoning=settings["reasoning"],
    )


def _check_chat(server: str | None, served: str | None, template: str, reasoning: str) -> None:
    """Refuse what has no meaning where a server renders the conversation."""
    from agentrl.errors import ConfigurationError

    if server is None:
        raise ConfigurationError("--chat goes with --base-url, the server that says messages")
    here = {"--served-model": served is not None, "--chat-template-kwargs": template != "{}"}
    here["--reasoning"] = reasoning != "keep"
    if named := [name for name, given in here.items() if given]:
        raise ConfigurationError(
            f"{', '.join(named)} and --chat: the server renders the conversation itself, and --model is its name there"
        )


def make_tasks(rows: Any, prompts: int, group: int, seed: int) -> list[Task]:
    """The tasks of an evaluation, made as those of training are.

    Args:
        rows: A dataset; one that is empty stands for an environment that supplies its own tasks.
        prompts: How many tasks; fewer where the dataset has fewer rows.
        group: Episodes of each.
        seed: Decides the tasks' seeds.
    """
    from agentrl.training import data

    prompts = min(prompts, len(rows)) if len(rows) else prompts
    chosen = {i: dict(rows[i]) if len(rows) else {} for i in range(prompts)}
    step = data.ScheduledStep((0, 0), 0, chosen)
    return data.make_tasks(step, data.Shape(prompts, group, steps=1), seed)


def _rewards(engine: Any, functions: Sequence[Any], trajectories: Sequence[Any]) -> tuple[list[str], list[list[Any]]]:
    """What each source gave each trajectory."""
    from agentrl.training.rewards import RewardSet

    owners = None if engine.environments is None else engine.environments.reward_owners
    if not functions and not owners:  # rewards of turns, at most
        return [], [[] for _ in trajectories]
    rewards = RewardSet(functions, environments=owners)
    return rewards.names, rewards.compute(trajectories, run=engine.await_)


def as_plain(evaluation: Evaluation) -> dict[str, Any]:
    """The report as JSON can hold it."""
    plain = asdict(evaluation)

    def interval(estimate: Estimate | None) -> dict[str, float | None] | None:
        if estimate is None:
            return None
        return {name: value if abs(value) < float("inf") else None for name, value in estimate._asdict().items()}

    plain["reward"] = interval(evaluation.reward)
    plain["passes"] = {str(k): interval(estimate) for k, estimate in evaluation.passes.items()}
    plain["histogram"] = [bin_._asdict() for bin_ in evaluation.histogram]
    plain["outcomes"] = {outcome.value: count for outcome, count in evaluation.outcomes.items()}
    return plain


def as_text(evaluation: Evaluation, out: Path | None = None) -> str:
    """The report for people."""
    e, cost = evaluation, evaluation.cost
    lines = [f"{e.episodes} episodes of {e.tasks} tasks, {e.scored} scored. Intervals are 95%, over tasks."]
    if e.reward is not None:
        lines.append(f"reward    {_interval(e.reward)}")
    lines += [f"pass@{k:<4} {_interval(estimate)}" for k, estimate in e.passes.items()]
    if e.histogram:
        most = max(bin_.episodes for bin_ in e.histogram)
        lines.append("")
        for low, high, count in e.histogram:
            label = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
            lines.append(f"{label:>18} {'█' * -(-count * BAR // most)} {count}")
    outcomes = ", ".join(f"{outcome.value} {count}" for outcome, count in e.outcomes.items())
    failed = f", {e.tool_failures} of them failed" if e.tool_failures else ""
    tokens = cost.sampled_tokens
    others = (
        "" if cost.prompt_tokens is None else f", {cost.prompt_tokens} of prompts, {cost.other_tokens} of tool results"
    )
    lines += [
        "",
        f"outcomes  {outcomes}",
        f"turns     {e.turns:.1f} an episode; {e.tool_calls} tool calls{failed}",
        f"tokens    {tokens} sampled ({tokens / e.episodes:.0f} an episode){others}",
        f"time      {cost.seconds:.1f} s, {tokens / cost.seconds:.0f} sampled tokens a second; "
        f"{cost.sampling_seconds / e.episodes:.1f} s of an episode in the model, "
        f"{cost.tool_seconds / e.episodes:.1f} s in tools",
    ]
    if out is not None:
        lines.append(f"kept in   {out} (agentrl view {out})")
    return "\n".join(lines)


def _interval(estimate: Estimate) -> str:
    value, low, high = estimate
    return f"{value:.3f}" if high == float("inf") else f"{value:.3f}  [{low:.3f}, {high:.3f}]"


def json_object(text: str, option: str) -> dict[str, Any]:
    """What an option gives as JSON."""
    from agentrl.errors import ConfigurationError

    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{option} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{option} expects a JSON object, not {text!r}")
    return value
