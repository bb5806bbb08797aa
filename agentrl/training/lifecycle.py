"""How a run is saved, resumed and shared: the part of the trainer that has nothing to do with learning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from accelerate.utils import gather_object
from transformers import Trainer

from agentrl.errors import ConfigurationError
from agentrl.rollout.journal.schema import has_journal
from agentrl.training.arguments import RolloutConfig
from agentrl.training.checkpoints import InFlight, last_complete, load_in_flight, processes_of, save_in_flight
from agentrl.training.data import training_shape
from agentrl.training.model_card import model_card
from agentrl.training.preemption import EXIT_CODE, Preempted, Preemption
from agentrl.training.recording import Recorder
from agentrl.training.reporting import Reports
from agentrl.training.sharding import check_engine, whole_parameters
from agentrl.training.windows import Window


class LifeCycle(Trainer):
    """A `transformers.Trainer` whose checkpoints hold the window in flight as well.

    A subclass keeps the window of which steps are left in `_window`, and what is to be logged next in `reports`.
    """

    algorithm: ClassVar[str]
    args: RolloutConfig
    recorder: Recorder
    preemption: Preemption
    reports: Reports
    _window: Window | None = None
    _resumed_from: str | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the last one of `output_dir` that was written
                whole; where there is none yet, the run begins again. What the journal holds of the same windows and
                weights is not played again.
            *args: As of `transformers.Trainer.train`.
            **kwargs: The same.

        Raises:
            ConfigurationError: There is nothing to resume from, or DeepSpeed cannot go on from where it is.
            SystemExit: SIGTERM came; see `agentrl.training.preemption`.
        """
        resume, folder = bool(resume_from_checkpoint), self.args.output_dir or "."
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete(folder)
            if resume_from_checkpoint is None and not (self.args.journal and has_journal(folder)):
                raise ConfigurationError(f"output_dir={folder!r} holds no complete checkpoint, and no journal.")
        checkpoint = resume_from_checkpoint or None
        check_engine(self)
        if checkpoint is not None and self.is_deepspeed_enabled:
            self._check_world(checkpoint)
        self.recorder.begin_run(resume=resume)
        # What an earlier call left belongs to other weights and other steps.
        in_flight = InFlight() if checkpoint is None else self._load_in_flight(checkpoint)
        self._window, self.reports.metrics[True], self._resumed_from = in_flight.window, in_flight.metrics, checkpoint
        with self.preemption.listening():
            try:
                output = super().train(checkpoint, *args, **kwargs)
            except Preempted:
                self._save_before_leaving()
            else:
                if not self.preemption.requested or self.state.global_step >= self.state.max_steps:
                    return output
            self.accelerator.wait_for_everyone()  # a launcher ends them all when one has left
        sys.exit(EXIT_CODE)

    def _save_before_leaving(self) -> None:
        """Save the state after the last optimizer step, if it is not saved yet; rollouts were being played since."""
        step, folder = self.state.global_step, self.args.output_dir or "."
        saved = last_complete(folder) == str(Path(folder) / f"checkpoint-{step}")
        if self.args.world_size > 1:
            # Each may see another one's files already: the first decides for all.
            saved = gather_object([saved])[0]
        if self.args.save_strategy != "no" and step and not saved:
            assert self.model is not None
            self._save_checkpoint(self.model, trial=None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model and tokenizer for `from_pretrained`; every process calls it, and one writes.

        Args:
            output_dir: The folder; by default that of the run.
            _internal_call: Whether `transformers` calls it, for a checkpoint or an upload.
        """
        if not self.is_fsdp_enabled or (_internal_call and output_dir is not None):
            super().save_model(output_dir, _internal_call)
            return
        # `transformers` would write nothing where checkpoints are in pieces.
        model = self.accelerator.unwrap_model(self.model)
        whole = {name: value.cpu().clone() for name, value in whole_parameters(model) if self.args.should_save}
        if self.args.should_save:
            kept = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
            self._save(output_dir, state_dict={**whole, **kept})
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _check_world(self, checkpoint: str) -> None:
        """Refuse a checkpoint whose optimizer state is cut for another number of processes."""
        wrote = processes_of(checkpoint)
        if wrote not in (None, self.args.world_size):
            raise ConfigurationError(
                f"{checkpoint} was written by {wrote} processes, and DeepSpeed's optimizer state belongs to that "
                f"number. There are {self.args.world_size} now: resume with {wrote}, or start anew from its weights."
            )

    def _save_rng_state(self, output_dir: str) -> None:
        """Write what this process needs to go on from a checkpoint; `transformers` calls it in every process."""
        super()._save_rng_state(output_dir)
        save_in_flight(output_dir, InFlight(self._window, self.reports.metrics[True]), training_shape(self.args))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states once, before the first rollouts: `transformers` would do it after them."""
        if self._resumed_from is not None:
            super()._load_rng_state(checkpoint)
            self._resumed_from = None

    def _load_in_flight(self, checkpoint: str) -> InFlight:
        if self.args.ignore_data_skip:  # the epoch begins anew, and so do its windows
            return InFlight()
        state = load_in_flight(checkpoint, training_shape(self.args))
        if self.args.world_size > 1 and len(set(gather_object([state.window and state.window.identity]))) > 1:
            return InFlight()  # some processes lack their share, so all play the window again
        return state

    def create_model_card(  # type: ignore[override]
        self,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
        **metadata: Any,
    ) -> None:
        """Write the card of the model into `output_dir`, as `push_to_hub` does, which takes the same arguments.

        Args:
            model_name: Its title; by default the name of `output_dir`.
            dataset_name: Training data on the hub, one or several.
            tags: Tags besides those of the algorithm and of agentrl.
            **metadata: Further fields of the card's header, for instance `license` or `language`.
        """
        if not self.is_world_process_zero():
            return
        model = self.accelerator.unwrap_model(self.model)
        folder = Path(self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        card = model_card(
            algorithm=self.algorithm,
            model_name=model_name or folder.absolute().name,
            base_model=getattr(model.config, "_name_or_path", None),
            dataset_name=dataset_name,
            tags=[tags] if isinstance(tags, str) else list(tags or ()),
            adapters=hasattr(model, "peft_config"),
            **metadata,
        )
        card.save(folder / "README.md")
