"""Reading tasks and datasets, and refusing what cannot be played here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from agentrl.envs import Harbor
from agentrl.envs.harbor import Fault, HarborFailure
from agentrl.envs.harbor.datasets import find_tasks
from agentrl.envs.harbor.dockerfile import Plain, read_plain
from agentrl.envs.harbor.rewards import combine, passes, read_rewards, score
from agentrl.envs.harbor.task import PUBLISHED, Artifact, instruction_text, load_task
from agentrl.envs.harbor.unsupported import unsupported
from agentrl.errors import ConfigurationError
from tests.envs.harbor.writing import DOCKERFILE, GREP, write_task
from tests.envs.sandbox.conftest import local_backend


@pytest.mark.parametrize(
    ("as_json", "as_text", "expected"),
    [
        (b'{"reward": 0.5, "flag": true}', b"1", {"reward": 0.5, "flag": 1.0}),
        (None, b" 0.25\n", {"reward": 0.25}),
        (None, None, Fault.REWARD_MISSING),
        (b"", b"1", Fault.REWARD_EMPTY),
        (None, b"\n", Fault.REWARD_EMPTY),
        *((text, b"1", Fault.REWARD_UNREADABLE) for text in (b"[1]", b"1", b"{}", b'{"a": "1"}', b'{"a": NaN}', b"{")),
        *((b'{"a": %s}' % value, None, Fault.REWARD_UNREADABLE) for value in (b"1e999", b"1" * 400, b"null", b"[1]")),
        *((None, text, Fault.REWARD_UNREADABLE) for text in (b"nan", b"inf", b"pass", b"1 2", b"\xff", b"1\n0")),
    ],
)
def test_reward_files_are_read_or_are_a_fault(as_json: bytes | None, as_text: bytes | None, expected: object) -> None:
    """A verdict is numbers, all of them finite; whatever else is no reward, and no 0 either."""
    if isinstance(expected, dict):
        assert read_rewards(as_json, as_text) == expected
        return
    with pytest.raises(HarborFailure) as raised:
        read_rewards(as_json, as_text)
    assert raised.value.fault is expected
    assert not raised.value.retry, "a verifier that ran would do the same again"


def test_the_reward_that_counts_is_never_guessed() -> None:
    assert score({"reward": 1.0, "style": 0.0}) == 1.0
    assert score({"accuracy": 0.5}) == 0.5
    assert score({"accuracy": 0.5, "style": 1.0}, "style") == 1.0
    with pytest.raises(HarborFailure, match="accuracy, style"):
        score({"accuracy": 0.5, "style": 1.0})
    with pytest.raises(HarborFailure, match="none 'style'"):
        score({"accuracy": 0.5}, "style")


def test_rewards_of_steps() -> None:
    steps = [{"reward": 1.0, "style": 0.5}, {"reward": 0.0}]
    assert combine(steps, "mean") == {"reward": 0.5, "style": 0.25}
    assert combine(steps, "final") == {"reward": 0.0}
    assert passes({"reward": 0.5}, 0.5)
    assert passes({"reward": 0.5}, None)
    assert not passes({"reward": 0.49}, 0.5)
    assert not passes({"reward": 1.0}, {"reward": 0.5, "style": 0.1}), "a missing reward does not pass"


def test_instructions_lose_their_canary_and_nothing_else() -> None:
    text = "<!-- harbor-canary GUID 1 -->\n# terminal-bench-canary GUID 2\n\n# Title\n<!-- canary -->\nx\n"
    assert instruction_text(text) == "# Title\n<!-- canary -->\nx"


FULL = """
artifacts = ["/app/a", {source = "/app/b", destination = "b"}]
multi_step_reward_strategy = "final"
[task]
name = "org/name"
[agent]
timeout_sec = 9.5
user = 1000
[verifier]
timeout_sec = 7
user = "judge"
env = {TOKEN = "${HARBOR_TEST_TOKEN}", MODE = "a ${HARBOR_TEST_MODE:-b}"}
[[verifier.collect]]
command = "make dump"
[environment]
cpus = 0.5
memory = "2G"
storage = "512M"
allow_internet = false
workdir = "/app"
env = {A = "1"}
[environment.healthcheck]
command = "true"
[[steps]]
name = "one"
min_reward = {reward = 0.5}
artifacts = ["/app/c"]
[steps.agent]
timeout_sec = 3
[[steps]]
name = "two"
[steps.verifier]
environment_mode = "separate"
env = {MODE = "c"}
"""


def test_a_task_with_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_TEST_TOKEN", "t")
    task = load_task(write_task(tmp_path / "t", FULL, steps={"one": GREP, "two": GREP}))
    one, two = task.steps
    assert (task.name, task.strategy, one.instruction) == ("org/name", "final", "Do one.")
    place = task.place
    assert (place.cpus, place.memory_mb, place.storage_mb, place.network) == (0.5, 2048, 512, "no-network")
    assert (one.timeout, one.user, one.min_reward, one.artifacts) == (
        3,
        "1000",
        {"reward": 0.5},
        (PUBLISHED, Artifact("/app/a"), Artifact("/app/b"), Artifact("/app/c")),
    )
    assert (two.timeout, two.artifacts) == (9.5, (PUBLISHED, Artifact("/app/a"), Artifact("/app/b")))
    assert one.verifier.place is None
    assert two.verifier.place == place
    assert (two.verifier.timeout, two.verifier.user) == (7, "judge")
    assert one.verifier.env == {"TOKEN": "t", "MODE": "a b"}
    assert two.verifier.env == {"TOKEN": "t", "MODE": "c"}
    assert [collect.command for collect in one.verifier.collect] == ["make dump"]


SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
OWN = "[verifier.environment]\ncpus = 2\n"
IMAGE = f'{OWN}docker_image = "judge"\n'


@pytest.mark.parametrize(
    ("toml", "dockerfile", "image", "cpus", "brings"),
    [
        ("", False, None, None, False),
        ("", True, None, None, False),
        (SEPARATE, False, "agent", 1, False),
        (SEPARATE, True, "tests", 1, True),
        (OWN, False, "agent", 2, False),
        (OWN, True, "tests", 2, True),
        (IMAGE, True, "judge", 2, True),
    ],
)
def test_where_a_verifier_judges_is_what_harbor_resolves(
    toml: str, dockerfile: bool, image: str | None, cpus: float | None, brings: bool, tmp_path: Path
) -> None:
    """An image of its own brings its tests; a copy of the agent's is given them. A Dockerfile alone wants nothing."""
    task = write_task(tmp_path / "t", f'{toml}[environment]\ndocker_image = "agent"', dockerfile=None)
    if dockerfile:
        (task / "tests/Dockerfile").write_text("FROM x\n")
    verifier = load_task(task).steps[0].verifier
    place = verifier.place
    found = place and (place.image or (place.dockerfile and place.dockerfile.name))
    assert (found, place and place.cpus, verifier.brings_tests) == (image, cpus, brings)


