"""`zerofit report`: write report.html of a run, or of several side by side."""

import argparse
import functools
import json
import shlex
import time
from pathlib import Path

from zerofit.base import command_line, paths
from zerofit.base.errors import Diverged, UserError, printable
from zerofit.checkpoint.facts import step_of
from zerofit.job import memory_figure, run_folder, scores, stretches
from zerofit.report import plots, run
from zerofit.report.plots import Line
from zerofit.report.run import FILE, Run, as_text, duration
from zerofit.train import model_card

RELOAD_SECONDS = 15  # of a page whose run trains

EVERY_SECONDS = (5, 86_400)  # the least and the most of --every

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


def main(argv: list[str]) -> None:
    """`zerofit report`: see --help. Raises: UserError for a folder without a run."""
    parser = argparse.ArgumentParser(prog="zerofit report", allow_abbrev=False, description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders (several also in one word, as make passes them)")
    parser.add_argument("--output", default="", help="the file (default: in the run folder; of several: beside them)")
    parser.add_argument(
        "--every", type=float, default=0.0, metavar="SECONDS", help="write it again and again until the runs have ended"
    )
    args = parser.parse_args(argv)
    least, most = EVERY_SECONDS
    if args.every and not least <= args.every <= most:
        raise UserError(f"--every {args.every:g}: must be between {least} and {most} seconds; a page takes one.")
    folders = [one for word in args.runs for one in ([word] if Path(word).expanduser().is_dir() else shlex.split(word))]
    runs = [run.open_run(name) for name in folders]
    several = runs[0].folder.resolve().parent / "report-{}.html".format("-".join(one.name for one in runs))
    file = Path(args.output).expanduser() if args.output else several if len(runs) > 1 else runs[0].folder / FILE
    if file.is_symlink() and not args.output:
        raise UserError(f"{file}: is a link, to {file.readlink()}; name the file to write to with --output.")
    is_rewritten = args.every or file == runs[0].folder / FILE  # the other way by the run itself
    while True:
        _write_to(file, of(runs, reload=args.every or RELOAD_SECONDS if is_rewritten else 0), bool(args.output))
        print(paths.from_here(printable(f"report: {file}")), flush=True)
        if not (args.every and any(one.training for one in runs)):
            return
        time.sleep(args.every)
        runs = [run.open_run(name) for name in folders]


def _write_to(file: Path, text: str, is_named: bool) -> None:
    """Write a page. is_named: by the user, so that it may be a pipe, or a link that the user has made."""
    try:
        if is_named:
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        else:
            paths.write_text(file, text)
    except OSError as error:
        raise UserError(f"{file}: cannot be written to: {error.strerror}; name another file with --output.") from None


def of(runs: list[Run], reload: float = 0) -> str:
    """Return the page of a run, or of several. reload: seconds after which it loads itself again, if one trains."""
    reload = round(reload) if any(one.training for one in runs) else 0
    return of_several(runs, reload) if len(runs) > 1 else of_one(runs[0], reload)


def write(folder: Path, told: bool = False) -> None:
    """Write the report of a run that has ended, print where it is and the next command.

    A run never fails for its report. Args: told: the next command has been printed already.
    """
    try:
        paths.write_text(folder / FILE, of_one(Run(folder)))
    except Exception as error:
        print(printable(f"note: {folder / FILE} could not be written: {error}"), flush=True)
    else:
        print(printable(f"report: {folder / FILE}"))
        if not told:
            print(f"next: {' or '.join(next_steps(folder))}", flush=True)


# --- one run ---


def of_one(one: Run, reload: int = 0) -> str:
    """Return the page of a run. reload: seconds after which it loads itself again; 0: never."""
    facts = one.facts
    recipe = facts.get("recipe", "run")
    model = model_card.Card(facts, one.name, "", None, None, "", "").base
    started = facts.get("started", "").replace("T", " ").replace("+0000", " UTC")
    why = [] if one.finished or one.training else [one.failure.get("cause") or one.result.get("error")]
    if why and one.failure.get("try"):
        why.append(f"Try: {one.failure['try']}")
    sample_head, samples = _samples(one)
    return _template().render(
        title=f"{recipe} of {model}" if model else recipe,
        status=one.status,
        state="good" if one.finished else "" if one.training else "bad",
        subtitle=f"{one.folder} · {started} · {facts.get('device', '')}",
        reload=reload,
        progress=progress(one),
        why=[sentence for sentence in why if sentence],
        broke=run.broke(one),
        figures=summary(one),
        training=_charts([one]),
        memory=_memory(one),
        memory_table=run.memory_rows(one),
        sample_head=sample_head,
        samples=samples,
        scores=scores.table(scores.of_folder(one.folder)),
        checkpoints=_checkpoints(one.folder),
        next=next_steps(one.folder, one.training),
        **_what_was_run(one),
    )


def progress(one: Run) -> dict | None:
    """Return {"step", "total", "words"} of a run that trains; None of others."""
    if not one.training:
        return None
    (step, total), left = run.position(one), run.seconds_left(one)
    words = f"step {step:,}" + (f" of {total:,}" if total else "")
    words += f" · about {duration(left)} left" if left else ""
    return {"step": step, "total": total, "words": f"{words} · written {time.strftime('%H:%M:%S')}"}


@functools.cache
def _template():
    """Return the page's template, which escapes the texts that fill it."""
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=folder, autoescape=True, trim_blocks=True).get_template("page.html.jinja")


