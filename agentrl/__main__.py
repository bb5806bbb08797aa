"""`python -m agentrl`, for launchers that start modules: `accelerate launch -m agentrl train ...`."""

from agentrl.cli.main import app

if __name__ == "__main__":
    app()
