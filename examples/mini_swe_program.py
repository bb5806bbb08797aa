"""mini-swe-agent as a program that agentrl trains: it is used as its authors ship it, against the endpoint.

`third_party_agent.py` starts it for each rollout, with the interpreter that mini-swe-agent is installed for. It imports
nothing of agentrl. What the model writes runs in mini-swe-agent's own bubblewrap sandbox, without network and without
the endpoint's key.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment, BubblewrapEnvironmentConfig
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

SYSTEM = "Answer with exactly one command, in a block that begins with ```mswea_bash_command and ends with ```."
INSTANCE = "{{task}} When you are done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt"


def main() -> None:
    """Play one rollout: the task comes on standard input, what was submitted goes to standard output."""
    task = json.load(sys.stdin)
    # bubblewrap keeps the environment unless told otherwise, and the endpoint's key is in it.
    args = ["--unshare-all", "--die-with-parent", "--clearenv", *BubblewrapEnvironmentConfig().wrapper_args]
    agent = DefaultAgent(
        LitellmTextbasedModel(
            model_name="openai/policy",
            model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]},
            cost_tracking="ignore_errors",
        ),
        BubblewrapEnvironment(wrapper_args=args, timeout=10),
        system_template=SYSTEM,
        instance_template=INSTANCE,
        step_limit=6,
    )
    print(json.dumps(agent.run(task["prompt"][-1]["content"])))


if __name__ == "__main__":
    main()
