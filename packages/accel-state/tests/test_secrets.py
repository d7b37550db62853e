"""Credentials in what is printed, by name and by form, and settings that look similar and are shown."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import random
import string
import time
import uuid
from typing import Any

import pytest

from accel_state.secrets import HIDDEN, hide, hide_arguments, hide_in_text, hide_values, is_secret_name

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "name",
    [
        *("SLURM_JWT", "ACCELERATE_PWD", "HTTP_AUTH", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASS"),
        *(
            "AWS_ACCESS_KEY_ID",
            "apiKey",
            "aws_secret_access_key",
            "password",
            "hub_token",
            "private-key",
            "client.secret",
        ),
        *("GOOGLE_APPLICATION_CREDENTIALS", "azureSasToken", "cookie", "PASSPHRASE"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name) and hide(name, "value") == HIDDEN
    assert hide(name, None) is None and hide(name, "") == "" and hide(name, True) is True


@pytest.mark.parametrize(
    "name",
    [
        *("PWD", "OLDPWD", "SSH_AUTH_SOCK", "tokenizer", "max_tokens", "eos_token", "pad_token_id", "sort_key", "key"),
        *("num_key_value_heads", "token_type", "author", "keyword", "compass", "monkey", "key_projection", "passes"),
    ],
)
def test_names_that_look_similar(name: str) -> None:
    assert not is_secret_name(name) and hide(name, "value") == "value"


def test_numbers() -> None:
    assert hide("token", 5) == 5 and hide("HF_TOKEN", "512") == "512", "a count of tokens"
    assert hide("password", 1234) == HIDDEN and hide("password", "1234") == HIDDEN


FORMS = [
    JWT,
    "hf_" + "aB3d" * 8,
    "AKIA" + "ABCD1234EFGH5678",
    "ghp_" + "a1B2" * 9,
    "sk-proj-" + "a1B2c3D4" * 4,
    "glpat-" + "a1B2c3D4" * 3,
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", FORMS)
@pytest.mark.parametrize("template", ["{}", "run --x {} --y", "a={};b", "say '{}'", "http://host/?q={}&z=1"])
def test_forms_of_secrets(secret: str, template: str) -> None:
    shown = hide_in_text(template.format(secret))
    assert secret not in shown and HIDDEN in shown and hide("anything", template.format(secret)) == shown


def test_long_random_texts() -> None:
    dice = random.Random(0)
    drawn = ["".join(dice.choices(string.ascii_letters + string.digits, k=40)) for _ in range(200)]
    drawn += [base64.b64encode(dice.randbytes(36)).decode() for _ in range(200)]
    assert sum(hide_in_text(f"x {text} y") == f"x {HIDDEN} y" for text in drawn) >= 392


@pytest.mark.parametrize(
    "text",
    [
        f"CUDA_VISIBLE_DEVICES=GPU-{uuid.UUID(int=2**127 + 12345)}",
        "/srv/User1/Projects/Model7B/CheckpointsFinal/NousResearchMetaLlama38BInstruct",
        "da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "NCCL_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=4 python train.py --max_tokens 512 --tokenizer gpt2 --eos_token </s>",
        "torch.nn.modules.transformer.TransformerEncoderLayer.self_attn.out_proj.weight",
        "the learning rate 1e-4 is not allowed: token expected",
        "https://example.org/a/b?c=d",
        "(NoCredentialsError: Unable to locate credentials)",
        "botocore.exceptions.TokenRetrievalError: Error when retrieving token from sso",
    ],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert hide_in_text(text) is text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("curl https://me:pw@host/x", f"curl https://me:{HIDDEN}@host/x"),
        ("export HF_TOKEN=abc; ls", f"export HF_TOKEN={HIDDEN}; ls"),
        ('{"api_key": "a b", "lr": 1}', f'{{"api_key": {HIDDEN}, "lr": 1}}'),
        ("run --api-key abc --lr 1", f"run --api-key {HIDDEN} --lr 1"),
        ("run --api-key=abc --lr 1", f"run --api-key={HIDDEN} --lr 1"),
        ("Authorization: Bearer abc1", f"Authorization: Bearer {HIDDEN}"),
        ("Authorization: Basic YTpi", f"Authorization: Basic {HIDDEN}"),
        ("MY_PASSWORD_Error: abc", f"MY_PASSWORD_Error: {HIDDEN}"),
        ("error: password=abc", f"error: password={HIDDEN}"),
        ("NoCredentialsError: password=abc", f"NoCredentialsError: password={HIDDEN}"),
        ("password: 'two words' next", f"password: {HIDDEN} next"),
    ],
)
def test_secrets_in_text(text: str, shown: str) -> None:
    assert hide_in_text(text) == shown
    assert hide_in_text(shown) == shown, "hiding twice changes nothing"


def test_arguments() -> None:
    assert hide_arguments(["x.py", "--token", "abc", "--lr", "1", "KEY_TOKEN=z", "--token=y"]) == [
        *("x.py", "--token", HIDDEN, "--lr", "1", f"KEY_TOKEN={HIDDEN}", f"--token={HIDDEN}"),
    ]


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    hub_token: str | None = None


def test_nested_settings() -> None:
    settings: dict[Any, Any] = {"lr": 1, "data": {"s3": {"secret": "x"}, 3: ["a", "--token", "b"]}, "none": None}
    assert hide_values(settings) == {
        "lr": 1,
        "data": {"s3": {"secret": HIDDEN}, 3: ["a", "--token", HIDDEN]},
        "none": None,
    }
    plain, own = Settings(), Settings(hub_token="x")
    assert hide("run", plain) is plain and hide("run", own) == {"lr": 0.1, "hub_token": HIDDEN}
    assert own.hub_token == "x" and hide("run", argparse.Namespace(password="y")) == {"password": HIDDEN}
    assert hide("api_keys", ["a", "b"]) == [HIDDEN, HIDDEN] and hide("dataset_keys", ["a"]) == ["a"]
    assert hide("shape", (1, 2)) == (1, 2) and hide("config", {"eos_token": "</s>"}) == {"eos_token": "</s>"}


def test_what_contains_itself_is_hidden_too() -> None:
    settings: dict[str, Any] = {"token": "abc", "lr": 0.1}
    settings["again"] = [settings]
    inner = {"token": HIDDEN, "lr": 0.1, "again": "<cycle>"}
    assert hide_values(settings) == {"token": HIDDEN, "lr": 0.1, "again": [inner]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://s3cret@sentry.io/1", "https://(hidden)@sentry.io/1"),
        ("https://git@github.com/x", "https://git@github.com/x"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("curl -u user:s3cret https://x", "curl -u user:(hidden) https://x"),
        ("docker run -u 1000:1000 image", "docker run -u 1000:1000 image"),
        ("python -u C:/x.py a:b", "python -u C:/x.py a:b"),
        ("sshpass -p s3cret ssh x", "sshpass -p (hidden) ssh x"),
        ("mysql -u root -ps3cret db", "mysql -u root -p(hidden) db"),
        ("docker login -u me -p s3cret host", "docker login -u me -p (hidden) host"),
        ("docker login -p 8080", "docker login -p 8080"),
        ("redis-cli -h x -a s3cret ping", "redis-cli -h x -a (hidden) ping"),
        ("aws configure set aws_secret_access_key s3/cret", "aws configure set aws_secret_access_key (hidden)"),
        ("git config set user.name joe", "git config set user.name joe"),
        ("PGPASSWORD=s3cret psql", "PGPASSWORD=(hidden) psql"),
        ("https://hooks.slack.com/services/T00000000/B0000000/x1", "https://hooks.slack.com/services/(hidden)"),
        ("https://discord.com/api/webhooks/12345/abcdEFGHijklMNOP", "https://discord.com/api/webhooks/(hidden)"),
        ("torchrun -p 29500", "torchrun -p 29500"),
        ("error: password=s3cret", "error: password=(hidden)"),
    ],
)
def test_secrets_without_a_name(text: str, shown: str) -> None:
    assert hide_in_text(text) == shown


@pytest.mark.parametrize("name", ["CI_PAT", "ACCELERATE_SALT", "X_HMAC", "SENTRY_DSN", "SLACK_WEBHOOK_URL"])
def test_further_names(name: str) -> None:
    assert hide(name, "s3cret") == HIDDEN


@pytest.mark.parametrize(
    "part", ["a:", "a-", "a", "mysql x ", "login ", "set a ", "eyJ", "token=", "-u a:", "https://", '"', "--a "]
)
def test_long_texts_take_no_long_time(part: str) -> None:
    """A text of a hostile file: no expression goes back and forth in it, and nothing recurses."""
    began = time.process_time()
    hide_in_text(part * (60_000 // len(part)))
    assert time.process_time() - began < 3
