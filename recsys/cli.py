"""The command line: `recsys COMMAND ...`. Heavy imports wait until a command needs them."""

import logging
import os
import pathlib
import shutil
import sys
from typing import Annotated, Any

import typer

from recsys.errors import UserError

app = typer.Typer(
    name="recsys",
    help="Train, evaluate and ship click-through-rate models on sharded embedding tables.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file that describes the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="Settings that replace the recipe's.")
]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or one checkpoint inside it.")]


@app.command()
def prepare(
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="movielens-100k, movietweetings-100k or synthetic.")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[option=value ...]", help="Options of the data set.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Folder to write; default: $RECSYS_DATA/DATASET.")] = None,
    source: Annotated[str | None, typer.Option(help="Local copy of the raw data.")] = None,
) -> None:
    """Turn a data set into parquet, with counts and checksums."""
    from recsys.data.prepare import prepare as run_prepare
    from recsys.paths import data_home

    print(run_prepare(dataset, output or data_home() / dataset, source, _options(options)))


@app.command()
def check(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Find every problem of a recipe and its data without training; exit code 1 if there are any."""
    from recsys.check import check as run_check

    problems = run_check(recipe, overrides or [])
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise typer.Exit(1)
    print(f"{recipe}: no problems")


@app.command()
def vocab(
    recipe: RecipePath,
    overrides: Overrides = None,
    output: Annotated[str | None, typer.Option(help="Folder to write; default: one in the data cache.")] = None,
    grow: Annotated[
        str | None, typer.Option(help="Folder of vocabularies, or run, whose hot ids keep their rows.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="File that the figures are written to as well.")] = None,
) -> None:
    """Count the ids of the training data: coverage, a size for the hot rows, and the vocabularies themselves."""
    _require_stack()
    from rich.console import Console

    from recsys.frequencies import report
    from recsys.survey import vocabularies

    console = Console()
    all_found = vocabularies(_load(recipe, overrides), output=output, grow=grow, json_path=json)
    if not all_found:
        print("Nothing was counted: the ids of all tables have a fixed range, or are of several kinds")
    for found in all_found:
        console.print(report(found))
        console.print(f"Written to {found['path']}\n", soft_wrap=True, markup=False)


@app.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    devices_per_node: Annotated[int, typer.Option(help="Ranks on each node: GPUs, or processes on CPU.")] = 1,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: that of the machine, else cpu.")] = None,
    machine: Annotated[str | None, typer.Option(help="Named machine, such as h100-80gb (docs/planning.md).")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one device, such as 80GB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory for each device, such as 128GB.")] = None,
    memory_bandwidth: Annotated[str | None, typer.Option(help="Of one device's memory, such as 2TB/s.")] = None,
    intra_bandwidth: Annotated[str | None, typer.Option(help="Of one device inside its node, such as 300GB/s.")] = None,
    inter_bandwidth: Annotated[str | None, typer.Option(help="Of one device to other nodes, such as 25GB/s.")] = None,
    json: Annotated[str | None, typer.Option(help="File for the plan; `train.plan` reads it.")] = None,
    picture: Annotated[str | None, typer.Option(help="PNG file: memory of each table on each rank.")] = None,
) -> None:
    """Plan a recipe for a cluster that need not be here: exit code 1 when its tables do not fit."""
    from recsys.cluster import cluster_of

    rates = {"memory_bandwidth": memory_bandwidth, "intra_bandwidth": intra_bandwidth}
    rates["inter_bandwidth"] = inter_bandwidth
    cluster = cluster_of(nodes, devices_per_node, device, machine, memory, host_memory, **rates)
    loaded = _load(recipe, overrides)
    _require_stack()
    from rich.console import Console

    from recsys import plan_report
    from recsys.plan_misfit import DoesNotFitError

    plan_report.require_writable([json, picture])
    try:
        found = plan_report.plan_recipe(loaded, cluster)
    except DoesNotFitError as error:
        print(cluster.describe(), *cluster.notes, sep="\n")
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    plan_report.print_plan(found, cluster, Console())
    if json:
        found.write(json)
    if picture:
        plan_report.write_picture(found, picture)


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        # torchrun takes `--run` behind `-m recsys train` for a short form of its own `--run-path`
        typer.Option("--run-dir", "--run", help="Run folder; default: runs/RECIPE-DATE-TIME."),
    ] = None,
    resume: Annotated[
        str, typer.Option(help="auto: go on from the newest whole checkpoint of the run folder, or begin; never; PATH.")
    ] = "never",
) -> None:
    """Train, evaluate every epoch, keep the best one and write a report. Exit code 75: told to stop, and saved."""
    _require_stack()
    from recsys.cold_report import print_tables
    from recsys.interruption import EXIT_CODE, InterruptedRunError
    from recsys.train import train as run_train

    loaded = _load(recipe, overrides)
    path = pathlib.Path(recipe)
    name = f"{path.parent.name}-{path.stem}" if path.parent.name else path.stem
    try:
        result = run_train(loaded, run=run, name=name, resume=resume)
    except InterruptedRunError:
        raise typer.Exit(EXIT_CODE) from None
    if _is_first():
        if splits := [split for split in ("valid", "test") if split in result.metrics]:
            _print_metrics({split: result.metrics[split] for split in splits})
        print_tables(result.metrics)
        print(f"Best epoch {result.metrics['best_epoch']}; report: {result.report}")


@app.command()
def evaluate(
    run: RunPath,
    data: Annotated[str | None, typer.Option(help="Parquet file or folder; default: the recipe's test set.")] = None,
    json: Annotated[str | None, typer.Option(help="File that the metrics are written to as well.")] = None,
) -> None:
    """Metrics of a trained model: auc, gauc, logloss, normalized entropy, calibration."""
    _require_stack()
    from recsys.cold_report import print_tables
    from recsys.predict import evaluate as run_evaluate

    found = run_evaluate(run, data_path=data, json_path=json)
    if _is_first():
        _print_metrics({data or "test": found})
        slices = {data or "test": found["slices"]} if found["slices"] else {}
        print_tables({"traffic": {data or "test": found["traffic"]}, "slices": slices})


@app.command()
def predict(
    run: RunPath,
    data: Annotated[str, typer.Option(help="Parquet file or folder; needs no label.")],
    output: Annotated[str, typer.Option(help="Parquet file to write.")],
) -> None:
    """One probability per input row, in input order."""
    _require_stack()
    from recsys.predict import predict as run_predict

    num_rows = run_predict(run, data_path=data, output=output)
    if _is_first():
        print(f"{num_rows:,} rows written to {output}")


@app.command()
def changes(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    output: Annotated[str, typer.Option(help="Parquet file to write: table, row, id, vector.")],
    step: Annotated[
        int | None, typer.Option(help="Step of an incremental checkpoint; default: the newest one.")
    ] = None,
) -> None:
    """Write the rows that an incremental checkpoint has changed, for a serving store."""
    _require_stack()
    from recsys.refresh import write

    print(f"{write(run, output, step=step):,} rows written to {output}")


@app.command()
def doctor(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST ...]", help="With --network: the job's hosts, first node first."),
    ] = None,
    network: Annotated[bool, typer.Option("--network", help="How ranks of several hosts reach each other.")] = False,
) -> None:
    """Installed and supported versions, devices, threads; exit code 1 when something does not fit."""
    from recsys.doctor import network_report, report

    if hosts and not network:
        raise UserError("Hosts are looked at with --network", received=" ".join(hosts), fix="add --network")
    text, ok = network_report(hosts or []) if network else report()
    print(text)
    if not ok:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; a mistake of the user's ends with one message and exit code 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[_StderrOfTheMoment()])
    logging.getLogger("recsys").setLevel(logging.INFO if _is_first() else logging.WARNING)
    if (mistake := _former_mistake()) is not None:
        sys.stderr.write(mistake)
        sys.exit(2)
    if "RECSYS_LOGS" in os.environ and _is_first():
        sys.stderr.write(f"Logs of each rank: {os.environ['RECSYS_LOGS']}\n")
    try:
        app()
    except UserError as error:
        if error.is_printed_here:
            sys.stderr.write(f"Error: {error}\n")  # in one piece, for ranks share the terminal
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise error.with_traceback(None) from None  # what led to it is of no use to the user
            except UserError as short:
                get_error_handler().record_exception(short)  # torchrun shows it as the cause, on its last lines
            if not error.is_worth_retrying:
                _remember_mistake(error)
        sys.exit(2)
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        raise


def _remember_mistake(error: UserError) -> None:
    """Tell further attempts of this job, torchrun's and the scheduler's, of a mistake that they would repeat."""
    file = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    if (folder := _folder_of_all_attempts(file)) is not None and file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / "mistake.json")
        (folder / "mistake.txt").write_text(str(error), encoding="utf-8")


def _former_mistake() -> str | None:
    """What to say of a mistake that an attempt before this one has told; this one then fails with the same cause.

    The launcher ends the other ranks of a host when the first one ends: whichever comes first says it.
    """
    file = pathlib.Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    folder = _folder_of_all_attempts(file)
    if folder is None or not (folder / "mistake.txt").exists():
        return None
    shutil.copyfile(folder / "mistake.json", file)
    try:
        (file.parents[1] / "told").touch(exist_ok=False)
    except FileExistsError:
        return ""
    lasts = f" Remove {folder} to try again." if "RECSYS_LOGS" in os.environ else ""
    return f"Not tried again: {(folder / 'mistake.txt').read_text(encoding='utf-8')}{lasts}\n"


def _folder_of_all_attempts(file: pathlib.Path) -> pathlib.Path | None:
    """Of a rank's error file, which torchrun keeps as FOLDER/attempt_N/RANK/error.json.

    A job that the scheduler may start again has a new FOLDER each time; its launcher names one that stays.
    """
    if not file.parent.parent.name.startswith("attempt_"):
        return None
    logs = os.environ.get("RECSYS_LOGS")
    return pathlib.Path(logs, f"mistake-{os.environ['TORCHELASTIC_RUN_ID']}") if logs else file.parents[2]


class _StderrOfTheMoment(logging.StreamHandler):
    """Writes to what `sys.stderr` is now, since a progress bar takes its place to keep lines apart from itself."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignored."""


def _load(path: str, overrides: list[str] | None) -> Any:
    from recsys.distributed import alike_on_host
    from recsys.recipe_file import load

    with alike_on_host():
        return load(path, overrides or [])


def _options(pairs: list[str] | None) -> dict[str, str]:
    options = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(
                "An option has no value",
                received=pair,
                allowed="option=value, for instance rows=10000",
                fix="write name and value with = between them",
            )
        options[key] = value
    return options


def _require_stack() -> None:
    from recsys.stack import require_stack

    require_stack()


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_metrics(by_split: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from recsys.metrics import METRICS

    table = Table("metric", *map(escape, by_split))
    for name in METRICS:
        values = [found[name] for found in by_split.values()]
        table.add_row(
            name, *("undefined" if v is None else f"{v:,}" if isinstance(v, int) else f"{v:.4f}" for v in values)
        )
    Console().print(table)
