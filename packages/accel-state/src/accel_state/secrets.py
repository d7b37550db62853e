"""Hides credentials in whatever is printed or logged: by the name of a setting, and by the form of a value. Torch-free.

Everything that shows settings uses this module: ``accel env``, ``accel doctor``, ``--dry_run``, ``accel config show``,
messages about configuration files, and the configuration that trackers receive.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"

# Words of a name whose value is always hidden, and those whose value is hidden if it is text that is not a number.
_STRONG = frozenset({
    *("secret", "secrets", "password", "passwd", "passphrase", "passwords", "pwd", "pass", "jwt", "credential"),
    *("credentials", "apikey", "apikeys", "authtoken", "accesskey", "secretkey", "privatekey", "webhook"),
})  # fmt: skip
_STRONG_ENDS = ("password", "passwd", "passphrase", "sshpass")  # PGPASSWORD
_WEAK = frozenset({
    *("key", "keys", "token", "auth", "authorization", "bearer", "cookie", "cookies", "sig", "signature"),
    *("pat", "salt", "hmac", "otp", "dsn", "sas"),
})  # fmt: skip
# `eos_token` and `image_token` name words of a vocabulary, `sort_key` a column.
_VOCABULARY = frozenset({
    *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "special", "start", "stop", "end"),
    *("decoder", "boi", "eoi", "prefix", "suffix", "middle", "sort", "group", "primary", "foreign", "text", "label"),
    *("input", "query", "metric", "data", "dataset", "feature", "class", "dict", "column", "cache", "public", "per"),
    *("by", "num", "head", "target", "prompt"),
})  # fmt: skip
_NOT_SECRET = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK"})
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")

_FORMS = re.compile(
    r"eyJ[\w-]{5,2000}\.[\w-]{5,}\.[\w-]*"  # JSON Web Token
    r"|\b(?:hf|ghp|gho|ghu|ghs|ghr|npm)_[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b|\bAIza[\w-]{30,}|\bya29\.[\w-]{16,}"
    r"|\b(?:sk|pk|rk|nvapi|pypi|dop_v1|dapi)-[\w-]{16,}|\bsk-[A-Za-z0-9]{16,}|\bxox[abeoprs]-[\w-]{10,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]{16,}|(?<=/api/webhooks/)\d+/[\w-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
_AUTHORIZATION = re.compile(
    r"""(\bauthorization["']?\s*[:=]\s*["']?\w+\s+|\bbearer\s+(?=\S*\d))[^\s"']+""", re.IGNORECASE
)
_IN_URL = re.compile(r"(?<=://)([^\s/@:]*):([^\s/@]+)@")
# A token in place of a user and a password, as services of errors and of source code take it.
_USER_IN_URL = re.compile(r"(?<=https://)(?!git@)[^\s/@:]+(?=@)|(?<=http://)[^\s/@:]+(?=@)", re.IGNORECASE)
# Commands whose password has no name: `curl -u user:X`, `sshpass -p X`, `mysql -pX`, `docker login -p X`, and
# `redis-cli -a X`.
_OF_COMMAND = re.compile(
    r"""((?<=\s)(?:-u|--user)[\s=]{1,9}["']?[^\s:"'=-][^\s:"']{1,99}:|\bsshpass\s{1,9}-p\s{0,9}["']?"""
    r"""|\bmysql\w{0,20}\s(?:[^|;&]{0,300}\s)?-p["']?|\blogin\s(?:[^|;&]{0,300}\s)?-p\s{1,9}["']?"""
    r"""|\bredis-cli\s(?:[^|;&]{0,300}\s)?-a\s{1,9}["']?)(?!\d+(?:\s|$))[^\s"']+"""
)
# As in `aws configure set aws_secret_access_key X`.
_SET = re.compile(
    r"""(?P<name>(?<=\bset\s)[A-Za-z_][\w.-]{0,199})(?P<sep>\s{1,99})(?P<value>"[^"]*"|'[^']*'|[^\s"'-][^\s"']*)"""
)
# NAME=value, NAME: value, --name value; the value may be quoted. Names are bounded, for the time that long texts take.
_ASSIGNED = re.compile(r"""(?P<name>[A-Za-z_][\w.-]{0,199})(?P<sep>["']?\s{0,99}[=:]\s{0,99})""")
_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s"',;&})\]]+""")
_FLAG = re.compile(r"""(?P<name>--?[A-Za-z][\w-]{0,199})(?P<sep>\s{1,99})(?P<value>"[^"]*"|'[^']*'|[^\s"'-][^\s"']*)""")
# The class of an exception in a message, as in `NoCredentialsError: Unable to locate credentials`.
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z](?:Error|Exception|Warning)")
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_LONG = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
# Share of neighbours of different kinds (lower case, upper case, digit): about 0.65 in random text, 0.2 in names.
_RANDOM = 0.42


def is_secret_name(name: str) -> bool:
    """Return True if the name of a variable, an option or a key says that its value is a secret."""
    return _strength(name) > 0


