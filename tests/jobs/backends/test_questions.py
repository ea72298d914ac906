"""Questions to jobs that run, on real backends: `footplate jobs stacks` and `footplate jobs profile`."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from footplate.cli.main import main
from footplate.core.errors import Unavailable
from footplate.jobs.backends.ray import asking
from footplate.jobs.backends.ray.asking import RayProcesses
from footplate.jobs.questions import processes_of
from footplate.jobs.states import State
from footplate.jobs.store.jobs import WrongState
from footplate.server.dependencies import ServerContext
from footplate.server.routes.jobs import profile_job, profile_of_job
from jobs.backends.conftest import ENGINE
from jobs.backends.places import Place
from jobs.backends.ray_backend import RayCluster
from jobs.conftest import NET, PATIENCE_S, TWO, Bench, until

EVERYWHERE = pytest.mark.parametrize(
    "place",
    [
        pytest.param("local", marks=pytest.mark.slow),
        pytest.param("ray", marks=ENGINE),
        pytest.param("slurm", marks=ENGINE),
    ],
    indirect=True,
)
ON_THIS_MACHINE = pytest.mark.parametrize("place", [pytest.param("local", marks=pytest.mark.slow)], indirect=True)
ON_RAY = pytest.mark.parametrize("place", [pytest.param("ray", marks=ENGINE)], indirect=True)
ON_SLURM = pytest.mark.parametrize("place", [pytest.param("slurm", marks=ENGINE)], indirect=True)

# Trains until there is a file `end`.
TRAINS = f"""
{NET}
class Watch(fp.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (place / f"rank-{{trainer.global_rank}}-trains").touch()
        if (place / "end").exists():
            trainer.should_stop = True
        time.sleep(0.2)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 4)), batch_size=4)
fp.Trainer(
    accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, default_root_dir=place / "run", callbacks=Watch(),
).fit(Net(), data)
"""


@pytest.fixture
def footplate(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `footplate …` in this process. Returns exit code, output and errors."""

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as exit:
            code = int(exit.code or 0)
        return code, *capsys.readouterr()

    return run


@EVERYWHERE
def test_all_replicas_show_their_stacks_and_are_profiled_also_if_their_training_ends_with_the_profile(
    bench: Bench, place: Place, footplate: Any
):
    bench.program(TRAINS)
    bench.submit(text=TWO)
    bench.there("rank-0-trains")
    bench.there("rank-1-trains")
    bench.is_in(State.RUNNING)

    code, text, errors = footplate("jobs", "stacks", "my_job")
    assert code == 0, errors
    assert re.findall(r"^rank (\d): process \d+ \(", text, re.MULTILINE) == ["0", "1"]
    assert re.match(r"ranks? [01] .*(waits?|is|are) in ", text)
    assert "task.py:" in text

    # The button of the page.
    context = ServerContext(bench.jobs.home)
    assert profile_job(context, "my_job", 2).state == "waiting"
    view = until(lambda: (view := profile_of_job(context, "my_job")).state in ("done", "failed") and view)
    assert (view.state, view.error) == ("done", None)
    assert view.summary.startswith("Profile of steps ")

    # The command. The training ends as soon as the profile has files.
    def profiles() -> list[Path]:
        return list((bench.directory / "run").glob("profile-*"))

    def end_with_the_files() -> None:
        until(lambda: len(profiles()) == 2)
        (bench.directory / "end").touch()

    ender = threading.Thread(target=end_with_the_files)
    ender.start()
    code, text, errors = footplate("jobs", "profile", "my_job", "--steps", "3")
    ender.join()
    assert code == 0, errors
    assert text.startswith("Profile of steps ")
    assert ", rank 0 of 2, " in text
    assert "task.py:" in text
    assert re.match(r"my_job at step \d+: waits for the next step …\n", errors)
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    for profile in profiles():
        assert {path.name for path in profile.glob("trace-*")} == {"trace-rank0.json.gz", "trace-rank1.json.gz"}

    for action, noun in {"stacks": "stacks", "profile": "a profile"}.items():
        code, text, errors = footplate("jobs", action, "my_job")
        assert (code, text) == (2, "")
        assert f"my_job is SUCCEEDED: only a running job has {noun}." in errors


@ON_THIS_MACHINE
def test_a_job_without_a_training_is_not_profiled_and_shows_its_stacks(bench: Bench, place: Place, footplate: Any):
    start_without_a_training(bench, footplate)
    assert "--steps 0: expected a number of steps" in footplate("jobs", "profile", "my_job", "--steps", "0")[2]
    code, text, errors = footplate("jobs", "stacks", "my_job")
    assert code == 0, errors
    assert re.search(r"^process \d+ \(", text, re.MULTILINE)
    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED


