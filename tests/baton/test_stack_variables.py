"""Which variables the processes of a stack get, and which a stack refuses. And what is said of a bad chat template."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

from baton.client.sync_client import Client
from baton.settings import load
from baton.stack import stack_plan
from baton.stack.local_stack import Stack, run
from common.config import UpSettings
from common.errors import ConfigError, StartupError, UnauthenticatedError
from common.model_files import broken_template
from tests.integration.stack import CALL_TIMEOUT_S, ClientOptions, running
from tests.integration.stack import Stack as RunningStack

SHARED = {"BATON_TLS_CERT": "c.pem", "BATON_TLS_KEY": "k.pem", "BATON_TLS_CA": "ca.pem"}
OF_ROUTER = {"BATON_API_KEYS_FILE": "keys", "BATON_MAX_REQUESTS": "7", "BATON_TLS_CLIENT_CA": "clients.pem"}
OF_WORKERS = {"BATON_MAX_WAITING_REQUESTS": "9", "BATON_METRICS_PORT": "0"}
OTHERS = {
    "BATON_NUM_BLOCKS": "5",  # the stack's own, and a flag of its workers
    "BATON_PREFILL": "2",  # a number here, addresses at a router
    "BATON_CONFIG": "/nowhere",
    "BATON_ROUTER": "10.0.0.1:1",  # clients'
    "BATON_TARGET_REQUESTS": "3",  # the autoscaler's
    "BATON_ROUTER_PORT": "tcp://10.0.0.1:80",  # Kubernetes'
    "HOME": "/root",
}


def test_each_child_gets_what_is_its_own() -> None:
    planned = stack_plan.plan(UpSettings(both=1), Path("/kv"), {**SHARED, **OF_ROUTER, **OF_WORKERS, **OTHERS})
    assert planned.variables == {
        "prefill-1": {**SHARED, **OF_WORKERS},
        "decode-1": {**SHARED, **OF_WORKERS},
        "worker-1": {**SHARED, **OF_WORKERS},
        "router": {**SHARED, **OF_ROUTER},
    }


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("BATON_HTTP_LISTEN", "127.0.0.1:8000", "cannot be passed on: the stack has --host and --http-port"),
        ("BATON_GRPC_LISTEN", "127.0.0.1:1", "cannot be passed on: the stack has --host and --grpc-port"),
        ("BATON_PROCESSES", "2", "cannot be passed on: the stack has --router-processes"),
        ("BATON_LISTEN", "127.0.0.1:1", "cannot be passed on: a stack chooses its workers' addresses"),
        ("BATON_ADVERTISE", "10.0.0.1:1", "cannot be passed on"),
        ("BATON_HEALTH_LISTEN", "127.0.0.1:1", "cannot be passed on"),
        ("BATON_METRICS_PORT", "9000", "cannot be passed on"),
        ("BATON_MAX_REQUESTS", "none", "should be a valid integer"),
        ("BATON_API_KEY_FILE", "keys", "no such setting, did you mean BATON_API_KEYS_FILE"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(variable: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}: .*{why}"):
        stack_plan.plan(UpSettings(), Path("/kv"), {variable: value})


def test_a_client_s_key_asks_nobody_for_one(caplog: pytest.LogCaptureFixture) -> None:
    stack_plan.plan(UpSettings(), Path("/kv"), {"BATON_API_KEY": "k"})
    assert ["BATON_API_KEYS_FILE" in record.message for record in caplog.records] == [True]
    caplog.clear()
    stack_plan.plan(UpSettings(), Path("/kv"), {"BATON_API_KEY": "k", "BATON_API_KEYS_FILE": "keys"})
    assert not caplog.records


def test_a_process_gets_its_variables_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_NUM_BLOCKS", "1")
    code = (
        "import os, sys; sys.exit(f'baton x: error: {[v for k, v in os.environ.items() if k.startswith(\"BATON_\")]}')"
    )
    stack = Stack({"odd": [sys.executable, "-c", code]}, 1.0, 60.0, variables={"odd": {"BATON_MAX_REQUESTS": "7"}})
    with pytest.raises(StartupError, match=r"^odd could not start: \['7'\]$"):
        run(stack, work=lambda _: 0)


def test_settings_of_the_web_are_the_stack_s_own() -> None:
    environ = {"BATON_CORS_ORIGINS": "https://a.example,https://b.example", "BATON_ROOT_PATH": "/llm"}
    settings = load(UpSettings, {"uds": "/run/baton.sock"}, environ=environ)
    command = stack_plan.plan(settings, Path("/kv"), environ).commands["router"]
    wanted = {"--cors-origins=https://a.example,https://b.example", "--root-path=/llm"}
    assert {*wanted, "--http-listen=unix:/run/baton.sock"} <= set(command)
    for bad in (UpSettings(uds="/a b"), UpSettings(uds="/run/b", router_processes=2)):
        with pytest.raises(ConfigError, match="--uds"):
            stack_plan.check(bad)


class Keyed(RunningStack):
    client_options = ClientOptions(api_key="sk-mine")


@pytest.mark.slow
def test_a_running_stack_with_keys_lets_nobody_else_in(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-mine name=mine\n")
    stack = Keyed(tmp_path, "--device=simulated", variables={"BATON_API_KEYS_FILE": str(tmp_path / "keys")})

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"prompt": "Hi", "max_tokens": 2}
        return httpx.post(
            f"{stack.http}/v1/completions", json=body, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False
        ).status_code

    with running(stack):
        assert [status(key) for key in ("sk-mine", "", "sk-wrong")] == [200, 401, 401]
        with stack.client() as client:
            assert client.generate("Hi", max_tokens=2).result().text
        with Client(stack.grpc, timeout=CALL_TIMEOUT_S) as nobody, pytest.raises(UnauthenticatedError):
            nobody.generate("Hi", max_tokens=2).result()


BAD = "{% if messages %}{{ messages }"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", BAD),
        ("tokenizer_config.json", json.dumps({"chat_template": BAD})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": BAD}]})),
        ("chat_template.json", json.dumps({"chat_template": BAD})),
    ],
)
def test_a_template_that_does_not_compile_is_named_with_its_file(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / file).write_text(content)
    assert f"the chat template of {file} cannot be compiled" in broken_template(tmp_path)


@pytest.mark.parametrize("content", ["{{ messages }}", BAD])
def test_a_template_that_compiles_or_is_not_used_is_not_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": content}))
    assert not broken_template(tmp_path)
