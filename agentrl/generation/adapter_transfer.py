"""LoRA adapters on their way to a vLLM server that takes them while it runs.

vLLM's route for this reads a folder, so the server has to see the trainer's temporary files (set `TMPDIR` to a shared
file system where they run on different machines). What is sent is the adapter alone; the base weights are the server's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from agentrl.generation.vision import placeholder_id
from agentrl.generation.vllm_http import Replica

NAME = "agentrl-policy"
"""What the server calls the adapter, and turns ask for."""


def why_whole(replica: Replica, policy: PreTrainedModel) -> str | None:
    """Say why a server cannot be given the adapters alone, or None if it can."""
    if not replica.loads_adapters:
        return "it takes no adapters (--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)"
    if placeholder_id(policy) is not None:
        return "vLLM leaves out what they adapt in a vision tower"
    model: Any = policy
    config = model.peft_config[model.active_adapter]
    if config.peft_type.value != "LORA" or config.use_dora or config.bias != "none":
        return "they are not plain LoRA, the only kind that vLLM applies"
    if config.modules_to_save or getattr(config, "trainable_token_indices", None):
        return "they train whole modules or tokens too (modules_to_save, trainable_token_indices)"
    ranks = [config.r, *(config.rank_pattern or {}).values()]
    if max(ranks) > replica.lora_rank:
        return f"their rank {max(ranks)} is above the server's --max-lora-rank {replica.lora_rank}"
    return None


class AdapterTransfer:
    """Sends the policy's adapters to one server.

    Args:
        server: The server.
        policy: A PEFT model.
        timeout: Seconds that each step of an update may take.
    """

    def __init__(self, server: Replica, policy: PreTrainedModel, timeout: float) -> None:
        self.model = NAME
        self._server, self._timeout = server, timeout
        self._policy: Any = policy
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def push(self, version: int) -> None:
        """Make the server sample with the policy's adapters as they are now; raises `GenerationError`."""
        folder = tempfile.TemporaryDirectory(prefix="agentrl-adapter-")
        self._policy.save_pretrained(folder.name, selected_adapters=[self._policy.active_adapter])
        subfolder = Path(folder.name, self._policy.active_adapter)  # where the adapter has a name of its own
        path = str(subfolder if subfolder.is_dir() else folder.name)
        body = {"lora_name": NAME, "lora_path": path, "load_inplace": True}
        self._server.call("POST", "/v1/load_lora_adapter", body, timeout=self._timeout)
        self._server.call("POST", "/reset_prefix_cache?reset_running_requests=true", timeout=self._timeout)
        self._server.call("POST", "/update_weight_version", {"new_version": str(version)})
        self.close()
        self._folder = folder  # vLLM reads it once more when the first turn comes

    def close(self) -> None:
        """Remove the adapter's files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
