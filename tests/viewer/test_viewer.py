"""The viewer's data and its server: what it shows, to whom, and that nothing a model wrote does harm."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import ConfigurationError
from agentrl.rollout.journal.journal import Journal
from agentrl.types import Failure, Outcome, Task, ToolCall, ToolResult
from agentrl.viewer import index as index_module
from agentrl.viewer.index import Index
from agentrl.viewer.page import MODULES, one_script, read_file, write_page
from agentrl.viewer.server import listen, make_app
from agentrl.viewer.shown import Shown
from tests.viewer.journals import fill, play, run_of, turn_record

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)></script><!-- \x00\x1b[31m \u202eevil\u202c \ud800 \u2028"


def call(**values: Any) -> ToolResult:
    return ToolResult(
        ToolCall("c", values.pop("name", "look"), values.pop("arguments", {})), **{"content": "", **values}
    )


def hostile(folder: Path) -> Path:
    """A run in which everything that a model or an environment writes is hostile, images included."""
    picture = Image.new("RGB", (4, 3), (200, 30, 30))

    async def evil(journal: Journal, task: Task) -> None:
        answer = call(name=EVIL, arguments={EVIL: float("nan")}, content=EVIL, failed=True)
        turns = [turn_record([3, 4], at=0, content=EVIL, results=[answer], following=[5])]
        prompt = [{"role": EVIL, "content": [{"type": "text", "text": EVIL}, {"type": "image", "image": picture}]}]
        failure = Failure("look", EVIL, EVIL)
        task = Task(EVIL.replace("\ud800", ""), 0, 7, None, {EVIL: EVIL}, "<b>")
        await play(journal, task, prompt, turns, outcome=Outcome.ENV_FAILURE, failure=failure)

    async def long(journal: Journal, task: Task) -> None:
        await play(journal, task, "p", [turn_record([3], at=0, content="<b>" + "x" * 5_000_000)], reward=1.0)

    async def broken(journal: Journal, task: Task) -> None:
        image = {"type": "image", "image": Image.new("L", (2, 2))}
        await play(journal, task, [{"role": "user", "content": [image]}], [turn_record([3], at=0, content="seen")])

    run_of(folder, evil, long, broken)
    with sqlite3.connect(folder / "_rollouts.db") as connection:
        [digest] = connection.execute("SELECT digest FROM rollout_images WHERE rollout = 3").fetchone()
        connection.execute("UPDATE images SET png = ? WHERE digest = ?", [b"<svg onload=alert(3)>", digest])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("run"), steps=2, groups=2, members=4)


def client(*folders: Path, **options: Any) -> TestClient:
    return TestClient(make_app(Shown(folders)), base_url="http://127.0.0.1:8910", **options)


def test_a_rollout_is_shown_as_it_was_played(folder: Path) -> None:
    web = client(folder)
    assert [(run["key"], run["algorithm"]) for run in web.get("/api/runs").json()] == [("0.1", "GRPO")]
    listed = web.get("/api/rollouts/0").json()
    rows = [dict(zip(listed["columns"], row, strict=True)) for row in listed["rows"]]
    assert len(rows) == 16
    row = next(row for row in rows if row["outcome"] == "finished")
    content = web.get(f"/api/rollout/0/0/{row['id']}").json()
    assert row["turns"] == len(content["turns"]) == 2
    assert row["sampled"] == sum(content["rows"][0]["mask"])
    assert row["reward"] == pytest.approx(sum(content["rewards"].values()))
    assert row["calling"] == pytest.approx(content["turns"][0]["results"][0]["seconds"], abs=1e-4)
    assert row["prefill"] == pytest.approx(row["sampling"] / 4, abs=1e-3)
    assert (row["resetting"], row["rewarding"]) == (0.2, 0.1)
    assert row["tools"] == ["add"]
    assert row["advantage"] == content["advantages"][0]
    [part] = content["rows"]
    assert len(part["ids"]) == len(part["mask"]) == len(part["logprobs"])
    texts = web.get(f"/api/tokens/0/0/{row['id']}").json()
    assert texts["exact"][0].startswith("<|im_start|>user\nWhat is")
    assert "".join(texts["pieces"][str(i)] for i in [*part["prompt"], *part["ids"]]) == texts["exact"][0]
    entropies = web.get("/api/logs/0").json()["1"]["entropy"]
    assert [step for step, _ in entropies] == [1, 2]


def test_text_is_searched_for_as_it_is_written(tmp_path: Path) -> None:
    async def said(journal: Journal, task: Task) -> None:
        texts = ['a "quoted" 100% under_score', "line\nbreak é", "nothing"]
        await play(journal, task, "p", [turn_record([3], at=0, content=texts[task.member])])

    index = Index(run_of(tmp_path, said, said, said))
    found = {text: [number for _, number in index.search(text)] for text in ('"quoted"', "100%", "0%u", "r_s", "e\nb")}
    assert found == {'"quoted"': [1], "100%": [1], "0%u": [], "r_s": [1], "e\nb": [2]}
    assert index.search("É") == []
    assert index.search("NOTHING") == [(0, 3)]
    assert index.search("\ud800") == []


def test_weights_of_rewards_count_and_those_of_turns(tmp_path: Path) -> None:
    async def rewarded(journal: Journal, task: Task) -> None:
        result = call(content="x", reward=0.25)
        played = await play(journal, task, "p", [turn_record([3], at=0, results=[result])], reward=1.0)
        journal.add_rewards([played], ["f", "g", "Env"], [[2.0, None, 1.0]])

    index = Index(run_of(tmp_path, rewarded, info={"config": {"reward_weights": [0.5, 3.0]}}))
    changes = index.changes()
    assert changes["rows"][0][changes["columns"].index("reward")] == 0.5 * 2.0 + 1.0 + 0.25


def test_a_run_is_followed_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows that changed are given again; those that were deleted make a new beginning."""
    monkeypatch.setattr(index_module, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(index_module, "RECENT", 1)
    journal = Journal(tmp_path)

    def enter(task: Task, **options: Any) -> Any:
        async def entered() -> Any:
            journal.open_window(kind="train", step=task.member)
            played = await play(journal, task, "p", [turn_record([3], at=0)], **options)
            journal.add_log(task.member, {"loss": float(task.member)})
            return played

        played = asyncio.run(entered())
        journal.close()
        return played

    def outcomes(changes: dict[str, Any]) -> dict[int, Any]:
        at = [changes["columns"].index(name) for name in ("id", "outcome", "reward")]
        return {row[at[0]]: (row[at[1]], row[at[2]]) for row in changes["rows"]}

    enter(Task("g", 0, 1), outcome=None)
    index = Index(tmp_path)
    first = index.changes()
    assert outcomes(first) == {1: (None, None)}
    assert index.changes(first["epoch"], first["version"])["rows"] == []
    played = enter(Task("g", 1, 1), reward=0.5)
    second = index.changes(first["epoch"], first["version"])
    assert outcomes(second) == {2: (Outcome.FINISHED, 0.5)}
    journal.add_rewards([played], ["f"], [[0.75]])
    journal.close()
    third = index.changes(second["epoch"], second["version"])
    assert outcomes(third) == {2: (Outcome.FINISHED, 0.75)}
    assert len(index.changes()["rows"]) == 2
    assert index.logs() == {1: {"loss": [[0, 0.0], [1, 1.0]]}}
    with sqlite3.connect(tmp_path / "_rollouts.db") as connection:
        connection.execute("DELETE FROM rollouts WHERE id = 1")
    fourth = index.changes(third["epoch"], third["version"])
    assert fourth["epoch"] != third["epoch"]
    assert list(outcomes(fourth)) == [2]


def test_what_was_logged_again_after_resuming_counts_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin_run({})
    for step, loss in [(1, 0.1), (2, 0.2), (2, 0.3)]:
        journal.add_log(step, {"loss": loss})
    journal.close()
    assert Index(tmp_path).logs() == {1: {"loss": [[1, 0.1], [2, 0.3]]}}


def test_other_hosts_get_nothing(folder: Path) -> None:
    web = client(folder)
    for host, status in [
        ("127.0.0.1:8910", 200),
        ("localhost:9", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example:8910", 400),
    ]:
        answer = web.get("/api/runs", headers={"host": host})
        assert answer.status_code == status, host
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    assert web.post("/api/runs").status_code == 405
    with listen(0) as listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1"
        listening.listen()
        with pytest.raises(ConfigurationError, match="--port"):
            listen(port)


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../index.py", "/static/..%2f..%2fcli%2fmain.py", "/static/%2e%2e/page.py", "/static//etc/passwd"),
        *("/api/image/0/..%2f_rollouts.db", "/api/image/0/_rollouts.db", "/api/rollout/0/0/-1", "/api/rollout/9/0/1"),
        *("/api/rollout/0/9/1", "/api/rollouts/0?version=x", "/api/rollouts/7", "/api/logs/7", "/_rollouts.db"),
        *(
            "/api/tokens/0/0/99999",
            "/api/search/7?text=a",
            "/api/image/7/a",
            "/api/rollout/0/0/99999999999999999999999",
        ),
    ],
)
def test_no_path_and_nothing_else_can_be_asked_for(folder: Path, path: str) -> None:
    assert client(folder).get(path).status_code == 404