def test_the_verifier_of_a_step_is_its_own_before_it_is_the_tasks(tmp_path: Path) -> None:
    toml = (
        f"{IMAGE}[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n[steps.verifier]\nenvironment_mode = 'shared'\n"
        "[[steps]]\nname = 'three'\n[steps.verifier.environment]\nmemory_mb = 64"
    )
    task = write_task(tmp_path / "t", toml, steps=dict.fromkeys(("one", "two", "three"), GREP))
    (task / "steps/three/tests/Dockerfile").write_text("FROM x\n")
    one, two, three = (step.verifier.place for step in load_task(task).steps)
    assert one is not None
    assert (one.image, one.cpus, two) == ("judge", 2, None)
    assert three is not None
    assert (three.image, three.dockerfile, three.memory_mb) == (None, task / "steps/three/tests", 64)


def test_tests_with_an_ignore_file_are_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", files={"tests/data/.harborignore": "*.csv"})
    assert any(
        "tests/data/.harborignore" in problem for problem in unsupported(load_task(task), network=False, builds=True)
    )


def test_limits_and_times_are_read_from_either_schema_g12(tmp_path: Path) -> None:
    toml = '[environment]\nmemory = "8G"\nstorage = "512M"{}\n[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 30'
    old = load_task(write_task(tmp_path / "old", toml.format("")))
    assert (old.place.memory_mb, old.place.storage_mb) == (8192, 512)
    assert (old.steps[0].timeout, old.steps[0].verifier.timeout) == (120, 30)
    assert load_task(write_task(tmp_path / "new", toml.format("\nmemory_mb = 4096"))).place.memory_mb == 4096
    with pytest.raises(ConfigurationError, match="8X"):
        load_task(write_task(tmp_path / "bad", '[environment]\nmemory = "8X"'))


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        ('[environment]\nenv = {A = "${HARBOR_TEST_UNSET}"}', "environment.env.A wants .* HARBOR_TEST_UNSET"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec"),
        ('[verifier]\ntimeout_sec = "1"', "verifier.timeout_sec"),
        ('[environment]\nmemory = "much"', "environment.memory"),
        ("[environment]\ncpus = -1", "environment.cpus"),
        ('[environment]\nnetwork_mode = "some"', "environment.network_mode"),
        ("environment = 3", "environment is 3"),
        ('artifacts = ["/app/../etc"]', "artifacts"),
        ('artifacts = ["app"]', "artifacts"),
        ('multi_step_reward_strategy = "max"', "multi_step_reward_strategy"),
        ('[[steps]]\nname = "../x"', r"steps\[0\].name"),
        ('[[steps]]\nname = "x"\nmin_reward = "1"', "instruction.md|min_reward"),
        ("[environment.healthcheck]\nretries = 3", "environment.healthcheck.command is missing"),
        ("[agent]\nuser = 1.5", "agent.user"),
        ('artifacts = [{source = "/a", exclude = "*.o"}]', "of /a: exclude"),
    ],
)
def test_bad_fields_are_named(toml: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=field):
        load_task(write_task(tmp_path / "t", toml))


