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
from zerofit.job import program
from zerofit.launch import launch
from zerofit.tools import kubernetes

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / kubernetes.TEMPLATE
# Words that a shell, YAML or Kubernetes would each read its own way.
HOSTILE = [
    "--run_name", "two words", "--model_revision", 'a "quoted" \'name\'',
    "--system_prompt", "cost: $5, $(HOME) $$ ${X} `id` \\",
    "--learning_rate", "5e-5", "--seed", "0o17", "--project", "yes", "--trackio_space_id", "y", "--logging_dir_", "",
    "--chat", "{{ x }} # no comment: \n\tnew line, ümläut, 日本",
    "--more", "1e3", "~", "null", "- a", ".5", "0x1f", "1_000",
]  # fmt: skip
# What the operator puts into each pod (trainer 2: plugins/torch/torch.go)
OPERATOR = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "demo-node-0-0.demo",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip
PLACED = ["--node_rank", "1", "--master_addr", "demo-node-0-0.demo", "--port", "29500"]


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
    """The container of a node."""
    return found[1]["spec"]["trainer"]


def expanded(words: list[str], env: dict[str, str]) -> list[str]:
    """Return the words as a kubelet makes them: $(NAME) filled in if the container has it, $$ one dollar sign."""

    def one(match):
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([^)]*)\)", one, word) for word in words]


def job(flags: list[str]) -> kubernetes.Manifest:
    return kubernetes.Manifest("demo", 2, 2, "registry.example/zerofit:1", False, ["recipes/sft.py", *flags])


@pytest.mark.injection
def test_every_word_reaches_the_recipe_as_it_was_written():
    one = container(documents(kubernetes.render(job(HOSTILE))))
    assert {type(word) for word in one["args"]} == {str}  # 5e-5 unquoted would be refused by the server
    env = OPERATOR | {"HOME": "/wrong", "X": "/wrong"}
    assert expanded(one["command"] + one["args"], env) == [
        "python", "-m", "zerofit", "launch", "--gpus", "2", "--nnodes", "2", *PLACED, "--join_timeout", "600",
        "recipes/sft.py", *HOSTILE,
    ]  # fmt: skip


# --- the published schemas ---


def faults(found: list[dict]) -> list[str]:
    """Where documents break the schema of their kind; unknown keys are faults."""
    from kubeflow_trainer_api import models
    from pydantic import ValidationError

    kinds = {"TrainingRuntime": models.TrainerV1alpha1TrainingRuntime, "TrainJob": models.TrainerV1alpha1TrainJob}
    all_faults = []
    for document in found:
        try:
            kinds[document["kind"]].model_validate(_with_quantities(document), extra="forbid")
        except ValidationError as error:
            all_faults += [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    return all_faults


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


@pytest.mark.parametrize("options", [["--nodes", "4", "--gpus", "8"], ["--queue", "team-a"]])
def test_the_schema_takes_what_is_rendered(options, capsys):
    found = rendered(capsys, *options, "recipes/sft.py", "--zero", "2", "--run_name", 'two "words"')
    assert faults(found) == [] and [document["kind"] for document in found] == ["TrainingRuntime", "TrainJob"]


def test_the_template_is_valid_as_it_is_and_marks_what_is_of_a_site():
    text = TEMPLATE.read_text()
    assert faults(documents(text)) == []
    lines = text.splitlines()
    for part in (
        "name: my-run",
        "image:",
        "claimName:",
        "nvidia.com/gpu:",
        "workingDir:",
        "queue-name:",
        "terminationGracePeriodSeconds:",
    ):
        assert all("# EDIT" in line for line in lines if part in line.partition("#")[0]), part


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("backoffLimit", "backOffLimit"),
        ("terminationGracePeriodSeconds", "terminationGracePeriodSecond"),
        ("restartPolicy", "restartPolice"),
        ("numNodes", "nodes"),
        ("onExitCodes", "onExitCode"),
        ("secretKeyRef", "secretRef"),
    ],
)
def test_the_schema_refuses_a_misspelt_key(right, wrong):
    found = faults(documents(kubernetes.render(job([])).replace(f"{right}:", f"{wrong}:")))
    assert found and any(wrong in fault for fault in found)


# --- what is put in ---