def test_hostile_content_stays_data(tmp_path: Path) -> None:
    """Script tags, control characters, surrogates, NaN, 5 MB of text and broken images."""
    web = client(hostile(tmp_path))
    listed = web.get("/api/rollouts/0")
    assert listed.headers["content-type"] == "application/json"
    assert len(listed.json()["rows"]) == 3
    evil = web.get("/api/rollout/0/0/1").json()
    assert evil["turns"][0]["message"]["blocks"] == [{"text": EVIL, "more": 0}]
    assert evil["turns"][0]["results"][0]["name"] == EVIL
    image = web.get(f"/api/image/0/{evil['prompt'][0]['blocks'][1]['image']}")
    assert image.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(image.content)).size == (4, 3)
    short = web.get("/api/rollout/0/0/2")
    assert len(short.content) < 100_000
    assert short.json()["turns"][0]["message"]["blocks"][0]["more"] == 4_980_003
    assert len(web.get("/api/rollout/0/0/2?full").content) > 5_000_000
    broken = web.get("/api/rollout/0/0/3").json()
    assert web.get(f"/api/image/0/{broken['prompt'][0]['blocks'][0]['image']}").status_code == 404
    assert web.get("/api/search/0", params={"text": "<script>"}).json() == [[0, 1]]


def test_one_file_holds_hostile_data_and_nothing_of_others(tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    assert write_page(Shown([hostile(tmp_path)]), file, most=2) == (2, 3)
    text = file.read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>") == 2
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert sorted(data["contents"]) == ["0/0/2", "0/0/3"]
    assert len(data["rollouts"][0]["rows"]) == 3
    assert "default-src 'none'" in text
    assert 'src="/' not in text
    assert 'href="/' not in text


def test_the_modules_make_one_script() -> None:
    """Names at the top of modules are distinct, imports are one line each and of modules before."""
    names: list[str] = []
    for place, module in enumerate(MODULES):
        text = read_file(module)
        names += re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.M)
        names += [n for part in re.findall(r"^(?:let|const) \[(.*?)\] =", text, re.M) for n in part.split(", ")]
        for imported in re.findall(r'^import .* from "\./(.*)";$', text, re.M):
            assert imported in MODULES[:place], (module, imported)
        assert len(re.findall(r"^import ", text, re.M)) == len(re.findall(r"^import .*;$", text, re.M))
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)
    assert not re.search(r"^(import|export)\b", one_script(), re.M)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
        assert word not in one_script()


def test_the_command_writes_a_file_and_names_mistakes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["view", str(folder), "--html", str(out), "--most", "3"])
    assert result.exit_code == 0
    assert "16 rollouts, 3 of them" in result.stdout
    assert out.exists()
    for arguments, message in [([str(tmp_path)], "no journal"), ([str(folder)] * 2, "twice")]:
        result = CliRunner().invoke(app, ["view", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr
