"""Completions on the hub: a dataset repository that gets a Parquet file at each log.

Files are uploaded in the background, in order. A hub that cannot be reached does not stop the training; what could not
be uploaded is named in a warning at the end.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import datasets
from huggingface_hub import HfApi

from agentrl.training.completions import cell

logger = logging.getLogger(__name__)


class CompletionsRepo:
    """A dataset repository for completions; it is made if it does not exist.

    Args:
        name: `owner/name`, or `name` for one of the user that the token belongs to.
        token: Access token; None takes the one that is logged in.
        private: Whether a repository that is made here is private; None: as its owner's default is.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: The repository cannot be made.
    """

    def __init__(self, name: str, *, token: str | None, private: bool | None) -> None:
        self._api = HfApi(token=token, library_name="agentrl")
        self.name = self._api.create_repo(name, repo_type="dataset", private=private, exist_ok=True).repo_id
        self._uploads: list[tuple[str, Future[Any]]] = []

    def add(self, rows: Sequence[dict[str, Any]], step: int) -> None:
        """Upload the rows of a log as `completions/STEP.parquet`, in the background."""
        if not rows:
            return
        table = [{"step": step, **{name: _portable(value) for name, value in row.items()}} for row in rows]
        buffer = io.BytesIO()
        datasets.Dataset.from_list(table).to_parquet(buffer)
        path = f"completions/{step:06d}.parquet"
        upload = self._api.upload_file(
            path_or_fileobj=buffer.getvalue(),
            path_in_repo=path,
            repo_id=self.name,
            repo_type="dataset",
            commit_message=f"Completions at step {step}",
            run_as_future=True,
        )
        self._uploads.append((path, upload))

    def finish(self) -> None:
        """Wait for the uploads, and warn of those that failed."""
        for path, upload in self._uploads:
            if (error := upload.exception()) is not None:
                logger.warning("%s could not be uploaded to %s: %s", path, self.name, error)
        self._uploads.clear()


def _portable(value: Any) -> float | str | None:
    """Numbers stay numbers; all else becomes text, so that a column is of one type."""
    return value if value is None or isinstance(value, float) else cell(value)
