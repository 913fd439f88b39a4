"""The batch script for SLURM: what is rendered, what bash makes of it, what is refused; `zerofit status` and `cancel`.

The real SLURM is in tests/cluster/test_slurm.py.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from zerofit.base.errors import UserError
from zerofit.commands import cancel, status
from zerofit.job import run_lock
from zerofit.tools import slurm

RECIPE = "recipes/sft.py"
STUB = """#!{python}
import json, os, sys, time
name = os.path.basename(sys.argv[0])
with open(os.environ["SAID"], "a") as file:
    file.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if name == "scontrol" and sys.argv[1] == "show":
    print("node7\\nnode9")
if name == "srun":
    time.sleep(float(os.environ.get("LASTS", "0")))
    os.environ["SLURM_NODEID"] = "1"
    os.execvp("bash", sys.argv[sys.argv.index("bash"):]) if "CODE" not in os.environ else \
sys.exit(int(os.environ["CODE"]))
"""
TELLS = """#!{python}
import json, sys
print(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def printed(capsys):
    """`printed("--nodes", "2", RECIPE)`: the batch script."""

    def words(*given) -> str:
        slurm.main(["--print", *map(str, given)])
        return capsys.readouterr().out

    return words


@pytest.fixture
def bash(tmp_path):
    """Run a batch script with SLURM's commands put on; return its exit code, its output and the commands' words."""
    bin, said = tmp_path / "bin", tmp_path / "said"
    bin.mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (bin / name).write_text(STUB.format(python=sys.executable))
        (bin / name).chmod(0o755)
    (bin / "python").write_text(TELLS.format(python=sys.executable))
    (bin / "python").chmod(0o755)

    def run(script: str, term_after: float = 0, **env):
        said.write_text("")
        job = {
            "SLURM_JOB_ID": "12007",
            "SLURM_JOB_NODELIST": "node[7,9]",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "3",
        }
        process = subprocess.Popen(
            ["bash", "-c", script.replace(f"python={shlex.quote(sys.executable)}", f"python={bin}/python")],
            stdout=subprocess.PIPE, text=True,
            env=os.environ | job | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "SAID": str(said)} | env,
        )  # fmt: skip
        if term_after:
            while "srun" not in said.read_text():
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
        return process.returncode, output, [json.loads(line) for line in said.read_text().splitlines()]

    return run


def test_the_rendered_script(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = printed(
        "--nodes", 4, "--gpus", 8, "--time", "2-00:00:00", "--partition", "gpu", "--account", "it's \"us\"",
        "--sbatch", "--mem=0 -C 'a b' --signal=USR1@600 --exclusive", "--output_dir", 'my runs/50% "x"',
        "--args", "--run_name 'a; b'", RECIPE, "--zero", "3", "--learning_rate", "1e-5",
    )  # fmt: skip
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("#SBATCH")] == [
        '#SBATCH --job-name="50% \\"x\\""',
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f'#SBATCH --output="{tmp_path}/my runs/50%% \\"x\\"/slurm.log"',
        f"#SBATCH --chdir={tmp_path}",
        "#SBATCH --partition=gpu",
        '#SBATCH --account="it\'s \\"us\\""',
        "#SBATCH --mem=0",
        '#SBATCH -C "a b"',
        "#SBATCH --signal=USR1@600",  # the later one wins
        "#SBATCH --exclusive",
    ]
    where = lines.index("set -u")
    assert lines[where + 2 : where + 13] == [
        f"root={ROOT}",
        f"python={shlex.quote(sys.executable)}",
        "image=",
        "mounts=",
        f"out='{tmp_path}/my runs/50% \"x\"'",
        "gpus=8",
        "launch=(--join_timeout 600)",
        next(line for line in slurm.TEMPLATE.read_text().splitlines() if line.startswith("port=")),
        f"recipe=({ROOT}/recipes/sft.py --zero 3 --learning_rate 1e-5 --run_name 'a; b')  # relative paths begin at "
        "--chdir",
        "case ${SLURM_ARRAY_TASK_ID:-} in    # extra flags of each job of a sweep; the runs are in $out/0, $out/1 ...",
        "esac",
    ]
    template = slurm.TEMPLATE.read_text()
    assert text.partition("\nesac\n")[2] == template.partition("\nesac\n")[2]  # no EDIT line below
    assert not (tmp_path / "my runs").exists()


def test_cpu_ranks_ask_for_no_gpu(printed):
    text = printed("--gpus", 2, RECIPE, "--use_cpu", "true")
    assert "gpus-per-node" not in text and "#SBATCH --cpus-per-task=2\n" in text


