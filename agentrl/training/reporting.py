"""What a run reports: metrics and completions since the last log, of training and of evaluation."""

from __future__ import annotations

from transformers import Trainer

from agentrl.training.arguments import RolloutConfig
from agentrl.training.completions import CompletionLog, print_rows, report_rows, select_rows
from agentrl.training.completions_hub import CompletionsRepo
from agentrl.training.metrics import MetricStore
from agentrl.training.windows import Window


class Reports:
    """Collects what is to be logged, and shows completions with it.

    Args:
        trainer: Gives the state and the loggers; its process is alone in showing completions if it is the first.
        args: The configuration.

    Attributes:
        metrics: Of training (True) and of evaluation (False).
    """

    def __init__(self, trainer: Trainer, args: RolloutConfig) -> None:
        self._trainer = trainer
        self._args = args
        self.metrics = {True: MetricStore(), False: MetricStore()}
        self._completions = {True: CompletionLog(), False: CompletionLog()}
        self._repo: CompletionsRepo | None = None
        repo = getattr(args, "log_completions_hub_repo", None)
        if repo is not None and trainer.is_world_process_zero():
            self._repo = CompletionsRepo(repo, token=args.hub_token, private=args.hub_private_repo)

    def begin_training(self) -> None:
        """Forget completions of an earlier training; its metrics are the checkpoint's to set."""
        self._completions[True].clear()

    def begin_evaluation(self) -> None:
        """Forget what an earlier evaluation that was cut off has left."""
        self.metrics[False] = MetricStore()
        self._completions[False].clear()

    def add(self, window: Window, *, train: bool) -> None:
        """Add a window's metrics and completions to what the next log shows."""
        metrics = self.metrics[train]
        metrics.add_all(window.metrics, weight=window.rows)
        for name, value in window.own_metrics:
            metrics.add(name, value)
        if train:
            self._trainer.state.num_input_tokens_seen += window.tokens_seen
            metrics.add("num_tokens", self._trainer.state.num_input_tokens_seen, how="max")
        if self._args.log_completions:
            self._completions[train].extend(window.log)

    def take(self, *, train: bool) -> dict[str, float]:
        """Give the metrics over all processes and show the completions; both begin anew. Every process calls this."""
        metrics = self.metrics[train].reduce(self._args.world_size)
        log, step = self._completions[train], self._trainer.state.global_step
        if self._args.log_completions and self._trainer.is_world_process_zero():
            rows = select_rows(log, limit=None, unique_prompts=self._args.log_unique_prompts)
            shown = rows[: self._args.num_completions_to_print]
            print_rows(shown, step)
            report_rows(shown, step, self._trainer)
            if train and self._repo is not None:
                self._repo.add(rows, step)
        log.clear()
        return metrics

    def end_training(self) -> None:
        """See that what was handed to the hub is there."""
        if self._repo is not None:
            self._repo.finish()
