"""The tiny agent: recorded games, tokenizer and template, the fit and its cache, the playing loop."""

import json
import random

import pytest
import torch
from counter import Counter
from guess_number import GuessNumber
from tiny_agent import Lesson, Recipe, make_tiny_agent, play, record
from tiny_agent.agents import careless, count, halve
from tiny_agent.transcripts import call_tool, calling, tools_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.chat.renderer import Renderer
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.limits import Limits
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Outcome, Task

SMALL = Recipe(hidden_size=32, layers=1, heads=1, batch_size=4)


def small_lessons():
    return [Lesson([record(GuessNumber(), halve, seed) for seed in range(20)], steps=3)]


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    folder = make_tiny_agent(small_lessons(), SMALL, cache=tmp_path_factory.mktemp("agents"))
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


# Recorded games --------------------------------------------------------------------------------------------


def test_the_good_player_wins_every_game():
    for seed in range(200):
        game = GuessNumber()
        record(game, halve, seed)
        assert game.get_reward() == 1.0


def test_the_counting_player_reaches_the_target_and_stops():
    for seed in range(20):
        counter = Counter()
        transcript = record(counter, count, seed)
        assert counter.get_reward() == 1.0
        assert transcript.messages[-1] == {"role": "assistant", "content": "Done."}


def test_a_careless_player_is_careless_as_often_as_said():
    player = careless(lambda *_: calling({"name": "good"}), lambda *_: calling({"name": "bad"}), how_often=0.4)
    rng = random.Random(0)
    moves = [player([], rng)["tool_calls"][0]["function"]["name"] for _ in range(1000)]
    assert 350 < moves.count("bad") < 450


def test_recording_again_gives_the_same_game():
    player = careless(halve, halve, 0.5)
    assert record(GuessNumber(), player, 3) == record(GuessNumber(), player, 3)


def test_tools_are_the_public_methods():
    assert list(tools_of(GuessNumber())) == ["guess"]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ({"name": "reset", "arguments": {}}, "error: no tool named 'reset'"),
        ({"name": "_hidden", "arguments": {}}, "error: no tool named '_hidden'"),
        ({"arguments": {}}, "error: no tool named None"),
        ({"name": "increment", "arguments": {"step": 2}}, "2"),
    ],
)
def test_calls_and_their_answers(call, answer):
    counter = Counter()
    counter.reset(seed=0)
    assert call_tool(tools_of(counter), call) == (answer, False)


def test_a_call_with_wrong_arguments_is_answered_with_an_error():
    counter = Counter()
    counter.reset(seed=0)
    answer, done = call_tool(tools_of(counter), {"name": "increment", "arguments": {"by": 2}})
    assert answer.startswith("error: ")
    assert not done


# Tokenizer and template ------------------------------------------------------------------------------------


def test_what_is_appended_never_changes_what_was_rendered(agent):
    _, tokenizer = agent
    transcript = record(GuessNumber(), halve, seed=1)
    assert len(transcript.messages) > 4
    whole = tokenizer.apply_chat_template(transcript.messages, tools=transcript.tools)["input_ids"]
    for stop, message in enumerate(transcript.messages):
        asked = message["role"] == "assistant"
        part = tokenizer.apply_chat_template(
            transcript.messages[:stop] if asked else transcript.messages[: stop + 1],
            tools=transcript.tools,
            add_generation_prompt=asked,
        )["input_ids"]
        assert whole[: len(part)] == part


def test_no_token_reaches_from_the_generation_prompt_into_the_answer(agent):
    _, tokenizer = agent
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Done."}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    assert whole[: len(prompt)] == prompt


def test_a_rendered_call_is_parsed_back(agent):
    _, tokenizer = agent
    asked = [{"role": "user", "content": "Find it."}]
    call = {"name": "guess", "arguments": {"number": 12}}
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*asked, calling(call)])["input_ids"]
    parsed = tokenizer.parse_response(tokenizer.decode(whole[len(prompt) :]), prefix="")
    assert parsed["tool_calls"] == [{"type": "function", "function": call}]


def test_a_run_of_tool_results_is_one_turn(agent):
    _, tokenizer = agent
    results = [{"role": "tool", "name": "guess", "content": text} for text in ("higher", "lower")]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Find it."}, calling({"name": "guess", "arguments": {}}), *results],
        tokenize=False,
    )
    assert rendered.count("<|im_start|>user\n") == 2
    assert rendered.endswith(
        "<tool_response>\nhigher\n</tool_response><tool_response>\nlower\n</tool_response><|im_end|>\n"
    )


def test_numbers_are_single_tokens_and_any_text_survives(agent):
    _, tokenizer = agent
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(1, 16))
    for text in ("été\n\t漢字 🙂 <tool_call> 12345", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# The fit and its cache -------------------------------------------------------------------------------------


def test_the_same_recipe_makes_the_same_agent(tmp_path):
    folders = [make_tiny_agent(small_lessons(), SMALL, cache=tmp_path / name) for name in ("one", "two")]
    one, two = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert folders[0].name == folders[1].name
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (folders[0] / "tokenizer.json").read_text() == (folders[1] / "tokenizer.json").read_text()


def test_an_agent_is_made_once_and_anew_when_something_changed(tmp_path):
    lessons = small_lessons()
    folder = make_tiny_agent(lessons, SMALL, cache=tmp_path)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_agent(small_lessons(), SMALL, cache=tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made

    longer = [Lesson(lessons[0].transcripts, steps=4)]
    fewer = [Lesson(lessons[0].transcripts[1:], steps=3)]
    other_seed = Recipe(**{**vars(SMALL), "seed": 1})
    others = {
        make_tiny_agent(longer, SMALL, cache=tmp_path),
        make_tiny_agent(fewer, SMALL, cache=tmp_path),
        make_tiny_agent(lessons, other_seed, cache=tmp_path),
    }
    assert len(others | {folder}) == 4
    assert set(tmp_path.iterdir()) == others | {folder}  # nothing unfinished is left behind


def test_the_agent_can_be_loaded_with_its_template_and_parser(agent):
    model, tokenizer = agent
    assert model.config.tie_word_embeddings
    assert tokenizer.eos_token == "<|im_end|>"
    assert json.dumps(tokenizer.response_template)


# Playing ---------------------------------------------------------------------------------------------------


def test_playing_again_gives_the_same_games(agent):
    model, tokenizer = agent
    once, again = (play(model, tokenizer, GuessNumber, range(4), max_completion_length=60) for _ in range(2))
    assert [game.completion for game in once] == [game.completion for game in again]
    assert all(game.environment is None for game in once), "environments are given back"


def test_the_agents_calls_are_read_and_run(agent):
    """The template, the response template and the environment fit together: a sure player's game is really played."""
    _, tokenizer = agent
    written = tokenizer.encode('<tool_call>\n{"name": "guess", "arguments": {"number": 8}}\n</tool_call><|im_end|>')
    generator = ScriptedGenerator(lambda *_: written)
    engine = RolloutEngine(generator, Renderer(tokenizer, tools=True), environments=GuessNumber, limits=Limits())
    [game] = engine.run([Task("0", 0, seed=0)])
    engine.close()
    assert len(generator.calls) == GuessNumber.budget
    assert "no guess is left" in game.completion[-1]["content"]
    assert game.outcome is Outcome.ENV_DONE
    assert game.tool_failures == 0
    assert_row_invariants(game, generator.calls)
