"""`footplate jobs`: gcloud's command lines and config.yaml, checked and shown, with each option on its side of `--`.

Both of the guide's example command lines are reconstructed, like its example configurations: see tests/jobs/test_spec.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jobs.test_spec import ATTACHED, LEGACY

COMMON = ["--package-path", "trainer", "--module-name", "trainer.task", "--job-dir", "gs://my-bucket/job"]
WITH_FILE = [*COMMON, "--region", "us-central1", "--config", "config.yaml"]
WITH_FLAGS = [
    *COMMON,
    "--region", "us-central1",
    "--scale-tier", "custom",
    "--master-machine-type", "n1-highcpu-16",
    "--master-accelerator", "count=4,type=nvidia-tesla-k80",
    "--worker-count", "9",
    "--worker-machine-type", "n1-highcpu-16",
    "--worker-accelerator", "count=4,type=nvidia-tesla-k80",
    "--parameter-server-count", "3",
    "--parameter-server-machine-type", "n1-highmem-8",
]  # fmt: skip
USERS = ["--", "--user_arg_1", "value_1", "--user_arg_n", "value_n"]


@pytest.fixture
def submit(footplate, tmp_path, monkeypatch):
    """Run `footplate jobs submit training my_job …` in a folder with a package and the guide's config.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("trainer").mkdir()
    Path("trainer/__init__.py").touch()
    Path("trainer/task.py").touch()
    Path("config.yaml").write_text(ATTACHED)
    return lambda *argv: footplate("jobs", "submit", "training", "my_job", *argv)


@pytest.mark.parametrize("text", [LEGACY, ATTACHED])
def test_the_guides_command_line_with_a_file(submit, text):
    Path("config.yaml").write_text(text)
    result = submit(*WITH_FILE, "--dry-run", *USERS)
    assert result.code == 0, result.err
    job = yaml.safe_load(result.out)
    assert [(replica["role"], replica["count"]) for replica in job["replicas"]] == [
        ("master", 1),
        ("worker", 9),
        ("parameter_server", 3),
    ]
    assert job["replicas"][0]["accelerator"] == {"type": "NVIDIA_TESLA_K80", "count": 4}
    assert job["command"] == [
        "python", "-m", "trainer.task", "--user_arg_1", "value_1", "--user_arg_n", "value_n",
        "--job-dir", "gs://my-bucket/job",
    ]  # fmt: skip


def test_the_guides_command_line_with_flags_is_the_same_job(submit):
    with_flags = submit(*WITH_FLAGS, "--dry-run", "--format", "json", *USERS)
    with_file = submit(*WITH_FILE, "--dry-run", "--format", "json", *USERS)
    assert with_flags.code == 0, with_flags.err
    assert json.loads(with_flags.out) == json.loads(with_file.out)


def test_an_older_spelling_of_a_flag(submit):
    older = ["--worker-server-count" if argument == "--worker-count" else argument for argument in WITH_FLAGS]
    assert submit(*older, "--dry-run", *USERS).out == submit(*WITH_FLAGS, "--dry-run", *USERS).out


def test_k80s_are_accepted_and_todays_equivalent_is_proposed(submit):
    result = submit(*WITH_FLAGS, "--dry-run")
    assert "K80 no longer exists: Compute Engine ended its support on 2024-05-01." in result.err
    assert "Today's equivalent: n1-highcpu-16 with 4 T4." in result.err


def test_modernize_takes_todays_equivalent_and_leaves_the_file(submit):
    result = submit(*WITH_FILE, "--dry-run", "--modernize")
    assert "no longer exists" not in result.err
    assert yaml.safe_load(result.out)["replicas"][0]["accelerator"] == {"type": "NVIDIA_TESLA_T4", "count": 4}
    assert Path("config.yaml").read_text() == ATTACHED


def test_a_table_for_people(submit):
    result = submit(*WITH_FILE, "--dry-run", "--format", "table", *USERS)
    assert "n1-highcpu-16" in result.out
    assert "4 K80" in result.out
    assert "--job-dir" in result.out


def test_arguments_are_never_read_by_a_shell(submit):
    result = submit(*WITH_FILE, "--dry-run", "--", "$(touch pwned)", "; rm -rf /", "`ls`")
    assert yaml.safe_load(result.out)["command"][3:6] == ["$(touch pwned)", "; rm -rf /", "`ls`"]
    assert not Path("pwned").exists()


def test_the_programs_options_before_the_dashes(submit):
    result = submit(*WITH_FILE, "--dry-run", "--learning-rate", "0.1")
    assert result.code == 2
    assert result.err == (
        "footplate jobs: --learning-rate: jobs submit training has no such option. If it belongs to your program, write it "
        "after --: footplate jobs submit training … -- --learning-rate\n"
    )
    assert 'Did you mean "--job-dir"' in submit(*WITH_FILE, "--job_dir=gs://abc/d").err
    assert "--kms-key is an option of gcloud" in submit(*WITH_FILE, "--kms-key", "k").err
    assert "--staging-bucket is for --backend vertex" in submit(*WITH_FILE, "--staging-bucket", "gs://abc").err