def test_what_is_not_named_stays_as_the_template_says(capsys):
    found = rendered(capsys, "--nodes", "3", "--gpus", "4", "recipes/sft.py", "--effective_batch_size", "48")
    node, one = kubernetes._node(found[0]), container(found)
    assert found[0]["spec"]["mlPolicy"]["numNodes"] == one["numNodes"] == 3 and node["backoffLimit"] == 18
    assert one["numProcPerNode"] == 4 and one["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 4}
    assert one["args"][-4:] == ["--output_dir", "/runs/demo", "--resume_from_checkpoint", "auto"]
    assert one["env"][1]["valueFrom"]["secretKeyRef"] == {"name": "zerofit", "key": "HF_TOKEN", "optional": True}
    assert node["template"]["spec"]["volumes"][1]["emptyDir"] == {"medium": "Memory"}
    assert node["podFailurePolicy"]["rules"][0] == {
        "action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]},
    }  # fmt: skip


def test_the_name_is_put_in_everywhere(capsys):
    text = json.dumps(rendered(capsys, "--nodes", "2", "recipes/lora.py"))
    assert "my-run" not in text and '"--output_dir", "/runs/demo"' in text


def test_a_queue_is_a_label_of_the_train_job_and_without_one_there_is_none(capsys):
    """Kueue reads it there, and suspends the job until all its pods can start."""
    for options, labels in ((["--queue", "team-a"], {kubernetes.QUEUE: "team-a"}), ([], {})):
        assert rendered(capsys, *options, "recipes/sft.py")[1]["metadata"]["labels"] == labels


def test_what_a_site_edits_in_the_template_is_in_every_manifest(monkeypatch, tmp_path, capsys):
    """The volume with its mount, the secret, the nodes."""
    (tmp_path / "launchers").mkdir()
    text = TEMPLATE.read_text()
    for old, new in (
        ("mountPath: /runs", "mountPath: /ckpt/"),
        ("claimName: zerofit-runs", "claimName: claim"),
        ("name: zerofit, key", "name: keys, key"),
        ("# nodeSelector: {}", "nodeSelector: {pool: gpu}"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / kubernetes.TEMPLATE).write_text(text)
    monkeypatch.setattr(kubernetes, "PROJECT", tmp_path)
    found = json.dumps(rendered(capsys, "--nodes", "2", "recipes/sft.py"))
    assert '"--output_dir", "/ckpt/demo"' in found and found.count('"claimName": "claim"') == 1
    assert found.count('"name": "keys"') == 2 and found.count('"nodeSelector": {"pool": "gpu"}') == 1


def test_the_cpu_needs_no_gpu(capsys):
    found = rendered(capsys, "--gpus", "2", "recipes/sft.py", "--use_cpu", "true")
    assert container(found)["resourcesPerNode"]["limits"] == {"cpu": 2}


def test_own_folder_and_auto_are_not_named_twice(capsys):
    flags = ["--output_dir", "/runs/other/here", "--resume_from_checkpoint", "auto"]
    assert container(rendered(capsys, "recipes/sft.py", *flags))["args"][-4:] == flags


def test_a_recipe_is_named_as_the_image_has_it(tmp_path, capsys, monkeypatch):
    """By its path in the project, whatever links lead there; a file outside is one that the image must hold."""
    monkeypatch.setattr(program, "_started", None)  # what is set here must not be the program of a later test
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
    "nodes": (["--nodes", "1:4"], [], "--nodes 1:4: must be a number of pods"),
    "queue": (["--queue", "a b"], [], "--queue a b: must be the name"),
    "name": (["--name", "My_Run"], [], "--name My_Run"),
    "long name": (["--name", "x" * 60], [], "must be 1 to 54"),
    "gpu": (["--gpu_type", "h100-8g"], [], "--gpu_type h100-8g: not in the table"),
    "token": ([], ["--hub_token", "hf_x"], "hub_token (flag): the manifest would expose it"),
    "token=": ([], ["--hub-token=hf_x"], "kubectl create secret"),
    "folder": ([], ["--output_dir", "runs/x"], "is not on the volume"),
    "checkpoint": ([], ["--resume_from_checkpoint", "/runs/x/checkpoint-1"], "would start from it again"),
    "batch": (["--nodes", "3", "--gpus", "8"], ["--effective_batch_size", "32"], "24"),
    "unknown flag": ([], ["--zeero", "3"], "did you mean --zero?"),
    "show": ([], ["--show"], "--show: only prints"),
    "recipe": ([], None, "recipes/ppo.py: no such recipe; use dpo, lora, pipeline, sft"),
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
    with pytest.raises(UserError, match=r"hub_token \(.*run.yaml\): the manifest would expose it"):
        kubernetes.main(["--name", "demo", "--image", "i", "recipes/sft.py", "--config", str(tmp_path / "run.yaml")])


@pytest.mark.bad_input
def test_a_template_edited_beyond_use_is_named(monkeypatch, tmp_path):
    (tmp_path / "launchers").mkdir()
    text = TEMPLATE.read_text()
    monkeypatch.setattr(kubernetes, "PROJECT", tmp_path)
    for broken, place in (
        (text.replace("numNodes:", "nodes:").replace("args:", "words:"), "required key (KeyError: 'args')"),
        (text.replace("name: runs,", "name: data,"), "restore its keys and the volume `runs`"),
        (text.replace("kind: TrainingRuntime", "kind: [TrainingRuntime"), "trainjob.yaml:7: not valid YAML"),
    ):
        (tmp_path / kubernetes.TEMPLATE).write_text(broken)
        with pytest.raises(UserError, match=re.escape(place)):
            kubernetes.main(["--name", "d", "--image", "i", "recipes/sft.py"])


# --- the command in a pod, for real ---


@pytest.mark.slow
def test_the_launch_takes_a_pods_command_line(capsys):
    """The whole command as a container would run it, on one node of two processes, with the operator's variables."""
    found = rendered(
        capsys, "--gpus", "2", "recipes/sft.py", "--use_cpu", "true", "--run_name", "two $words 'and' \"quotes\""
    )
    env = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(distributed.free_port()), "PET_NNODES": "1",
           "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}  # fmt: skip
    one = container(found)
    words = expanded(one["command"] + one["args"], env)
    words.insert(words.index("launch") + 1, "--show")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, env=os.environ | env | {"PATH": path}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "two $words" in done.stdout and "--nproc_per_node 2" in done.stdout
    assert re.search(r"output_dir +/runs/demo", done.stdout)


def test_the_launch_knows_its_node_from_the_operators_variables(capsys):
    found = rendered(capsys, "--nodes", "2", "--gpus", "2", "recipes/sft.py", "--use_cpu", "true")
    words = expanded(container(found)["args"], OPERATOR)
    launch.main(["--show", *words])
    shown = capsys.readouterr().out
    assert f"--rdzv_endpoint {PLACED[3]}:" in shown and "node_rank=1," in shown