def summary(one: Run) -> dict[str, str | None]:
    """Return the figures of a run by name; None for those that it has not."""
    result = one.result
    steps = result.get("steps") or one.last("step")
    loss, held_out = one.last("loss"), result.get("eval_loss") or one.last("eval_loss")
    speed = result.get("tokens_per_second") or one.last("tokens_per_second")
    planned = run.planned_speed(one)
    peak = result.get("peak_memory_bytes") or one.last("peak_memory_bytes")
    seconds, before = result.get("train_seconds"), stretches.seconds_before(one.facts)
    since_resume = f", of it {duration(seconds)} since the last resume" if before and seconds is not None else ""
    scores = {name: [result.get(f"{name}_{when}") for when in ("before", "after")] for name in run_folder.SCORES}
    score = next((name for name, values in scores.items() if None not in values), None)
    before_and_after = score and " → ".join(f"{value:.1%}" for value in scores[score])
    return {
        (score or "score").replace("_", " ") + " before → after": before_and_after,
        "last training loss": None if loss is None else f"{loss:.4f}",
        "evaluation loss": None if held_out is None else f"{held_out:.4f}",
        "optimizer steps": None if steps is None else f"{steps:,}",
        "tokens a second": None if not speed else f"{speed:,.0f}",
        "tokens a second, planned": None if not planned else f"{planned:,.0f}",
        f"peak memory, {result.get('peak_memory_of', 'of a rank')}": None if not peak else _size(peak),
        "training time": None if seconds is None else duration(before + seconds) + since_resume,
        "trained parameters": _trained(result),
        "processes, stage, offload": "{}, ZeRO-{}, {}".format(
            one.facts.get("world_size", "?"), *(one.arguments().get(name, ("?", ""))[0] for name in ("zero", "offload"))
        ),
    }


def _trained(result: dict) -> str | None:
    """Return the millions of parameters that train, "1.52 M of 853.12 M" for an adapter; None of an unfinished run."""
    trained, total = (result.get(name) for name in ("trainable_parameters", "parameters"))
    if not trained:
        return None
    return f"{trained / 1e6:,.2f} M" + (f" of {total / 1e6:,.2f} M" if total not in (None, trained) else "")


def _charts(runs: list[Run]) -> dict[str, str]:
    drawn = {}
    has_unit = not any(run_folder.trained_on_preferences(one.facts) for one in runs)
    for title, (unit, metrics, from_zero) in CHARTS.items():
        lines = []
        for number, one in enumerate(runs):
            for place, (metric, label) in enumerate(metrics.items()):
                color, name = (number, f"{one.name}, {label}") if len(runs) > 1 else (place, label)
                lines.append(Line(name, one.points(metric), color, dashed=place > 0))
            if title == "Speed" and (speed := run.planned_speed(one)) and lines[-1].points:
                steps = [lines[-1].points[0][0], lines[-1].points[-1][0]]
                name = f"{one.name}, planned" if len(runs) > 1 else "planned"
                lines.append(Line(name, [(step, speed) for step in steps], number, dashed=True))
        drawn[title] = plots.chart(unit if has_unit or title != "Loss" else "", lines, from_zero)
    return {title: picture for title, picture in drawn.items() if picture}


def _memory(one: Run) -> dict[str, str]:
    """Return the charts of the planned and of the measured peaks by phase and part."""
    plan, measured = one.facts.get("plan") or {}, run_folder.read_record(one.folder / "memory.json").get("peak", {})
    planned, limit = dict(plan.get("peak", {})), plan.get("limit_bytes")
    where, parts = run.measured_memory(one)
    if planned and not measured and run.THE_REST in parts:
        planned[where] = {"untracked" if part == run.THE_REST else part: int(size) for part, size in parts.items()}
    of_rank = {"Peak memory of a rank, planned": planned, "Peak memory of a rank, measured": measured}
    line = (limit, "limit") if limit else None
    return {name: _bars(json.dumps(bars), line) for name, bars in of_rank.items() if bars}


@functools.lru_cache(maxsize=8)  # they stay the same for most of a run, and take as long as all other charts
def _bars(peak: str, line: tuple[float, str] | None) -> str:
    return plots.picture(memory_figure.figure(json.loads(peak), "", line))


