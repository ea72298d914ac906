"""Build hook of the site: the pages that are generated from the code.

- reference/api/NAME.md: public names, grouped by idea. mkdocstrings fills them with docstrings, which it reads without
  importing the code. A function that another function makes has no docstring in the text of the code: it is imported here.
- reference/help/NAME.md: the `--help` of every command, from its parser.

These pages exist on the site only. `API` and `HELP` say which name and which command is on which page. tests/test_site.py
compares both with the code.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mkdocs.structure.files import File, Files

# A block of code has this width on a laptop.
HELP_COLUMNS = 88
EXAMPLES = (
    "In the examples, `fp` is `footplate`, `model` is a module, and `train` and `val` are loaders, as in "
    "[A first run](../../start/first-run.md). The tests run the examples."
)


@dataclass(frozen=True)
class ApiPage:
    """A page of public names.

    Attributes:
        title: the heading.
        about: the paragraph under it, with links to other pages.
        names: the full names of classes, functions and attributes, in the order of the page.
        inherited: the classes among them whose inherited methods are shown too.
        alone: the classes among them that are shown without signature and members.
        made: the functions among them that another function makes.
    """

    title: str
    about: str
    names: tuple[str, ...]
    inherited: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Write the page, with a block of mkdocstrings for each name."""
        return "\n\n".join([f"# {self.title}", self.about, EXAMPLES, *map(self._block, self.names)]) + "\n"

    def _block(self, name: str) -> str:
        if name in self.made:
            return made_block(name)
        options = ["inherited_members: true"] if name in self.inherited else []
        options += ["members: false", "show_signature: false"] if name in self.alone else []
        return "\n      ".join([f"::: {name}", *options]).replace("\n", "\n    options:\n", 1)


def made_block(name: str) -> str:
    """Write the heading, signature and docstring of a function, with its examples as a block of code."""
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    arguments = "".join(f"    {argument},\n" for argument in inspect.signature(function).parameters)
    text, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
    blocks = [f"{attribute}(\n{arguments})", inspect.cleandoc(examples)]
    signature, example = (f"```python\n{block}\n```" for block in blocks)
    heading = "## " + attribute.replace("_", "\\_")
    return "\n\n".join([f'<a id="{name}"></a>', heading, signature, text, "**Examples:**", example])


def of(package: str, *names: str) -> tuple[str, ...]:
    """Return the full names of some names of a package."""
    return tuple(f"{package}.{name}" for name in names)


HOROVODS_VERBS = (
    *("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce", "grouped_allgather"),
    *("grouped_reducescatter", "sparse_allreduce_async", "barrier", "join", "synchronize", "poll"),
)
# The forms of the verbs that wait for no result, or work in place.
HOROVODS_FORMS = (
    *("allreduce_", "allreduce_async", "allreduce_async_", "allgather_async", "broadcast_", "broadcast_async"),
    *("broadcast_async_", "alltoall_async", "reducescatter_async", "grouped_allreduce_", "grouped_allreduce_async"),
    *("grouped_allreduce_async_", "grouped_allgather_async", "grouped_reducescatter_async"),
)

