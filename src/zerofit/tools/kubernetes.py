"""`zerofit kubernetes`: print a Kubeflow TrainJob manifest for a command line."""

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

MAX_LABEL_LENGTH = 63  # characters of a DNS label

# Strings that every YAML parser reads as strings; for example Kubernetes reads 1e3 as a number.
PLAIN = re.compile(r"[A-Za-z][A-Za-z]+[\w./-]*|--[a-z][\w-]*|\$\(\w+\)")


@dataclass
class Manifest:
    """The values for the template."""

    name: str
    nodes: int
    gpus: int  # processes per node
    image: str
    use_cpu: bool  # request no GPU
    words: list[str]  # recipe and flags for `zerofit launch` in a pod
    queue: str = ""  # Kueue's local queue; "": none


def main(argv: list[str]) -> None:
    """Print the manifest (`zerofit kubernetes`); see --help.

    Raises: UserError for invalid options or recipe flags, before anything is printed.
    """
    parser = argparse.ArgumentParser(prog="zerofit kubernetes", allow_abbrev=False, description=__doc__)
    parser.add_argument("--name", required=True, help="name of the job; its run folder is /runs/<name>")
    parser.add_argument("--nodes", default="1", help="number of pods")
    parser.add_argument("--gpus", default="1", help="GPUs of each pod, one process per GPU")
    parser.add_argument("--image", required=True, help="container image with this repository installed")
    parser.add_argument("--queue", default="", help="Kueue's local queue, which starts all pods together")
    parser.add_argument("--gpu_type", default="h100-80g", help="the cluster's GPU, to check the flags")
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")
    parser.add_argument("recipe", help="recipes/sft.py, or any other recipe's file")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the recipe's flags")
    sys.stdout.write(render(_manifest(parser.parse_args(argv))))


# --- options and flags ---


def _manifest(args) -> Manifest:
    named = program.start(args.recipe)
    flags, gpus = command_line.with_extra_flags(args.flags, args.args, args.gpus)
    if not args.nodes.isdigit() or int(args.nodes) < 1:
        raise UserError(f"--nodes {args.nodes}: must be a number of pods; a TrainJob cannot run with fewer.")
    nodes = int(args.nodes)
    _check_names(args)
    if nodes > 1:
        prepare.check_for_nodes(flags)
    request = parse.request(named.recipe, flags)
    _check_request(request)
    settings = resolve.resolve(request.put(gpus=nodes * gpus), nodes * gpus, hardware.find(args.gpu_type))
    if Path(file := named.in_project).is_absolute():
        print(
            f"note: {file} is outside the project {PROJECT}: the image must contain it at this path",
            file=sys.stderr,
            flush=True,
        )
    words = [file, *flags, *_resume_flags(settings, _mount(), args.name)]
    return Manifest(args.name, nodes, gpus, args.image, settings.use_cpu, words, args.queue)


def _check_names(args) -> None:
    """Check the names against Kubernetes' rules, with room for the operator's suffix. Raises: UserError."""
    limit = MAX_LABEL_LENGTH - len(f"-node-0-{args.nodes}")
    if not LABEL.fullmatch(args.name) or len(args.name) > limit:
        raise UserError(
            f"--name {args.name}: must be 1 to {limit} of a-z, 0-9 and -, begin with a letter and not end with -; "
            "Kubernetes derives the pods' names from it."
        )
    if args.queue and not LABEL.fullmatch(args.queue):
        raise UserError(f"--queue {args.queue}: must be the name of a Kueue LocalQueue (kubectl get localqueues).")
    if not args.image or any(c.isspace() for c in args.image):
        raise UserError(f"--image {args.image!r}: must be an image name without spaces.")


def _check_request(request: Request) -> None:
    """Reject a token, which the manifest would expose, and flags that only print. Raises: UserError."""
    if request.get("hub_token"):
        raise UserError(
            f"hub_token ({request.source['hub_token']}): the manifest would expose it; put it into a secret (kubectl "
            "create secret generic zerofit --from-literal=HF_TOKEN=...) and remove it."
        )
    for name in ("show", "plan"):
        if request.get(name):
            raise UserError(f"--{name}: only prints and needs no pods; use `zerofit launch` for it.")


