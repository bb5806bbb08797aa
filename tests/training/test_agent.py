"""An agent program that owns its loop is trained like any other rollout: real generator, real HTTP, a few steps."""

import openai
import pytest

from agentrl import Agent, GRPOTrainer
from agentrl.errors import ConfigurationError
from agentrl.testing.vllm import free_port
from tests.generation.vllm_stub import StubServer
from tests.training.helpers import TRAINERS, Game, chat_rows, make, model
from tests.training.runs import logged


async def chatter(base_url, api_key, task):
    """Two turns, then one in a rewritten context; rewarded for the letters it got."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as api:
        messages, said = list(task.prompt), ""
        for question in ("more", None):
            answer = await api.chat.completions.create(model="m", messages=messages, max_tokens=4)
            said += answer.choices[0].message.content or ""
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": question or ""}]
        await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "sum"}], max_tokens=4)
    return float(sum(map(str.isalpha, said)))


@pytest.mark.parametrize("cls", TRAINERS)
def test_an_agent_trains_with_its_own_reward(cls, tmp_path):
    """The sampler's logprobs of forked and merged rows are the trainer's (invariant 3)."""
    seen = []

    def lengths(completions, **_):
        seen.extend(completions)
        return [float(len(completion)) for completion in completions]

    trainer = make(
        cls,
        tmp_path,
        agent=chatter,
        reward_funcs=lengths,
        train_dataset=chat_rows(),
        config={"max_steps": 2, "max_completion_length": 64},
    )
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    logs = trainer.state.log_history
    assert any("rewards/chatter/mean" in entry for entry in logs)
    assert len(seen) == 2 * 4
    assert any((value != before[name]).any() for name, value in trainer.model.named_parameters())
    differences = [
        entry[key] for entry in logs for key in entry if key.startswith("sampling/sampling_logp_difference/max")
    ]
    assert differences
    assert max(differences) < 1e-4


def test_an_agent_may_ask_a_vllm_server_by_way_of_the_endpoint(tmp_path):
    """Forked and merged rows have the ids and logprobs of the server's own answers."""
    policy = model()
    server = StubServer(policy, max_model_len=512)
    vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_group_port": free_port()}
    config = {"max_steps": 2, "max_completion_length": 64, **vllm}
    try:
        trainer = make(
            GRPOTrainer,
            tmp_path,
            model=policy,
            agent=chatter,
            reward_funcs=None,
            train_dataset=chat_rows(),
            config=config,
        )
        trainer.train()
    finally:
        server.die()
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert len(server.bodies("/v1/completions")) >= 2 * 4 * 3


def test_an_agent_needs_no_reward_function(tmp_path):
    trainer = make(
        GRPOTrainer,
        tmp_path,
        agent=Agent(chatter),
        reward_funcs=None,
        train_dataset=chat_rows(),
        config={"max_steps": 1, "max_completion_length": 64},
    )
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment_factory": Game}, "environment_factory would never be used"),
        ({"rollout_func": lambda prompts, trainer: {}}, "rollout_func would never be used"),
        ({"config": {"max_tool_calling_iterations": 2}}, "runs its tools itself"),
        ({"agent": "program.py"}, "expected a function"),
    ],
)
def test_what_contradicts_an_agent_is_refused(options, words, tmp_path):
    with pytest.raises(ConfigurationError, match=words):
        make(GRPOTrainer, tmp_path, **({"agent": chatter, "train_dataset": chat_rows()} | options))