API = {
    "training": ApiPage(
        "API: trainer and modules",
        "[The trainer](../trainer.md) lists every argument of `Trainer`. [Training](../../guide/training.md) shows how "
        "to use it.",
        (
            "footplate.Trainer",
            *of("footplate.Trainer", "fit", "validate", "test", "predict", "save_checkpoint", "callback_metrics"),
            *of("footplate.Trainer", "logged_metrics", "global_step", "current_epoch", "estimated_stepping_batches"),
            *of("footplate", "Module", "DataModule", "TableDataModule", "Tuner", "seed_everything", "__version__"),
        ),
        inherited=("footplate.Module",),
        alone=("footplate.Trainer",),  # its signature is that of TrainerConfig
    ),
    "data": ApiPage(
        "API: tables and loaders",
        "[Train from tables](../../guide/data.md) and [Train on text](../../guide/text.md) show how to use them.",
        (
            *of("footplate", "Table", "Loader", "MixedLoader", "CombinedLoader"),
            *of("footplate.data", "MappedTable", "PackedTable", "document_mask", "block_mask", "cumulative_lengths"),
            *of("footplate.data", "next_token_targets", "DecodedCache", "FileCache", "Prefetcher"),
        ),
    ),
    "callbacks": ApiPage(
        "API: callbacks",
        "[Metrics, callbacks and searches](../../guide/metrics-and-callbacks.md) shows how to use them.",
        of(
            "footplate",
            "Callback",
            "ModelCheckpoint",
            "EarlyStopping",
            "Timer",
            "LearningRateMonitor",
            "DataWaitMonitor",
            "EMAWeightAveraging",
            "StochasticWeightAveraging",
            "GradientAccumulationScheduler",
            "ProgressBar",
            "ModelSummary",
            "Report",
            "Alert",
            "AlertMessage",
            "Webhook",
            "Email",
        ),
    ),
    "loggers": ApiPage(
        "API: loggers",
        "[Loggers](../../guide/trackers.md) shows how to use them. [Tracking](../../guide/tracking.md) describes what "
        "MLflow receives.",
        (
            *of("footplate", "Logger", "CSV", "JSONLines", "Console", "TensorBoard", "MLflow", "WandB", "Trackio"),
            "footplate.tracking.Status",
            "footplate.tracking.mlflow.deliver_pending",
            "footplate.tracking.wandb.deliver_pending",
            "footplate.tracking.trackio.deliver_pending",
        ),
    ),
    "processes": ApiPage(
        "API: several processes",
        "[The ladder](../../guide/ladder.md) shows how to use `Runner`. The functions of `footplate.launch.worker` are for "
        "code that runs in its processes. Outside of them, they do no harm.",
        (
            "footplate.Runner",
            "footplate.PeerLostError",
            *of("footplate.launch", "launch", "Restarts"),
            *of("footplate.launch.worker", "attempt", "inside", "kept", "log_to_driver", "progressed", "saved", "slot"),
        ),
    ),
    "models": ApiPage(
        "API: sharded, pretrained and exported models",
        "[Sharded models](../../guide/sharding.md), [tensor parallelism](../../guide/tensor-parallel.md) and "
        "[export](../../guide/tracking.md) show how to use them.",
        of("footplate", "FSDPStrategy", "ModelParallelStrategy", "load_pretrained", "export_model"),
    ),
    "runs": ApiPage(
        "API: runs, afterwards",
        "[Reports](../../guide/report.md), [goodput](../../guide/goodput.md), [replays](../../guide/replay.md) and "
        "[profiling](../../guide/profiling.md) show how to use them.",
        of("footplate", "report", "goodput", "rows", "replay", "verify", "Profiler"),
    ),
    "hardware": ApiPage(
        "API: hardware, plans and scaling",
        "[Plans](../../guide/plan.md), [scaling](../../guide/scaling.md) and "
        "[your own accelerator](../../guide/accelerator.md) show how to use them.",
        (
            *of("footplate", "plan", "scale"),
            "footplate.scaling.learning_rate",
            "footplate.Accelerator",
            "footplate.hardware.base.Device",
        ),
    ),
    "jobs": ApiPage(
        "API: jobs",
        "[Jobs](../../guide/jobs.md) and [tuning](../../guide/tune.md) show the commands. These classes do the same in "
        "Python. In the examples, `rates` is a tuning that has ended.",
        ("footplate.jobs.operations.Jobs", "footplate.jobs.states.State", "footplate.jobs.tuning.results.Tuning"),
    ),
    "catalog": ApiPage(
        "API: catalog",
        "Machine types and accelerators of clouds: sizes, rates, prices, and which of them fit together. "
        "[The catalog](../jobs-config.md#the-catalog) shows the commands.",
        of(
            "footplate.catalog",
            *("catalog", "Catalog", "Machine", "Accelerator", "find_machine", "find_accelerator"),
            *("check", "Choice", "Validity", "valid_choices"),
            *("check_region", "regions_of", "zones_of", "accelerators_in"),
            *("price_of_machine", "what_became", "today"),
        ),
    ),
    "lab": ApiPage(
        "API: lab",
        "Several machines on this one, to see what a training does when a network breaks. [The lab](../../guide/lab.md) "
        "shows the commands.",
        of("footplate.lab", "Lab", "Machine", "Command", "Link", "why_not"),
    ),
    "lightning": ApiPage(
        "API: Lightning",
        "A program that uses Lightning's classes needs nothing else of Footplate but `Trainer`. "
        "[From Lightning](../../guide/lightning.md) shows how to change it.",
        ("footplate.compat.lightning.load_from_checkpoint", "footplate.compat.lightning.cli.LightningCLI"),
    ),
    "horovod": ApiPage(
        "API: Horovod",
        "[From Horovod](../../guide/horovod.md) shows how to change a program. [The verbs](../horovod.md) lists how each "
        "verb differs from Horovod's. In the examples, `hvd` is `footplate.compat.horovod` after `hvd.init()`, with one "
        "rank.",
        (
            *of(
                "footplate.compat.horovod",
                *("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank"),
                *("cross_size", "is_homogeneous", "HorovodRunner", "DistributedOptimizer", "broadcast_parameters"),
                *("broadcast_optimizer_state", "broadcast_object", "allgather_object"),
                *("Compression", "Compressor", "SyncBatchNorm"),
                *HOROVODS_VERBS,
                *HOROVODS_FORMS,
                *("Average", "Sum", "Adasum", "Min", "Max", "Product"),
                *("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
                *("HorovodInternalError", "PeerLostError", "HostsUpdatedInterrupt"),
                *("gloo_built", "gloo_enabled", "nccl_built", "cuda_built", "rocm_built", "mpi_built", "mpi_enabled"),
                *("mpi_threads_supported", "ccl_built", "ddl_built", "start_timeline", "stop_timeline"),
            ),
            *of("footplate.compat.horovod.elastic", "run", "TorchState", "ObjectState", "State", "ElasticSampler"),
        ),
        made=of("footplate.compat.horovod", *HOROVODS_FORMS),
    ),
    "petastorm": ApiPage(
        "API: Petastorm",
        "[From Petastorm](../../guide/petastorm.md) shows how to change a program. "
        "[The differences](../petastorm.md) lists what differs. In the examples, `flowers.parquet` is a table of 8 rows "
        "with the columns `x` and `label`.",
        of(
            "footplate.compat.petastorm",
            *("make_spark_converter", "SparkDatasetConverter", "register_delete_dir_handler"),
            *("make_reader", "make_batch_reader", "Reader", "TransformSpec", "edit_field"),
            *("DataLoader", "BatchedDataLoader", "InMemBatchedDataLoader", "BatchLoader", "decimal_friendly_collate"),
            *("PredicateBase", "in_set", "in_intersection", "in_lambda", "in_negate", "in_reduce"),
            *("in_pseudorandom_split", "Unischema", "UnischemaField", "ScalarCodec", "NdarrayCodec"),
            *("CompressedNdarrayCodec", "CompressedImageCodec"),
        ),
    ),
    "estimator": ApiPage(
        "API: Estimator",
        "[From Estimator and TPUEstimator](../../guide/estimators.md) shows how to change a program. In the examples, "
        "`model_fn`, `input_fn` and `estimator` are those of the example of `Estimator`.",
        of(
            "footplate.compat.estimator",
            *("Estimator", "TPUEstimator", "train_and_evaluate", "get_module", "ModeKeys"),
            *("EstimatorSpec", "TPUEstimatorSpec", "RunConfig", "TPUConfig", "TrainSpec", "EvalSpec"),
            *("WarmStartSettings", "Exporter", "LatestExporter", "FinalExporter"),
        ),
    ),
    "errors": ApiPage(
        "API: errors",
        "A user can fix each of these errors: its text tells what was given, what was expected and what to do. The command "
        "line prints the text without a traceback, and exits with 2. [Troubleshooting](../../guide/troubleshooting.md) has "
        "the likeliest.",
        (
            *of(
                "footplate",
                "FootplateError",
                "ConfigError",
                "Unavailable",
                "DataError",
                "CheckpointError",
                "LaunchError",
            ),
            *of("footplate", "PackageError", "MissingExtra"),
            "footplate.step.xla.capture.refusals.CaptureError",
            "footplate.step.xla.lowering.interpret.MissingOperation",
            "footplate.step.xla.lowering.arrays.NotRepresentable",
            "footplate.planning.program_client.PlanError",
            "footplate.launch.cluster.member.LostError",
            "footplate.core.adapters.RefusedAttribute",
            "footplate.jobs.spec.problems.SpecError",
            "footplate.jobs.submission.DestinationError",
            "footplate.jobs.store.jobs.UnknownJob",
            "footplate.jobs.store.jobs.WrongState",
            "footplate.jobs.translate.common.Untranslatable",
            "footplate.jobs.backends.vertex.client.Refused",
            "footplate.jobs.backends.vertex.client.Unanswered",
            "footplate.compat.horovod.MismatchError",
            "footplate.compat.horovod.MisuseError",
        ),
    ),
}
"""The pages of public names, by the names of their files."""

HELP = {
    "training": ("Options: fit, validate, test, predict", ("fit", "validate", "test", "predict")),
    "processes": ("Options: processes and hardware", ("run", "scale", "plan", "doctor", "catalog", "lab")),
    "jobs": ("Options: jobs", ("jobs", "tune", "server")),
    "runs": ("Options: runs", ("report", "goodput", "checkpoint", "rows", "replay", "verify", "stacks", "profile")),
    "others": ("Options: other commands", ("demo", "new", "table", "completion")),
}
"""The pages of `--help`, by the names of their files: the heading, and the commands."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site."""
    pages = {f"reference/api/{name}.md": page.markdown() for name, page in API.items()}
    pages |= {f"reference/help/{name}.md": help_page(title, commands) for name, (title, commands) in HELP.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def help_page(title: str, commands: tuple[str, ...]) -> str:
    """Write a page with the `--help` of some commands and of their actions."""
    sections = [
        f"## footplate {name}\n\n```text\n{text.rstrip()}\n```" for command in commands for name, text in helps(command)
    ]
    about = "What `--help` prints. [The command line](../cli.md) explains the commands."
    return "\n\n".join([f"# {title}", about, *sections]) + "\n"


def helps(command: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the `--help` of a command, and of each of its actions."""
    from footplate.cli.commands import COMMANDS

    module = importlib.import_module(COMMANDS[command].module)
    parser = module.parser(command)
    if hasattr(module, "add_actions"):
        module.add_actions(parser)

    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(HELP_COLUMNS)
    try:
        yield from _helps(command, parser)
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width


def _helps(name: str, parser: Any) -> Iterator[tuple[str, str]]:
    yield name, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, inner_parser in action.choices.items():
                yield from _helps(f"{name} {inner}", inner_parser)