def _resume_flags(settings: Settings, mount: str, name: str) -> list[str]:
    """Return the flags that make a restarted pod resume from the previous pod's checkpoints.

    Raises: UserError if the user's --output_dir or --resume_from_checkpoint prevents it.
    """
    flags = []
    folder, checkpoint = settings.output_dir, settings.resume_from_checkpoint
    if not folder or settings.source["output_dir"] in ("default", "transformers default"):
        flags += ["--output_dir", f"{mount}/{name}"]
    elif not folder.startswith(f"{mount}/"):
        raise UserError(
            f"--output_dir {folder}: is not on the volume, and a pod's disk is deleted with the pod; name a folder in "
            f"{mount}, or remove it."
        )
    if not checkpoint:
        flags += ["--resume_from_checkpoint", "auto"]
    elif checkpoint != "auto":
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: a restarted pod would start from it again; use `auto` and the "
            "run's folder as --output_dir."
        )
    return flags


# --- the manifest ---


def render(manifest: Manifest) -> str:
    """Fill in the template and return it as YAML.

    Raises: UserError for a template that lacks a key.
    """
    documents = _template()
    try:
        _fill(documents, manifest)
    except (LookupError, TypeError) as error:
        raise _edited(error) from None
    head = f"# Generated by `zerofit kubernetes` from {TEMPLATE}, which explains every line.\n"
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _template() -> list[dict]:
    """Read the template. Raises: UserError for invalid YAML."""
    file = PROJECT / TEMPLATE
    try:
        return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}.") from None


def _edited(error: Exception) -> UserError:
    return UserError(
        f"{TEMPLATE}: an edit removed a required key ({type(error).__name__}: {error}); restore its keys and the "
        "volume `runs` (see git diff)."
    )


def _mount() -> str:
    """Return the mount path of the volume `runs` in the template. Raises: UserError if it is not mounted."""
    try:
        pod = _node(_template()[0])["template"]["spec"]
        paths = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        return paths["runs"].rstrip("/")
    except (LookupError, TypeError) as error:
        raise _edited(error) from None


def _node(runtime: dict) -> dict:
    """Return the specification of the Job whose pods are the nodes."""
    return runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def _fill(documents: list[dict], manifest: Manifest) -> None:
    runtime, train = documents
    trainer = train["spec"]["trainer"]
    runtime["metadata"]["name"] = train["metadata"]["name"] = train["spec"]["runtimeRef"]["name"] = manifest.name
    labels = train["metadata"].setdefault("labels", {})
    labels.pop(QUEUE, None)  # the template's example
    if manifest.queue:
        labels[QUEUE] = manifest.queue
    runtime["spec"]["mlPolicy"]["numNodes"] = trainer["numNodes"] = manifest.nodes
    _node(runtime)["backoffLimit"] = RESTARTS * manifest.nodes
    trainer["numProcPerNode"] = manifest.gpus
    trainer["image"] = manifest.image
    trainer["args"] = _words(trainer["args"], manifest)
    limits = trainer["resourcesPerNode"]["limits"]
    others = {key: amount for key, amount in limits.items() if not key.endswith("/gpu")}
    gpus = {key: manifest.gpus for key in limits if key.endswith("/gpu")}
    trainer["resourcesPerNode"]["limits"] = others | ({"cpu": manifest.gpus} if manifest.use_cpu else gpus)


def _words(template: list[str], manifest: Manifest) -> list[str]:
    """Return the template's launch options with this job's numbers, then the job's recipe and flags.

    Kubernetes expands $(VARIABLE) and replaces $$ by $ without a shell, so the user's dollar signs are doubled.
    """
    options = template[: template.index("recipes/sft.py")]
    options[options.index("--gpus") + 1] = str(manifest.gpus)
    options[options.index("--nnodes") + 1] = str(manifest.nodes)
    return options + [word.replace("$", "$$") for word in manifest.words]


class _Dumper(yaml.SafeDumper):
    """A dumper without anchors that quotes strings which another parser could read as a number."""

    def ignore_aliases(self, data) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str):
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if PLAIN.fullmatch(text) else '"')


_Dumper.add_representer(str, _string)
