"""Configurations of any words and bytes load, or are refused by name."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from eagle3_ray.config import Config, ConfigError, keys, load

_KEYS = [name for name, _ in keys()]
_VALUES = st.one_of(
    st.text(max_size=40),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "2026-13-45",
            "!!int x",
            "!!bool x",
            "!!python/object/apply:os.system [ls]",
            "0x_",
            "0b_",
            "~no-such-user/x",
            "[" * 300,
            *[
                "{a: &x [*x]}",
                "&a [*a]",
                "0x" + "f" * 5000,
                "1" * 5000,
                "null",
                "[]",
                "{}",
                "a,b",
                "\0",
                "http://u:p@h",
            ],
        ]
    ),
)
_WORDS = st.builds("{}={}".format, st.one_of(st.sampled_from(_KEYS), st.text(max_size=20)), _VALUES)


def loaded(source: str, words: list[str]) -> Config | None:
    try:
        return load(source, words)
    except ConfigError:
        return None


@given(st.lists(_WORDS, max_size=4))
def test_any_words_are_taken_or_refused(words: list[str]) -> None:
    config = loaded("smollm2-cpu", words)
    assert config is None or config == Config.model_validate(config.model_dump())


@given(st.one_of(st.binary(max_size=200), st.text(alphabet="a:-[]{}&*!|>#'\"\n 01,?%@`~", max_size=80).map(str.encode)))
def test_any_file_is_taken_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    loaded(str(path), [])


@given(st.text(max_size=400))
def test_any_name_of_a_preset_is_taken_or_refused(source: str) -> None:
    loaded(source, [])