def _strength(name: str) -> int:
    """2: any value is hidden; 1: texts are hidden; 0: the name says nothing."""
    if name in _NOT_SECRET:
        return 0
    words = [word.lower() for word in _WORD.findall(name)]
    if _STRONG.intersection(words) or any(word.endswith(_STRONG_ENDS) for word in words):
        return 2
    while words and (words[-1].isdigit() or words[-1] in {"id", "value"}):
        words.pop()
    before, word = ["", "", *words][-2:]
    is_key_of_mapping = word in {"key", "keys"} and not before
    return int(word in _WEAK and before not in _VOCABULARY and not is_key_of_mapping)


def hide(name: str, value: Any, _within: tuple[int, ...] = ()) -> Any:
    """Return a setting's value for display: hidden if its name or its form says that it is a secret.

    Args:
        name: of the variable, option or key; what is in mappings, data classes and namespaces has names of its own.
        value: any value.

    Returns:
        The value itself if nothing in it is hidden, else a copy; what contains itself is "<cycle>" there.
    """
    if id(value) in _within:
        return "<cycle>"
    strength = _strength(name)
    is_group = isinstance(value, Mapping) or hasattr(value, "__dict__")
    if strength and value not in (None, "") and not (isinstance(value, bool) or is_group):
        is_number = isinstance(value, (int, float)) or (isinstance(value, str) and _NUMBER.fullmatch(value))
        if strength > 1 or not (is_number or isinstance(value, (list, tuple, set))):
            return HIDDEN
    if isinstance(value, str):
        return hide_in_text(value)
    if isinstance(value, (list, tuple)):
        within = (*_within, id(value))
        shown = hide_arguments(value, within) if strength == 0 else [hide(name, item, within) for item in value]
        unchanged = all(new is old for new, old in zip(shown, value, strict=True))
        return value if unchanged else tuple(shown) if isinstance(value, tuple) else shown
    fields = value if isinstance(value, Mapping) else vars(value) if _is_record(value) else {}
    copied = hide_values(fields, (*_within, id(value)))
    return value if all(copied[key] is fields[key] for key in fields) else copied


def _is_record(value: Any) -> bool:
    named = isinstance(value, (argparse.Namespace, types.SimpleNamespace)) or dataclasses.is_dataclass(value)
    return named and not isinstance(value, type) and hasattr(value, "__dict__")


def hide_values(settings: Mapping[Any, Any], _within: tuple[int, ...] = ()) -> dict[Any, Any]:
    """Return a copy of a mapping of names to values with secrets hidden, at any depth."""
    return {name: hide(str(name), value, _within) for name, value in settings.items()}


def hide_arguments(arguments: Sequence[Any], _within: tuple[int, ...] = ()) -> list[Any]:
    """Return a copy of a command line (or any list) with secrets hidden: ``--token=X``, ``--token X``, ``TOKEN=X``."""
    shown: list[Any] = []
    for before, item in zip(["", *arguments], arguments, strict=False):
        is_flag = isinstance(before, str) and before.startswith("-") and "=" not in before
        of_flag = is_flag and isinstance(item, str) and not item.startswith("-")
        shown.append(hide(before.lstrip("-") if of_flag else "", item, _within))
    return shown


def hide_in_text(text: str) -> str:
    """Return a text, such as a command or a message, with the secrets in it hidden."""
    original = text
    text = _FORMS.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\1:{HIDDEN}@", text)
    text = _USER_IN_URL.sub(HIDDEN, text)
    text = _OF_COMMAND.sub(rf"\1{HIDDEN}", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    text = _hide_assigned(text)
    text = _FLAG.sub(_hide_match, text)
    text = _SET.sub(_hide_match, text)
    text = _LONG.sub(_hide_random, text)
    return original if text == original else text


def _hide_assigned(text: str) -> str:
    parts, shown, place = [], 0, 0
    while (match := _ASSIGNED.search(text, place)) is not None:
        # What follows another name may be an assignment itself: `error: password=x`.
        place = match.end()
        is_exception = match["sep"] == ": " and _EXCEPTION.fullmatch(match["name"])
        strength = 0 if is_exception else _strength(match["name"])
        value = _VALUE.match(text, place) if strength else None
        if value is not None:
            place = value.end()
            if _is_hidden(value[0], strength):
                parts += [text[shown : value.start()], HIDDEN]
                shown = place
    return "".join([*parts, text[shown:]])


def _hide_match(match: re.Match[str]) -> str:
    strength = _strength(match["name"].lstrip("-"))
    return f"{match['name']}{match['sep']}{HIDDEN}" if strength and _is_hidden(match["value"], strength) else match[0]


def _is_hidden(value: str, strength: int) -> bool:
    value = value.strip("\"'")
    if not value or value in {"Bearer", "Basic"} or value.startswith(HIDDEN[:-1]):
        return False
    return strength > 1 or _NUMBER.fullmatch(value) is None


def _hide_random(match: re.Match[str]) -> str:
    text = _UUID.sub("", match[0])
    kinds = ["digit" if char.isdigit() else "upper" if char.isupper() else "lower" for char in text if char.isalnum()]
    if len(kinds) < 32 or len(set(kinds)) < 3:
        return match[0]
    changes = sum(first != second for first, second in itertools.pairwise(kinds))
    return HIDDEN if changes / (len(kinds) - 1) >= _RANDOM else match[0]
