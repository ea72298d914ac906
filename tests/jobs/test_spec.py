"""A job's spec: the guide's examples, flags over the file, scale tiers, and every problem at once with its line.

The guide's own text was not available. Its two example configurations and two example command lines are reconstructed from
their description in the mission (rows D1 to D3): legacy machine types in a file; machine types with attached GPUs in a file
and as flags; the program's arguments after an empty `--`.
"""

from __future__ import annotations

import pytest

from footplate.catalog.validity import Choice
from footplate.jobs.spec import flags
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.model import Job
from footplate.jobs.spec.problems import SpecError
from footplate.jobs.spec.reading import Reading, plain
from footplate.jobs.spec.resolving import problems, resolve, unknown
from footplate.jobs.spec.yamlfile import parse

LEGACY = """\
trainingInput:
  scaleTier: CUSTOM
  # Configure a master worker with 4 K80 GPUs
  masterType: complex_model_m_gpu
  # Configure 9 workers, each with 4 K80 GPUs
  workerCount: 9
  workerType: complex_model_m_gpu
  # Configure 3 parameter servers with no GPUs
  parameterServerCount: 3
  parameterServerType: large_model
"""

ATTACHED = """\
trainingInput:
  scaleTier: CUSTOM
  # Configure a master worker with 4 K80 GPUs
  masterType: n1-highcpu-16
  masterConfig:
    acceleratorConfig:
      count: 4
      type: NVIDIA_TESLA_K80
  # Configure 9 workers, each with 4 K80 GPUs
  workerCount: 9
  workerType: n1-highcpu-16
  workerConfig:
    acceleratorConfig:
      count: 4
      type: NVIDIA_TESLA_K80
  # Configure 3 parameter servers with no GPUs
  parameterServerCount: 3
  parameterServerType: n1-highmem-8
"""

FLAGS = {"module-name": "trainer.task", "job-dir": "gs://my-bucket/job", "region": "us-central1"}


def resolved(text: str = "", given: dict[str, str] | None = None, args: tuple[str, ...] = ()):
    return resolve(draft(parse(text), {**FLAGS, **(given or {})}, args, "my_job"))


def wrong(text: str, given: dict[str, str] | None = None, partial: bool = True) -> list[str]:
    return [str(problem) for problem in problems(draft(parse(text), given or {}, partial=partial))]


def one_wrong(text: str, given: dict[str, str] | None = None) -> str:
    messages = wrong(text, given)
    assert len(messages) == 1, messages
    return messages[0]


@pytest.mark.parametrize(
    ("text", "machine", "servers"),
    [(LEGACY, "complex_model_m_gpu", "large_model"), (ATTACHED, "n1-highcpu-16", "n1-highmem-8")],
)
def test_the_guides_example_configurations_are_accepted_as_they_are(text, machine, servers):
    job = resolved(text)
    four = Choice(machine, "NVIDIA_TESLA_K80", 4)
    assert [(replica.role, replica.count, replica.machine) for replica in job.replicas] == [
        ("master", 1, four),
        ("worker", 9, four),
        ("parameter_server", 3, Choice(servers)),
    ]
    assert "K80 no longer exists" in job.notices[0]


def test_flags_make_the_same_job_as_the_file():
    job = resolved(
        given={
            "scale-tier": "custom",
            "master-machine-type": "n1-highcpu-16",
            "master-accelerator": "count=4,type=nvidia-tesla-k80",
            "worker-count": "9",
            "worker-machine-type": "n1-highcpu-16",
            "worker-accelerator": "count=4,type=nvidia-tesla-k80",
            "parameter-server-count": "3",
            "parameter-server-machine-type": "n1-highmem-8",
        }
    )
    assert job == resolved(ATTACHED)


def test_flags_win_over_the_file():
    text = f"{ATTACHED}  region: us-west1\n  jobDir: gs://other/dir\n  args: [--old]\n"
    job = resolved(text, {"worker-count": "2", "worker-accelerator": "type=t4"}, ("--new", "1"))
    assert job.region == "us-central1"
    assert job.job_dir == "gs://my-bucket/job"
    assert job.replicas[1].count == 2
    assert job.replicas[1].machine == Choice("n1-highcpu-16", "NVIDIA_TESLA_T4", 1)
    assert job.replicas[0].machine == Choice("n1-highcpu-16", "NVIDIA_TESLA_K80", 4)
    assert "--old" not in job.command


def test_labels_of_flags_are_added_to_those_of_the_file():
    assert resolved("labels: {a: file, b: file}", {"labels": "b=flag,c=flag"}).labels == {
        "a": "file",
        "b": "flag",
        "c": "flag",
    }


