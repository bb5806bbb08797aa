"""The pure parts of the OpenEnv client: frames, tools from schemas, what the model is shown, rewards, settings."""

import base64
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agentrl.envs import OpenEnv
from agentrl.envs.openenv import Container
from agentrl.envs.openenv.content import observation_content, result_content
from agentrl.envs.openenv.environment import Reward, episode_reward, tool_error
from agentrl.envs.openenv.protocol import ErrorCode, Observation, ProtocolError, RpcAnswer, ServerError, parse, request
from agentrl.envs.openenv.tools import Style, mcp_tools, style_of, typed_tools
from agentrl.errors import ConfigurationError, EnvironmentFailure

# Frames; the first ones were recorded from openenv 0.10 ------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "answer"),
    [
        (
            '{"type":"observation","data":{"observation":{"metadata":{"iid":"29"},"hint":"number in 1..10",'
            '"remaining":5},"reward":null,"done":false,"metadata":{"iid":"29"}}}',
            Observation({"metadata": {"iid": "29"}, "hint": "number in 1..10", "remaining": 5}, None, False),
        ),
        (
            '{"type":"observation","data":{"observation":{"metadata":{},"hint":"correct"},"reward":1.0,"done":true}}',
            Observation({"metadata": {}, "hint": "correct"}, 1.0, True),
        ),
        (
            '{"type":"error","data":{"message":"tool blew up","code":"EXECUTION_ERROR"}}',
            ServerError(ErrorCode.EXECUTION_ERROR, "tool blew up"),
        ),
        (
            '{"type":"mcp","data":{"jsonrpc":"2.0","id":7,"error":{"code":-32601,"message":"Method not found: x"}}}',
            RpcAnswer(7, None, -32601),
        ),
    ],
)
def test_recorded_frames_are_read(frame, answer):
    assert parse(frame) == answer


@pytest.mark.parametrize(("written", "read"), [("true", 1.0), ("false", 0.0), ("3", 3.0), ("-1e-3", -0.001)])
def test_rewards_are_numbers_and_truth_values_as_the_protocol_has_them(written, read):
    frame = f'{{"type":"observation","data":{{"observation":{{}},"reward":{written},"done":false}}}}'
    assert parse(frame).reward == read


def test_pydantics_list_of_mistakes_becomes_text():
    errors = [{"loc": ["a", 0], "msg": "too small"}, {"msg": "odd"}, {"loc": "x", "msg": None}, "strange"]
    frame = json.dumps({"type": "error", "data": {"message": "m", "code": "VALIDATION_ERROR", "errors": errors}})
    assert str(parse(frame)) == "m; a.0: too small; odd; None; strange"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


KINDS = st.sampled_from(["observation", "error", "mcp", "state"])
ERRORS = st.fixed_dictionaries({"code": JSON}, optional={"message": JSON, "errors": JSON})
ANYTHING = st.one_of(
    st.text(),
    st.binary(),
    JSON.map(json.dumps),
    st.tuples(KINDS, JSON | ERRORS).map(lambda parts: json.dumps({"type": parts[0], "data": parts[1]})),
)


@given(ANYTHING)
def test_anything_else_is_a_protocol_error(frame):
    with pytest.raises(ProtocolError):
        parse(frame)


@given(st.dictionaries(st.text(), JSON), JSON, JSON)
def test_an_observation_is_read_as_it_is_or_refused(fields, reward, done):
    frame = json.dumps({"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}})
    try:
        read = parse(frame)
    except ProtocolError:
        return
    assert read.done is done
    assert read.reward is None if reward is None else read.reward == float(reward)
    assert json.dumps(read.fields) == json.dumps(fields)


def test_requests_have_no_numbers_that_json_has_not():
    with pytest.raises(ValueError, match="JSON"):
        request("step", {"x": float("nan")})


# Tools -------------------------------------------------------------------------------------------------------------

FIELDS = {"metadata": {"type": "object"}, "x": {"type": "integer"}, "to": {"$ref": "#/$defs/Place"}}
PLACE = {"Place": {"type": "object", "properties": {"name": {"type": "string"}}}}


def test_an_action_model_is_one_tool_with_its_fields_as_arguments():
    [tool] = typed_tools({"title": "Go", "properties": FIELDS, "required": ["x", "metadata"], "$defs": PLACE})
    assert tool.description == {
        "name": "step",
        "description": "Take the action Go.",
        "parameters": {
            "type": "object",
            "properties": {"x": FIELDS["x"], "to": FIELDS["to"]},
            "required": ["x"],
            "$defs": PLACE,
        },
    }
    assert tool.action({"x": 1}) == {"x": 1}


@pytest.mark.parametrize("together", ["oneOf", "anyOf"])
def test_a_union_of_models_is_a_tool_each(together):
    models = {
        "Move": {"title": "Move", "description": "Walk.", "properties": {"kind": {"const": "go"}, "x": {}}},
        "TakeLamp": {
            "title": "TakeLamp",
            "properties": {"kind": {"const": "take"}, "metadata": {}},
            "required": ["kind"],
        },
    }
    references = [{"$ref": f"#/$defs/{name}"} for name in models]
    union = {"$defs": models, together: references}
    told_apart = typed_tools({**union, "discriminator": {"propertyName": "kind"}})
    assert [tool.name for tool in told_apart] == ["go", "take"]
    assert told_apart[0].description["parameters"] == {"type": "object", "properties": {"x": {}}, "required": []}
    assert told_apart[0].action({"x": 2, "kind": "take"}) == {"x": 2, "kind": "go"}
    assert [tool.name for tool in typed_tools(union)] == ["move", "take_lamp"]


def test_a_union_that_names_what_is_not_there_is_refused():
    with pytest.raises(ProtocolError, match="does not define"):
        typed_tools({"oneOf": [{"$ref": "#/$defs/Gone"}]})


def test_the_style_is_told_by_the_schema():
    call = {"properties": {"type": {}, "tool_name": {}, "arguments": {}, "metadata": {}}}
    assert style_of(call) is Style.MCP
    assert style_of({"title": "Action", "properties": {"metadata": {}}}) is Style.MCP
    assert style_of({"properties": {"x": {}}}) is Style.TYPED
    assert style_of({"oneOf": [{}, {}]}) is Style.TYPED


def test_mcp_tools_are_called_by_the_servers_names():
    [tool] = mcp_tools([{"name": "look up", "description": " ", "input_schema": {"type": "object"}}])
    assert (tool.name, tool.description["description"]) == ("look_up", "Call look up.")
    assert tool.action({"a": 1}) == {"type": "call_tool", "tool_name": "look up", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "listed", [None, {}, ["x"], [{"name": 1}], [{"name": "a", "description": None, "input_schema": {}}]]
)
def test_a_list_of_tools_that_is_none_is_refused(listed):
    with pytest.raises(ProtocolError):
        mcp_tools(listed)


# What the model is shown -------------------------------------------------------------------------------------------


def picture(side: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (255, 0, 0)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"hint": "higher", "metadata": {"id": 1}}, "higher"),
        ({"hint": "", "error": None}, ""),
        ({"metadata": {}}, ""),
        ({"position": 1}, '{"position": 1}'),
        ({"a": "é", "b": [None], "c": None}, '{"a": "é", "b": [null]}'),
    ],
)
def test_observations_as_text(fields, shown):
    assert observation_content(fields) == shown


