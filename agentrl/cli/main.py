"""`agentrl`: the entry point, with one group of commands a module."""

from __future__ import annotations

import typer

from agentrl.cli import check, replay, rollout, templates, train, view

app = typer.Typer(
    help="Train language-model agents by reinforcement learning in real environments.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(templates.app, name="templates")
app.command(context_settings=train.FURTHER)(train.train)
app.command()(train.options)
app.command()(check.check)
app.command()(rollout.rollout)
app.command()(replay.replay)
app.command()(replay.export)
app.command()(view.view)


@app.callback()
def _root() -> None:
    """Keeps the names of groups in front of their commands, however many groups there are."""
