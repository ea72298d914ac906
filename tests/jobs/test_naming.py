"""Names stay in their folder, and none can be taken for an option or has a meaning to a shell."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.jobs.spec import naming

NASTY = st.one_of(st.text(max_size=40), st.text("./\\-~$;`|&\0\n ab_1:", max_size=20))


@settings(deadline=None)
@given(NASTY)
def test_a_job_name_never_leaves_its_folder(name):
    try:
        good = naming.job_name(name)
    except ValueError:
        return
    assert (Path("/jobs") / good).resolve().parent == Path("/jobs")
    assert good.isascii()
    assert good[0].isalpha()
    assert not set(good) & set("./\\-~$;`|& \n")


@pytest.mark.parametrize("name", ["demo_job", "A", "census_2021_01", "x" * 128])
def test_job_names_as_ai_platform_had_them(name):
    assert naming.job_name(name) == name


@pytest.mark.parametrize("name", ["", "1job", "my-job", "a/b", "..", "a b", "jöb", "x" * 129, "a\n", "_a"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        naming.job_name(name)


@pytest.mark.parametrize(
    "uri",
    [
        "gs://bucket/a/b",
        "s3://my.bucket-1/",
        "gs://abc",
        "abfss://lake@account.dfs.core.windows.net/a/b",
        "abfss://lake/a",
        "runs/job",
        "/tmp/x",
        "file:///tmp/x",
    ],
)
def test_job_directories(uri):
    assert naming.location(uri) == uri


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "gs://",
        "gs:///a",
        "gs://B/a",
        "s3://a",
        "abfss://lake@account/a",
        "abfss://lake@-account.dfs.core.windows.net/a",
        "abfss://lake/../a",
        "http://x/y",
        "ftp://x",
        "file://x",
        "-rf",
        "gs://abc/../d",
        "a\0b",
        "a\nb",
    ],
)
def test_other_job_directories_are_refused(uri):
    with pytest.raises(ValueError):
        naming.location(uri)


@settings(deadline=None)
@given(NASTY)
def test_modules_images_and_labels_mean_nothing_to_a_shell(text):
    for form in (naming.module, naming.image, naming.version, naming.label_key, naming.label_value):
        try:
            good = form(text)
        except ValueError:
            continue
        assert good == text
        assert not good.startswith("-") or form is naming.label_value
        assert not set(good) & set("$;`|& \n\0\\~")


@settings(deadline=None)
@given(st.integers(1, 10**6), st.sampled_from("smhd"))
def test_durations_become_seconds(count, unit):
    size = {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    assert naming.duration(f"{count}{unit}") == f"{count * size}s"


@settings(deadline=None)
@given(st.decimals("0.000000001", 10**6, places=9))
def test_seconds_keep_their_fraction(count):
    assert Decimal(naming.duration(f"{count:f}s").removesuffix("s")) == count


@pytest.mark.parametrize("text", ["", "2", "2w", "-1s", "0s", "1e3s", "s", "1.s", "9" * 20 + "s", "٣s"])
def test_other_durations_are_refused(text):
    with pytest.raises(ValueError, match="expected a time"):
        naming.duration(text)
