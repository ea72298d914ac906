"""config.yaml: lines, the text of numbers, and dangerous contents that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.core.errors import ConfigError
from footplate.jobs.spec.document import Scalar
from footplate.jobs.spec.yamlfile import LONGEST, load, parse


@pytest.mark.parametrize("text", ["010", "0x1F", "0b11", "1:30", "1:30.5", "-0o7"])
def test_a_number_that_is_not_decimal_stays_text(text):
    assert parse(f"a: {text}").values == {"a": text}


def test_every_key_and_item_has_its_line():
    document = parse("a: 1\n# nothing\nb:\n  c: [x,\n      y]\n  d: {e: f}\n")
    assert document.lines == {
        ("a",): 1,
        ("b",): 3,
        ("b", "c"): 4,
        ("b", "c", 0): 4,
        ("b", "c", 1): 5,
        ("b", "d"): 6,
        ("b", "d", "e"): 6,
    }
    assert document.place(("b", "d", "missing")) == "config.yaml line 6"


def test_numbers_and_truth_values_keep_their_text():
    values = parse("a: 2.10\nb: 31\nc: yes\nd: '2.10'\ne: 1_000\nf:\n").values
    assert values == {
        "a": Scalar(2.1, "2.10"),
        "b": Scalar(31, "31"),
        "c": Scalar(True, "yes"),
        "d": "2.10",
        "e": Scalar(1000, "1_000"),
        "f": None,
    }


def test_json_is_taken_too():
    assert parse('{"trainingInput": {"args": ["--a", "b"]}}').values == {"trainingInput": {"args": ["--a", "b"]}}


def test_characters_that_json_writes_as_two_escapes_are_one():
    assert parse(r'{"a": "\ud83d\ude82"}').values == {"a": "\N{STEAM LOCOMOTIVE}"}


REFUSED = {
    "half of a character": ('a: 1\nb: ["\\ud83d"]', "line 2: an escape"),
    "an alias": ("a: &x [1]\nb: *x", "line 1: anchors"),
    "a bomb": ("a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b]", "anchors"),
    "a tag": ("a: !!python/object/apply:os.system [ls]", "line 1: tags"),
    "a tag of one's own": ("a: !thing x", "line 1: tags"),
    "two documents": ("a: 1\n---\nb: 2", "line 2: a second document"),
    "depth": ("[" * 5000, "expected at most 20 levels of nesting"),
    "a book": ("a," * 2**17 + "a", "more than 262,144 characters: expected a job's configuration"),
    "a list": ("- a\n- b", "expected keys with values, such as trainingInput:, found a list."),
    "a word": ("hello", 'found "hello"'),
    "a mapping as key": ("{a: b}: c", "expected a word as key"),
    "an open bracket": ("a: [1", "isn't YAML: line"),
    "a tab": ("a:\n\t- b", "isn't YAML: line 2"),
    "a control character": ("a: \x00", "isn't YAML"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_spec_needs_is_refused(kind):
    text, message = REFUSED[kind]
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert str(raised.value).startswith("config.yaml")
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["9" * 5000, "0b_", "1:99:" + "9" * 4400, "2020-13-45"])
def test_a_number_that_python_cannot_make_stays_text(text):
    assert parse(f"a: {text}").values == {"a": text}


def test_infinity_is_a_number():
    assert parse("a: .inf").values == {"a": Scalar(float("inf"), ".inf")}


@pytest.mark.parametrize(
    ("data", "message"), [(b"a: \xff", "isn't UTF-8 text"), ("é".encode() * (LONGEST + 1), "more than 262,144")]
)
def test_files_that_are_no_configuration(tmp_path, data, message):
    (tmp_path / "c.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        load(str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("name", ["nowhere.yaml", ".", "a\0b", "/dev/null/x"])
def test_paths_that_are_no_files(name):
    with pytest.raises(ConfigError, match="can't be read"):
        load(name)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_a_document_or_one_mistake(text):
    try:
        said = f"config.yaml: {parse(text).values}"
    except ConfigError as error:
        said = str(error)
    assert said.startswith("config.yaml")
