"""`zerofit slurm`: fill in, check and submit launchers/slurm.sbatch."""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from zerofit.base import command_line, hardware
from zerofit.base.errors import UserError
from zerofit.base.paths import PROJECT, write_text
from zerofit.checkpoint.resumable import choose_folder
from zerofit.commands import status
from zerofit.commands.status import CANCELLED, JOB, LOG
from zerofit.config import parse, resolve
from zerofit.job import program, run_folder, run_lock
from zerofit.job.recipe import Recipe
from zerofit.job.request import FLAG
from zerofit.job.settings import Settings
from zerofit.launch import node_options, prepare
from zerofit.plan import preflight

TEMPLATE = PROJECT / "launchers" / "slurm.sbatch"

RESUME = ("--resume_from_checkpoint",)

SCRIPT = "slurm.sbatch"  # name of the filled-in script in the run folder

CORES_PER_GPU = 4  # default of --cpus


@dataclass
class Submission:
    """The values for the template.

    flags: the recipe's flags without --output_dir; gpus, cpus: per node; on_cpu: request no GPU; setup: shell commands;
    image, mounts: the container; launch: options of `zerofit launch`; sweep: extra flags of each job of an array;
    more: extra sbatch options, verbatim.
    """

    recipe: Path
    flags: list[str]
    folder: Path
    nodes: int
    gpus: int
    cpus: int
    on_cpu: bool = False
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    qos: str = ""
    exclusive: bool = False
    setup: str = ""
    image: str = ""
    mounts: str = ""
    port: str = ""
    launch: list[str] = field(default_factory=lambda: ["--join_timeout", node_options.JOIN_TIMEOUT])
    sweep: list[list[str]] = field(default_factory=list)
    more: list[tuple[str, str]] = field(default_factory=list)


def main(argv: list[str]) -> None:
    """Run `zerofit slurm`; see --help.

    Raises: UserError for invalid options or recipe flags, before anything is written or submitted.
    """
    parser = argparse.ArgumentParser(prog="zerofit slurm", allow_abbrev=False, description=__doc__)
    parser.add_argument("--nodes", default="1", help="number of nodes")
    parser.add_argument("--gpus", default="1", help="GPUs (with --use_cpu true: processes) on each node")
    parser.add_argument("--cpus", default="", help=f"cores of each node (default: {CORES_PER_GPU} per GPU)")
    parser.add_argument("--time", default="24:00:00", help="time limit of one start; the job is then requeued")
    node_options.add_rendezvous_options(parser)
    parser.add_argument("--port", default="", help="port on the first node; the next is used too (default: by job id)")
    parser.add_argument("--exclusive", action="store_true", help="request exclusive nodes with all their memory")
    parser.add_argument("--setup", default="", help="shell commands before the job: module load, source, export")
    parser.add_argument("--image", default="", help="container image: FILE.sif for Apptainer, any other for Pyxis")
    parser.add_argument("--mounts", default="", help="extra mounts besides zerofit, run and current folder: A:B,C:D")
    for name in ("partition", "account", "qos"):
        parser.add_argument(f"--{name}", default="", help="passed to sbatch")
    parser.add_argument("--sbatch", default="", help="more sbatch options in one string; they override the others")
    parser.add_argument("--output_dir", default="", help="the run folder (default: runs/<recipe>-<time>)")
    parser.add_argument("--sweep", default="", help="a file with extra flags on a line for each job of an array")
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")
    parser.add_argument("--print", action="store_true", help="print the batch script; write and submit nothing")
    parser.add_argument("recipe", help="recipes/sft.py, or any other recipe's file")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the recipe's flags")
    if "--sbatch" in argv[:-1]:  # argparse accepts a value that looks like an option only after =
        index = argv.index("--sbatch")
        argv = [*argv[:index], f"--sbatch={argv[index + 1]}", *argv[index + 2 :]]
    args = parser.parse_args(argv)
    request = request_of(args)
    script = render(request)
    if args.print:
        print(script, end="")
        return
    submit(request, script)