def test_pictures_follow_the_text():
    fields = {
        "screen": f"data:image/png;base64,{picture(3)}",
        "text": "look",
        "map": f"data:image/png;base64,{picture(5)}",
    }
    text, screen, chart = observation_content(fields)
    assert text == {"type": "text", "text": "look"}
    assert (screen["type"], screen["image"].size, chart["image"].size) == ("image", (3, 3), (5, 5))
    assert observation_content({"screen": fields["screen"]})[0]["image"].size == (3, 3)


def test_results_of_mcp_tools_are_their_content():
    blocks = [{"type": "text", "text": "a"}, {"type": "resource", "uri": "u"}, {"type": "text", "text": "b"}]
    assert result_content({"content": blocks}) == 'a\n{"type": "resource", "uri": "u"}\nb'
    assert result_content({"content": [{"type": "image", "data": picture(2)}]})[0]["image"].size == (2, 2)
    assert result_content("plain") == "plain"
    assert result_content({"k": 1}) == '{"k": 1}'
    with pytest.raises(ProtocolError, match="picture"):
        result_content({"content": [{"type": "image", "data": "####"}]})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"result": 1, "error": None}, None),
        ({"result": {"is_error": True, "content": [{"type": "text", "text": "no"}]}}, RuntimeError),
        ({"error": {"error_type": "execution_error", "message": "no"}}, RuntimeError),
        ({"error": {"error_type": "timeout", "message": "no"}}, RuntimeError),
        ({"error": {"error_type": "invalid_args", "message": "no"}}, ValueError),
        ({"error": {"error_type": "tool_not_found", "message": "no"}}, ValueError),
    ],
)
def test_errors_of_mcp_tools_are_the_models_or_the_tools(fields, kind):
    error = tool_error(fields)
    assert error is None if kind is None else (type(error), str(error)) == (kind, "no")


def test_errors_of_the_way_to_mcp_tools_are_the_environments():
    with pytest.raises(EnvironmentFailure, match="cannot reach its tools"):
        tool_error({"error": {"error_type": "transport_error", "message": "pipe"}})
    with pytest.raises(ProtocolError):
        tool_error({"error": "no"})


# Rewards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "given", "done", "reward"),
    [
        (Reward.SUM, [0.5, -1.0, 2.0], True, 1.5),
        (Reward.LAST, [0.5, -1.0, 2.0], True, 2.0),
        (Reward.STEPS, [0.5], True, None),
        (None, [0.5], True, None),
        (Reward.SUM, [], False, 0.0),  # the model never acted
        (Reward.LAST, [], False, 0.0),
        (Reward.SUM, [], True, None),  # no reward at the end: there is none, or it was NaN
        (Reward.LAST, [], True, None),
    ],
)
def test_the_reward_of_an_episode(kind, given, done, reward):
    assert episode_reward(kind, given, done) == reward


# Settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either a `url` or an `image`"),
        ({"url": "http://h", "image": "i"}, "either a `url` or an `image`"),
        ({"url": "ftp://h"}, "such as http://127.0.0.1:8000"),
        ({"url": "127.0.0.1:8000"}, "such as http://127.0.0.1:8000"),
        ({"url": "http://h?x=1"}, "such as http://127.0.0.1:8000"),
        ({"url": "http://h", "style": "gym"}, "style='gym'.*'typed', 'mcp'"),
        ({"url": "http://h", "reward": "mean"}, "reward='mean'.*'sum', 'last', 'steps'"),
        ({"url": "http://h", "columns": "level"}, "a list of names"),
        ({"url": "http://h", "max_sessions": 0}, "max_sessions=0"),
        ({"url": "http://h", "max_message_size": 0}, "max_message_size=0"),
        ({"url": "http://h", "step_timeout": float("inf")}, "step_timeout=inf"),
        ({"url": "http://h", "keepalive": None}, "keepalive=None"),
        ({"url": "http://h", "ping_timeout": -1}, "ping_timeout=-1"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        OpenEnv(**settings)


def test_a_container_must_be_told_its_port():
    with pytest.raises(ConfigurationError, match=r"\{port\}"):
        Container("image", command=["uvicorn", "app"])
