"""`zerofit report`: write report.html for a run, or a comparison of several runs."""

import argparse
import functools
import json
import shlex
import time
from pathlib import Path

from zerofit.base import command_line, paths
from zerofit.base.errors import Diverged, UserError, printable
from zerofit.checkpoint.facts import step_of
from zerofit.job import memory_figure, run_folder, run_segments, scores
from zerofit.report import plots
from zerofit.report import run as run_data
from zerofit.report.plots import Series
from zerofit.report.run import FILE, Run, as_text, duration
from zerofit.train import model_card

RELOAD_SECONDS = 15  # for pages of runs that train

EVERY_RANGE = (5, 86_400)  # seconds, for --every

# {chart: (unit, {metric: label}, whether the axis starts at 0)}
CHARTS = {
    "Loss": ("nats per token", {"loss": "training", "eval_loss": "evaluation"}, False),
    "Learning rate": ("", {"learning_rate": "learning rate"}, True),
    "Gradient norm": ("", {"grad_norm": "gradient norm"}, True),
    "Speed": ("tokens/s", {"tokens_per_second": "tokens/s"}, True),
    "Rewards": ("", {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"}, False),
    "Reward accuracy": ("share", {"rewards/accuracies": "training", "eval_rewards/accuracies": "evaluation"}, False),
}

# Arguments with different values in any two runs.
RUN_SPECIFIC = ("output_dir", "logging_dir", "run_name", "local_rank", "resume_from_checkpoint")


def main(argv: list[str]) -> None:
    """`zerofit report`: see --help. Raises: UserError for a folder without a run."""
    parser = argparse.ArgumentParser(prog="zerofit report", allow_abbrev=False, description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders (make passes several in one word)")
    parser.add_argument(
        "--output", default="", help="output file (default: in the run folder; next to the folders of several runs)"
    )
    parser.add_argument(
        "--every", type=float, default=0.0, metavar="SECONDS", help="update the page until the runs have ended"
    )
    args = parser.parse_args(argv)
    least, most = EVERY_RANGE
    if args.every and not least <= args.every <= most:
        raise UserError(f"--every {args.every:g}: must be between {least} and {most} seconds.")
    folders = [f for word in args.runs for f in ([word] if Path(word).expanduser().is_dir() else shlex.split(word))]
    runs = [run_data.open_run(name) for name in folders]
    several = runs[0].folder.resolve().parent / "report-{}.html".format("-".join(run.name for run in runs))
    file = Path(args.output).expanduser() if args.output else several if len(runs) > 1 else runs[0].folder / FILE
    if file.is_symlink() and not args.output:
        raise UserError(f"{file}: is a link to {file.readlink()}; set the output file with --output.")
    is_updated = args.every or file == runs[0].folder / FILE  # a run updates its own page
    while True:
        _write_to(file, render(runs, reload=args.every or RELOAD_SECONDS if is_updated else 0), bool(args.output))
        print(paths.from_here(printable(f"report: {file}")), flush=True)
        if not (args.every and any(run.training for run in runs)):
            return
        time.sleep(args.every)
        runs = [run_data.open_run(name) for name in folders]


def _write_to(file: Path, text: str, is_explicit: bool) -> None:
    """Write a page. is_explicit: the user chose the file, so it may be a pipe or a link."""
    try:
        if is_explicit:
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        else:
            paths.write_text(file, text)
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}; set another file with --output.") from None


def render(runs: list[Run], reload: float = 0) -> str:
    """Return the page of one or more runs. reload: seconds between reloads while a run trains."""
    reload = round(reload) if any(run.training for run in runs) else 0
    return render_runs(runs, reload) if len(runs) > 1 else render_run(runs[0], reload)


def write(folder: Path, next_printed: bool = False) -> None:
    """Write the report of an ended run, and print its path and the next command.

    Errors of the report never fail a run. Args: next_printed: the next command has already been printed.
    """
    try:
        paths.write_text(folder / FILE, render_run(Run(folder)))
    except Exception as error:
        print(printable(f"note: {folder / FILE} could not be written: {error}"), flush=True)
    else:
        print(printable(f"report: {folder / FILE}"))
        if not next_printed:
            print(f"next: {' or '.join(next_steps(folder))}", flush=True)


# --- one run ---


def render_run(run: Run, reload: int = 0) -> str:
    """Return the page of a run. reload: seconds between reloads, 0 for none."""
    facts = run.facts
    recipe = facts.get("recipe", "run")
    model = model_card.Card(facts, run.name, "", None, None, "", "").base
    started = facts.get("started", "").replace("T", " ").replace("+0000", " UTC")
    why = [] if run.finished or run.training else [run.failure.get("cause") or run.result.get("error")]
    if why and run.failure.get("try"):
        why.append(f"Try: {run.failure['try']}")
    sample_head, samples = _samples(run)
    return _template().render(
        title=f"{recipe} of {model}" if model else recipe,
        status=run.status,
        state="good" if run.finished else "" if run.training else "bad",
        subtitle=f"{run.folder} · {started} · {facts.get('device', '')}",
        reload=reload,
        progress=progress(run),
        why=[sentence for sentence in why if sentence],
        failures=run_data.failures(run),
        figures=summary(run),
        training=_charts([run]),
        memory=_memory(run),
        memory_table=run_data.memory_rows(run),
        sample_head=sample_head,
        samples=samples,
        scores=scores.table(scores.read_evaluations(run.folder)),
        checkpoints=_checkpoints(run.folder),
        next=next_steps(run.folder, run.training),
        **_details(run),
    )


def progress(run: Run) -> dict | None:
    """Return {"step", "total", "text"} for a run that trains, or None."""
    if not run.training:
        return None
    (step, total), left = run_data.position(run), run_data.seconds_left(run)
    text = f"step {step:,}" + (f" of {total:,}" if total else "")
    text += f" · about {duration(left)} left" if left else ""
    return {"step": step, "total": total, "text": f"{text} · updated {time.strftime('%H:%M:%S')}"}


@functools.cache
def _template():
    """Return the page's template, which escapes texts."""
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=folder, autoescape=True, trim_blocks=True).get_template("page.html.jinja")


def summary(run: Run) -> dict[str, str | None]:
    """Return {name: figure} of a run, None for missing figures."""
    result = run.result
    steps = result.get("steps") or run.last("step")
    loss, held_out = run.last("loss"), result.get("eval_loss") or run.last("eval_loss")
    speed = result.get("tokens_per_second") or run.last("tokens_per_second")
    planned = run_data.planned_speed(run)
    peak = result.get("peak_memory_bytes") or run.last("peak_memory_bytes")
    seconds, before = result.get("train_seconds"), run_segments.previous_seconds(run.facts)
    since_resume = f" ({duration(seconds)} since the last resume)" if before and seconds is not None else ""
    scores = {name: [result.get(f"{name}_{when}") for when in ("before", "after")] for name in run_folder.SCORES}
    score = next((name for name, values in scores.items() if None not in values), None)
    before_and_after = score and " → ".join(f"{value:.1%}" for value in scores[score])
    return {
        (score or "score").replace("_", " ") + " before → after": before_and_after,
        "last training loss": None if loss is None else f"{loss:.4f}",
        "evaluation loss": None if held_out is None else f"{held_out:.4f}",
        "optimizer steps": None if steps is None else f"{steps:,}",
        "tokens/s": None if not speed else f"{speed:,.0f}",
        "tokens/s, planned": None if not planned else f"{planned:,.0f}",
        f"peak memory, {result.get('peak_memory_of', 'of a rank')}": None if not peak else _size(peak),
        "training time": None if seconds is None else duration(before + seconds) + since_resume,
        "trained parameters": _trained(result),
        "processes, stage, offload": "{}, ZeRO-{}, {}".format(
            run.facts.get("world_size", "?"), *(run.arguments().get(name, ("?", ""))[0] for name in ("zero", "offload"))
        ),
    }


def _trained(result: dict) -> str | None:
    """Return the trained parameters, e.g. "1.52 M of 853.12 M"; None for an unfinished run."""
    trained, total = (result.get(name) for name in ("trainable_parameters", "parameters"))
    if not trained:
        return None
    return f"{trained / 1e6:,.2f} M" + (f" of {total / 1e6:,.2f} M" if total not in (None, trained) else "")


def _charts(runs: list[Run]) -> dict[str, str]:
    drawn = {}
    has_unit = not any(run_folder.trained_on_preferences(run.facts) for run in runs)
    for title, (unit, metrics, from_zero) in CHARTS.items():
        lines = []
        for number, run in enumerate(runs):
            for place, (metric, label) in enumerate(metrics.items()):
                color, name = (number, f"{run.name}, {label}") if len(runs) > 1 else (place, label)
                lines.append(Series(name, run.points(metric), color, dashed=place > 0))
            if title == "Speed" and (speed := run_data.planned_speed(run)) and lines[-1].points:
                steps = [lines[-1].points[0][0], lines[-1].points[-1][0]]
                name = f"{run.name}, planned" if len(runs) > 1 else "planned"
                lines.append(Series(name, [(step, speed) for step in steps], number, dashed=True))
        drawn[title] = plots.chart(unit if has_unit or title != "Loss" else "", lines, from_zero)
    return {title: picture for title, picture in drawn.items() if picture}


def _memory(run: Run) -> dict[str, str]:
    """Return the charts of planned and measured peaks by phase and part."""
    plan, measured = run.facts.get("plan") or {}, run_folder.read_record(run.folder / "memory.json").get("peak", {})
    planned, limit = dict(plan.get("peak", {})), plan.get("limit_bytes")
    where, parts = run_data.measured_memory(run)
    if planned and not measured and run_data.OTHER_MEMORY in parts:
        planned[where] = {
            "untracked" if part == run_data.OTHER_MEMORY else part: int(size) for part, size in parts.items()
        }
    peaks = {"Peak memory per rank, planned": planned, "Peak memory per rank, measured": measured}
    line = (limit, "limit") if limit else None
    return {name: _bars(json.dumps(bars), line) for name, bars in peaks.items() if bars}


@functools.lru_cache(maxsize=8)  # rarely change, and take as long as all other charts
def _bars(peak: str, line: tuple[float, str] | None) -> str:
    return plots.picture(memory_figure.figure(json.loads(peak), "", line))


def _samples(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of generated answers."""
    samples = run.result.get("samples", [])
    names = ["prompt", "before", "after", "wanted"]
    if all(sample.get("before") is None for sample in samples):
        names.remove("before")
    return names, [[printable(str(sample.get(name, ""))) for name in names] for sample in samples]


def _checkpoints(folder: Path) -> list[list[str]]:
    models = [folder / name for name in ("final", "export") if (folder / name).is_dir()]
    return [[f.name, _size(paths.size_of(f))] for f in (*run_folder.checkpoints(folder).values(), *models)]


def next_steps(folder: Path, training: bool = False) -> list[str]:
    """Return the next commands for a run: to use its model, to resume it, or to inspect it."""
    if training:
        cancel = command_line.next_step("cancel", folder)
        return [command_line.next_step("watch", folder), f"{cancel}    # saves, then ends"]
    from zerofit.checkpoint import integrity  # imports torch

    if run_folder.finished(folder):
        return [command_line.next_step(verb, folder) for verb in ("chat", "export")]
    if bad_steps := _bad_steps(folder):
        return [f"zerofit replay {shlex.quote(str(bad_steps[-1]))}    # a resumed run would diverge again in this step"]
    saved = integrity.latest_valid_checkpoint(folder, hashes=False)
    where = f"from step {step_of(saved)}" if saved else "from the start"
    return [f"{command_line.next_step('resume', folder)}    # {where}"]


def _bad_steps(folder: Path) -> list[Path]:
    """Return the saved steps of a diverged run in order, [] for other runs."""
    diverged = str(Run(folder).result.get("error")).startswith(f"{Diverged.__name__}:")
    return [*run_folder.by_step(folder / "nan", "step").values()] if diverged else []


def _details(run: Run) -> dict:
    """Return the template's values for command, data, decisions, arguments and versions."""
    facts = run.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    commit = f"; commit {facts['git_commit'][:12]}" if facts.get("git_commit") else ""
    return {
        "command": facts.get("typed") or facts.get("command", ""),
        "segments": _segments(run),
        "data": [
            [name, *(str(entry.get(key, "")) for key in ("source", "rows", "kept", "fingerprint"))]
            for name, entry in facts.get("data", {}).items()
        ],
        "decisions": facts.get("decisions", []),
        "arguments": [[name, value, source] for name, (value, source) in run.arguments().items()],
        "versions": versions + commit,
    }


def _segments(run: Run) -> list[list[str]]:
    """Return a row per segment of a resumed run, [] if it was never resumed."""
    segments = run_segments.all_segments(run.facts)
    last = run.result.get("steps") or run.last("step")
    rows = []
    for number, segment in enumerate(segments, 1):
        to_step = last if number == len(segments) else segment.get("to_step")
        ranks = f"{segment.get('world_size', '?')}, ZeRO-{segment.get('zero', '?')}, {segment.get('offload', '?')}"
        started = str(segment.get("started") or "").replace("T", " ").replace("+0000", " UTC")
        end = "?" if to_step is None else int(to_step)
        steps = f"{segment.get('from_step', 0) + 1} to {end}"
        rows.append([steps, started, ranks, str(segment.get("typed") or segment.get("command") or "")])
    return rows if len(rows) > 1 else []


# --- several runs ---


def render_runs(runs: list[Run], reload: int = 0) -> str:
    """Return a comparison of runs: figures, different settings, charts. reload: see `render_run`."""
    figures = [summary(run) | _scores(run) for run in runs]
    names = list(dict.fromkeys(name for values in figures for name in values))
    texts = [(progress(run) or {"text": ""})["text"] for run in runs]
    rows = [["status", *(run.status for run in runs)], ["progress", *texts]]
    rows += [[name, *(values.get(name) or "" for values in figures)] for name in names]
    return _template().render(
        title=" and ".join(run.name for run in runs) if len(runs) == 2 else f"{len(runs)} runs",
        subtitle=", ".join(str(run.folder) for run in runs),
        reload=reload,
        head=["", *(run.name for run in runs)],
        comparison=[row for row in rows if any(row[1:])],
        differences=differences(runs),
        failures=[f"{run.name}: {sentence}" for run in runs for sentence in run_data.failures(run)],
        training=_charts(runs),
        next=[command for run in runs for command in next_steps(run.folder, run.training)],
    )


def _scores(run: Run) -> dict[str, str]:
    """Return the scores of the final weights by task and metric."""
    head, rows = scores.table(scores.read_evaluations(run.folder))
    of_final = [dict(zip(head, row, strict=True)) for row in rows if scores.is_final(row[0])]
    return {f"{row['task']}, {row['metric']}": row.get("tuned") or "" for row in of_final}


def differences(runs: list[Run]) -> list[list[str]]:
    """Return [name, value of each run] for all arguments and facts that differ."""
    rows = [["recipe", *(str(run.facts.get("recipe", "")) for run in runs)]]
    rows += [["processes", *(str(run.facts.get("world_size", "")) for run in runs)]]
    rows += [["device", *(str(run.facts.get("device", "")) for run in runs)]]
    for place in ("training", "evaluation"):
        prints = [str(run.facts.get("data", {}).get(place, {}).get("fingerprint", "")) for run in runs]
        rows.append([f"{place} data (fingerprint)", *prints])
    for name in sorted({name for run in runs for name in run.facts.get("arguments", {})} - set(RUN_SPECIFIC)):
        values = [run.facts.get("arguments", {}).get(name, {}).get("value") for run in runs]
        rows.append([name, *map(as_text, values)])
    for package in sorted({name for run in runs for name in run.facts.get("versions", {})}):
        rows.append([f"version of {package}", *(run.facts.get("versions", {}).get(package) or "" for run in runs)])
    return [row for row in rows if len(set(row[1:])) > 1]


# --- values as text ---


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
