"""`zerofit report`: write report.html of a run, or of several side by side."""

import argparse
import functools
import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zerofit.base import command_line, paths
from zerofit.base.errors import Diverged, UserError, printable
from zerofit.checkpoint.facts import step_of
from zerofit.job import run_folder, scores, stretches
from zerofit.report import plots
from zerofit.report.plots import Line
from zerofit.train import model_card

FILE = "report.html"

# Chart -> (unit, {metric: label}, whether its axis begins at 0).
CHARTS = {
    "Loss": ("nats per token", {"loss": "training", "eval_loss": "evaluation"}, False),
    "Learning rate": ("", {"learning_rate": "learning rate"}, True),
    "Gradient norm": ("", {"grad_norm": "gradient norm"}, True),
    "Speed": ("tokens a second", {"tokens_per_second": "tokens a second"}, True),
    "Rewards": ("", {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"}, False),
    "Pairs ranked right": ("share", {"rewards/accuracies": "training", "eval_rewards/accuracies": "evaluation"}, False),
}

# Arguments whose values differ between any two runs.
OF_A_RUN = ("output_dir", "logging_dir", "run_name", "local_rank", "resume_from_checkpoint")


@dataclass
class Run:
    """What a run folder says of itself; files that are missing or damaged are empty."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def facts(self) -> dict:
        return run_folder.read_record(self.folder / "run.json")

    @cached_property
    def result(self) -> dict:
        return run_folder.read_record(self.folder / "result.json")

    @cached_property
    def failure(self) -> dict:
        return run_folder.read_record(self.folder / "report.json")

    @cached_property
    def metrics(self) -> list[dict]:
        return run_folder.read_metrics(self.folder)

    @property
    def finished(self) -> bool:
        return self.result.get("status") == "finished"

    @property
    def status(self) -> str:
        return "finished" if self.finished else self.result.get("status") or "not finished"

    def points(self, metric: str) -> list[tuple[float, float]]:
        return [(entry["step"], entry[metric]) for entry in self.metrics if entry.get(metric) is not None]

    def last(self, metric: str) -> float | None:
        return next((value for _, value in reversed(self.points(metric))), None)

    def arguments(self) -> dict[str, tuple[str, str]]:
        """Return argument -> (value, source) of those that are not a default of transformers."""
        return {
            name: (_text(entry.get("value")), entry.get("source") or "")
            for name, entry in self.facts.get("arguments", {}).items()
            if entry.get("source") != "transformers default"
        }


def main(argv: list[str]) -> None:
    """`zerofit report`: see --help. Raises: UserError for a folder without a run."""
    parser = argparse.ArgumentParser(prog="zerofit report", allow_abbrev=False, description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders (several also in one word, as make passes them)")
    parser.add_argument("--output", default="", help="the file (default: in the run folder; of several: beside them)")
    args = parser.parse_args(argv)
    names = [name for word in args.runs for name in ([word] if Path(word).expanduser().is_dir() else shlex.split(word))]
    runs = [Run(Path(name).expanduser()) for name in names]
    for run in runs:
        if not run.facts:
            raise UserError(f"{run.folder}: is no run folder (its run.json is missing or damaged); name one of runs/.")
    several = runs[0].folder.resolve().parent / "report-{}.html".format("-".join(run.name for run in runs))
    file = Path(args.output).expanduser() if args.output else several if len(runs) > 1 else runs[0].folder / FILE
    if file.is_symlink() and not args.output:
        raise UserError(f"{file}: is a link, to {file.readlink()}; name the file to write to with --output.")
    text = of_several(runs) if len(runs) > 1 else of_one(runs[0])
    try:
        if args.output:  # may be a pipe, or a link that the user has made
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        else:
            paths.write_text(file, text)
    except OSError as error:
        raise UserError(f"{file}: cannot be written to: {error.strerror}; name another file with --output.") from None
    print(f"report: {file}")


def write(folder: Path, told: bool = False) -> None:
    """Write the report of a run that has ended, print where it is and the next command.

    A run never fails for its report. Args: told: the next command has been printed already.
    """
    try:
        paths.write_text(folder / FILE, of_one(Run(folder)))
    except Exception as error:
        print(f"note: {folder / FILE} could not be written: {error}", flush=True)
    else:
        print(f"report: {folder / FILE}")
        if not told:
            print(f"next: {' or '.join(next_steps(folder))}", flush=True)


# --- one run ---


def of_one(run: Run) -> str:
    """Return the page of a run."""
    facts = run.facts
    recipe = facts.get("recipe", "run")
    model = model_card.Card(facts, run.name, "", None, None, "", "").base
    started = facts.get("started", "").replace("T", " ").replace("+0000", " UTC")
    why = [] if run.finished else [run.failure.get("cause") or run.result.get("error")]
    if run.failure.get("try") and not run.finished:
        why.append(f"Try: {run.failure['try']}")
    sample_head, samples = _samples(run)
    return _page(
        title=f"{recipe} of {model}" if model else recipe,
        status=run.status,
        finished=run.finished,
        subtitle=f"{run.folder} · {started} · {facts.get('device', '')}",
        why=[sentence for sentence in why if sentence],
        figures=summary(run),
        training=_charts([run]),
        memory=_memory(run),
        sample_head=sample_head,
        samples=samples,
        scores=scores.table(scores.of_folder(run.folder)),
        checkpoints=_checkpoints(run.folder),
        next=next_steps(run.folder),
        **_what_was_run(run),
    )


def _page(**values) -> str:
    """Fill in the page's template; texts are escaped."""
    return _template().render(values)


@functools.cache
def _template():
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=folder, autoescape=True, trim_blocks=True).get_template("page.html.jinja")


def summary(run: Run) -> dict[str, str | None]:
    """Return the figures of a run by name; None for those that it has not."""
    result = run.result
    steps = result.get("steps") or run.last("step")
    loss, held_out = run.last("loss"), result.get("eval_loss") or run.last("eval_loss")
    speed = result.get("tokens_per_second") or run.last("tokens_per_second")
    peak = result.get("peak_memory_bytes") or run.last("peak_memory_bytes")
    seconds, before = result.get("train_seconds"), stretches.seconds_before(run.facts)
    scores = {name: [result.get(f"{name}_{when}") for when in ("before", "after")] for name in run_folder.SCORES}
    score = next((name for name, values in scores.items() if None not in values), None)
    before_and_after = score and " → ".join(f"{value:.1%}" for value in scores[score])
    return {
        (score or "score").replace("_", " ") + " before → after": before_and_after,
        "last training loss": None if loss is None else f"{loss:.4f}",
        "evaluation loss": None if held_out is None else f"{held_out:.4f}",
        "optimizer steps": None if steps is None else f"{steps:,}",
        "tokens a second": None if not speed else f"{speed:,.0f}",
        f"peak memory, {result.get('peak_memory_of', 'of a rank')}": None if not peak else _size(peak),
        "training time": None if seconds is None else _time(seconds, before),
        "trained parameters": _trained(result),
        "processes, stage, offload": "{}, ZeRO-{}, {}".format(
            run.facts.get("world_size", "?"), *(run.arguments().get(name, ("?", ""))[0] for name in ("zero", "offload"))
        ),
    }


def _time(seconds: float, before: float) -> str:
    """Return the training time of a run, and of its last stretch if it was resumed."""
    last = f", of it {_duration(seconds)} since the last resume" if before else ""
    return _duration(before + seconds) + last


def _trained(result: dict) -> str | None:
    """Return the millions of parameters that train, "1.52 M of 853.12 M" for an adapter; None of an unfinished run."""
    trained, total = (result.get(name) for name in ("trainable_parameters", "parameters"))
    if not trained:
        return None
    return f"{trained / 1e6:,.2f} M" + (f" of {total / 1e6:,.2f} M" if total not in (None, trained) else "")


def _charts(runs: list[Run]) -> dict[str, str]:
    drawn = {}
    of_pairs = any(run_folder.trained_on_pairs(run.facts) for run in runs)
    for title, (unit, metrics, from_zero) in CHARTS.items():
        lines = []
        for number, run in enumerate(runs):
            for place, (metric, label) in enumerate(metrics.items()):
                color, name = (number, f"{run.name}, {label}") if len(runs) > 1 else (place, label)
                lines.append(Line(name, run.points(metric), color, dashed=place > 0))
        drawn[title] = plots.chart("" if of_pairs and title == "Loss" else unit, lines, from_zero)
    return {title: picture for title, picture in drawn.items() if picture}


def _memory(run: Run) -> dict[str, str]:
    """Return the charts of the planned and of the measured peaks by phase and part."""
    from zerofit.train import memory_report  # imports transformers' Trainer, for seconds

    plan, measured = run.facts.get("plan") or {}, run_folder.read_record(run.folder / "memory.json").get("peak", {})
    planned, limit = dict(plan.get("peak", {})), plan.get("limit_bytes")
    peak = run.result.get("peak_memory_bytes") or run.last("peak_memory_bytes")
    if planned and peak and not measured and run.facts.get("device") != "cpu":
        planned["measured"] = {"untracked": int(peak)}
    of_rank = {"Peak memory of a rank, planned": planned, "Peak memory of a rank, measured": measured}
    line = (limit, "limit") if limit else None
    return {name: plots.picture(memory_report.figure(bars, "", line)) for name, bars in of_rank.items() if bars}


def _samples(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of sample answers."""
    samples = run.result.get("samples", [])
    names = ["prompt", "before", "after", "wanted"]
    if all(sample.get("before") is None for sample in samples):
        names.remove("before")
    return ["asked", *names[1:]], [[printable(str(sample.get(name, ""))) for name in names] for sample in samples]


def _checkpoints(folder: Path) -> list[list[str]]:
    models = [folder / name for name in ("final", "export") if (folder / name).is_dir()]
    return [[f.name, _size(paths.size_of(f))] for f in (*run_folder.checkpoints(folder).values(), *models)]


def next_steps(folder: Path) -> list[str]:
    """Return the commands that continue from a run: those of its model, how to resume it, or what looks into it."""
    from zerofit.checkpoint import integrity

    if run_folder.finished(folder):
        return [command_line.next_step(verb, folder) for verb in ("chat", "export")]
    if bad_steps := _bad_steps(folder):
        return [f"zerofit replay {shlex.quote(str(bad_steps[-1]))}    # resumed, this step would diverge again"]
    saved = integrity.latest_valid_checkpoint(folder, hashes=False)
    where = f"from step {step_of(saved)}" if saved else "from the start"
    return [f"{command_line.next_step('resume', folder)}    # {where}"]


def _bad_steps(folder: Path) -> list[Path]:
    """Return the folders of the steps that a diverged run has kept, in order; none for runs that ended otherwise."""
    diverged = str(Run(folder).result.get("error")).startswith(f"{Diverged.__name__}:")
    return [*run_folder.by_step(folder / "nan", "step").values()] if diverged else []


def _what_was_run(run: Run) -> dict:
    """Return the template's values on the command, its data, decisions, arguments and versions."""
    facts = run.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    commit = f"; commit {facts['git_commit'][:12]}" if facts.get("git_commit") else ""
    return {
        "command": facts.get("typed") or facts.get("command", ""),
        "stretches": _stretches(run),
        "data": [
            [name, *(str(of.get(key, "")) for key in ("source", "rows", "kept", "fingerprint"))]
            for name, of in facts.get("data", {}).items()
        ],
        "decisions": facts.get("decisions", []),
        "arguments": [[name, value, source] for name, (value, source) in run.arguments().items()],
        "versions": versions + commit,
    }


def _stretches(run: Run) -> list[list[str]]:
    """Return a row for each stretch of a run that was resumed; none of one that was not."""
    found = stretches.of_run(run.facts)
    last = run.result.get("steps") or run.last("step")
    rows = []
    for number, one in enumerate(found, 1):
        to_step = last if number == len(found) else one.get("to_step")
        placed = f"{one.get('world_size', '?')}, ZeRO-{one.get('zero', '?')}, {one.get('offload', '?')}"
        started = str(one.get("started") or "").replace("T", " ").replace("+0000", " UTC")
        steps = f"{one.get('from_step', 0) + 1} to {'?' if to_step is None else int(to_step)}"
        rows.append([steps, started, placed, str(one.get("typed") or one.get("command") or "")])
    return rows if len(rows) > 1 else []


# --- several runs ---


def of_several(runs: list[Run]) -> str:
    """Return the page of runs side by side: figures, differing settings, charts."""
    figures = [summary(run) | _scores(run) for run in runs]
    names = list(dict.fromkeys(name for of in figures for name in of))
    rows = [["status", *(run.status for run in runs)]]
    rows += [[name, *(of.get(name) or "" for of in figures)] for name in names if any(of.get(name) for of in figures)]
    return _page(
        title=" and ".join(run.name for run in runs) if len(runs) == 2 else f"{len(runs)} runs",
        subtitle=", ".join(str(run.folder) for run in runs),
        head=["", *(run.name for run in runs)],
        of_runs=rows,
        differences=differences(runs),
        training=_charts(runs),
        next=[command for run in runs for command in next_steps(run.folder)],
    )


def _scores(run: Run) -> dict[str, str]:
    """Return the scores of the run's final weights by task and metric."""
    head, rows = scores.table(scores.of_folder(run.folder))
    of_final = [dict(zip(head, row, strict=True)) for row in rows if row[0].startswith("final")]
    return {f"{row['task']}, {row['metric']}": row.get("tuned") or "" for row in of_final}


def differences(runs: list[Run]) -> list[list[str]]:
    """Return [name, value of each run] of every argument and fact in which the runs differ."""
    rows = [["recipe", *(str(run.facts.get("recipe", "")) for run in runs)]]
    rows += [["processes", *(str(run.facts.get("world_size", "")) for run in runs)]]
    rows += [["device", *(str(run.facts.get("device", "")) for run in runs)]]
    for place in ("training", "evaluation"):
        prints = [str(run.facts.get("data", {}).get(place, {}).get("fingerprint", "")) for run in runs]
        rows.append([f"{place} data (fingerprint)", *prints])
    for name in sorted({name for run in runs for name in run.facts.get("arguments", {})} - set(OF_A_RUN)):
        values = [run.facts.get("arguments", {}).get(name, {}).get("value") for run in runs]
        rows.append([name, *map(_text, values)])
    for package in sorted({name for run in runs for name in run.facts.get("versions", {})}):
        rows.append([f"version of {package}", *(run.facts.get("versions", {}).get(package) or "" for run in runs)])
    return [row for row in rows if len(set(row[1:])) > 1]


# --- values as text ---


def _text(value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 10 on a command line and 10.0 in a YAML file are the same
    return ", ".join(map(str, value)) if isinstance(value, list) else json.dumps(value)


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{seconds:.1f} s"