def test_the_project_of_a_command_for_gcloud_is_ignored_here(submit):
    result = submit(*COMMON, "--project", "mine", "--dry-run")
    assert result.code == 0
    assert result.err == "--project is ignored: it is for --backend vertex.\n"


def test_a_job_directory_that_is_a_file_is_refused(submit):
    Path("out").touch()
    for directory in ("out", "out/deeper"):
        result = submit(*COMMON[:-1], directory)
        assert result.code == 2
        assert "out is a file. Give a directory; it is created when the job starts." in result.err


def test_options_of_ours_after_the_dashes(submit):
    result = submit(*COMMON, "--dry-run", "--", "--region", "us-central1")
    assert result.code == 0
    assert (
        "--region is after --, so it belongs to the program. If it is meant for the job, write it before --."
        in result.err
    )

    result = submit(*WITH_FILE, "--dry-run", "--", "--labels", "x", "--region", "again")
    assert result.code == 0
    assert "--labels is after --" in result.err
    assert "--region stands" not in result.err


def test_the_job_directory_after_the_dashes(submit):
    result = submit("--package-path", "trainer", "--module-name", "trainer.task", "--", "--job-dir=gs://abc/d")
    assert result.code == 2
    assert "--job-dir is after --, so it would be the program's own. Write it before --" in result.err


def test_all_problems_at_once(submit):
    Path("config.yaml").write_text("trainingInput:\n  masterTyp: n1-standard-8\n  workerCount: 2\n")
    result = submit("--package-path", "nowhere", "--config", "config.yaml", "--job-dir", "http://x", "--dry-run")
    assert result.code == 2
    assert result.err.splitlines()[0] == "footplate jobs: the job has 5 problems:"
    for text in (
        '--job-dir: trainingInput.jobDir: "http://x": expected gs://',
        'config.yaml line 2: trainingInput.masterTyp: there is no such key. Did you mean "masterType"?',
        "trainingInput.workerCount: scale tier BASIC determines the machines",
        "trainingInput.pythonModule: missing",
        "--package-path: 'nowhere' isn't a package",
    ):
        assert text in result.err


def test_a_module_that_the_package_lacks(submit):
    result = submit(
        "--package-path", "trainer", "--module-name", "trainer.tusk", "--region", "us-central1", "--dry-run"
    )
    said = "trainingInput.pythonModule: the package has no module trainer.tusk: expected trainer/tusk.py."
    assert f"--module-name: {said}" in result.err
    Path("tusk.yaml").write_text("trainingInput:\n  region: us-central1\n  pythonModule: trainer.tusk\n")
    assert f"tusk.yaml line 3: {said}" in submit("--package-path", "trainer", "--config", "tusk.yaml", "--dry-run").err


def test_names_that_no_file_can_have_are_mistakes_and_no_tracebacks(submit):
    long = "a" * 400
    result = submit("--package-path", long * 20, "--module-name", "trainer.task", "--region", "us-central1")
    assert (result.code, "isn't a package: expected a directory" in result.err) == (2, True)
    result = submit("--package-path", "trainer", "--module-name", f"trainer.{long}", "--region", "us-central1")
    assert (result.code, "the package has no module" in result.err) == (2, True)


def test_what_this_machine_would_refuse_a_dry_run_refuses_too(submit):
    result = submit("--master-image-uri", "gcr.io/project/trainer", "--region", "us-central1", "--dry-run")
    assert result.code == 2
    assert "the spec names a container image and no module. On this machine jobs run as Python packages" in result.err


def test_a_dry_run_of_a_tuning_shows_its_hyperparameters(submit):
    params = "[{parameterName: lr, type: DOUBLE, minValue: 0.1, maxValue: 1}]"
    spec = f"{{goal: MAXIMIZE, algorithm: RANDOM_SEARCH, params: {params}}}"
    Path("tune.yaml").write_text(f"trainingInput: {{hyperparameters: {spec}}}")
    result = submit(*COMMON, "--region", "us-central1", "--config", "tune.yaml", "--dry-run", "--format", "json")
    assert result.code == 0, result.err
    shown = json.loads(result.out)["trainingInput"]["hyperparameters"]
    assert shown["params"] == [{"parameterName": "lr", "type": "DOUBLE", "minValue": 0.1, "maxValue": 1.0}]


def test_check_says_all_that_is_wrong_with_a_file(submit, footplate):
    assert footplate("jobs", "check", "config.yaml").code == 0
    Path("bad.yaml").write_text("trainingInput:\n  masterTyp: x\n  scaleTier: BIG\n")
    result = footplate("jobs", "check", "bad.yaml")
    assert result.code == 1
    assert [line.split(": ")[0] for line in result.out.splitlines()] == ["bad.yaml line 2", "bad.yaml line 3"]
    answer = json.loads(footplate("jobs", "check", "bad.yaml", "--format", "json").out)
    assert not answer["valid"]
    assert answer["problems"][0]["key"] == "trainingInput.masterTyp"


