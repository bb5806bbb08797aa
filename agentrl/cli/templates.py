"""`agentrl templates`: which chat formats are known, and whether a model can be trained with tools."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import asdict
from typing import Annotated

import typer

app = typer.Typer(help="Chat templates: the known families, and whether a model's template is exact.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_families(as_json: AsJson = False) -> None:
    """List the known model families and how they are trained with tools."""
    from agentrl.chat.families import FAMILIES  # loads transformers, which --help can do without

    rows = [
        {
            "family": family.name,
            "calls": str(family.format.calls),
            "training_template": family.training_template,
            "tools_are_ours": family.tools_are_ours,
        }
        for family in FAMILIES
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(len(family.name) for family in FAMILIES)
    for family in FAMILIES:
        ours = ", tools in a form of ours" if family.tools_are_ours else ""
        typer.echo(f"{family.name:{width}}  {family.training_template or 'own template'}{ours}")


@app.command()
def show(family: Annotated[str, typer.Argument(help="A name from `agentrl templates list`.")]) -> None:
    """Print the training template of a family."""
    from agentrl.chat.families import FAMILIES

    known = {member.name.lower(): member for member in FAMILIES}
    found = known.get(family.lower())
    if found is None:
        typer.echo(f"There is no family {family!r}; see `agentrl templates list`.", err=True)
        raise typer.Exit(2)
    if found.training_template is None:
        typer.echo(f"{found.name} has no training template: its models' own templates are used.")
        return
    folder = importlib.resources.files("agentrl.chat_templates")
    typer.echo(folder.joinpath(found.training_template).read_text(encoding="utf-8"))


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="A model's name on the hub, or its folder.")],
    trust_remote_code: Annotated[bool, typer.Option(help="Allow tokenizer code from the hub to run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove a model's chat template exact, or say what is wrong. Exits with 1 if tools cannot be trained with it."""
    from agentrl.chat.verify import verify_template
    from agentrl.errors import ConfigurationError

    try:
        report = verify_template(model, trust_remote_code=trust_remote_code)
    except ConfigurationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(json.dumps(asdict(report) | {"usable": report.usable}, indent=2) if as_json else str(report))
    raise typer.Exit(0 if report.usable else 1)