def start_without_a_training(bench: Bench, footplate: Any) -> None:
    """Run a job that doesn't train, until there is a file `go`. Assert that it is not profiled."""
    bench.program('(place / "began").touch(); until_there("go")')
    bench.submit()
    bench.there("began")
    bench.is_in(State.RUNNING)
    code, _, errors = footplate("jobs", "profile", "my_job")
    assert code == 2
    assert "my_job: no Trainer.fit runs in these processes now." in errors


@ON_RAY
def test_without_a_training_too_a_question_needs_no_supervisor_leaves_no_job_and_carries_no_secret(
    bench: Bench, place: RayCluster, footplate: Any, monkeypatch: pytest.MonkeyPatch
):
    from ray.job_submission import JobSubmissionClient

    # A busy cluster sees late that a question has ended, and only then it can be deleted.
    monkeypatch.setattr(asking, "DELETE_S", PATIENCE_S)
    monkeypatch.setenv("MY_API_KEY", "s3cret-s3cret")
    start_without_a_training(bench, footplate)
    job = bench.jobs.find("my_job")
    submitted: list[dict[str, Any]] = []
    submit = type(place.client).submit

    def noted(self: Any, arguments: Any) -> None:
        submitted.append(arguments)
        submit(self, arguments)

    monkeypatch.setattr(type(place.client), "submit", noted)
    # Another machine with the same store.
    store = bench.jobs.store
    elsewhere = dataclasses.replace(job, host="another-machine")
    assert re.search(r"^process \d+ \(", processes_of(store, elsewhere, "stacks").stacks(), re.MULTILINE)
    (arguments,) = submitted
    assert "s3cret" not in json.dumps(arguments)
    assert set(arguments["runtime_env"]["env_vars"]) == {"FOOTPLATE_RAY_QUESTION"}
    assert arguments["entrypoint"] == "exec python -P -m footplate.jobs.backends.ray.question"
    known = [listed.submission_id for listed in JobSubmissionClient(place.options["address"]).list_jobs()]
    assert arguments["submission_id"] not in known
    assert f"{job.id}-1" in known
    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED

    # The store may not know yet that the attempt has ended.
    with pytest.raises(WrongState, match=r"my_job has no process now\. See: footplate jobs describe my_job"):
        RayProcesses("my_job", place.options["address"], f"{job.id}-1").stacks()


@ON_SLURM
def test_without_a_training_too_a_question_leaves_no_file_and_is_refused_by_a_replica_that_has_ended(
    bench: Bench, place: Place, footplate: Any
):
    start_without_a_training(bench, footplate)
    store, job = bench.jobs.store, bench.jobs.find("my_job")
    # A machine with the same disk, on which no supervisor runs.
    elsewhere = dataclasses.replace(job, host="another-machine")
    processes = processes_of(store, elsewhere, "stacks")
    assert re.search(r"^process \d+ \(", processes.stacks(), re.MULTILINE)
    folder = bench.jobs.home.attempt("my_job", 1)
    assert not list(folder.glob("answer-*"))
    assert folder.stat().st_mode & 0o077 == 0

    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    with pytest.raises(Unavailable, match=r"my_job: master-0 has ended, or was lost\."):
        processes.stacks()


def test_a_cluster_that_does_not_answer_is_named():
    with pytest.raises(Unavailable, match=r"the Ray cluster at http://127\.0\.0\.1:1 does not answer: "):
        RayProcesses("my_job", "http://127.0.0.1:1", "my_job-1-1").stacks()


def test_files_of_a_long_hang_are_kept_whole(tmp_path: Path):
    from footplate.jobs.backends.ray.attempt import RayAttempt
    from footplate.jobs.backends.ray.listener import Output
    from footplate.jobs.backends.ray.log_protocol import LONGEST, event

    attempt = RayAttempt("http://127.0.0.1:1", "key", 1, tmp_path, 1, dict, lambda: None, begun=False)
    text = "rank 1 is late\n" + "frame é\\\n" * LONGEST
    output = event("hang", role="master", index=0, at=1.0, text=text).decode()
    for start in range(0, len(output), 1000):
        attempt._take(Output(output[start : start + 1000]))
    attempt.close()
    assert (tmp_path / "hang-1.txt").read_text() == text
