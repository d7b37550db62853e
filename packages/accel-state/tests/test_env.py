"""Readers of environment variables, and what puts them back."""

from __future__ import annotations

import asyncio
import os
import unittest

import pytest

from accel_state import env
from accel_state.errors import ConfigurationError


@pytest.mark.parametrize("word", ["y", "yes", "T", "TRUE", "on", "1", " true "])
def test_true_words(word: str) -> None:
    assert env.str_to_bool(word) == 1 and not isinstance(env.str_to_bool(word), bool)
    assert env.str_to_bool(word, to_bool=True) is True


@pytest.mark.parametrize("word", ["n", "No", "f", "false", "OFF", "0"])
def test_false_words(word: str) -> None:
    assert env.str_to_bool(word) == 0 and not isinstance(env.str_to_bool(word), bool)
    assert env.str_to_bool(word, to_bool=True) is False


@pytest.mark.parametrize("word", ["", "maybe", "2", "truee"])
def test_other_words_are_refused_with_the_allowed_ones(word: str) -> None:
    with pytest.raises(ValueError, match="Allowed: y, yes"):
        env.str_to_bool(word)


def test_parse_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_FLAG", raising=False)
    assert env.parse_flag_from_env("A_FLAG") is False
    assert env.parse_flag_from_env("A_FLAG", default=True) is True
    monkeypatch.setenv("A_FLAG", "on")
    assert env.parse_flag_from_env("A_FLAG") is True
    monkeypatch.setenv("A_FLAG", "")
    assert env.parse_flag_from_env("A_FLAG", default=True) is True
    monkeypatch.setenv("A_FLAG", "maybe")
    with pytest.raises(ConfigurationError, match="A_FLAG.*'maybe'"):
        env.parse_flag_from_env("A_FLAG")


def test_parse_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_CHOICE", raising=False)
    assert env.parse_choice_from_env("A_CHOICE") == "no"
    assert env.parse_choice_from_env("A_CHOICE", default="x") == "x"
    monkeypatch.setenv("A_CHOICE", "fp16")
    assert env.parse_choice_from_env("A_CHOICE") == "fp16"


def test_get_int_takes_the_first_that_is_set_and_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST", "-1")
    monkeypatch.setenv("SECOND", "0")
    monkeypatch.setenv("THIRD", "7")
    assert env.get_int_from_env(["UNSET_XYZ", "FIRST", "SECOND", "THIRD"], 9) == 0
    assert env.get_int_from_env(["UNSET_XYZ"], 9) == 9
    monkeypatch.setenv("FIRST", "two")
    with pytest.raises(ConfigurationError, match="FIRST='two' is not an integer"):
        env.get_int_from_env(["FIRST"], 9)


def test_are_libraries_initialized() -> None:
    assert env.are_libraries_initialized("os", "no_such_library", "pytest") == ["os", "pytest"]


def test_patch_environment_restores_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_OLD", "before")
    monkeypatch.delenv("ACCELERATE_NEW", raising=False)
    with pytest.raises(KeyError), env.patch_environment(accelerate_old=1, ACCELERATE_NEW=True):
        assert os.environ["ACCELERATE_OLD"] == "1"
        assert os.environ["ACCELERATE_NEW"] == "True"
        raise KeyError
    assert os.environ["ACCELERATE_OLD"] == "before"
    assert "ACCELERATE_NEW" not in os.environ


def test_patch_environment_survives_a_variable_that_the_block_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_NEW", raising=False)
    with env.patch_environment(accelerate_new=1):
        del os.environ["ACCELERATE_NEW"]
    assert "ACCELERATE_NEW" not in os.environ


def test_clear_environment() -> None:
    before = dict(os.environ)
    with env.clear_environment():
        assert not os.environ
        os.environ["DROPPED"] = "1"
    assert dict(os.environ) == before


def test_purge_restores_what_a_function_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "before")
    monkeypatch.setenv("ACCELERATE_REMOVED", "before")

    @env.purge_accelerate_environment
    def change(fail: bool) -> str:
        """Changes variables."""
        os.environ.update(ACCELERATE_KEPT="after", ACCELERATE_ADDED="1", UNRELATED_XYZ="stays")
        del os.environ["ACCELERATE_REMOVED"]
        if fail:
            raise KeyError
        return "done"

    def check() -> None:
        assert os.environ["ACCELERATE_KEPT"] == os.environ["ACCELERATE_REMOVED"] == "before"
        assert "ACCELERATE_ADDED" not in os.environ
        assert os.environ.pop("UNRELATED_XYZ") == "stays"

    assert change(False) == "done" and change.__doc__ == "Changes variables."
    check()
    with pytest.raises(KeyError):
        change(True)
    check()


def test_purge_of_a_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_ADDED", raising=False)

    @env.purge_accelerate_environment
    async def change() -> int:
        os.environ["ACCELERATE_ADDED"] = "1"
        await asyncio.sleep(0)
        return 3

    assert asyncio.run(change()) == 3
    assert "ACCELERATE_ADDED" not in os.environ


def test_purge_of_a_class_covers_its_tests_and_leaves_their_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_SET_UP", raising=False)
    monkeypatch.delenv("ACCELERATE_IN_TEST", raising=False)
    seen = []

    @env.purge_accelerate_environment
    class Case(unittest.TestCase):
        def setUp(self) -> None:
            os.environ["ACCELERATE_SET_UP"] = "1"

        def tearDown(self) -> None:
            seen.append("ACCELERATE_IN_TEST" in os.environ)
            os.environ.pop("ACCELERATE_SET_UP")

        def test_it(self) -> None:
            seen.append(os.environ["ACCELERATE_SET_UP"])
            os.environ["ACCELERATE_IN_TEST"] = "1"

    assert Case("test_it").run() is not None
    assert seen == ["1", False]


def test_purge_of_a_class_covers_its_subclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["ACCELERATE_INHERITED", "ACCELERATE_ADDED", "ACCELERATE_STATIC", "ACCELERATE_CLASS"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    made = []

    @env.purge_accelerate_environment
    class Base:
        def __init_subclass__(cls, **kwargs: object) -> None:
            made.append((cls.__name__, kwargs))

        def test_inherited(self) -> None:
            os.environ["ACCELERATE_INHERITED"] = "1"

        @staticmethod
        def test_static() -> None:
            os.environ["ACCELERATE_STATIC"] = "1"

    class Derived(Base, option=3):
        def test_added(self) -> None:
            os.environ["ACCELERATE_ADDED"] = "1"

        @classmethod
        def test_class(cls) -> str:
            os.environ["ACCELERATE_CLASS"] = "1"
            return cls.__name__

    case = Derived()
    case.test_inherited()
    case.test_added()
    Base.test_static()
    assert case.test_class() == "Derived"
    assert not set(names) & set(os.environ)
    assert made == [("Derived", {"option": 3})]


def test_convert_dict_to_env_variables() -> None:
    with pytest.warns(UserWarning, match="BAD"):
        lines = env.convert_dict_to_env_variables({"GOOD": "value", "NUMBER": 3, "BAD": "a b"})
    assert lines == ["GOOD=value\n", "NUMBER=3\n"]
    for bad in ["a;b", "a\nb", "", "<"]:
        with pytest.warns(UserWarning, match="left out"):
            assert env.convert_dict_to_env_variables({"KEY": bad}) == []
