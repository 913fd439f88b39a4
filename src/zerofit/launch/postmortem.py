"""Classify how an attempt ended, and write report.json and report.md."""

import json
import math
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from zerofit.base import hardware, paths, rank_status
from zerofit.base.errors import EXIT_CODES, UserError
from zerofit.job import run_folder
from zerofit.job.settings import Settings

EXITS = "exits.json"  # {rank: exit code}, written by launch/torchrun.py; exits<node>.json on several nodes

REPORTED_STEPS = 5  # in report.md


@dataclass
class Outcome:
    """Outcome of an attempt.

    kind: "finished", a key of errors.EXIT_CODES or "crash"; code: exit code of the job; rank: the first failed rank;
    error: its exception in one line; step: last completed optimizer step of this rank or of any rank; what_next: change
    for the next attempt, "" without one (a rank may set it, checkpoint/restart.py); phase: see errors.OutOfMemory.
    """

    kind: str
    code: int
    rank: int | None = None
    error: str = ""
    signal: str = ""
    step: int | None = None
    traceback: str = ""
    what_next: str = ""
    phase: str = ""

    @property
    def sentence(self) -> str:
        name = "the job" if self.rank is None else f"rank {self.rank}"
        after = "" if self.step is None else f" after step {self.step}"
        if self.signal:
            return f"{name} was ended by {self.signal}{after}{f' ({self.error})' if self.error else ''}"
        return (
            f"{name} {'hung' if self.kind == 'hang' else 'ended'}{after}: {self.error.partition(': ')[2] or self.error}"
        )


@dataclass
class Evidence:
    """Evidence of how an attempt ended.

    code: exit code of the launcher, None if it still runs; signals: received by the supervisor; hung: the rank furthest
    behind when no rank made a step for `limit` seconds; host_kills: processes that the kernel's OOM killer ended;
    where: the attempt's folder; steps: {rank: last step}; records: errors of the ranks, the earliest first.
    """

    code: int | None
    signals: list[int]
    hung: int | None
    limit: float
    host_kills: int
    where: Path
    steps: dict[int, int]
    records: list[dict]

    @property
    def step(self) -> int | None:
        return max(self.steps.values(), default=None)

    @property
    def exits(self) -> dict[int | None, int]:
        """Return the known exit codes by rank; -n for signal n."""
        files = sorted(self.where.glob(EXITS.replace(".", "*.")))
        exits = {int(rank): code for file in files for rank, code in json.loads(file.read_text()).items()}
        if exits or self.code is None:
            return exits
        # Other launchers report signal n as 128 + n.
        return {None: 128 - self.code if 128 < self.code < 160 else self.code}

    @property
    def root_errors(self) -> list[dict]:
        """Return the errors other than a broken connection to another rank."""
        return [record for record in self.records if not record["of_a_peer"]]


def ending(
    code: int | None, where: Path, signals: list[int], hung: int | None, limit: float, host_kills: int
) -> Outcome:
    """Classify how an attempt ended, from exit codes, error records and heartbeats. See Evidence for the arguments."""
    for file in where.glob(rank_status.HUNG_FILE.replace(".", "*.")):
        record = json.loads(file.read_text())
        hung, limit = record["rank"], record["limit"]
    steps = {rank: step for rank, (_, step, _) in rank_status.heartbeats(where).items()}
    evidence = Evidence(code, signals, hung, limit, host_kills, where, steps, rank_status.records(where))
    outcomes = (classify(evidence) for classify in CLASSIFIERS)
    return next(outcome for outcome in outcomes if outcome)


def _stopped(evidence: Evidence) -> Outcome | None:
    """Detect a save and exit that a signal requested."""
    if not (evidence.signals and evidence.records and evidence.records[0]["kind"] == "stopped"):
        return None
    return Outcome("stopped", EXIT_CODES["stopped"], error=evidence.records[0]["error"], step=evidence.step)


def _interrupted(evidence: Evidence) -> Outcome | None:
    """Detect an end by a signal without a save, except if the save failed on a full disk."""
    disk_full = evidence.root_errors and evidence.root_errors[0]["kind"] == "disk full"
    if not (evidence.signals and evidence.code) or disk_full:
        return None
    name = signal.Signals(evidence.signals[0]).name
    return Outcome("interrupted", EXIT_CODES["interrupted"], signal=name, step=evidence.step)


def _finished(evidence: Evidence) -> Outcome | None:
    return Outcome("finished", 0, step=evidence.step) if evidence.code == 0 else None


