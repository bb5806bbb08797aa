"""`agentrl replay` and `agentrl export`: what a run's journal is good for on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.mistakes import mistakes

if TYPE_CHECKING:
    from agentrl.rollout.journal.reading import Records
    from agentrl.rollout.journal.records import RolloutRecord

Run = Annotated[Path, typer.Argument(help="The run's output_dir, or its _rollouts.db.")]


def replay(
    run: Run,
    rollout: Annotated[str, typer.Argument(help="Its number, or PROCESS:NUMBER.")],
    env: Annotated[str, typer.Option(help="The environment: package.module:Class or file.py:Class.")],
    from_turn: Annotated[int | None, typer.Option(help="Sample anew from this turn, with --model.")] = None,
    model: Annotated[str | None, typer.Option(help="With --from-turn: a model's folder, or its name.")] = None,
) -> None:
    """Play a rollout's actions again and show the first difference. Exits with 1 if there is one.

    With --from-turn and --model the turns before are done again, and the model goes on from there.
    """
    from agentrl.cli.environments import load_environment
    from agentrl.rollout.journal.reading import Records, RolloutKey
    from agentrl.rollout.replay import Difference, Diverged
    from agentrl.rollout.replay import replay as play_again

    if (from_turn is None) != (model is None):
        typer.echo("--from-turn and --model go together: the model samples from that turn.", err=True)
        raise typer.Exit(2)
    difference: Difference | None = None
    with mistakes(), Records(run) as records:
        record = records.rollout(RolloutKey.parse(rollout))
        factory = load_environment(env)
        if from_turn is None or model is None:
            difference = play_again(record, factory)
            said = f"{len(record.turns)} turns were played again without a difference."
        else:
            try:
                trajectory = _play_on(records, record, from_turn, model, factory)
            except Diverged as found:
                difference = found.difference
            else:
                said = _transcript(trajectory)
    if difference is None:
        typer.echo(said)
        return
    turn = "" if difference.turn is None else f" of turn {difference.turn}"
    typer.echo(
        f"{difference.place}{turn} is different.\nrecorded: {difference.recorded!r}\nnow:      {difference.seen!r}"
    )
    raise typer.Exit(1)


def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="The file to write, *.parquet or *.jsonl.")],
    only_run: Annotated[int | None, typer.Option(help="Only the run of this number; default: all.")] = None,
) -> None:
    """Write a run's rollouts to a Parquet file or to JSON lines."""
    from agentrl.rollout.journal.export import export as write
    from agentrl.rollout.journal.reading import Records

    with mistakes(), Records(run) as records:
        count = write(records, to, run=only_run)
    typer.echo(f"{count} rollouts written to {to}")


def _play_on(records: Records, record: RolloutRecord, turn: int, model_name: str, factory: Any) -> Any:
    """Let a model go on, with the limits and the sampling that the run was configured with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentrl.chat.renderer import Renderer
    from agentrl.generation.base import SamplingParams
    from agentrl.generation.factory import make_generator
    from agentrl.rollout.engine import RolloutEngine
    from agentrl.rollout.limits import Limits
    from agentrl.training.loading import declared_eos_ids

    config = next(r.info for r in records.runs() if r.id == record.summary.run).get("config", {})
    model = AutoModelForCausalLM.from_pretrained(model_name)
    generator = make_generator(model)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {name: config[name] for name in names if config.get(name) is not None}
    engine = RolloutEngine(
        generator,
        Renderer(
            AutoTokenizer.from_pretrained(model_name),
            template_kwargs=config.get("chat_template_kwargs"),
            tools=True,
            eos_ids=declared_eos_ids(model),
            reasoning=config.get("reasoning", "keep"),
        ),
        environments=factory,
        limits=Limits(
            max_completion_length=config.get("max_completion_length", 512),
            max_context=generator.max_context,
            max_tool_iterations=config.get("max_tool_calling_iterations"),
        ),
        sampling=SamplingParams(max_tokens=1, **sampling),
    )
    try:
        return engine.play_on(record, turn)
    finally:
        engine.close()
        generator.close()


def _transcript(trajectory: Any) -> str:
    messages = trajectory.completion
    lines = (
        [messages] if isinstance(messages, str) else [json.dumps(m, ensure_ascii=False, default=str) for m in messages]
    )
    return "\n".join([*lines, f"outcome: {trajectory.outcome}, reward: {trajectory.reward}"])