@pytest.mark.injection
def test_the_words_reach_every_machine_as_they_were(printed, bash, tmp_path):
    odd = 'it\'s "odd" $HOME `id` \\ % *'
    text = printed("--nodes", 2, "--gpus", 4, "--output_dir", tmp_path / odd, RECIPE, "--zero", "3", "--run_name", odd)
    code, output, said = bash(text)
    assert code == 0
    assert json.loads(output) == [
        "-m", "zerofit", "launch", "--node_rank", "1", "--gpus", "4", "--nnodes", "2", "--master_addr", "node7",
        "--port", "20014", "--join_timeout", "600", str(ROOT / RECIPE), "--zero", "3",
        "--run_name", odd, "--output_dir", str(tmp_path / odd), "--resume_from_checkpoint", "auto",
    ]  # fmt: skip
    srun = next(words for words in said if words[0] == "srun")
    assert srun[1:4] == ["--kill-on-bad-exit=0", "--wait=120", "--cpus-per-task=3"]
    assert not any(words[1] == "requeue" or words[0] == "scancel" for words in said)


def test_what_a_site_needs_is_in_the_script(printed, bash, tmp_path):
    text = printed(
        "--nodes", 2, "--port", 31000, "--interface", "ib0", "--join_timeout", "900", "--exclusive",
        "--setup", "module load cuda/12.8; export OF_SETUP='a b'\necho \"set: $OF_SETUP\"", "--output_dir",
        tmp_path / "run", RECIPE,
    )  # fmt: skip
    assert "#SBATCH --exclusive\n#SBATCH --mem=0\n" in text and "EDIT module" not in text
    code, output, _ = bash('module() { echo "module: $*"; }\n' + text)
    assert code == 0 and output.startswith("module: load cuda/12.8\nset: a b\n")
    words = json.loads(output.splitlines()[-1])
    assert words[words.index("--port") : words.index(str(ROOT / RECIPE))] == [
        "--port", "31000", "--join_timeout", "900", "--interface", "ib0",
    ]  # fmt: skip


@pytest.mark.injection
@pytest.mark.parametrize("image", ["nvcr.io#nvidia/pytorch:26.01 $HOME", "/images/it's `odd`.sif"])
def test_a_container_sees_the_run_and_its_words_as_they_were(printed, bash, tmp_path, image):
    """Pyxis mounts by srun, Apptainer by a command before the launch."""
    run = tmp_path / "my run"
    text = printed("--image", image, "--mounts", "/data:/data,/a b:/m", "--output_dir", run, RECIPE)
    (tmp_path / "bin" / "python3").write_text(TELLS.format(python=sys.executable))
    (tmp_path / "bin" / "python3").chmod(0o755)
    code, output, said = bash(text)
    bind = f"{ROOT}:{ROOT},{run}:{run},{Path.cwd()}:{Path.cwd()},/data:/data,/a b:/m"
    srun = next(words for words in said if words[0] == "srun")
    if image.endswith(".sif"):
        within = ["apptainer", "exec", "--nv", "--bind", bind, image]
        assert srun[4:11] == [*within, "bash"]
    else:
        pyxis = [f"--container-image={image}", f"--container-mounts={bind}", f"--container-workdir={Path.cwd()}"]
        assert srun[4:8] == [*pyxis, "bash"]
    words = json.loads(output.splitlines()[-1])
    assert code == 0 and words[:3] == ["-m", "zerofit", "launch"] and str(run) in words and run.is_dir()


def test_the_template_itself_is_a_batch_script(bash, tmp_path):
    text = slurm.TEMPLATE.read_text().replace("python=$root/.venv/bin/python", f"python={sys.executable}")
    code, output, _ = bash(text, SLURM_SUBMIT_DIR=str(tmp_path), SLURM_ARRAY_TASK_ID="1")
    words = json.loads(output)
    assert code == 0 and words[words.index("--zero") : words.index("--resume_from_checkpoint")] == [
        "--zero", "3", "--learning_rate", "2e-5", "--output_dir", f"{tmp_path}/runs/slurm-12007/1",
    ]  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        (0, 0, False), (1, 0, False), (2, 0, False), (3, 0, False),
        (75, 99, True), (143, 0, True), (138, 9, True), (143, 10, False),
    ],
)  # fmt: skip
def test_what_is_queued_again(printed, bash, tmp_path, code, restarts, again):
    text = printed("--output_dir", tmp_path / "run", RECIPE)
    found, output, said = bash(text, CODE=str(code), SLURM_RESTART_COUNT=str(restarts))
    assert found == code
    assert (["scontrol", "requeue", "12007"] in said) == again == ("is queued again" in output)


def test_a_cancelled_run_is_not_queued_again(printed, bash, tmp_path):
    text = printed("--output_dir", tmp_path / "run", RECIPE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / status.CANCELLED).touch()
    code, _, said = bash(text, CODE="75")
    assert code == 75 and said[-1] == ["scancel", "12007"] and ["scontrol", "requeue", "12007"] not in said
    assert ["scancel", "12007"] not in bash(text, CODE="0")[2]  # it had finished


