"""The example with a real pretrained model: its tool, its reward, its template; the training itself is slow."""

import subprocess

import pytest

pytest.importorskip("reasoning_gym", reason="pip install 'agentrl[pretrained]'")

from smollm2 import CHAT_TEMPLATE, smollm2_folder
from smollm2_arithmetic import SUMS, calculate, conversation, correct, main, used_tool
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import render_jinja_template


@pytest.mark.parametrize(
    ("expression", "result"), [("12 + 7 - 3", "16"), ("-4-1", "-5"), ("5", "5"), ("57 + 87+70", "214")]
)
def test_calculate_works_out_sums(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize("expression", ["", "2 * 3", "1 +", "one", "__import__('os')"])
def test_calculate_refuses_what_is_not_a_sum(expression):
    with pytest.raises(ValueError, match="not a sum"):
        calculate(expression)


def test_the_last_number_is_scored():
    right = SUMS[0]["answer"]
    answers = [f"First 1, so the answer is {right}.", f"{right}? No, 100000.", "I do not know.", None]
    scores = correct([[{"role": "assistant", "content": answer}] for answer in answers], index=[0] * 4)
    assert scores[0] == 1.0
    assert max(scores[1:]) < 0.5


def test_only_a_call_that_worked_counts_as_using_the_tool():
    def completion(*results):
        return [{"role": "tool", "content": result} for result in results] + [{"role": "assistant"}]

    completions = [completion(), completion("47"), completion("Error: not a sum"), completion("Error: x", "47")]
    assert used_tool(completions) == [0.0, 1.0, 0.0, 1.0]


def test_what_is_appended_never_changes_what_was_rendered():
    messages = conversation("What is 1 + 2?")
    tools = [get_json_schema(calculate)]

    def rendered(count, **kwargs):
        return render_jinja_template([messages[:count]], tools=tools, chat_template=CHAT_TEMPLATE, **kwargs)[0][0]

    whole = rendered(len(messages))
    assert '"name": "calculate", "arguments": {"expression": "21 - 4 + 30"}' in whole
    for count in range(1, len(messages) + 1):
        assert whole.startswith(rendered(count))
    assert whole.startswith(rendered(1, add_generation_prompt=True))


@pytest.mark.slow
def test_smollm2_trains(tmp_path):
    try:
        folder = smollm2_folder()
    except subprocess.CalledProcessError:
        pytest.skip("the package registry, which has the weights, cannot be reached")
    trainer = main(["--model", str(folder), "--steps", "1", "--out", str(tmp_path)])
    assert trainer.state.global_step == 1
