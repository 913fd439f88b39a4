"""The manifests: the words reach the recipe as they are, the published schemas take them, mistakes are refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.commands import kubernetes
from zerofit.launch import launch

ROOT = Path(__file__).resolve().parents[2]
KINDS = list(kubernetes.TEMPLATES)
# Words that a shell, YAML or Kubernetes would each read its own way.
HOSTILE = [
    "--run_name", "two words", "--model_revision", 'a "quoted" \'name\'',
    "--system_prompt", "cost: $5, $(HOME) $$ ${X} `id` \\",
    "--learning_rate", "5e-5", "--seed", "0o17", "--project", "yes", "--trackio_space_id", "y", "--logging_dir_", "",
    "--chat", "{{ x }} # no comment: \n\tnew line, ümläut, 日本",
    "--more", "1e3", "~", "null", "- a", ".5", "0x1f", "1_000",
]  # fmt: skip
# What the operators put into each pod (training-operator 1.9: envvar.go, master.go; trainer 2: plugins/torch/torch.go)
OPERATOR = {
    "pytorchjob": {
        "PYTHONUNBUFFERED": "0", "MASTER_PORT": "23456", "MASTER_ADDR": "demo-master-0", "WORLD_SIZE": "4", "RANK": "1",
        "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_NNODES": "2",
    },
    "trainjob": {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "demo-node-0-0.demo",
        "PET_MASTER_PORT": "29500",
    },
}  # fmt: skip
PLACED = {
    "pytorchjob": ["--node_rank", "1", "--master_addr", "demo-master-0", "--port", "23456"],
    "trainjob": ["--node_rank", "1", "--master_addr", "demo-node-0-0.demo", "--port", "29500"],
}
COMMAND = {
    "pytorchjob": [*"env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT python -m zerofit launch".split()],
    "trainjob": ["python", "-m", "zerofit", "launch"],
}


class LikeGo(yaml.SafeLoader):
    """Takes for a number or a truth value what Kubernetes' own parser does, which is more than Python's does."""


LikeGo.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$"), None)
LikeGo.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?0o[0-7]+$"), None)
LikeGo.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"[yYnN]$"), None)


def documents(text: str) -> list[dict]:
    return list(yaml.load_all(text, Loader=LikeGo))


def rendered(capsys, *words: str) -> list[dict]:
    """What `zerofit kubernetes` prints for a job named demo."""
    kubernetes.main(["--name", "demo", "--image", "registry.example/zerofit:1", *words])
    return documents(capsys.readouterr().out)


def container(found: list[dict]) -> dict:
    """The container of node 0."""
    if found[0]["kind"] == "PyTorchJob":
        return found[0]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    return found[1]["spec"]["trainer"]


def expanded(words: list[str], env: dict[str, str]) -> list[str]:
    """Return the words as a kubelet makes them: $(NAME) filled in if the container has it, $$ one dollar sign."""

    def one(match):
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([^)]*)\)", one, word) for word in words]


def job(kind: str, flags: list[str], **changed) -> kubernetes.Job:
    facts = {"name": "demo", "least": 2, "most": 2, "gpus": 2, "image": "registry.example/zerofit:1", "use_cpu": False}
    return kubernetes.Job(kind=kind, words=["recipes/sft.py", *flags], **(facts | changed))


@pytest.mark.injection
@pytest.mark.parametrize("kind", KINDS)
def test_every_word_reaches_the_recipe_as_it_was_written(kind):
    found = documents(kubernetes.render(job(kind, HOSTILE)))
    one = container(found)
    assert [type(word) for word in one["args"]] == [str] * len(
        one["args"]
    )  # 5e-5 unquoted would be refused by the server
    env = OPERATOR[kind] | {"HOME": "/wrong", "X": "/wrong"}
    assert expanded(one["command"] + one["args"], env) == [
        *COMMAND[kind], "--gpus", "2", "--nnodes", "2", *PLACED[kind], "--join_timeout", "600",
        "recipes/sft.py", *HOSTILE,
    ]  # fmt: skip


# --- the published schemas ---


def faults(found: list[dict]) -> list[str]:
    """Where documents break the schema of their kind; unknown keys are faults."""
    from kubeflow_trainer_api import models

    v2 = {"TrainingRuntime": models.TrainerV1alpha1TrainingRuntime, "TrainJob": models.TrainerV1alpha1TrainJob}
    all_faults = []
    for document in found:
        if document["kind"] in v2:
            all_faults += _model_faults(document, v2[document["kind"]])
        else:
            all_faults += _v1_faults(document, document["kind"], "")
    return all_faults


def _model_faults(value: dict, model) -> list[str]:
    from pydantic import ValidationError

    try:
        model.model_validate(_with_quantities(value), extra="forbid")
    except ValidationError as error:
        return [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    return []


def _with_quantities(value):
    """Amounts of resources in the class that the models have for "a number or a string"."""
    from kubeflow_trainer_api.models import IoK8sApimachineryPkgApiResourceQuantity as Quantity

    if isinstance(value, list):
        return [_with_quantities(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        key: {k: Quantity(amount) for k, amount in v.items()} if key in ("limits", "requests") else _with_quantities(v)
        for key, v in value.items()
    }


def _v1_faults(value, type_name: str, path: str) -> list[str]:
    """By tests/schemas/pytorchjob.json; the pod's template by the same Kubernetes models as above."""
    from kubeflow_trainer_api import models

    schema = json.loads((ROOT / "tests" / "schemas" / "pytorchjob.json").read_text())
    pods = {"V1PodTemplateSpec": models.IoK8sApiCoreV1PodTemplateSpec,
            "V1ObjectMeta": models.IoK8sApimachineryPkgApisMetaV1ObjectMeta}  # fmt: skip
    simple = {"str": str, "int": int, "bool": bool}
    if type_name in pods:
        return [f"{path}.{fault}" for fault in _model_faults(value, pods[type_name])]
    if type_name in simple:
        return [] if type(value) is simple[type_name] else [f"{path}: {value!r} is no {type_name}"]
    if type_name.startswith("dict(str, "):
        return [f for key, v in value.items() for f in _v1_faults(v, type_name[10:-1], f"{path}.{key}")]
    known = schema[type_name]
    unknown = [f"{path}.{key}: unknown" for key in value if key not in known]
    return unknown + [f for key, v in value.items() if key in known for f in _v1_faults(v, known[key], f"{path}.{key}")]