def _hung(evidence: Evidence) -> Outcome | None:
    """Detect a hang, ended by the supervisor or by the ranks themselves (base/phases.py)."""
    reported = [record["error"] for record in evidence.root_errors[:1] if record["kind"] == "hang"]
    if evidence.hung is None and not reported:
        return None
    rank = _rank_not_waiting(evidence)
    phase = rank_status.phases(evidence.where).get(rank)
    in_phase = f" (phase: {phase})" if phase else ""
    error = reported[0] if reported else f"no step for {evidence.limit:.0f} s{in_phase}"
    error += f"{_missing(evidence.records)}; see the stacks of all ranks in stack<rank>.txt"
    return Outcome("hang", EXIT_CODES["hang"], rank, error, step=evidence.steps.get(rank, evidence.step))


def _missing(records: list[dict]) -> str:
    """Return which collective some ranks started and others did not, from torch's records on each rank, or "".

    A rank counts for groups that it has used, since not all backends record the groups of a rank.
    """
    groups_by_rank = {record["rank"]: record.get("collectives", {}) for record in records}
    for group in dict.fromkeys(group for groups in groups_by_rank.values() for group in groups):
        begun = {rank: dict(groups[group]) for rank, groups in groups_by_rank.items() if group in groups}
        last = {rank: max(numbers) for rank, numbers in begun.items()}
        number = min(last.values()) + 1
        if behind := [rank for rank in last if last[rank] < number <= max(last.values())]:
            operation = next((numbers[number] for numbers in begun.values() if number in numbers), "unknown")
            ranks = f"rank{'s' * (len(behind) > 1)} {', '.join(map(str, sorted(behind)))}"
            collective = f"collective {number} of group {group} ({operation})"
            return f"; {ranks} never started {collective}, which the other ranks wait for"
    return ""


def _rank_not_waiting(evidence: Evidence) -> int | None:
    """Return the rank with the fewest steps whose stack does not wait for other ranks.

    All ranks hang in the same step and ended the previous one within milliseconds, so that order is not informative.
    """
    fewest = min(evidence.steps.values(), default=0)
    ranks = [rank for rank, step in sorted(evidence.steps.items()) if step == fewest]
    not_waiting = [rank for rank in ranks if not _waits(evidence.where / f"stack{rank}.txt")]
    return not_waiting[0] if not_waiting and evidence.hung not in not_waiting else evidence.hung


def _waits(stack: Path) -> bool:
    """Return whether a rank's main thread was in a collective, or in backward, which reduces gradients."""
    text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    innermost = text.partition("Current thread ")[2].partition("\n")[2].partition("\n")[0]
    return any(place in innermost for place in ("/torch/distributed/", "/deepspeed/", " in _engine_run_backward"))


def _killed(evidence: Evidence) -> Outcome | None:
    """Detect a rank that was ended by a signal from another program than the supervisor or torchrun."""
    expected = (signal.SIGTERM, rank_status.TORCHRUN_END_SIGNAL)
    killed = [(rank, -code) for rank, code in evidence.exits.items() if code < 0 and -code not in expected]
    if not killed or evidence.root_errors:
        return None
    rank, number = killed[0]
    name = signal.Signals(number).name
    if evidence.host_kills and number == signal.SIGKILL:
        error = "the kernel's OOM killer: host memory was full"
        return Outcome("out of memory", EXIT_CODES["out of memory"], rank, error, name, evidence.step)
    return Outcome("lost rank", 128 + number, rank, "", name, evidence.step)


def _lost_connection(evidence: Evidence) -> Outcome | None:
    """Detect a rank that was lost without a record, from the broken connections of the other ranks."""
    if not evidence.records or evidence.root_errors:
        return None
    silent = sorted(set(evidence.steps) - {record["rank"] for record in evidence.records})
    error = f"lost: {evidence.records[0]['error']}"
    return Outcome("lost rank", 1, silent[0] if silent else None, error, step=evidence.step)


def _failed(evidence: Evidence) -> Outcome | None:
    """Detect a rank that reported its error."""
    if not evidence.root_errors:
        return None
    first = evidence.root_errors[0]
    code = evidence.code if 0 < (evidence.code or 0) < 128 else rank_status.exit_code(first["kind"])
    step = evidence.steps.get(first["rank"], evidence.step)
    details = {name: first.get(name, "") for name in ("what_next", "phase")}
    return Outcome(first["kind"], code, first["rank"], first["error"], "", step, first["traceback"], **details)


