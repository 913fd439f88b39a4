"""`zerofit kubernetes`: print the manifest of a Kubeflow TrainJob for a command line."""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from zerofit.base import command_line, hardware
from zerofit.base.errors import UserError
from zerofit.base.paths import PROJECT
from zerofit.config import parse, resolve
from zerofit.job import program
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import prepare

TEMPLATE = "launchers/trainjob.yaml"

RESTARTS = 6  # per node; the default backoffLimit of a Kubernetes Job

QUEUE = "kueue.x-k8s.io/queue-name"  # Kueue's label

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # a service name in Kubernetes (RFC 1035)

LONGEST = 63  # characters of a DNS label

# Strings that every YAML parser reads as strings; Kubernetes' parser reads 1e3 as a number, Python's does not.
PLAIN = re.compile(r"[A-Za-z][A-Za-z]+[\w./-]*|--[a-z][\w-]*|\$\(\w+\)")


@dataclass
class Job:
    """The values for the template."""

    name: str
    nodes: int
    gpus: int  # processes per node
    image: str
    use_cpu: bool  # request no GPU
    words: list[str]  # recipe and flags for `zerofit launch` in a pod
    queue: str = ""  # Kueue's; "" without one


def main(argv: list[str]) -> None:
    """`zerofit kubernetes`: see --help. Prints the manifest.

    Raises: UserError for the user's mistakes, also in the recipe's flags, before anything is printed.
    """
    parser = argparse.ArgumentParser(prog="zerofit kubernetes", allow_abbrev=False, description=__doc__)
    parser.add_argument("--name", required=True, help="of the job; its run folder is /runs/<name>")
    parser.add_argument("--nodes", default="1", help="number of pods")
    parser.add_argument("--gpus", default="1", help="GPUs of each pod, one process on each")
    parser.add_argument("--image", required=True, help="container image with this repository, installed")
    parser.add_argument("--queue", default="", help="Kueue's local queue, which starts all pods of the job or none")
    parser.add_argument("--gpu_type", default="h100-80g", help="the cluster's GPU, for the check of the flags")
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")
    parser.add_argument("recipe", help="recipes/sft.py, or any other recipe's file")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the recipe's flags")
    sys.stdout.write(render(_job(parser.parse_args(argv))))


# --- options and flags ---


def _job(given) -> Job:
    named = program.start(given.recipe)
    flags, gpus = command_line.with_more(given.flags, given.args, given.gpus)
    if not given.nodes.isdigit() or int(given.nodes) < 1:
        raise UserError(f"--nodes {given.nodes}: must be a number of pods; a TrainJob needs all of them.")
    nodes = int(given.nodes)
    _check_names(given)
    if nodes > 1:
        prepare.check_for_nodes(flags)
    request = parse.request(named.recipe, flags)
    _check_request(request)
    settings = resolve.resolve(request.put(gpus=nodes * gpus), nodes * gpus, hardware.find(given.gpu_type))
    if Path(file := named.in_project).is_absolute():
        print(
            f"note: {file} is outside the project, {PROJECT}: the image must hold it at this path",
            file=sys.stderr,
            flush=True,
        )
    words = [file, *flags, *_to_go_on(settings, _mount(), given.name)]
    return Job(given.name, nodes, gpus, given.image, settings.use_cpu, words, given.queue)


def _check_names(given) -> None:
    """Check the names by Kubernetes' rules, with room for the operator's suffix. Raises: UserError."""
    limit = LONGEST - len(f"-node-0-{given.nodes}")
    if not LABEL.fullmatch(given.name) or len(given.name) > limit:
        raise UserError(
            f"--name {given.name}: must be 1 to {limit} of a-z, 0-9 and -, begin with a letter and not end with -; "
            "Kubernetes makes the pods' names of it."
        )
    if given.queue and not LABEL.fullmatch(given.queue):
        raise UserError(f"--queue {given.queue}: must be the name of a LocalQueue of Kueue (kubectl get localqueues).")
    if not given.image or any(c.isspace() for c in given.image):
        raise UserError(f"--image {given.image!r}: must be an image's name without spaces.")


def _check_request(request: Request) -> None:
    """Refuse a token, which the manifest would contain, and flags that only print. Raises: UserError."""
    if request.get("hub_token"):
        raise UserError(
            f"hub_token ({request.source['hub_token']}): it would stand in the manifest for all to read; put it into a "
            "secret (kubectl create secret generic zerofit --from-literal=HF_TOKEN=...) and leave it out."
        )
    for name in ("show", "plan"):
        if request.get(name):
            raise UserError(
                f"--{name}: prints and trains nothing; a job needs no pods for it (`zerofit launch` does it here)."
            )