def test_a_wrong_label_is_told_where_it_was_written():
    file = parse("trainingInput: {region: us-central1}\nlabels: {Team: a}", "config.yaml")
    mistakes = problems(draft(file, {"labels": "team=B"}, partial=True))
    assert [(mistake.place, mistake.path) for mistake in mistakes] == [
        ("--labels", ("labels", "team")),
        ("config.yaml line 2", ("labels", "Team")),
    ]


def test_a_flag_replaces_what_is_wrong_in_the_file():
    assert wrong("trainingInput: {scheduling: soon}", {"max-running-time": "2h"}) == []


def test_the_job_directory_is_passed_on_to_the_program():
    job = resolved(args=("--user_arg_1", "value_1"))
    assert job.command == (
        "python", "-m", "trainer.task", "--user_arg_1", "value_1", "--job-dir", "gs://my-bucket/job"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tier", "machines"),
    [
        ("BASIC", [("master", 1, Choice("n1-standard-4"))]),
        (
            "STANDARD_1",
            [
                ("master", 1, Choice("n1-highcpu-8")),
                ("worker", 4, Choice("n1-highcpu-8")),
                ("parameter_server", 3, Choice("n1-standard-4")),
            ],
        ),
        (
            "PREMIUM_1",
            [
                ("master", 1, Choice("n1-highcpu-16")),
                ("worker", 19, Choice("n1-highcpu-16")),
                ("parameter_server", 11, Choice("n1-highmem-8")),
            ],
        ),
        ("BASIC_GPU", [("master", 1, Choice("n1-standard-8", "NVIDIA_TESLA_K80", 1))]),
        (
            "basic-tpu",
            [("master", 1, Choice("n1-standard-4")), ("worker", 1, Choice("cloud_tpu", "TPU_V2", 8))],
        ),
    ],
)
def test_a_scale_tier_is_a_set_of_machines(tier, machines):
    job = resolved(given={"scale-tier": tier})
    assert [(replica.role, replica.count, replica.machine) for replica in job.replicas] == machines


def test_without_a_scale_tier_it_is_basic_or_custom():
    assert resolved().scale_tier == "BASIC"
    assert resolved(given={"master-machine-type": "n1-standard-8"}).scale_tier == "CUSTOM"


def test_workers_have_the_masters_image_unless_they_have_their_own():
    text = "trainingInput: {masterType: n1-standard-4, workerType: n1-standard-4, workerCount: 2, %s}"
    images = "masterConfig: {imageUri: gcr.io/a/b}"
    assert [replica.image_uri for replica in resolved(text % images).replicas] == ["gcr.io/a/b"] * 2
    images += ", workerConfig: {imageUri: gcr.io/a/c}"
    assert [replica.image_uri for replica in resolved(text % images).replicas] == ["gcr.io/a/b", "gcr.io/a/c"]


EVERYTHING = """\
jobId: my_job
labels: {team: vision}
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-8
  masterConfig:
    imageUri: gcr.io/project/trainer:1
    containerCommand: [python, -m, trainer.task]
    diskConfig: {bootDiskType: pd-ssd, bootDiskSizeGb: 200}
    acceleratorConfig: {count: 1, type: NVIDIA_TESLA_T4}
  workerCount: "2"
  workerType: n1-standard-8
  workerConfig: {acceleratorConfig: {count: 1, type: nvidia-tesla-t4}}
  parameterServerCount: 1
  parameterServerType: n1-standard-4
  parameterServerConfig: {imageUri: gcr.io/project/server:1}
  evaluatorCount: 1
  evaluatorType: n1-standard-4
  evaluatorConfig: {imageUri: gcr.io/project/evaluator:1}
  packageUris: [gs://my-bucket/trainer-0.1.tar.gz]
  pythonModule: trainer.task
  hyperparameters:
    goal: MAXIMIZE
    maxTrials: 4
    maxParallelTrials: 2
    hyperparameterMetricTag: accuracy
    enableTrialEarlyStopping: true
    algorithm: RANDOM_SEARCH
    params:
      - {parameterName: lr, type: DOUBLE, minValue: 0.0001, maxValue: 1e-1, scaleType: UNIT_LOG_SCALE}
      - {parameterName: layers, type: INTEGER, minValue: 1, maxValue: 5}
      - {parameterName: kind, type: CATEGORICAL, categoricalValues: [a, b]}
      - {parameterName: width, type: DISCRETE, discreteValues: [16, 32.5]}
  region: us-central1
  jobDir: gs://my-bucket/job
  pythonVersion: 3.10
  scheduling: {maxRunningTime: 7200s, maxWaitTime: 1h, priority: 3}
  useChiefInTfConfig: true
  network: projects/12345/global/networks/mine
  serviceAccount: a@b.iam.gserviceaccount.com
  encryptionConfig: {kmsKeyName: projects/p/locations/l/keyRings/r/cryptoKeys/k}
  enableWebAccess: false
"""


