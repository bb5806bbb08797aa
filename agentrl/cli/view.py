"""`agentrl view`: a page that shows runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.mistakes import mistakes


def view(
    runs: Annotated[list[Path], typer.Argument(help="Runs' output_dirs, or their _rollouts.db.")],
    html: Annotated[Path | None, typer.Option(help="Write one HTML file instead of serving the page.")] = None,
    most: Annotated[int, typer.Option(min=1, help="With --html: rollouts with content, the last ones.")] = 500,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0 takes a free one.")] = 8910,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or name; default: the run's, if it is here.")] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Show runs in the browser, live while they go on, or write a page as one file."""
    with mistakes():
        from agentrl.errors import ConfigurationError
        from agentrl.viewer.shown import Shown

        shown = Shown(runs, tokenizer)
        if html is not None:
            from agentrl.viewer.page import write_page

            written, all_ = write_page(shown, html, most=most)
            typer.echo(f"{html}: {all_} rollouts, {written} of them with their content")
            return
        try:
            from agentrl.viewer.server import listen, serve
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"{error}; serving needs pip install 'agentrl[viewer]', --html does not") from None
        shown.read()
        with listen(port) as listening:
            address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            typer.echo(f"{address}   (this machine only; Ctrl-C ends it)")
            if browser:
                webbrowser.open(address)
            serve(shown, listening)
