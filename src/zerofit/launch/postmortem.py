"""Classify why an attempt ended, and write report.json and report.md."""

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from zerofit import rank_status
from zerofit.errors import UserError

EXITS = "exits.json"  # {rank: exit code}, written by launch/torchrun.py


@dataclass
class Outcome:
    """How an attempt ended.

    kind: "finished", a key of errors.EXIT_CODES or "crash"; code: the job's exit code; rank: the first that failed;
    error: its exception in one line; step: the last optimizer step that it, or else any rank, had finished;
    what_next: the change for the next attempt, "" if there is none.
    """

    kind: str
    code: int
    rank: int | None = None
    error: str = ""
    signal: str = ""
    step: int | None = None
    traceback: str = ""
    what_next: str = ""

    @property
    def sentence(self) -> str:
        name = "the job" if self.rank is None else f"rank {self.rank}"
        after = "" if self.step is None else f" after step {self.step}"
        if self.signal:
            return f"{name} was ended by {self.signal}{after}{f' ({self.error})' if self.error else ''}"
        return (
            f"{name} {'hung' if self.kind == 'hang' else 'ended'}{after}: {self.error.partition(': ')[2] or self.error}"
        )


def ending(code: int, where: Path, heard: list[int], hung: int | None, limit: float, host_kills: int) -> Outcome:
    """Classify how an attempt ended, from exit codes, error records and heartbeats; first match wins.

    Args: code: exit code of the launcher; where: the attempt's folder; heard: signals that the supervisor received;
        hung: the rank furthest behind when no rank made a step for `limit` seconds; host_kills: processes that the
        kernel killed for lack of memory during the attempt.
    """
    pulses = rank_status.pulses(where)
    step = max((step for _, step, _ in pulses.values()), default=None)
    records = rank_status.records(where)
    if heard and records and records[0]["kind"] == "stopped":
        return Outcome("stopped", rank_status.exit_code("stopped"), error=records[0]["error"], step=step)
    if heard and code:
        return Outcome(
            "interrupted", rank_status.exit_code("interrupted"), signal=signal.Signals(heard[0]).name, step=step
        )
    if code == 0:
        return Outcome("finished", 0, step=step)
    if hung is not None:
        error = f"no step for {limit:.0f} s; the stacks of all ranks are in stack<rank>.txt"
        return Outcome("hang", rank_status.exit_code("hang"), hung, error, step=pulses[hung][1])
    exits = {int(r): c for r, c in json.loads((where / EXITS).read_text()).items()} if (where / EXITS).exists() else {}
    if not exits:  # not launch/torchrun.py: 128 + n means signal n
        exits = {None: 128 - code if 128 < code < 160 else code}
    own_records = [entry for entry in records if not entry["of_a_peer"]]
    killed = [(r, -c) for r, c in exits.items() if c < 0 and -c not in (signal.SIGTERM, rank_status.ENDS_RANKS)]
    if killed and not own_records:
        rank, number = killed[0]
        if host_kills and number == signal.SIGKILL:
            kind, result, error = (
                "out of memory",
                rank_status.exit_code("out of memory"),
                "the kernel: host memory was full",
            )
        else:
            kind, result, error = "lost rank", 128 + number, ""
        return Outcome(kind, result, rank, error, signal.Signals(number).name, step)
    if records and not own_records:  # ranks reported broken connections only: the lost one wrote nothing
        silent = sorted(set(pulses) - {entry["rank"] for entry in records})
        return Outcome("lost rank", 1, silent[0] if silent else None, f"lost: {records[0]['error']}", step=step)
    if records:
        first = (own_records or records)[0]
        result = code if 0 < code < 128 else rank_status.exit_code(first["kind"])
        step = pulses[first["rank"]][1] if first["rank"] in pulses else step
        return Outcome(first["kind"], result, first["rank"], first["error"], "", step, first["traceback"])
    return Outcome("crash", code if code > 0 else 1, error=f"exit code {code}", step=step)


def lost_node(who: str, where: Path) -> Outcome:
    """Return the outcome of an attempt that lost a node. who: its name; where: the attempt's folder."""
    step = max((step for _, step, _ in rank_status.pulses(where).values()), default=None)
    return Outcome(
        "lost rank", 1, None, f"lost: {who} is gone: it was not heard of any more, or started anew", step=step
    )


def write(folder: Path, endings: list[Outcome], advice: str) -> None:
    """Write report.json and report.md into the run folder, one entry per attempt."""
    from zerofit import run_folder

    last = endings[-1]
    content = {
        "status": "finished" if last.kind == "finished" else "failed",
        "exit_code": last.code,
        "cause": "" if last.kind == "finished" else last.sentence,
        "try": advice,
        "attempts": [asdict(ending) for ending in endings],
    }
    run_folder.write_json(folder / "report.json", content)
    lines = ["# What happened", ""]
    for number, outcome in enumerate(endings, 1):
        line = "finished" if outcome.kind == "finished" else f"{outcome.kind}: {outcome.sentence}"
        lines.append(f"{number}. {line}{f' -> {outcome.what_next}' if outcome.what_next else ''}")
    if advice:
        lines += ["", f"Try: {advice}"]
    steps = _last_steps(folder)
    if steps and last.kind != "finished":
        lines += ["", "The last steps:", "", "| step | loss | gradient norm |", "|---|---|---|", *steps]
    if last.traceback:
        lines += ["", f"Where rank {last.rank} failed:", "", "```", last.traceback.strip(), "```"]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _effect(before, after) -> str:
    """Return the memory that the change saves by the plan, " (saves ...)"; "" without a memory limit."""
    from zerofit import hardware
    from zerofit.plan import predict, simulate

    try:
        was, becomes = predict.predict(before), predict.predict(after)
    except (UserError, simulate.SimulationFailed):
        return ""
    if was is None or becomes is None:
        return ""
    saved = (was["peak_bytes"] - becomes["peak_bytes"]) / hardware.GIB
    fits = "fits" if becomes["peak_bytes"] <= becomes["limit_bytes"] else "does not fit yet"
    return f" (saves {saved:.2f} GiB by the plan: {fits})"


def _last_steps(folder: Path, count: int = 5) -> list[str]:
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return []
    entries = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    entries = [entry for entry in entries if "loss" in entry][-count:]
    return [
        f"| {entry['step']} | {entry['loss']:.4f} | {entry.get('grad_norm', float('nan')):.3f} |" for entry in entries
    ]


def advice(last: Outcome, folder: Path, settings, smaller: tuple | None) -> str:
    """Return what to do next, with the command.

    Args: folder: the run folder; smaller: the result of retry.next_smaller_setting, named with its effect.
    """
    from zerofit.train.checkpoint import resume

    if last.kind == "out of memory":
        plan = "`make plan` with the same arguments: it finds the setting that fits, or says what is missing"
        return plan if smaller is None else f"{smaller[0]}{_effect(settings, smaller[2])}; or {plan}"
    action = {
        "hang": "look where the ranks stand in attempts/*/stack*.txt: the one in another place than the rest holds "
        "them up",
        "lost rank": "look into the kernel's log of that machine (dmesg -T | tail): its memory, its GPU (Xid), or "
        "somebody's kill",
        "disk full": "make room",
        "crash": "read the traceback in report.md",
    }.get(last.kind)
    return f"{action}; {resume.next_command(folder)}" if action else ""