def _samples(one: Run) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of sample answers."""
    samples = one.result.get("samples", [])
    names = ["prompt", "before", "after", "wanted"]
    if all(sample.get("before") is None for sample in samples):
        names.remove("before")
    return ["asked", *names[1:]], [[printable(str(sample.get(name, ""))) for name in names] for sample in samples]


def _checkpoints(folder: Path) -> list[list[str]]:
    models = [folder / name for name in ("final", "export") if (folder / name).is_dir()]
    return [[f.name, _size(paths.size_of(f))] for f in (*run_folder.checkpoints(folder).values(), *models)]


def next_steps(folder: Path, training: bool = False) -> list[str]:
    """Return the commands that continue from a run: those of its model, how to resume it, or what looks into it."""
    if training:
        cancel = command_line.next_step("cancel", folder)
        return [command_line.next_step("watch", folder), f"{cancel}    # it saves, then ends"]
    from zerofit.checkpoint import integrity  # imports torch

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


def _what_was_run(one: Run) -> dict:
    """Return the template's values on the command, its data, decisions, arguments and versions."""
    facts = one.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    commit = f"; commit {facts['git_commit'][:12]}" if facts.get("git_commit") else ""
    return {
        "command": facts.get("typed") or facts.get("command", ""),
        "stretches": _stretches(one),
        "data": [
            [name, *(str(of.get(key, "")) for key in ("source", "rows", "kept", "fingerprint"))]
            for name, of in facts.get("data", {}).items()
        ],
        "decisions": facts.get("decisions", []),
        "arguments": [[name, value, source] for name, (value, source) in one.arguments().items()],
        "versions": versions + commit,
    }


def _stretches(one: Run) -> list[list[str]]:
    """Return a row for each stretch of a run that was resumed; none of one that was not."""
    found = stretches.of_run(one.facts)
    last = one.result.get("steps") or one.last("step")
    rows = []
    for number, one in enumerate(found, 1):
        to_step = last if number == len(found) else one.get("to_step")
        placed = f"{one.get('world_size', '?')}, ZeRO-{one.get('zero', '?')}, {one.get('offload', '?')}"
        started = str(one.get("started") or "").replace("T", " ").replace("+0000", " UTC")
        steps = f"{one.get('from_step', 0) + 1} to {'?' if to_step is None else int(to_step)}"
        rows.append([steps, started, placed, str(one.get("typed") or one.get("command") or "")])
    return rows if len(rows) > 1 else []


# --- several runs ---


def of_several(runs: list[Run], reload: int = 0) -> str:
    """Return the page of runs side by side: figures, differing settings, charts. reload: as of `of_one`."""
    figures = [summary(one) | _scores(one) for one in runs]
    names = list(dict.fromkeys(name for of in figures for name in of))
    how_far = [progress(one) or {"words": ""} for one in runs]
    rows = [["status", *(one.status for one in runs)], ["progress", *(far["words"] for far in how_far)]]
    rows += [[name, *(of.get(name) or "" for of in figures)] for name in names]
    return _template().render(
        title=" and ".join(one.name for one in runs) if len(runs) == 2 else f"{len(runs)} runs",
        subtitle=", ".join(str(one.folder) for one in runs),
        reload=reload,
        head=["", *(one.name for one in runs)],
        of_runs=[row for row in rows if any(row[1:])],
        differences=differences(runs),
        broke=[f"{one.name}: {sentence}" for one in runs for sentence in run.broke(one)],
        training=_charts(runs),
        next=[command for one in runs for command in next_steps(one.folder, one.training)],
    )


def _scores(run: Run) -> dict[str, str]:
    """Return the scores of the run's final weights by task and metric."""
    head, rows = scores.table(scores.of_folder(run.folder))
    of_final = [dict(zip(head, row, strict=True)) for row in rows if scores.is_of_final(row[0])]
    return {f"{row['task']}, {row['metric']}": row.get("tuned") or "" for row in of_final}


def differences(runs: list[Run]) -> list[list[str]]:
    """Return [name, value of each run] of every argument and fact in which the runs differ."""
    rows = [["recipe", *(str(one.facts.get("recipe", "")) for one in runs)]]
    rows += [["processes", *(str(one.facts.get("world_size", "")) for one in runs)]]
    rows += [["device", *(str(one.facts.get("device", "")) for one in runs)]]
    for place in ("training", "evaluation"):
        prints = [str(one.facts.get("data", {}).get(place, {}).get("fingerprint", "")) for one in runs]
        rows.append([f"{place} data (fingerprint)", *prints])
    for name in sorted({name for one in runs for name in one.facts.get("arguments", {})} - set(OF_A_RUN)):
        values = [one.facts.get("arguments", {}).get(name, {}).get("value") for one in runs]
        rows.append([name, *map(as_text, values)])
    for package in sorted({name for one in runs for name in one.facts.get("versions", {})}):
        rows.append([f"version of {package}", *(one.facts.get("versions", {}).get(package) or "" for one in runs)])
    return [row for row in rows if len(set(row[1:])) > 1]


# --- values as text ---


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
