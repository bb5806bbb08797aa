"""Datasets named on the command line: a file, a folder, or a name on the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(name: str, *, split: str = "train") -> Any:
    """Load a dataset.

    Args:
        name: A `.jsonl`, `.json`, `.parquet` or `.csv` file, a folder written by `save_to_disk`, or a name on the hub.
        split: Of a dataset on the hub or a folder with several.

    Raises:
        ConfigurationError: It cannot be loaded.
    """
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    path = Path(name)
    try:
        if path.suffix in _LOADERS:
            if not path.exists():
                raise FileNotFoundError("there is no such file")
            return datasets.load_dataset(_LOADERS[path.suffix], data_files=str(path), split="train")
        if path.is_dir() and any(path.glob("*.json")):
            stored = datasets.load_from_disk(str(path))
            return stored[split] if isinstance(stored, datasets.DatasetDict) else stored
        return datasets.load_dataset(name, split=split)
    except Exception as error:
        raise ConfigurationError(f"the dataset {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
