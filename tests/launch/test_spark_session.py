"""Checks of a present or missing Spark session, without starting one."""

from __future__ import annotations

import sys

import pytest

from footplate.core.errors import ConfigError, LaunchError, MissingExtra
from footplate.launch.cluster.spark import SparkPlacement, parse_failure
from footplate.launch.cluster.spark_session import check_settings, driver_host, expected_executors


def test_dynamic_allocation_is_refused_where_spark_has_it():
    check_settings({"spark.dynamicAllocation.enabled": "true", "spark.master": "local[2]"}.get)
    with pytest.raises(ConfigError, match=r"spark.dynamicAllocation.enabled=true.*spark.executor.instances"):
        check_settings({"spark.dynamicAllocation.enabled": "true", "spark.master": "yarn"}.get)


def test_how_many_executors_a_session_waits_for():
    assert expected_executors("local", None) == 0
    assert expected_executors("local[*]", "3") == 0
    assert expected_executors("local-cluster[2,1,1024]", None) == 2
    assert expected_executors("k8s://https://host:443", "8") == 8
    assert expected_executors("spark://host:7077", None) is None


def test_the_failure_of_a_stage_is_read_from_the_exception_of_its_job():
    stage = (
        "Job aborted due to stage failure: Could not recover … barrier task ResultTask(3, 1) finished unsuccessfully.\n"
    )
    lost = parse_failure(
        stage + "ExecutorLostFailure (executor 1 exited) Reason: code 137\nDriver stacktrace:\n\tat org"
    )
    assert (lost.text, lost.raised) == ("ExecutorLostFailure (executor 1 exited) Reason: code 137", False)
    raised = parse_failure(
        stage + "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
        '  File "worker.py", line 1, in main\n    call()\nValueError: too\nlarge\n SQLSTATE: 38000\n\n\tat org.apache'
    )
    assert (raised.text, raised.raised) == ("ValueError: too", True)
    assert parse_failure("Job 1 cancelled\n\tat org").text == "Job 1 cancelled"
    assert parse_failure(" \n").text == "the job is gone"


def test_a_driver_host_of_another_machine_is_refused():
    assert (
        driver_host({"spark.master": "local-cluster[2,1,1024]", "spark.driver.host": "192.0.2.77"}.get) == "127.0.0.1"
    )
    with pytest.raises(
        ConfigError, match=r"spark.driver.host=192.0.2.77: .*it can't listen.*an address of this machine"
    ):
        driver_host({"spark.master": "spark://host:7077", "spark.driver.host": "192.0.2.77"}.get)


def test_without_a_session_it_is_said_how_to_get_one_or_do_without():
    with pytest.raises(LaunchError, match=r"no Spark session is active.*getOrCreate\(\).*np=-2"):
        SparkPlacement()


def test_spark_connect_is_refused_with_what_to_use_instead(monkeypatch):
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")  # as PySpark does when it makes such a session
    with pytest.raises(ConfigError, match=r"session of Spark Connect: .*classic mode.*\"local\""):
        SparkPlacement()


def test_without_pyspark_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(MissingExtra, match=r"footplate\[spark\]"):
        SparkPlacement()