@pytest.mark.fault
def test_a_job_that_slurm_ends_waits_for_its_ranks_and_leaves_the_queue_to_slurm(printed, bash, tmp_path):
    text = printed("--output_dir", tmp_path / "run", RECIPE)
    code, _, said = bash(text, term_after=0.1, CODE="75", LASTS="3")
    assert code == 75 and not any(words[1] == "requeue" for words in said)


def test_a_sweep(printed, bash, tmp_path):
    file = tmp_path / "sweep.txt"
    file.write_text("# rates\n--learning_rate 1e-5\n\n--learning_rate 2e-5 --run_name 'two words'  # the second\n")
    text = printed("--sweep", file, "--output_dir", tmp_path / "runs%", RECIPE)
    assert (
        "#SBATCH --array=0-1\n" in text
        and f'#SBATCH --output="{tmp_path}/runs%%/%a/slurm.log"\n'.replace('"', "") in text
    )
    words = json.loads(bash(text, SLURM_ARRAY_TASK_ID="1")[1])
    assert words[words.index("--learning_rate") :] == [
        "--learning_rate", "2e-5", "--run_name", "two words", "--output_dir", f"{tmp_path}/runs%/1",
        "--resume_from_checkpoint", "auto",
    ]  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([RECIPE, "--hub_token", "x"], "set HF_TOKEN in the environment"),
        ([RECIPE, "--zero", "7"], "--zero"),
        (["recipes/none.py"], "none"),
        (["--nodes", "two", RECIPE], "NODES=two: must be a positive integer"),
        (["--gpus", "0", RECIPE], "GPUS=0"),
        (["--sbatch", "exclusive", RECIPE], "'exclusive' is not an sbatch option"),
        (["--sbatch", "--mail 'x", RECIPE], "cannot be split"),
        pytest.param(
            ["--sbatch", "'--comment x\ntouch /tmp/y\n'", RECIPE], "not an sbatch option", marks=pytest.mark.injection
        ),
        pytest.param(["--sbatch", "'--comment\ntouch=1'", RECIPE], "not an sbatch option", marks=pytest.mark.injection),
        pytest.param(["--sbatch", "'-\n'", RECIPE], "not an sbatch option", marks=pytest.mark.injection),
        pytest.param(["--sbatch", "--mem=0 'a\nb'", RECIPE], "not an sbatch option", marks=pytest.mark.injection),
        pytest.param(["--sbatch", "--comment 'a\nb'", RECIPE], "line break", marks=pytest.mark.injection),
        (["--nodes", "3", RECIPE, "--effective_batch_size", "8"], "8"),
        ([RECIPE, "--resume_from_checkpoint", "runs/x/checkpoint-5"], "name that folder with OUT=... and use auto"),
        (["--output_dir", "a\nb", RECIPE], "line break"),
        (["--port", "65535", RECIPE], "PORT=65535: must be a number from 1 to 65534"),
        (["--sbatch", "--export=ALL,HF_TOKEN=hf_secret_value", RECIPE], "would expose the value of HF_TOKEN"),
        (["--sweep", "none.txt", RECIPE], "none.txt: cannot be read"),
        (["--mounts", "/a:/a", RECIPE], "requires --image"),
        (["--image", "i", "--output_dir", "a:b", RECIPE], "its name contains , or :"),
        (["--setup", "export X=hf_secret_value", RECIPE], "would expose the value of HF_TOKEN"),
    ],
)
def test_what_is_refused(printed, monkeypatch, words, sentence):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    with pytest.raises(UserError) as refused:
        printed(*words)
    assert sentence in str(refused.value) and "hf_secret_value" not in str(refused.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--learning_rate 'x", "sweep.txt:2: cannot be split"),
        ("--output_dir x", "sweep.txt:2: --output_dir"),
        ("--zero 9", "sweep.txt: job 0 (--zero 9): "),
        ("", "does not contain flags"),
    ],
)
def test_what_is_refused_in_a_sweep(printed, tmp_path, line, sentence):
    (tmp_path / "sweep.txt").write_text(f"# one\n{line}\n")
    with pytest.raises(UserError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        printed("--sweep", tmp_path / "sweep.txt", RECIPE)


@pytest.mark.bad_input
def test_no_slurm_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sbatch is not installed: .*login node.*--print"):
        slurm.main(["--output_dir", str(tmp_path / "run"), str(ROOT / RECIPE)])
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="already holds"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.json").write_text("{}")
        slurm.main(["--output_dir", str(tmp_path / "run"), str(ROOT / RECIPE)])


# --- status and cancel, without SLURM ---


@pytest.mark.parametrize("sweep", [[], [["--seed", "1"], ["--seed", "2"]]])
def test_a_submission_that_fails_leaves_no_folder(tmp_path, monkeypatch, sweep):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    request = slurm.Submission(ROOT / RECIPE, [], tmp_path / "runs" / "x", 1, 1, 1, sweep=sweep)
    with pytest.raises(UserError, match="invalid partition"):
        slurm.submit(request, "#!/bin/sh\n")
    assert not request.folder.exists()
    request.folder.mkdir(parents=True)
    (request.folder / "mine").touch()
    with pytest.raises(UserError, match="invalid partition"):
        slurm.submit(request, "#!/bin/sh\n")
    assert (request.folder / "mine").exists()


def test_how_a_run_stands(tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.raises(UserError, match="not a run folder"):
        status.main([str(run)])
    run.mkdir()
    (run / "run.json").write_text("{}")
    status.main([str(run)])
    assert f"{run}: before the first step, no checkpoint yet\n  not running on this machine" in capsys.readouterr().out
    lines = [{"step": 9, "loss": 0.5, "tokens_per_second": 1234.5}, {"step": 9, "eval_loss": 0.7}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 1')
    (run / "checkpoint-5").mkdir()
    (run / "checkpoint-10").mkdir()
    (run / "report.json").write_text(json.dumps({"status": "failed", "cause": "rank 1 ended", "try": "--zero 3"}))
    status.main([str(run)])
    said = capsys.readouterr().out
    assert "step 9, loss 0.5000, 1,234 tok/s, " in said and "newest checkpoint 10" in said
    assert "the last start failed: rank 1 ended; try: --zero 3" in said
    (run / "result.json").write_text(json.dumps({"status": "finished", "steps": 1200, "train_loss": 0.25}))
    status.main([str(run)])
    assert capsys.readouterr().out == f"{run}: finished after 1,200 steps, train loss 0.2500\n"


@pytest.mark.injection
@pytest.mark.parametrize("facts", [{"job_id": "--me"}, {"job_id": "12 --me"}, {"job_id": "7", "cluster": "a,all b"},
                                   {"job_id": "12\n"}, {"job_id": ["7"]}])  # fmt: skip
def test_a_job_number_that_is_none_reaches_no_command(tmp_path, monkeypatch, facts):
    (tmp_path / status.JOB).write_text(json.dumps(facts))
    monkeypatch.setattr(status, "ask", lambda *words: pytest.fail(f"{words} was called"))
    for main in (cancel.main, status.main):
        with pytest.raises(UserError, match=r"slurm.json: (job_id .* is not a job id|cluster .* is not a cluster)"):
            main([str(tmp_path)])


@pytest.mark.injection
@pytest.mark.parametrize(
    ("log", "is_own"),
    [
        ("RUN/slurm.log", True),
        ("RUN/0/slurm.log", True),
        ("LINK/slurm.log", True),
        ("", True),  # not told
        ("/home/me/other run/slurm.log", False),
        ("RUN-2/slurm.log", False),
    ],
)
def test_a_job_of_another_run_is_not_cancelled(tmp_path, monkeypatch, log, is_own):
    """A run folder of somebody else may name any job of this user."""
    run, asked = tmp_path / "my 100% run", []
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    (run / status.JOB).write_text(json.dumps({"job_id": "12007"}))
    log = log.replace("RUN", str(run).replace("%", "%%")).replace("LINK", str(tmp_path / "link"))

    def ask(*words):
        asked.append(words)
        if words[0] == "scontrol":
            return f"JobId=12007 JobName=x StdIn=/dev/null StdOut={log} Power=\n" if log else ""
        return f"12007|{'RUNNING' if ('scancel', '12007') not in asked else 'CANCELLED'}|1:00\n"

    monkeypatch.setattr(status, "ask", ask)
    if is_own:
        cancel.main(["--now", str(run)])
    else:
        with pytest.raises(UserError, match=r"job 12007 belongs to another run.*`scancel 12007`"):
            cancel.main(["--now", str(run)])
    assert (("scancel", "12007") in asked) == is_own == (run / status.CANCELLED).exists()


def test_a_run_on_this_machine_is_cancelled(tmp_path, capsys):
    run, other = tmp_path / "my run", tmp_path / "other"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(UserError, match="not running on this machine"):
        cancel.main([str(run)])
    held = "import sys, time; from pathlib import Path; from zerofit.job import run_lock; "
    words = [sys.executable, "-c", f"{held}run_lock.take(Path(sys.argv[1])); time.sleep(300)"]
    mine, others = (subprocess.Popen([*words, folder.name], cwd=tmp_path) for folder in (run, other))
    while run_lock.holder(run) is None:  # it has not taken the lock yet
        time.sleep(0.05)
    cancel.main([str(run)])
    assert mine.wait(timeout=30) == -signal.SIGTERM and others.poll() is None
    assert f"process {mine.pid} was asked to save" in capsys.readouterr().out
    others.kill()
    others.wait()
