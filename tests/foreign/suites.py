"""The suites: the folders of tests in their archives, how they start, and the files that run in CI."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """One project's tests.

    Attributes:
        name: of the list, `lists/NAME.txt`.
        archive: glob of the archive, relative to the folder of archives.
        tests: the folder inside the archive to which the names of cases are relative.
        root: the folder inside the archive from which the tests import their own helpers.
        files: the test files, or folders of them, that run.
        plugin: the plugin of `plugins/` that puts Footplate in the other project's place; empty for none.
        ranks: how many processes run each file together.
        alone: the folder whose files run in one process all the same.
        quick_cases: CI runs the files that have at least so many passing cases; the others' cases are few, and each
            file costs the start of a process.
        case_s: after how long a case is ended.
        environment: more variables of the inner processes.
    """

    name: str
    archive: str
    tests: str
    root: str
    files: tuple[str, ...]
    plugin: str = ""
    ranks: int = 1
    alone: str = ""
    quick_cases: int = 1
    case_s: float = 90.0
    environment: dict[str, str] = field(default_factory=dict)


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "horovod",
            "horovod/tests*.tar.gz",
            "test",
            "test",
            ("parallel/test_torch.py", "parallel/test_adasum_pytorch.py", "single/test_torch_elastic.py"),
            plugin="foreign_horovod",
            ranks=2,
            alone="single/",
        ),
        Suite(
            "petastorm",
            "petastorm/tests*.tar.gz",
            "petastorm/tests",
            ".",
            (
                "test_spark_dataset_converter.py",
                "test_parquet_reader.py",
                "test_pytorch_dataloader.py",
                "test_pytorch_utils.py",
                "test_predicates.py",
                "test_transform.py",
                "test_end_to_end.py",
                "test_reader.py",
            ),
            plugin="foreign_petastorm",
            case_s=300.0,  # the first case of a file also starts Spark and writes its table
        ),
        Suite(
            "lightning",
            "lightning/tests*.tar.gz",
            "tests/tests_pytorch",
            "tests",
            (
                "trainer", "core", "callbacks", "checkpointing", "loops", "loggers", "models", "tuner", "profilers",
                "utilities", "serve", "accelerators", "strategies", "plugins", "deprecated_api", "overrides",
                "graveyard", "test_cli.py",
            ),
            plugin="foreign_lightning",
            quick_cases=3,
        ),
    )
}  # fmt: skip