def _crashed(evidence: Evidence) -> Outcome:
    """Report the exit code of ranks without an error record: a failed import, or a library ended the process."""
    code = evidence.code if evidence.code is not None else next(iter(evidence.exits.values()), 1)
    error = f"exit code {code}"
    if code == 1:  # bitsandbytes 0.50.2 calls C's exit(1)
        error += (
            " without a Python error record; without a traceback above, a last line 'Error ... at line ... in "
            "file ...' is a fatal CUDA error in bitsandbytes (for an out-of-memory error, halve "
            "--per_device_train_batch_size)"
        )
    return Outcome("crash", code if code > 0 else 1, error=error, step=evidence.step)


def host_kills() -> int:
    """Return how many processes of this control group the kernel's OOM killer has ended so far."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


CLASSIFIERS = (_stopped, _interrupted, _finished, _hung, _killed, _lost_connection, _failed, _crashed)


def lost_node(who: str, where: Path) -> Outcome:
    """Return the outcome of an attempt that lost a node. who: name of the node; where: the attempt's folder."""
    step = max((step for _, step, _ in rank_status.heartbeats(where).values()), default=None)
    error = f"lost: {who} left, restarted, or stopped sending heartbeats"
    return Outcome("lost rank", 1, None, error, step=step)


def write(folder: Path, endings: list[Outcome], advice: str, continues: bool = False) -> None:
    """Write report.json and report.md into the run folder, one entry per attempt. continues: another one follows."""
    last = endings[-1]
    content = {
        "status": "restarted" if continues else "finished" if last.kind == "finished" else "failed",
        "exit_code": last.code,
        "cause": "" if last.kind == "finished" else last.sentence,
        "try": advice,
        "attempts": [asdict(ending) | {"sentence": ending.sentence} for ending in endings],
    }
    run_folder.write_json(folder / "report.json", content)
    lines = ["# What happened", ""]
    for number, outcome in enumerate(endings, 1):
        line = "finished" if outcome.kind == "finished" else f"{outcome.kind}: {outcome.sentence}"
        lines.append(f"{number}. {line}{f' -> {outcome.what_next}' if outcome.what_next else ''}")
    if slow := run_folder.read_json(folder / "run.json").get("slow_ranks"):
        lines += ["", *(f"Slow: {sentence}" for sentence in slow)]
    if advice:
        lines += ["", f"Try: {advice}"]
    logged = [entry for entry in run_folder.read_metrics(folder) if "loss" in entry][-REPORTED_STEPS:]
    if logged and last.kind != "finished":
        lines += ["", "The last steps:", "", "| step | loss | gradient norm |", "|---|---|---|"]
        lines += [
            f"| {entry['step']} | {entry['loss']:.4f} | {entry.get('grad_norm', math.nan):.3f} |" for entry in logged
        ]
    if last.traceback:
        lines += ["", f"Traceback of rank {last.rank}:", "", "```", last.traceback.strip(), "```"]
    paths.write_text(folder / "report.md", "\n".join(lines) + "\n")


def _effect(before: Settings, after: Settings) -> str:
    """Return " (saves ...)" with the memory that the change saves according to the plan; "" without a memory limit."""
    from zerofit.plan import predict, simulate

    try:
        old, new = predict.predict(before), predict.predict(after)
    except (UserError, simulate.SimulationFailed):
        return ""
    if old is None or new is None:
        return ""
    saved = (old["peak_bytes"] - new["peak_bytes"]) / hardware.GIB
    fits = "fits" if new["peak_bytes"] <= new["limit_bytes"] else "still does not fit"
    return f" (according to the plan, saves {saved:.2f} GiB and {fits})"


def advice(last: Outcome, folder: Path, settings: Settings, smaller: tuple[str, Settings] | None) -> str:
    """Return advice for the next step, with the command.

    Args: folder: the run folder; smaller: result of next_settings.next_smaller_setting.
    """
    from zerofit.checkpoint import resumable

    if last.kind == "out of memory":
        plan = "`make plan` with the same arguments, to find a setting that fits"
        return plan if smaller is None else f"{smaller[0]}{_effect(settings, smaller[1])}; or {plan}"
    action = {
        "hang": "compare the stacks in attempts/*/stack*.txt: the other ranks wait for the rank with a different stack",
        "lost rank": "check the kernel log of that node (dmesg -T | tail) for GPU errors (Xid) and OOM kills",
        "disk full": "free disk space",
        "crash": "fix the error of the traceback in report.md: the same command would fail there again",
    }.get(last.kind)
    return f"{action}; {resumable.next_command(folder)}" if action else ""