CASES = {
    "pytorchjob": ["--nodes", "2", "--gpus", "8"],
    "one node": ["--nodes", "1", "--gpus", "1"],
    "elastic": ["--nodes", "1:4", "--gpus", "8"],
    "trainjob": ["--kind", "trainjob", "--nodes", "4", "--gpus", "8"],
}


@pytest.mark.parametrize("case", CASES)
def test_the_schema_takes_what_is_rendered(case, capsys):
    found = rendered(capsys, *CASES[case], "recipes/sft.py", "--zero", "2", "--run_name", 'two "words"')
    assert faults(found) == []
    kinds = {"TrainingRuntime", "TrainJob"} if "trainjob" in CASES[case] else {"PyTorchJob"}
    assert {document["kind"] for document in found} == kinds


@pytest.mark.parametrize("kind", KINDS)
def test_the_template_is_valid_as_it_is_and_marks_what_is_of_a_site(kind):
    text = (ROOT / kubernetes.TEMPLATES[kind]).read_text()
    assert faults(documents(text)) == []
    lines = text.splitlines()
    for part in (
        "name: my-run",
        "image:",
        "claimName:",
        "nvidia.com/gpu:",
        "workingDir:",
        "terminationGracePeriodSeconds:",
    ):
        assert all("# EDIT" in line for line in lines if part in line.partition("#")[0]), part


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("pytorchjob", "backoffLimit", "backOffLimit"),
        ("pytorchjob", "terminationGracePeriodSeconds", "terminationGracePeriodSecond"),
        ("pytorchjob", "restartPolicy", "restartPolice"),
        ("trainjob", "numNodes", "nodes"),
        ("trainjob", "onExitCodes", "onExitCode"),
        ("trainjob", "secretKeyRef", "secretRef"),
    ],
)
def test_the_schema_refuses_a_misspelt_key(kind, right, wrong):
    text = kubernetes.render(job(kind, []))
    found = faults(documents(text.replace(f"{right}:", f"{wrong}:")))
    assert found and any(wrong in fault for fault in found)


def test_the_schema_refuses_a_number_for_a_string():
    assert faults(documents(kubernetes.render(job("pytorchjob", [])).replace('nprocPerNode: "2"', "nprocPerNode: 2")))


# --- what is put in ---


