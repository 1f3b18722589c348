"""Pushing to the Hub: huggingface_hub against a server that notes what it is sent."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")

import ctrainer  # noqa: E402


class Hub(ThreadingHTTPServer):
    """Repositories as lists of commits, each (message, {path: content})."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: dict[str, object] = {}
        self.refuses = False
        self.goes_on = threading.Event()
        self.goes_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args) -> None:
        pass

    def answer(self, code: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if self.path == "/api/validate-yaml":  # of the model card
            return self.answer(200, {"errors": [], "warnings": []})
        found = re.fullmatch(r"/api/models/(.+)/(preupload|commit)/[^/]+", self.path)
        assert found, self.path
        self.server.goes_on.wait(60)
        if self.server.refuses:
            return self.answer(403, {"error": "no write access"})
        if found[2] == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in files
            ]
            return self.answer(200, {"files": modes})
        return self.commit(found[1], [json.loads(line) for line in body.splitlines()])

    def create(self, asked: dict) -> None:
        repo = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        self.server.commits.setdefault(repo, [])
        self.server.private[repo] = (
            asked.get("private") or asked.get("visibility") == "private"
        )
        self.answer(200, {"url": f"{self.server.url}/{repo}", "name": repo})

    def commit(self, repo: str, lines: list[dict]) -> None:
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        self.server.commits[repo].append((lines[0]["value"]["summary"], files))
        url = f"{self.server.url}/{repo}/commit/1"
        self.answer(200, {"commitUrl": url, "commitOid": "1", "success": True})


@pytest.fixture
def server(monkeypatch):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(hub.hf_api.api, "endpoint", server.url)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels=None):
        y = self.layer(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


def trained(folder: Path, callbacks=(), **options):
    rows = [{"x": torch.ones(2) * i, "labels": torch.tensor(1.0)} for i in range(8)]
    options = {"max_steps": 4, "save_steps": 2, "hub_token": "secret", **options}
    args = ctrainer.TrainingArguments(
        folder,
        push_to_hub=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = ctrainer.Trainer(Net(), args, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return trainer


def test_each_save_is_uploaded_and_the_end_with_a_card(server, tmp_path) -> None:
    trainer = trained(tmp_path / "mine", hub_always_push=True, hub_private_repo=True)
    assert trainer.hub_model_id == "somebody/mine"
    assert server.private["somebody/mine"] is True
    commits = server.commits["somebody/mine"]
    messages = [message for message, _ in commits]
    assert messages == [f"Training in progress, step {n}" for n in (2, 4)]
    trainer.push_to_hub("finished", license="mit")
    message, files = commits[-1]
    assert message == "finished"
    weights = tmp_path / "mine" / "model.safetensors"
    assert files["model.safetensors"] == weights.read_bytes()
    assert b"license: mit" in files["README.md"]
    assert not any("checkpoint" in name for name in files)
    # What an upload behind the training finds are the weights of a save, whole.
    saved = tmp_path.glob("mine/checkpoint-*/model.safetensors")
    assert commits[0][1]["model.safetensors"] in [path.read_bytes() for path in saved]


def test_a_card_keeps_the_tags_that_it_had(server, tmp_path) -> None:
    trainer = trained(tmp_path / "run", hub_strategy="end")
    trainer.model.model_tags = ["of-the-model"]
    trainer.push_to_hub(tags="first")
    trainer.push_to_hub(tags=["second"])
    card = hub.ModelCard.load(tmp_path / "run" / "README.md")
    assert {"first", "second", "of-the-model"} <= set(card.data.tags)


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("end", set()),
        ("every_save", {""}),
        ("checkpoint", {"", "last-checkpoint"}),
        ("all_checkpoints", {"", "checkpoint-2", "checkpoint-4"}),
    ],
)
def test_strategies(server, tmp_path, strategy, folders) -> None:
    trained(tmp_path / "run", hub_strategy=strategy, hub_always_push=True)
    found = {
        name.rpartition("/")[0]
        for _, files in server.commits["somebody/run"]
        for name in files
        if not name.startswith(".")
    }
    assert found == folders


@pytest.mark.parametrize(("always", "uploads"), [(False, 1), (True, 2)])
def test_a_save_during_an_upload(server, tmp_path, always, uploads) -> None:
    server.goes_on.clear()

    class GoesOn(ctrainer.TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            server.goes_on.set()

    if always:  # the second save waits for the first one's upload
        threading.Timer(2.0, server.goes_on.set).start()
    trained(tmp_path / "run", [] if always else [GoesOn()], hub_always_push=always)
    assert len(server.commits["somebody/run"]) == uploads


def test_a_failed_upload_is_reported_and_loses_nothing(
    server, tmp_path, caplog
) -> None:
    server.refuses = True
    trainer = trained(tmp_path / "run", hub_model_id="team/model")
    assert trainer.state.global_step == 4
    assert "push_to_hub: an upload of a checkpoint failed" in caplog.text
    with pytest.raises(RuntimeError, match=r"(?s)uploading .*run failed.*saved there"):
        trainer.push_to_hub()
    assert (tmp_path / "run" / "README.md").exists()
    assert server.commits == {"team/model": []}


def test_without_a_network_the_error_says_what_to_do(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(hub.hf_api.api, "endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(RuntimeError, match=r"the repository 'run' failed.*look"):
        trained(tmp_path / "run")