def request_of(args) -> Submission:
    """Check the options on the login node and return the request. Raises: UserError."""
    named = program.start(args.recipe)
    flags, gpus = command_line.with_extra_flags(args.flags, args.args, args.gpus)
    nodes = command_line.positive_integer("NODES=", args.nodes)
    on_cpu = (command_line.value_of(flags, ("--use_cpu",)) or "false").lower() in ("true", "1", "yes")
    node_options.seconds(args.join_timeout)
    if args.port and not (args.port.isdigit() and 0 < int(args.port) < 65535):
        raise UserError(f"PORT={args.port}: must be a number from 1 to 65534; the next port is also used.")
    cpus = command_line.positive_integer("--cpus ", args.cpus or str(gpus * (1 if on_cpu else CORES_PER_GPU)))
    sweep = read_sweep(Path(args.sweep).expanduser()) if args.sweep else []
    if nodes > 1:
        prepare.check_for_nodes(flags)
    ranks = nodes * gpus
    output_dir = args.output_dir or command_line.value_of(flags, ("--output_dir",))
    base = command_line.put(flags, output_dir=output_dir) if output_dir else flags
    settings = check(named.recipe, base, ranks, on_cpu)
    for number, added_flags in enumerate(sweep):
        try:
            check(named.recipe, [*flags, *added_flags], ranks, on_cpu)
        except UserError as error:
            raise UserError(f"{args.sweep}: job {number} ({shlex.join(added_flags)}): {error}") from None
    folder = choose_folder(settings)
    _check_image(args, folder.absolute())
    runs = [folder / str(number) for number in range(len(sweep)) if (folder / str(number) / "run.json").exists()]
    if run_folder.finished(folder) or (runs and command_line.value_of(flags, RESUME) is None):
        content = "runs" if runs else "a finished run"
        raise UserError(f"--output_dir {folder}: already holds {content}; name another folder (OUT=...).")
    launch = ["--join_timeout", args.join_timeout, *(["--interface", args.interface] if args.interface else [])]
    return Submission(
        named.file.absolute(), command_line.drop(flags, "--output_dir", "--resume_from_checkpoint"), folder.absolute(),
        nodes, gpus, cpus, on_cpu, args.time, args.partition, args.account, args.qos,
        args.exclusive, args.setup, args.image, args.mounts, args.port, launch, sweep,
        _options(args.sbatch),
    )  # fmt: skip


def _check_image(args, folder: Path) -> None:
    """Check --mounts and that a container can mount the folders. Raises: UserError."""
    if args.mounts and not args.image:
        raise UserError(f"--mounts {args.mounts}: requires --image.")
    for path in (PROJECT, folder, Path.cwd()) if args.image else ():
        if set(",:") & set(str(path)):
            raise UserError(f"{path}: cannot be mounted into --image {args.image}: its name contains , or :.")


def check(recipe: Recipe, flags: list[str], ranks: int, on_cpu: bool) -> Settings:
    """Resolve the recipe's flags for the job's ranks, like the recipe.

    Login nodes lack GPUs, so the job's GPU is assumed to be an A100, which supports bf16.
    Raises: UserError for invalid flags, and for a secret in the flags.
    """
    request = parse.request(recipe, flags)
    if request.source.get("hub_token") == FLAG:
        raise UserError(
            "--hub_token: the batch script would expose it to all users; remove it and set HF_TOKEN in the "
            "environment, which sbatch passes on."
        )
    resume = request.get("resume_from_checkpoint")
    if resume and resume.lower() not in ("auto", "true", "last"):
        raise UserError(
            f"--resume_from_checkpoint {resume}: the job always resumes from the newest checkpoint in its run folder; "
            "name that folder with OUT=... and use auto."
        )
    gpu = None if on_cpu else hardware.GPUS["a100-80g"]
    settings = resolve.resolve(request.put(gpus=ranks), ranks, gpu)
    preflight.only_print(settings)
    return settings