def test_every_key_of_a_training_input_is_understood():
    job = resolve(draft(parse(EVERYTHING)))
    assert len(job.replicas) == 4
    assert job.max_running_time == "7200s"
    assert set(job.spec) >= {"hyperparameters", "scheduling", "network", "encryptionConfig", "useChiefInTfConfig"}


def test_a_resolved_spec_is_a_spec_again():
    job = resolve(draft(parse(EVERYTHING)))
    again = Reading(unknown)
    assert plain(again.read(Job, {"trainingInput": job.spec}).training_input) == job.spec
    assert not again.mistakes


def test_a_version_is_text_and_keeps_its_zero():
    assert resolve(draft(parse(EVERYTHING))).spec["pythonVersion"] == "3.10"


def test_arguments_are_the_text_that_was_written():
    text = "trainingInput: {args: [--lr, 1e-3, --flag, true, --width, 0x10, --date, 2020-01-02, --none, null]}"
    with pytest.raises(SpecError, match=r"args\[9\]: nothing: expected text"):
        resolved(text)
    job = resolved(text.replace(", --none, null", ""))
    assert job.spec["args"] == ["--lr", "1e-3", "--flag", "true", "--width", "0x10", "--date", "2020-01-02"]


def test_all_problems_are_told_at_once_each_with_its_line():
    text = """\
trainingInput:
  scaleTier: CUSTOM
  masterTyp: n1-standard-8
  masterType: n1-standard-32
  masterConfig:
    acceleratorConfig: {count: 2, type: NVIDIA_TESLA_V100}
    imageURI: gcr.io/a/b
  workerCount: many
  workerType: n1-standrd-8
  parameterServerCount: 2
  region: us-east4
  jobDir: http://here
"""
    with pytest.raises(SpecError) as raised:
        resolve(draft(parse(text), {"module-name": "a b"}, name="my job"))
    messages = [str(problem) for problem in raised.value.problems]
    expected = [
        ("the job's name", "jobId", "expected letters, digits and underscores"),
        ("--module-name", "trainingInput.pythonModule", "expected the name of a Python module"),
        (
            "config.yaml line 1",
            "trainingInput.parameterServerType",
            "missing: give the machine type of the parameter server.",
        ),
        ("config.yaml line 3", "trainingInput.masterTyp", 'there is no such key. Did you mean "masterType"?'),
        ("config.yaml line 6", "trainingInput.masterConfig.acceleratorConfig", "allowed counts are 4 and 8"),
        ("config.yaml line 7", "trainingInput.masterConfig.imageURI", 'Did you mean "imageUri"?'),
        ("config.yaml line 8", "trainingInput.workerCount", '"many": expected a whole number'),
        ("config.yaml line 9", "trainingInput.workerType", 'Did you mean "n1-standard-8"'),
        ("config.yaml line 11", "trainingInput.region", "V100 is not offered in us-east4"),
        ("config.yaml line 12", "trainingInput.jobDir", "http:// is none of them"),
    ]
    # First the flags' problems, then the file's from top to bottom.
    for said, (place, key, text) in zip(messages, expected, strict=True):
        assert said.startswith(f"{place}: {key}: ")
        assert text in said
    assert str(raised.value).startswith("the job has 10 problems:\n  ")


