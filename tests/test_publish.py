"""`easyrl export --push`, against a hub that listens on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from easyrl.cli import app
from easyrl.config import load_config
from easyrl.observe.history import History
from easyrl.observe.model_card import model_card
from easyrl.runtime.run_folder import read_lines
from runs import Finished

TOKEN = "hf_of_the_test"


class FakeHub(BaseHTTPRequestHandler):
    """The requests by which the hub's client creates a repository and commits files to it."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    objects: dict[str, bytes]
    created: list[dict[str, Any]]

    def do_HEAD(self) -> None:
        self.answer({})

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == f"Bearer {TOKEN}"
        self.answer({"name": "me", "type": "user"}, status=200 if is_known else 401)

    def do_PUT(self) -> None:
        self.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body, address = self.body(), f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            name = "/".join(("me", self.created[-1]["name"]))
            self.answer({"url": f"{address}/{name}", "name": name, "id": "1"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            mode = {True: "lfs", False: "regular"}
            files = [
                {"path": n, "uploadMode": mode[n.endswith("s")], "shouldIgnore": False}
                for n in names
            ]
            self.answer({"files": files})
        elif self.path.endswith("/objects/batch"):
            found = json.loads(body)["objects"]
            for each in found:
                each["actions"] = {"upload": {"href": f"{address}/objects/{each['oid']}"}}
            self.answer({"transfer": "basic", "objects": found})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.objects[value["oid"]]
            self.answer(
                {"success": True, "commitOid": "1", "commitUrl": f"{address}/me/x/commit/1"}
            )

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, content: Any, status: int = 200) -> None:
        text = b"" if self.command == "HEAD" else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[FakeHub], str]]:
    handler = type("Hub", (FakeHub,), {"files": {}, "objects": {}, "created": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def export(*words: str, endpoint: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    hub = {"HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "easyrl", "export", *words],
        env={**os.environ, **hub, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_model_of_a_run_is_published_with_its_card(
    finished_run: Finished, hub: tuple[type[FakeHub], str], tmp_path: Path
) -> None:
    handler, endpoint = hub
    done = export(str(finished_run.folder), "--push", "me/sums", endpoint=endpoint)
    assert done.returncode == 0, done.stderr
    assert f"{endpoint}/me/" in done.stdout
    (created,) = handler.created
    assert created["name"] == "sums"
    for name, content in handler.files.items():
        (tmp_path / name).write_bytes(content)
    model = finished_run.folder / "model"
    assert {path.name for path in model.iterdir()} | {"README.md"} == set(handler.files)
    assert handler.files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
    card = handler.files["README.md"].decode()
    summary = json.loads((finished_run.folder / "summary.json").read_text())
    lines = read_lines(finished_run.folder / "metrics.jsonl")
    for fact in (
        *("`arithmetic`", "easyrl.data.tasks:score", "num_generations: 4", "3 iterations"),
        *(f"{summary[key]:.3f}" for key in ("accuracy_before", "accuracy_after")),
        *(f"{line['reward']:.3f}" for line in (lines[0], lines[-1])),
    ):
        assert fact in card
    assert not (model / "README.md").exists()


def test_a_checkpoint_is_published_with_what_is_known_up_to_it(
    finished_run: Finished, hub: tuple[type[FakeHub], str]
) -> None:
    handler, endpoint = hub
    checkpoint = min((finished_run.folder / "checkpoints").glob("[0-9]"))
    done = export(str(checkpoint), "--push", "me/sums", endpoint=endpoint)
    assert done.returncode == 0, done.stderr
    assert {"model.safetensors", "config.json"} < set(handler.files)
    assert f"{checkpoint.name} iterations" in handler.files["README.md"].decode()


@pytest.mark.parametrize("words", [["DIR", "--push", "me/sums"], ["--push", "no name"], []])
def test_an_export_needs_either_a_folder_or_a_repository(
    words: list[str], finished_run: Finished
) -> None:
    result = CliRunner().invoke(app, ["export", str(finished_run.folder), *words])
    assert result.exit_code == 2 and "OWNER/NAME" in result.stderr


def test_a_refused_token_a_silent_hub_and_a_folder_without_a_run_are_reported(
    finished_run: Finished, hub: tuple[type[FakeHub], str], tmp_path: Path
) -> None:
    run, push = str(finished_run.folder), ("--push", "me/sums")
    for done, expected in (
        (export(run, *push, endpoint=hub[1], token="wrong"), "hf auth login"),
        (export(run, *push, endpoint="http://127.0.0.1:9"), "cannot be reached"),
        (export(str(tmp_path), *push, endpoint=hub[1]), str(tmp_path)),
    ):
        assert done.returncode == 2 and expected in done.stderr
        assert "Traceback" not in done.stderr and not hub[0].created


def test_a_card_names_the_hubs_sources_and_hides_local_folders() -> None:
    config = load_config(
        words=[
            *("model.path=Qwen/Qwen3-0.6B", "output.dir=/home/ann/run"),
            "data.dataset=[gsm8k, /home/ann/data.jsonl, owner/rows:main:train]",
            "reward.functions=[/home/ann/my_rewards.py:correct]",
        ]
    )
    lines = {n + 1: {"reward": n / 10, "eval/accuracy": None} for n in range(10)}
    card = model_card(History(Path(), config, lines=lines), "me/sums")
    _, metadata, text = card.split("---\n", 2)
    found = yaml.safe_load(metadata)
    assert found["base_model"] == "Qwen/Qwen3-0.6B"
    assert found["datasets"] == ["openai/gsm8k", "owner/rows"]
    assert "/home" not in card and "my_rewards.py:correct" in text and "data.jsonl" in text
    assert "0.200 → 0.700" in text  # of five iterations each
    assert "accuracy" not in text