def test_other_schemas_and_broken_tasks_are_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t")
    (task / "task.toml").write_text('schema_version = "2.0"')
    with pytest.raises(ConfigurationError, match=r"schema_version is '2\.0'"):
        load_task(task)
    (task / "task.toml").write_text('version = "1.0"')
    load_task(task)
    (task / "tests/test.sh").unlink()
    with pytest.raises(ConfigurationError, match=r"tests/test\.sh"):
        load_task(task)
    (task / "task.toml").write_text("= 3")
    with pytest.raises(ConfigurationError, match=r"task\.toml cannot be read"):
        load_task(task)


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ('[environment]\nos = "windows"', "environment.os = 'windows'"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ('[environment]\ntpu = {type = "v4", topology = "2x2"}', "environment.tpu"),
        ('[environment]\nnetwork_mode = "allowlist"', "environment.network_mode = 'allowlist'"),
        ('[environment]\nallowed_hosts = ["a.org"]', "environment.allowed_hosts"),
        ('[environment]\nnetwork_mode = "public"', "network=True"),
        ('[environment]\nskills_dir = "s"', "environment.skills_dir"),
        ('[[environment.mcp_servers]]\nname = "m"', "environment.mcp_servers"),
        ('[agent]\nnetwork_mode = "public"', "agent.network_mode"),
        ('[verifier]\nallowed_hosts = ["a.org"]', "verifier.allowed_hosts"),
        ('artifacts = [{source = "/a", service = "db"}]', "artifacts.service"),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "db"', "verifier.collect.service"),
        ('[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\ndocker_image = "i"\ngpus = 1', "nt.gpus"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(toml: str, problem: str, tmp_path: Path) -> None:
    """Before training starts, not in the middle of it."""
    task = write_task(tmp_path / "t", toml)
    found = unsupported(load_task(task), network=False, builds=True)
    assert any(problem in each for each in found), found
    with pytest.raises(ConfigurationError, match="cannot be played here") as raised:
        Harbor(task, backend=local_backend())
    assert problem in str(raised.value)
    assert str(task) in str(raised.value)


def test_compose_and_earlier_conversations_are_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", files={"environment/docker-compose.yaml": "", "trajectory.json": "{}"})
    found = unsupported(load_task(task), network=True, builds=True)
    assert len(found) == 2
    assert "docker compose" in found[1]


def test_the_local_backend_refuses_images_that_must_be_built(tmp_path: Path) -> None:
    write_task(tmp_path / "a")
    write_task(tmp_path / "b", dockerfile=f"{DOCKERFILE}RUN make\n")
    write_task(tmp_path / "c", '[environment]\ndocker_image = "python:3.12"')
    with pytest.raises(ConfigurationError, match=r"b: .* builds no images(.|\n)*c: environment.docker_image"):
        Harbor(tmp_path, backend=local_backend())
    harbor = Harbor(tmp_path, backend=local_backend(), skip_unsupported=True)
    assert harbor.tasks()["name"] == ["a"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("FROM a\n# x\n\nWORKDIR /app\nWORKDIR b\nENV A=1 B='2 3'\n", Plain("/app/b", {"A": "1", "B": "2 3"})),
        ("FROM a", Plain(None, {})),
        ("FROM a\nRUN x", None),
        ("FROM a AS b\nFROM c", None),
        ("FROM a\nENV A 1", None),
        ("FROM a\nWORKDIR $HOME", None),
        ("FROM a\nENV A=1 \\\n B=2", None),
    ],
)
def test_plain_dockerfiles(text: str, plain: Plain | None, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    assert read_plain(tmp_path / "Dockerfile") == plain


def test_datasets(tmp_path: Path) -> None:
    """A task, a folder of tasks, a registry; what is in a repository is not fetched."""
    for name in ("b", "a"):
        write_task(tmp_path / "tasks" / name)
    assert [path.name for path in find_tasks(tmp_path / "tasks")] == ["a", "b"]
    assert find_tasks(tmp_path / "tasks" / "a") == [tmp_path / "tasks" / "a"]
    entry = {"name": "d", "version": "1", "tasks": [{"name": "b", "path": "tasks/b"}]}
    remote = {"name": "d", "version": "2", "tasks": [{"name": "c", "git_url": "https://x.org/c", "path": "c"}]}
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([entry, remote]))
    assert find_tasks(registry, "d@1") == [tmp_path / "tasks/b"]
    for dataset, problem in ((None, "d@1, d@2"), ("d", "d@1, d@2"), ("d@2", "https://x.org/c")):
        with pytest.raises(ConfigurationError, match=problem):
            find_tasks(registry, dataset)
    registry.write_text("{")
    with pytest.raises(ConfigurationError, match="no Harbor registry"):
        find_tasks(registry)
    with pytest.raises(ConfigurationError, match="holds no Harbor tasks"):
        find_tasks(tmp_path / "nowhere")


def test_arguments_are_checked(tmp_path: Path) -> None:
    task, local = write_task(tmp_path / "t"), local_backend()
    for wrong in ({"tools": ("fly",)}, {"image": "a"}, {"timeout": math.inf}, {"rootfs": tmp_path / "none"}):
        with pytest.raises(ConfigurationError):
            Harbor(task, backend=local, **wrong)