def test_what_is_not_named_stays_as_the_template_says(capsys):
    found = rendered(capsys, "--nodes", "3", "--gpus", "4", "recipes/sft.py", "--effective_batch_size", "48")
    spec = found[0]["spec"]
    assert spec["nprocPerNode"] == "4" and spec["runPolicy"]["backoffLimit"] == 18
    assert {role: r["replicas"] for role, r in spec["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 2}
    one = container(found)
    assert one["args"][-4:] == ["--output_dir", "/runs/demo", "--resume_from_checkpoint", "auto"]
    assert one["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert one["env"][1]["valueFrom"]["secretKeyRef"] == {"name": "zerofit", "key": "HF_TOKEN", "optional": True}
    pods = [r["template"] for r in spec["pytorchReplicaSpecs"].values()]
    assert pods[0] == pods[1] and pods[0]["spec"]["volumes"][1]["emptyDir"] == {"medium": "Memory"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_is_put_in_everywhere(kind, capsys):
    text = json.dumps(rendered(capsys, "--kind", kind, "--nodes", "2", "recipes/lora.py"))
    assert "my-run" not in text and '"--output_dir", "/runs/demo"' in text


def test_what_a_site_edits_in_the_template_is_in_every_manifest(monkeypatch, tmp_path, capsys):
    """The volume with its mount, the secret, the nodes."""
    (tmp_path / "launchers").mkdir()
    text = (ROOT / "launchers/pytorchjob.yaml").read_text()
    for old, new in (
        ("mountPath: /runs", "mountPath: /ckpt/"),
        ("claimName: zerofit-runs", "claimName: claim"),
        ("name: zerofit, key", "name: keys, key"),
        ("# nodeSelector: {}", "nodeSelector: {pool: gpu}"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "launchers/pytorchjob.yaml").write_text(text)
    monkeypatch.setattr(kubernetes, "PROJECT", tmp_path)
    found = json.dumps(rendered(capsys, "--nodes", "2", "recipes/sft.py"))
    assert '"--output_dir", "/ckpt/demo"' in found and found.count('"claimName": "claim"') == 2
    assert found.count('"name": "keys"') == 4 and found.count('"nodeSelector": {"pool": "gpu"}') == 2


def test_an_elastic_job_has_a_master_that_stays_and_no_rendezvous_of_the_operator(capsys):
    found = rendered(capsys, "--nodes", "1:4", "--gpus", "2", "recipes/sft.py")
    spec = found[0]["spec"]
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3 and "elasticPolicy" not in spec
    assert spec["runPolicy"]["schedulingPolicy"] == {"minAvailable": 1}
    args = container(found)["args"]
    assert args[args.index("--nnodes") + 1] == "1:4"
    assert args[-2:] == ["--effective_batch_size", "32"]  # not derived anew from the nodes that are there


def test_one_node_has_no_worker_and_the_cpu_needs_no_gpu(capsys):
    found = rendered(capsys, "--gpus", "2", "recipes/sft.py", "--use_cpu", "true")
    assert list(found[0]["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert container(found)["resources"]["limits"] == {"cpu": 2}


def test_own_folder_and_auto_are_not_named_twice(capsys):
    flags = ["--output_dir", "/runs/other/here", "--resume_from_checkpoint", "auto"]
    assert container(rendered(capsys, "recipes/sft.py", *flags))["args"][-4:] == flags


def test_a_recipe_is_named_as_the_image_has_it(tmp_path, capsys):
    """By its path in the project, whatever links lead there; a file outside is one that the image must hold."""
    (tmp_path / "link").symlink_to(ROOT)
    own = tmp_path / "own.py"
    own.write_text((ROOT / "recipes" / "sft.py").read_text())
    for named, word in ((f"{tmp_path}/link/recipes/sft.py", "recipes/sft.py"), (str(own), str(own))):
        kubernetes.main(["--name", "demo", "--image", "i", named])
        said = capsys.readouterr()
        assert word in container(documents(said.out))["args"]
        assert (f"note: {own} is outside the project" in said.err) == (word == str(own))
        assert (str(tmp_path) in said.out) == (word == str(own))


REFUSED = {
    "kind": (["--kind", "job"], [], "--kind job: must be one of pytorchjob, trainjob"),
    "nodes": (["--nodes", "4:1"], [], "--nodes 4:1"),
    "elastic trainjob": (["--kind", "trainjob", "--nodes", "1:4"], [], "use --kind pytorchjob, or --nodes 4"),
    "name": (["--name", "My_Run"], [], "--name My_Run"),
    "long name": (["--name", "x" * 60], [], "must be 1 to 54"),
    "gpu": (["--gpu_type", "h100"], [], "--gpu_type h100: not in the table"),
    "token": ([], ["--hub_token", "hf_x"], "hub_token (flag): it would stand in the manifest"),
    "token=": ([], ["--hub-token=hf_x"], "it would stand in the manifest"),
    "folder": ([], ["--output_dir", "runs/x"], "is not on the volume"),
    "checkpoint": ([], ["--resume_from_checkpoint", "/runs/x/checkpoint-1"], "would begin there again"),
    "batch": (["--nodes", "3", "--gpus", "8"], ["--effective_batch_size", "32"], "24"),
    "batch on the fewest": (["--nodes", "3:4", "--gpus", "8"], ["--effective_batch_size", "32"], "24"),
    "batch by size": (["--nodes", "3:4", "--gpus", "8"], [], "would be 24 on 24 ranks and 32 on 32"),
    "unknown flag": ([], ["--zeero", "3"], "did you mean --zero?"),
    "show": ([], ["--show"], "--show: prints and trains nothing"),
    "recipe": ([], None, "recipes/ppo.py: no such recipe; there are dpo, lora, pipeline, sft"),
}


@pytest.fixture(scope="module", autouse=True)
def deepspeed_is_imported():
    """Its first import prints to stdout, which the command line of zerofit sends elsewhere."""
    distributed.import_deepspeed(use_cpu=True)


@pytest.mark.bad_input
@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_refused_before_anything_is_printed(case, capsys):
    options, flags, sentence = REFUSED[case]
    recipe = ["recipes/ppo.py"] if flags is None else ["recipes/sft.py", *flags]
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        kubernetes.main(["--name", "demo", "--image", "i", *options, *recipe])
    assert "hf_x" not in str(caught.value) and capsys.readouterr().out == ""


@pytest.mark.bad_input
def test_a_token_in_the_config_file_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("hub_token: hf_x\n")
    with pytest.raises(UserError, match=r"hub_token \(.*run.yaml\): it would stand in the manifest"):
        kubernetes.main(["--name", "demo", "--image", "i", "recipes/sft.py", "--config", str(tmp_path / "run.yaml")])


@pytest.mark.bad_input
def test_a_template_edited_beyond_use_is_named(monkeypatch, tmp_path):
    (tmp_path / "launchers").mkdir()
    text = (ROOT / "launchers/pytorchjob.yaml").read_text()
    monkeypatch.setattr(kubernetes, "PROJECT", tmp_path)
    for broken, place in (
        (text.replace("Master:", "Boss:"), "no place in it (KeyError: 'Master')"),
        (text.replace("name: runs,", "name: data,"), "keep its keys and the volume `runs`"),
        (text.replace("kind: PyTorchJob", "kind: [PyTorchJob"), "pytorchjob.yaml:7: not valid YAML"),
    ):
        (tmp_path / "launchers/pytorchjob.yaml").write_text(broken)
        with pytest.raises(UserError, match=re.escape(place)):
            kubernetes._job(kubernetes._parser().parse_args(["--name", "d", "--image", "i", "recipes/sft.py"]))


# --- the command in a pod, for real ---


@pytest.mark.slow
def test_the_launch_takes_a_pods_command_line(capsys):
    """The whole command as a container would run it, on one node of two processes, with the operator's variables."""
    found = rendered(
        capsys, "--gpus", "2", "recipes/sft.py", "--use_cpu", "true", "--run_name", "two $words 'and' \"quotes\""
    )
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "demo-master-0",
           "MASTER_PORT": str(distributed.free_port()), "PET_NNODES": "1",
           "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}  # fmt: skip
    one = container(found)
    words = expanded(one["command"] + one["args"], env)
    words.insert(words.index("launch") + 1, "--show")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, env=os.environ | env | {"PATH": path}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "two $words" in done.stdout and "--nproc_per_node 2" in done.stdout
    assert re.search(r"output_dir +/runs/demo", done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_the_launch_knows_its_node_from_the_operators_variables(kind, capsys):
    found = rendered(capsys, "--kind", kind, "--nodes", "2", "--gpus", "2", "recipes/sft.py", "--use_cpu", "true")
    words = expanded(container(found)["args"], OPERATOR[kind])
    launch.main(["--show", *words])
    shown = capsys.readouterr().out
    assert PLACED[kind][3] in shown and "--node_rank 1" in shown