def read_sweep(file: Path) -> list[list[str]]:
    """Return the flags of each line, without blank lines and comments. Raises: UserError with file:line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--sweep {file}: cannot be read: {error.strerror}.") from None
    sweep = []
    for number, line in enumerate(lines, 1):
        words = command_line.split(line, f"{file}:{number}", comments=True)
        if command_line.value_of(words, ("--output_dir",)):
            raise UserError(f"{file}:{number}: --output_dir: the jobs of a sweep use OUT/0, OUT/1 ...; remove it.")
        if words:
            sweep.append(words)
    if not sweep:
        raise UserError(f"--sweep {file}: does not contain flags.")
    return sweep


def _options(text: str) -> list[tuple[str, str]]:
    """Split sbatch options: "--mem=0 -C 'a b'" -> [("--mem", "0"), ("-C", "a b")]. Raises: UserError."""
    options: list[tuple[str, str]] = []
    for word in command_line.split(text, f"--sbatch {text}"):
        name, _, value = word.partition("=")
        if re.fullmatch(r"--[A-Za-z][\w-]*", name):
            options.append((name, value))
        elif re.fullmatch(r"-[A-Za-z]", word[:2]):
            options.append((word[:2], word[2:]))
        elif options and not options[-1][1] and not word.startswith("-"):
            options[-1] = (options[-1][0], word)
        else:
            raise UserError(f"--sbatch {text}: {word!r} is not an sbatch option; options begin with - or --.")
    return options


# --- the batch script ---


def render(request: Submission) -> str:
    """Return the template with the lines marked EDIT filled in.

    Raises: UserError for a line break or a secret in a value.
    """
    folder = str(request.folder).replace("\\", "\\\\").replace("%", "%%")  # sbatch replaces %x and the like
    script = TEMPLATE.read_text(encoding="utf-8")
    for name, value in {
        "job-name": request.folder.name,
        "nodes": str(request.nodes),
        "gpus-per-node": "" if request.on_cpu else str(request.gpus),
        "cpus-per-task": str(request.cpus),
        "time": request.time,
        "output": f"{folder}{'/%a' * bool(request.sweep)}/{LOG}",
        "array": f"0-{len(request.sweep) - 1}" if request.sweep else "",
        "chdir": str(Path.cwd()),
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "mem": "0" if request.exclusive else "",
    }.items():
        script = _fill(script, rf"##?SBATCH --{name}=", _option(f"--{name}", value) if value else "")
    script = _fill(script, r"##SBATCH --exclusive ", "#SBATCH --exclusive" * request.exclusive)
    for name, value in {
        "root": shlex.quote(str(PROJECT)),
        "python": "python3" if request.image else shlex.quote(sys.executable),
        "image": shlex.quote(request.image) if request.image else "",
        "mounts": shlex.quote(request.mounts) if request.mounts else "",
        "out": shlex.quote(str(request.folder)),
        "gpus": str(request.gpus),
        "launch": f"({shlex.join(request.launch)})",
        "recipe": f"({shlex.join([str(request.recipe), *request.flags])})  # relative paths begin at --chdir",
    }.items():
        script = _fill(script, f"{name}=.*# EDIT", f"{name}={value}")
    if request.port:
        script = _fill(script, r"port=.*# EDIT", f"port={request.port}")
    jobs = "\n".join(f"    {number}) recipe+=({shlex.join(words)}) ;;" for number, words in enumerate(request.sweep))
    script = _fill(script, r"    1\) ", "")
    script = _fill(script, r"    0\) ", jobs)
    options = [_option(*option) for option in request.more]
    script = _fill(script, r"# EDIT module load", "\n".join([*options, *request.setup.splitlines()]))
    _check_secrets(script)
    return script


def _fill(script: str, beginning: str, line: str) -> str:
    """Replace the one line that begins with a regex by `line`; delete it for ""."""
    pattern = re.compile(rf"^{beginning}.*\n", re.MULTILINE)
    matches = pattern.findall(script)
    assert len(matches) == 1, (beginning, matches)
    return pattern.sub(lambda _: line + "\n" * bool(line), script)


def _option(name: str, value: str) -> str:
    """Return an #SBATCH line. In double quotes, sbatch treats only backslash and quote specially."""
    if "\n" in value or "\r" in value:
        raise UserError(f"{name} {value!r}: sbatch cannot read a value with a line break.")
    if not re.fullmatch(r"[\w./:,@%+=\-\[\]]*", value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if not name.startswith("--"):
        return f"#SBATCH {name} {value}".rstrip()
    return f"#SBATCH {name}={value}" if value else f"#SBATCH {name}"


def _check_secrets(script: str) -> None:
    for name, value in os.environ.items():
        if name.endswith(("_TOKEN", "_API_KEY", "_SECRET", "_PASSWORD")) and len(value) > 7 and value in script:
            raise UserError(
                f"the batch script would expose the value of {name} to all users; remove it from the flags: sbatch "
                "passes the environment on."
            )


# --- submission ---


def submit(request: Submission, script: str) -> None:
    """Submit the batch script, write it and the job id into the run folder, and print the next commands.

    Raises: UserError if sbatch rejects it, or if an earlier job of the folder is active.
    """
    folder = request.folder
    if active := [job for job in status.jobs(folder) if job.is_alive]:
        raise UserError(f"{folder}: its job {active[0].id} is {active[0].state.lower()}; end it with `zerofit cancel "
                        f"{shlex.quote(str(folder))}`.")  # fmt: skip
    if shutil.which("sbatch") is None:
        status.ask("sbatch")  # raises the UserError, before a folder is made
    folders = [folder / str(index) for index in range(len(request.sweep))] or [folder]
    new_folders = [path for path in dict.fromkeys([*folders, folder]) if not path.exists()]
    for run_dir in folders:  # SLURM does not create the log's folder; the job fails silently without it
        run_lock.refuse_links(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / CANCELLED).unlink(missing_ok=True)
    (folder / CANCELLED).unlink(missing_ok=True)
    write_text(folder / SCRIPT, script)
    try:
        answer = status.ask("sbatch", "--parsable", str(folder / SCRIPT))
    except UserError:
        with contextlib.suppress(OSError):
            if folder in new_folders:
                (folder / SCRIPT).unlink()
            for path in new_folders:
                path.rmdir()
        raise
    job_id, _, cluster = answer.strip().splitlines()[-1].partition(";")
    record = {"job_id": job_id, "cluster": cluster, "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    run_folder.write_json(folder / JOB, record | {"jobs": len(request.sweep)})
    for index, run_dir in enumerate(folders if request.sweep else []):
        run_folder.write_json(run_dir / JOB, record | {"job_id": f"{job_id}_{index}", "jobs": 0})
    name = shlex.quote(os.path.relpath(folder))
    nodes = f"{request.nodes} node{'s' * (request.nodes > 1)}"
    processes = f"{nodes} with {request.gpus} process{'es' * (request.gpus > 1)} each"
    print(
        f"job {job_id}{f': {len(folders)} runs' * bool(request.sweep)}: {processes}; run folder "
        f"{os.path.relpath(folder)}"
    )
    print(
        f"  zerofit status {name}\n  zerofit cancel {name}\n  tail -F {shlex.quote(os.path.relpath(folders[0] / LOG))}"
    )
