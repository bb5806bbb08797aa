"""Exit codes: 0 it went well, 1 it did not, 2 what was typed cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def mistakes() -> Iterator[None]:
    """A mistake of whoever typed the command ends it with 2, what goes wrong later with 1; both without a traceback."""
    from agentrl.errors import AgentRLError, ConfigurationError

    try:
        yield
    except ConfigurationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except AgentRLError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