MISTAKES = {
    "a key at the wrong place": ("region: us-central1", "line 1: region: belongs under trainingInput, not here."),
    "a key that belongs higher up": (
        "trainingInput:\n  labels: {a: b}",
        "line 2: trainingInput.labels: belongs at the top, beside trainingInput, not here.",
    ),
    "a key twice": (
        "trainingInput:\n  masterType: n1-standard-4\n  masterType: n1-standard-8",
        "line 3: trainingInput.masterType: given twice; first in line 2. Keep one.",
    ),
    "machines beside a scale tier": (
        "trainingInput: {scaleTier: BASIC_GPU, masterType: n1-standard-8}",
        "masterType: scale tier BASIC_GPU determines the machines: leave this out, or use CUSTOM.",
    ),
    "legacy and not": (
        "trainingInput: {masterType: standard_gpu, workerType: n1-standard-8, workerCount: 1}",
        "expected machine types that are all legacy, or all of Compute Engine: standard_gpu is legacy, n1-standard-8 is of",
    ),
    "a count with nothing": (
        "trainingInput: {masterType: n1-standard-8, masterConfig: {acceleratorConfig: {type: K80}}}",
        "acceleratorConfig.count: missing.",
    ),
    "a truth value for a count": ("trainingInput: {workerCount: yes}", '"yes": expected a whole number from 0'),
    "a count to the base of 60": ("trainingInput: {workerCount: 1:30}", '"1:30": expected a whole number from 0'),
    "a hexadecimal count": ("trainingInput: {workerCount: 0x10}", '"0x10": expected a whole number from 0'),
    "a negative count": ("trainingInput: {workerCount: -1}", '"-1": expected a whole number from 0 to 10000.'),
    "text for a mapping": ("trainingInput: {masterConfig: n1}", "masterConfig: expected keys with values below it."),
    "text for a list": ("trainingInput: {args: --lr 3}", "args: expected a list"),
    "a list for a word": (
        "trainingInput: {scaleTier: [a]}",
        "a list: not one of the choices. Expected one of BASIC, STANDARD_1",
    ),
    "a directory of nobody": (
        "trainingInput: {jobDir: ~nobody_here/x}",
        "this machine has no user nobody_here; write ./~nobody",
    ),
    "an unknown tier": ("trainingInput: {scaleTier: CUSTM}", 'not one of the choices. Did you mean "CUSTOM"?'),
    "a runtime beside an image": (
        "trainingInput: {runtimeVersion: 2.11, masterConfig: {imageUri: gcr.io/a/b}}",
        "the image has its own: leave out runtimeVersion, or masterConfig.imageUri.",
    ),
    "a short wait": ("trainingInput: {scheduling: {maxWaitTime: 60s}}", "60s: expected at least 1800s"),
    "a parameter twice": (
        "trainingInput: {hyperparameters: {goal: MAXIMIZE, params: [{parameterName: a, type: CATEGORICAL, "
        "categoricalValues: [x]}, {parameterName: a, type: CATEGORICAL, categoricalValues: [x]}]}}",
        'params[1].parameterName: "a" is given twice.',
    ),
    "a parameter without its end": (
        "trainingInput: {hyperparameters: {goal: MINIMIZE, params: [{parameterName: a, type: INTEGER, minValue: 1}]}}",
        "params[0]: maxValue is missing: a parameter of type INTEGER needs it.",
    ),
    "values that don't increase": (
        "trainingInput: {hyperparameters: {goal: MINIMIZE, params: [{parameterName: a, type: DISCRETE, "
        "discreteValues: [2, 1]}]}}",
        "discreteValues: expected increasing values.",
    ),
    "a logarithm of zero": (
        "trainingInput: {hyperparameters: {goal: MINIMIZE, params: [{parameterName: a, type: DOUBLE, minValue: 0, "
        "maxValue: 1, scaleType: UNIT_LOG_SCALE}]}}",
        "params[0].minValue: 0: UNIT_LOG_SCALE needs a number above 0.",
    ),
    "a grid of a continuum": (
        "trainingInput: {hyperparameters: {goal: MINIMIZE, algorithm: GRID_SEARCH, params: [{parameterName: a, "
        "type: DOUBLE, minValue: 0, maxValue: 1}]}}",
        "params[0].type: GRID_SEARCH takes no DOUBLE",
    ),
    "no trials": (
        "trainingInput: {hyperparameters: {goal: MINIMIZE, maxTrials: 0, params: [{parameterName: a, "
        "type: CATEGORICAL, categoricalValues: [x]}]}}",
        "hyperparameters.maxTrials: 0: expected 1 or more.",
    ),
    "a bad label": ("labels: {Team: a}", '"Team": expected lower-case letters'),
    "a zone for a region": ("trainingInput: {region: us-west1-b}", "us-west1-b is a zone: give its region, us-west1."),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_file(mistake):
    text, message = MISTAKES[mistake]
    assert message in one_wrong(text)


def test_what_was_taken_out_is_not_missed():
    assert "is not a machine type" in one_wrong("trainingInput: {scaleTier: CUSTOM, masterType: nothing-like-it}")


def test_an_empty_file_is_a_job_that_flags_describe():
    assert resolved("").scale_tier == "BASIC"
    assert resolved("trainingInput:\n").scale_tier == "BASIC"


def test_submitting_needs_a_name_and_a_module():
    messages = wrong("", partial=False)
    assert [message.split(":")[0] for message in messages] == ["jobId", "trainingInput.pythonModule"]


@pytest.mark.parametrize("text", ["count=4", "type", "type=t4,count=1,zone=a", "type=t4,type=t4", "", "=t4"])
def test_an_accelerator_flag_in_another_form_is_refused(text):
    with pytest.raises(ValueError, match="--master-accelerator"):
        flags.accelerator("master-accelerator", text)


@pytest.mark.parametrize(
    ("text", "missed"),
    [
        ("trainingInput: {scaleTier: CUSTOM}", "masterType: missing: give the machine type of the master."),
        (
            "trainingInput: {masterConfig: {containerCommand: [python]}}",
            "containerCommand: needs your own image: give imageUri.",
        ),
    ],
)
def test_what_is_missing_when_no_flag_can_follow(text: str, missed: str):
    assert any(missed in message for message in wrong(text, partial=False))
    assert not wrong(text)