@pytest.mark.parametrize(
    "text",
    [
        "trainingInput: {scaleTier: CUSTOM, workerCount: 2, workerType: n1-standard-8}",
        "trainingInput: {scaleTier: CUSTOM, workerCount: 2}",
        "trainingInput: {workerCount: 2}",
        "trainingInput: {scaleTier: CUSTOM, masterConfig: {acceleratorConfig: {count: 4, type: NVIDIA_TESLA_T4}}}",
        "trainingInput: {masterConfig: {containerCommand: [run]}}",
    ],
)
def test_check_misses_nothing_that_flags_may_still_bring(submit, footplate, text):
    Path("part.yaml").write_text(text)
    result = footplate("jobs", "check", "part.yaml")
    assert (result.code, result.out) == (0, "part.yaml: no problems.\n")
    assert footplate("jobs", "check", "part.yaml", "--modernize").code == 0
    assert Path("part.yaml").read_text() == text
    flags = ["--config", "part.yaml", "--scale-tier", "CUSTOM", "--worker-machine-type", "n1-standard-8"]
    whole = submit(*COMMON, *flags, "--master-machine-type", "n1-standard-8", "--master-image-uri", "img", "--dry-run")
    assert whole.code == 0, whole.err
    lacking = submit(*COMMON, *flags, "--dry-run")
    assert (lacking.code, "masterType: missing" in lacking.err) == (2, True)
    translated = footplate("jobs", "translate", "part.yaml", "--to", "slurm")
    assert translated.code == 2, translated.out


def test_check_modernize_rewrites_the_file(submit, footplate):
    Path("config.yaml").chmod(0o640)
    result = footplate("jobs", "check", "config.yaml", "--modernize")
    assert result.code == 0
    assert "trainingInput.masterConfig.acceleratorConfig.type: NVIDIA_TESLA_T4" in result.out
    assert Path("config.yaml").read_text() == ATTACHED.replace("NVIDIA_TESLA_K80", "NVIDIA_TESLA_T4")
    assert Path("config.yaml").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []
    assert "needs no change" in footplate("jobs", "check", "config.yaml", "--modernize").out


def test_a_file_with_problems_is_not_rewritten(submit, footplate):
    Path("bad.yaml").write_text("trainingInput: {masterType: standard_gpu, x: 1}")
    assert footplate("jobs", "check", "bad.yaml", "--modernize").code == 1
    assert Path("bad.yaml").read_text() == "trainingInput: {masterType: standard_gpu, x: 1}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "nowhere.yaml"], "'nowhere.yaml' can't be read as a configuration file: No such file"),
        (["check", "config.yaml", "--", "x"], "pass arguments to a program"),
        ([], "action"),
        (["submit"], "kind"),
        (["submit", "training"], "name"),
        (["submit", "serving", "x"], "training"),
    ],
)
def test_mistakes(submit, footplate, argv, message):
    result = footplate("jobs", *argv)
    assert result.code == 2
    assert message in result.err


HEAVY = {"torch", "numpy", "jsonargparse", "yaml", "rich", "pydantic"}


@pytest.mark.parametrize(
    "argv",
    [
        ["submit", "training", "my_job", *COMMON, "--region", "us-central1", "--dry-run", "--format", "json", *USERS],
        ["list"],
    ],
)
def test_what_people_wait_for_imports_no_more_than_it_needs(submit, argv):
    script = (
        "import sys; from footplate.cli.main import main; code = main(sys.argv[1:]); "
        f"sys.exit(code or ' '.join({HEAVY} & set(sys.modules)) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", script, "jobs", *argv], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_local_train_runs_the_program_as_a_job_would(submit, tmp_path):
    Path("trainer/task.py").write_text(
        "import json, os, sys\n"
        "task = json.loads(os.environ['TF_CONFIG'])['task']\n"
        "print(sys.argv[1:], os.environ['LEVEL'], task, os.path.isdir(sys.argv[-1]))\n"
        "sys.exit(7)\n"
    )
    Path("linked").symlink_to("trainer")
    for package in ("trainer", "linked"):
        command = [sys.executable, "-m", "footplate", "jobs", "local-train", "--package-path", package]
        command += [
            "--module-name",
            f"{package}.task",
            "--job-dir",
            "out/deep",
            "--env",
            "LEVEL=2",
            "--",
            "--lr",
            "0.1",
        ]
        process = subprocess.run(command, capture_output=True, text=True)
        expected = ["--lr", "0.1", "--job-dir", str(tmp_path / "out/deep")]
        assert (process.returncode, process.stdout) == (7, f"{expected} 2 {{'type': 'chief', 'index': 0}} True\n"), (
            process.stderr
        )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--package-path", "missing", "--module-name", "trainer.task"], "isn't a package"),
        (["--package-path", "trainer", "--module-name", "trainer.missing"], "has no module trainer.missing"),
        (["--package-path", "trainer", "--module-name", "trainer.task", "--job-dir", "config.yaml"], "is a file"),
        (["--package-path", "trainer", "--module-name", "trainer.task", "--", "--job-dir", "x"], "before --"),
    ],
)
def test_local_train_refuses_what_a_job_refuses(submit, footplate, argv, said):
    result = footplate("jobs", "local-train", *argv)
    assert (result.code, said in result.err) == (2, True), result.err