def _to_go_on(settings: Settings, mount: str, name: str) -> list[str]:
    """Return the flags with which a restarted pod resumes from the checkpoints of the previous one.

    Raises: UserError if the user's own --output_dir or --resume_from_checkpoint prevents it.
    """
    added = []
    folder, resumed = settings.output_dir, settings.resume_from_checkpoint
    if not folder or settings.source["output_dir"] in ("default", "transformers default"):
        added += ["--output_dir", f"{mount}/{name}"]
    elif not folder.startswith(f"{mount}/"):
        raise UserError(
            f"--output_dir {folder}: is not on the volume, and a pod's own disk is gone with it; name a folder in "
            f"{mount}, or leave it out."
        )
    if not resumed:
        added += ["--resume_from_checkpoint", "auto"]
    elif resumed != "auto":
        raise UserError(
            f"--resume_from_checkpoint {resumed}: a pod that is started again would begin there again; use `auto` and "
            "the run's folder as --output_dir."
        )
    return added


# --- the manifest ---


def render(job: Job) -> str:
    """Return the manifest as YAML text: the template with the job's values filled in.

    Raises: UserError for a template without the keys that are filled in.
    """
    documents = _template()
    try:
        _fill(documents, job)
    except (LookupError, TypeError) as error:
        raise _edited(error) from None
    head = f"# Made by `zerofit kubernetes` of {TEMPLATE}, where every line is explained.\n"
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _template() -> list[dict]:
    """Read the template. Raises: UserError if it is no longer valid YAML."""
    file = PROJECT / TEMPLATE
    try:
        return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}.") from None


def _edited(error: Exception) -> UserError:
    return UserError(
        f"{TEMPLATE}: has been edited so that --options find no place in it ({type(error).__name__}: {error}); "
        "keep its keys and the volume `runs` (git diff shows what was changed)."
    )


def _mount() -> str:
    """Return the path at which the template mounts the volume `runs`. Raises: UserError if it mounts none."""
    try:
        pod = _node(_template()[0])["template"]["spec"]
        paths = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        return paths["runs"].rstrip("/")
    except (LookupError, TypeError) as error:
        raise _edited(error) from None


def _node(runtime: dict) -> dict:
    """Return the specification of the Job whose pods are the nodes."""
    return runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def _fill(documents: list[dict], job: Job) -> None:
    runtime, train = documents
    trainer = train["spec"]["trainer"]
    runtime["metadata"]["name"] = train["metadata"]["name"] = train["spec"]["runtimeRef"]["name"] = job.name
    labels = train["metadata"].setdefault("labels", {})
    labels.pop(QUEUE, None)  # the template's example
    if job.queue:
        labels[QUEUE] = job.queue
    runtime["spec"]["mlPolicy"]["numNodes"] = trainer["numNodes"] = job.nodes
    _node(runtime)["backoffLimit"] = RESTARTS * job.nodes
    trainer["numProcPerNode"] = job.gpus
    trainer["image"] = job.image
    trainer["args"] = _words(trainer["args"], job)
    limits = trainer["resourcesPerNode"]["limits"]
    others = {key: amount for key, amount in limits.items() if not key.endswith("/gpu")}
    gpus = {key: job.gpus for key in limits if key.endswith("/gpu")}
    trainer["resourcesPerNode"]["limits"] = others | ({"cpu": job.gpus} if job.use_cpu else gpus)


def _words(template: list[str], job: Job) -> list[str]:
    """Return the template's launch options with this job's numbers, then the job's recipe and flags.

    Kubernetes expands $(VARIABLE) and turns $$ into $, so the user's dollar signs are doubled. No shell is involved.
    """
    options = template[: template.index("recipes/sft.py")]
    options[options.index("--gpus") + 1] = str(job.gpus)
    options[options.index("--nnodes") + 1] = str(job.nodes)
    return options + [word.replace("$", "$$") for word in job.words]


class _Dumper(yaml.SafeDumper):
    """YAML without anchors, and with quotes around strings that another parser could read as a number."""

    def ignore_aliases(self, data) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str):
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if PLAIN.fullmatch(text) else '"')


_Dumper.add_representer(str, _string)
