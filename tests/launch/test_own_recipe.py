"""A recipe of one's own, in any file, is launched, evaluated, retried, resumed, tried out and planned as itself; and a
run folder, which may be somebody else's, does not choose what code runs."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, Run, python, run_python, run_world
from test_retry import COMMON, launch

from zerofit.base.errors import UserError
from zerofit.checkpoint import differences
from zerofit.commands import resume
from zerofit.config import deepspeed_json, early_check, parse, resolve
from zerofit.job import program
from zerofit.launch import launch as launcher
from zerofit.launch import prepare
from zerofit.plan import simulate, simulated_rank
from zerofit.tools import replay, slurm
from zerofit.train import trainer

DOUBLED = '''class Doubled(ZerofitTrainer):
    """Trains on twice the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (2 * loss, outputs) if return_outputs else 2 * loss


def main() -> None:
    started = recipe.job.file_argument(recipe.sys.argv[1:])
    with open(__file__ + ".began", "a") as file:
        file.write(("canary" if started and "canary" in recipe.job.read(started).trial else "run") + "\\n")
'''

EVAL = ["--eval_data", str(TINY / "eval.jsonl"), "--per_device_eval_batch_size", "8"]


@pytest.fixture(autouse=True)
def program_as_before(monkeypatch):
    """Restore the program that this process starts: a later test of the same worker would take it for its own."""
    monkeypatch.setattr(program, "_started", program._started)


def own_recipe(folder, name="my_trainer.py"):
    """A copy of recipes/sft.py whose loss is doubled, and which records each of its starts."""
    text = (ROOT / "recipes" / "sft.py").read_text()
    assert text.count("def main() -> None:\n") == text.count("trainer = ZerofitTrainer(") == 1
    text = text.replace("def main() -> None:\n", DOUBLED).replace("trainer = ZerofitTrainer(", "trainer = Doubled(")
    file = folder / name
    file.write_text(text)
    return file


# --- as itself ---


def starts(own):
    """For each start of the recipe's main: "run", or the file of a canary's result."""
    return own.with_name(own.name + ".began").read_text().split()


@pytest.mark.slow
@pytest.mark.fault
def test_it_is_launched_and_retried_as_itself(tmp_path):
    own, folder = own_recipe(tmp_path), tmp_path / "run"
    fault = {"what": "oom", "where": "backward"}
    done = launch(folder, "--max_steps", "4", fault=fault, fresh=False, recipe=str(own))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "attempt 2, from checkpoint-2: micro batch 2" in done.stderr
    assert starts(own) == ["run"] * 4  # two ranks, two attempts
    before, after = Run(folder / "attempts" / "1").losses, Run(folder).losses
    assert before[0] > 6.5  # twice log(512) / 2 or so: the stock recipe's is 3.5
    assert len(before) == 3 and after[:3] == pytest.approx(before, rel=1e-3)  # the third step was made twice
    assert Run(folder).json("run.json")["program"] == {"file": str(own), "sha256": program.from_file(own).sha256}


@pytest.mark.slow
def test_it_is_tried_out_and_evaluated_as_itself_on_two_ranks(tmp_path):
    own, folder = own_recipe(tmp_path), tmp_path / "run"
    done = launch(folder, *EVAL, "--max_steps", "2", "--canary", "true", recipe=str(own))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "canary passed" in done.stdout
    assert len(starts(own)) == 4 and starts(own)[2:] == ["run", "run"] != starts(own)[:2]
    # What the stock recipe says of the same models: half the loss of the first step, half the evaluation's.
    stock = [*COMMON, *EVAL, "--max_steps", "1"]
    trained = ["--model", str(folder / "final"), "--learning_rate", "0"]
    runs = run_world(1, {"first": ("sft", stock), "final": ("sft", [*stock, *trained])}, tmp_path)
    assert Run(folder).losses[0] == pytest.approx(2 * runs["first"].losses[0], rel=1e-5)
    mine, theirs = (run.json("result.json")["eval_loss"] for run in (Run(folder), runs["final"]))
    assert mine == pytest.approx(2 * theirs, rel=1e-4)
    assert not any("eval_perplexity" in line for line in Run(folder).metrics)  # of no cross entropy


@pytest.mark.slow
@pytest.mark.fault
def test_the_command_that_a_stopped_run_prints_resumes_it_as_itself(tmp_path):
    own, folder = own_recipe(tmp_path), tmp_path / "run"
    words = [python(), "-m", "zerofit", "launch", str(own), *COMMON, *EVAL, "--max_steps", "5000",
             "--save_steps", "5000", "--lr_scheduler_type", "constant", "--output_dir", str(folder)]  # fmt: skip
    job = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 2:
        assert time.time() < deadline and job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 75, said
    step = int(re.search(r"stopped after step (\d+)", said).group(1))
    shutil.copytree(folder, tmp_path / "copy")
    printed = re.search(r"(make resume RUN=[^\s`]+)", said).group(1)
    more = ["-C", str(ROOT), "ENV=active", f"PYTHON={python()}", f"ARGS=--max_steps {step + 1}"]
    done = subprocess.run([*shlex.split(printed), *more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    assert "trained so far" not in done.stdout and "has changed" not in done.stdout
    # The copy is a folder in which this user has started nothing: its program is asked for, and named.
    words = ["-m", "zerofit", "resume", str(tmp_path / "copy"), "--max_steps", str(step + 1)]
    done = run_python(words, cwd=ROOT)
    assert done.returncode == 2 and f"it was trained by {own} (sha256 " in done.stderr and "--recipe" in done.stderr
    done = run_python([*words, "--recipe", "recipes/sft.py"], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"note: {own} (sha256 " in done.stdout and f"{ROOT}/recipes/sft.py (" in done.stdout
    assert re.search(r"- the program .*my_trainer.py \(.* saved the checkpoint, this run uses ", done.stdout)
    stock = Run(tmp_path / "copy")
    assert Run(folder).metrics[-2]["step"] == stock.metrics[-2]["step"] == step + 1
    assert Run(folder).losses[-1] == pytest.approx(2 * stock.losses[-1], rel=1e-5)
    assert Run(folder).json("result.json")["eval_loss"] == pytest.approx(
        2 * stock.json("result.json")["eval_loss"], rel=0.02
    )


@pytest.mark.slow
def test_an_own_loss_of_pairs_is_evaluated(tmp_path):
    text = (ROOT / "recipes" / "dpo.py").read_text().replace("= ZerofitTrainer(", "= Doubled(")
    own = tmp_path / "my_pairs.py"
    own.write_text(text.replace("def main() -> None:\n", DOUBLED))
    flags = ["--max_steps", "2", "--logging_steps", "1", "--max_samples", "32", "--effective_batch_size", "8",
             "--zero", "2", "--num_samples", "0", "--save_strategy", "no"]  # fmt: skip
    evaluated = {}
    for recipe in ("recipes/dpo.py", str(own)):
        folder = tmp_path / Path(recipe).stem
        words = ["-m", "zerofit", "launch", "--gpus", "2", recipe, *flags, "--output_dir", str(folder)]
        done = run_python(words, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        evaluated[recipe] = [line for line in Run(folder).metrics if "eval_loss" in line][-1]
    stock, mine = evaluated.values()
    assert mine["eval_loss"] == pytest.approx(2 * stock["eval_loss"], rel=1e-4)
    assert mine["eval_rewards/margins"] == pytest.approx(stock["eval_rewards/margins"], rel=1e-3)


@pytest.mark.slow
def test_its_batch_size_is_searched_with_its_own_steps(tmp_path):
    own = own_recipe(tmp_path)
    words = ["--recipe", str(own), *COMMON, "--use_cpu", "true", "--memory_limit", "2"]
    done = run_python(["-m", "zerofit", "batch-size", *words], cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "largest micro batch" in done.stdout and own.with_name(own.name + ".began").exists()


@pytest.mark.slow
def test_its_trainer_is_planned(tmp_path, monkeypatch):
    own = own_recipe(tmp_path)
    before, after = "        loss, outputs = super()", "        return (2 * loss, outputs)"
    text = own.read_text().replace(before, f"        kept = model.lm_head.weight.new_zeros(2**24)\n{before}")
    own.write_text(text.replace(after, f"        loss = loss + kept.sum()\n{after}"))
    flags = ["--model", str(TINY / "model"), *COMMON[:2], "--use_cpu", "true", "--max_length", "64"]
    peaks = []
    for named in ("sft", str(own)):
        program.start(named)
        question = simulate.Question(parse.request("sft", flags), 1, device="cpu")
        (answer,) = simulate.run_all([question])
        peaks.append(max(answer["total"].values()))
    monkeypatch.setattr(program, "_started", None)
    assert peaks[0] < 4 * 2**24 <= peaks[1]


@pytest.mark.slow
def test_a_step_is_repeated_with_its_own_loss(tmp_path):
    own, folder = own_recipe(tmp_path), tmp_path / "run"
    text = own.read_text().replace("else 2 * loss", "else 2 * loss / 0")
    own.write_text(text.replace("(2 * loss, out", "(2 * loss / 0, out"))
    done = run_python([str(own), *COMMON, "--output_dir", str(folder)], cwd=tmp_path)
    assert done.returncode == 4, done.stderr[-2000:]
    done = run_python(["-m", "zerofit", "replay", str(folder)], cwd=tmp_path)
    assert done.returncode == 4 and "rank 0 micro batch 0: loss inf" in done.stdout, done.stderr[-2000:]
    done = run_python(["-m", "zerofit", "replay", str(folder), "--recipe", "sft"], cwd=tmp_path)
    assert done.returncode == 0 and "everything is finite" in done.stdout, done.stderr[-2000:]


# --- with a name and a flag of its own ---

SCALED = ROOT / "tests" / "launch" / "scaled.py"


def made(*words, flags):
    """`make` with a recipe of one's own, on this interpreter."""
    words = [
        "make",
        "-C",
        str(ROOT),
        "--no-print-directory",
        "ENV=active",
        f"PYTHON={python()}",
        f"RECIPE={SCALED}",
        *words,
    ]
    return subprocess.run([*words, f"ARGS={shlex.join(flags)}"], capture_output=True, text=True, timeout=300)


def test_every_verb_knows_its_flag(tmp_path, monkeypatch, capsys):
    """--help, --show, YAML, a wrong flag's hint, batch files: nothing in src names it."""
    config = tmp_path / "own.yaml"
    config.write_text("loss_factor: 3\n")
    done = made("show", "launch", "GPUS=2", f"CONFIG={config}", flags=["--use_cpu", "true"])
    assert done.returncode == 0, done.stderr
    assert re.search(rf"loss_factor +3.0 +{re.escape(str(config))}\n", done.stdout), done.stdout
    monkeypatch.setattr(program, "_started", None)
    with pytest.raises(SystemExit, match="0"):
        early_check.command("launch", [str(SCALED), "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: tests/launch/scaled.py [--flag value ...]      (make launch RECIPE=")
    assert re.search(r"scaled:\n  --loss_factor +The loss is multiplied by it. \(default 2.0\)\n", said)
    for words, says in (("--loss_factr 3", "unknown flag --loss_factr; did you mean --loss_factor?"),
                        ("--loss_factor x", "--loss_factor x: must be a number"),
                        ("--beta 3", "unknown flag --beta; did you mean recipes/dpo.py")):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(says)):
            slurm.main(["--print", "--nodes", "2", str(SCALED), *words.split()])
    flags = ["--loss_factor", "3", "--use_cpu", "true", "--max_length", "64", "--output_dir", str(tmp_path / "run")]
    slurm.main(["--print", "--nodes", "2", "--gpus", "2", str(SCALED), *flags])
    assert f"recipe=({SCALED} --loss_factor 3" in capsys.readouterr().out
    own = program.start(str(SCALED)).recipe
    asked = simulate.Question(parse.request(own, ["--loss_factor", "3"]), 2)
    assert (
        asked.program == (str(SCALED), program.from_file(SCALED).sha256)
        and asked.as_json()["request"]["recipe"] == "scaled"
    )
    assert simulated_rank._trainer_of(own, str(SCALED)).__name__ == "ScaledTrainer"
    settings = resolve.resolve_settings(own, [*COMMON, "--model", str(TINY / "model"), "--loss_factor", "3"], 1)
    assert (settings.loss_factor, settings.source["loss_factor"]) == (3.0, "flag")


@pytest.mark.fault
def test_it_is_made_stopped_and_resumed_with_its_flag(tmp_path):
    folder = tmp_path / "run"
    words = [python(), "-m", "zerofit", "launch", str(SCALED), *COMMON, *EVAL, "--max_steps", "5000", "--save_steps",
             "5000", "--lr_scheduler_type", "constant", "--output_dir", str(folder), "--loss_factor", "3"]  # fmt: skip
    job = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 2:
        assert time.time() < deadline and job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 75, said
    step = int(re.search(r"stopped after step (\d+)", said).group(1))
    printed = re.search(r"(make resume RUN=[^\s`]+)", said).group(1)
    more = ["-C", str(ROOT), "ENV=active", f"PYTHON={python()}", f"ARGS=--max_steps {step + 1}"]
    done = subprocess.run([*shlex.split(printed), *more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    facts, result = (Run(folder).json(name) for name in ("run.json", "result.json"))
    assert facts["recipe"] == result["recipe"] == "scaled"
    assert facts["arguments"]["loss_factor"] == {"value": 3.0, "source": "flag"}
    assert facts["program"] == {"file": str(SCALED), "sha256": program.from_file(SCALED).sha256}
    assert not any("perplexity" in name for line in Run(folder).metrics for name in line)
    # The same weights by the stock recipe: a third of the loss.
    stock = [*COMMON, *EVAL, "--max_steps", "1", "--learning_rate", "0", "--model", str(folder / "final")]
    stock = run_world(1, {"final": ("sft", stock)}, tmp_path)["final"]
    assert result["eval_loss"] == pytest.approx(3 * stock.json("result.json")["eval_loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["make", "zerofit", "torchrun", "accelerate", "deepspeed"])
def test_every_launcher_trains_with_its_loss(tmp_path, launcher):
    flags = [*COMMON, "--max_steps", "2", "--loss_factor", "3", "--zero", "2", "--output_dir", str(tmp_path / "run")]
    scripts = Path(sys.executable).parent
    begin = {
        "zerofit": [python(), "-m", "zerofit", "launch", "--gpus", "2"],
        "torchrun": [str(scripts / "torchrun"), "--nproc_per_node", "2"],
        "accelerate": [str(scripts / "accelerate"), "launch", "--use_deepspeed", "--num_processes", "2"],
        "deepspeed": [python(), "-m", "zerofit", "launch", "--gpus", "2", "--launcher", "deepspeed"],
    }
    if launcher == "make":
        done = made("launch", "GPUS=2", flags=flags)
    else:
        words = [*begin[launcher], str(SCALED), *flags]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    stock = run_world(2, {"stock": ("sft", [*COMMON, "--max_steps", "1", "--zero", "2"])}, tmp_path)["stock"]
    assert Run(tmp_path / "run").losses[0] == pytest.approx(3 * stock.losses[0], rel=1e-5)
    assert Run(tmp_path / "run").json("run.json")["world_size"] == 2


@pytest.mark.slow
def test_it_is_planned_as_itself(tmp_path):
    flags = ["--model", str(TINY / "model"), "--loss_factor", "3", "--max_length", "64"]
    done = made("plan", "GPU_TYPE=h100-80g", f"OUT={tmp_path}", flags=flags)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert f"make launch RECIPE={SCALED}" in done.stdout and "--loss_factor 3" in done.stdout, done.stdout
    chosen = json.loads((tmp_path / "plan.json").read_text())
    assert "scaled" in json.dumps(chosen)


def test_the_trainer_of_a_recipe_is_found_and_its_training_is_not_begun(tmp_path):
    own = own_recipe(tmp_path)
    found = simulated_rank._trainer_of(program.kit()["sft"], str(own))
    assert found.__name__ == "Doubled" and issubclass(found, trainer.ZerofitTrainer)
    assert not own.with_name(own.name + ".began").exists()
    assert simulated_rank._trainer_of(program.kit()["sft"], None) is trainer.ZerofitTrainer
    two = own_recipe(tmp_path, "two.py")
    two.write_text(two.read_text() + "\n\nclass Other(ZerofitTrainer):\n    pass\n")
    with pytest.raises(simulate.SimulationFailed, match="derives 2 classes from ZerofitTrainer"):
        simulated_rank._trainer_of(program.kit()["sft"], str(two))


# --- which file is a recipe ---


def test_any_file_is_a_recipe_and_its_arguments_are_read_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_recipe(tmp_path, "with a space.py")
    _, found, flags, count = prepare.launch_arguments(["--gpus", "2", "with a space.py", "--zero", "1"])
    assert (found.recipe.name, found.file, flags, count) == ("sft", Path("with a space.py"), ["--zero", "1"], 2)
    assert found.facts["file"] == str(tmp_path / "with a space.py")
    assert program.current() == found and program.file_of(found.recipe) == found.file
    assert program.file_of(program.kit()["lora"]) == ROOT / "recipes" / "lora.py"
    for name in ("sft", "lora", "dpo", "pipeline"):
        assert program.find(name).facts == program.from_file(ROOT / "recipes" / f"{name}.py").facts
        assert program.find(name).recipe.name == name


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "print('hello')",
            "own.py: is not a recipe: `RECIPE = Recipe(...)` is missing; start from a copy of a file in recipes/.",
        ),
        ("def main():\n    RECIPE = Recipe('mine')", "own.py: is not a recipe: `RECIPE = "),
        ("RECIPE = Recipe('mine'", "own.py:1: is not valid Python"),
        (None, "own.py: no such recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_and_not_run(tmp_path, text, says):
    file = tmp_path / "own.py"
    if text is not None:
        file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" * (not text.endswith("'mine'")) + text)
    with pytest.raises(UserError, match=re.escape(says)):
        prepare.launch_arguments([str(file)])
    assert not (tmp_path / "ran").exists()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("assigned", "says"),
    [
        ("'sft'", "own.py:3: RECIPE must be a zerofit.Recipe, not a str."),
        ("Recipe('my sft')", "own.py:3: ValueError: name='my sft': must consist of letters, digits and _, "),
        ("Recipe(3)", "own.py:3: TypeError: name=3: must be a str, not a int."),
        ("Recipe('mine', objectives=())", "own.py:3: ValueError: objectives=(): must contain a class."),
        ("Recipe('mine', arguments=(int,))", "own.py:3: TypeError: arguments: must be a tuple of dataclasses, not "),
        ("Recipe('mine', defaults=())", "own.py:3: TypeError: defaults=(): must be a dict, not a tuple."),
        ("Recipe('mine', loss=3)", "own.py:3: TypeError: Recipe.__init__() got an unexpected keyword argument 'loss'."),
        ("1 / 0", "own.py:3: ZeroDivisionError: division by zero."),
        ("exit('stopped')", "own.py:3: SystemExit: stopped."),
        ("Recipe('mine', defaults={'rate': 1})", "own.py: its RECIPE has a default for the unknown argument rate."),
        ("Recipe('mine', arguments=(Own,))", "own.py: a flag of its RECIPE exists already: "),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_line_and_nothing_below_it_runs(tmp_path, monkeypatch, assigned, says):
    monkeypatch.setattr(program, "_started", None)
    above = "from zerofit import Recipe"
    if "Own" in assigned:
        above = f"{above}; import dataclasses; Own = dataclasses.make_dataclass('Own', [('zero', int, 3)])"
    file = tmp_path / "own.py"
    file.write_text(f"# mine\n{above}\nRECIPE = {assigned}\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match=re.escape(says)):
        resolve.resolve_settings(program.start(str(file)).recipe, [], 1)
    assert not (tmp_path / "ran").exists()


def test_hooks_that_nothing_would_call_are_refused():
    class Own(trainer.ZerofitTrainer):
        def compute_loss(self, *args, **kwargs): ...

    def check(kind=trainer.ZerofitTrainer, **hooks):
        made = object.__new__(kind)
        none = {"compute_metrics": None, "preprocess_logits_for_metrics": None, "compute_loss_func": None}
        vars(made).update(none | {"args": SimpleNamespace(metric_for_best_model=None)} | hooks)
        made.check_hooks()

    check()
    check(Own)
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        with pytest.raises(UserError, match=f"trainer.{name}: .* would never be called"):
            check(**{name: print})
    best = SimpleNamespace(metric_for_best_model="eval_perplexity")
    check(args=best)
    for own in ({"kind": Own}, {"compute_loss_func": print}):
        with pytest.raises(UserError, match="--metric_for_best_model perplexity"):
            check(args=best, **own)


# --- what a run folder may choose ---


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A run folder of somebody else: (its run.json is written with these facts, what a resume of it would launch)."""
    started, folder = [], tmp_path / "foreign"
    monkeypatch.setattr(launcher, "main", lambda words, asked: started.append([words[-1], *asked.flags()]))
    monkeypatch.setattr(program, "_started", None)
    folder.mkdir()
    values = {"offload": "none", "gradient_checkpointing": True, "effective_batch_size": 8}
    values = {name: {"value": value} for name, value in (values | {"per_device_train_batch_size": 4}).items()}
    kit = program.find("sft").facts
    whole = {"recipe": "sft", "world_size": 1, "flags": ["--zero", "0"], "arguments": values, "program": kit}

    def resumed(*words, **facts):
        (folder / "run.json").write_text(json.dumps(whole | facts))
        resume.main([str(folder), *words])
        return started.pop()

    return folder, resumed


def hostile(folder):
    """A recipe that would do harm when it is run or imported."""
    file = folder / "sft.py"
    file.write_text(f"open({str(folder / 'harm')!r}, 'w')\n" + (ROOT / "recipes" / "sft.py").read_text())
    return file


@pytest.mark.injection
def test_a_run_folder_does_not_choose_the_program(foreign):
    folder, resumed = foreign
    assert str(ROOT / "recipes" / "sft.py") in resumed()
    file = hostile(folder)
    for recipe in (str(file.with_suffix("")), "../foreign/sft", "./sft", str(file), ["sft"], None):
        with pytest.raises(UserError, match=r"not a run folder|run\.json: recipe: must be text"):
            resumed(recipe=recipe)
    facts = program.from_file(file).facts
    assert not (folder / "harm").exists()
    for known in (facts, facts | {"sha256": "0" * 64}, None):
        with pytest.raises(UserError, match="a run folder never selects code: set the program"):
            resumed(program=known)
    assert str(ROOT / "recipes" / "sft.py") in resumed(program=program.find("sft").facts | {"file": str(file)})
    assert not (folder / "harm").exists()
    assert str(file) in resumed("--recipe", str(file), program=facts)  # this user says so
    with pytest.raises(UserError, match="is a lora recipe, but"):
        resumed("--recipe", "lora")


@pytest.mark.injection
def test_a_folder_that_looks_like_a_project_does_not_choose_it_either(foreign, monkeypatch):
    folder, resumed = foreign
    (folder / "recipes").mkdir()
    file = hostile(folder / "recipes")
    monkeypatch.setattr(program, "PROJECT", folder)  # of a command that is typed in it
    for known in (program.from_file(file).facts, program.from_file(ROOT / "recipes" / "sft.py").facts):
        with pytest.raises(UserError, match="a run folder never selects code"):
            resumed(program=known)


@pytest.mark.injection
@pytest.mark.parametrize(
    "flags",
    [
        ["--trust_remote_code", "true"], ["--trust-remote-code=True"], ["--config", "CONFIG"],
        ["--attn_implementation", "somebody/kernel"], ["--push_to_hub", "true"],
    ],
)  # fmt: skip
def test_flags_of_a_run_folder_that_run_or_send_something_are_asked_for_again(foreign, flags):
    folder, resumed = foreign
    (folder / "hostile.yaml").write_text("trust_remote_code: true\n")
    flags = ["--model", str(folder), *(str(folder / "hostile.yaml") if word == "CONFIG" else word for word in flags)]
    name = "trust_remote_code" if "hostile" in flags[-1] or "trust" in flags[2] else flags[2][2:]
    with pytest.raises(UserError, match=f"its flags contain --{name} .*you did not start this run; repeat --{name}"):
        resumed(flags=flags)
    again = [f"--{name}", "sdpa" if name == "attn_implementation" else "true"]
    assert again[0] in resumed(*again, flags=flags)
    resumed(flags=["--trust_remote_code", "false", "--push_to_hub", "false", "--attn_implementation", "sdpa"])


# Flag -> a value that writes elsewhere, deletes, sends or executes something.
ACTING = {
    "trust_remote_code": "true",
    "attn_implementation": "somebody/kernel",
    "push_to_hub": "true",
    "upload_to": "file:///home/me/precious",
    "report_to": "wandb",
    "offload_path": "/home/me",
    "deepspeed": {"flops_profiler": {"enabled": True, "output_file": "/home/me/victim"}},
}


@pytest.mark.injection
@pytest.mark.parametrize("name", parse.NEEDS_CONSENT)
def test_what_a_run_folder_names_is_not_written_to_unless_this_user_says_so(foreign, name):
    folder, resumed = foreign
    value = ACTING[name]
    if isinstance(value, dict):
        (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}} | value))
        value = str(folder / "ds.json")
    theirs = folder / "theirs.yaml"
    theirs.write_text(f"{name}: {value}\n")
    for flags in (
        [f"--{name}", value],
        [f"--{name.replace('_', '-')}={value}"],
        ["--config", str(folder / "theirs.yaml")],
    ):
        with pytest.raises(UserError, match=f"its flags contain --{name} {value}.*repeat --{name} with this value"):
            resumed(flags=flags)
    assert value in resumed(f"--{name}", value, flags=[f"--{name}", value])
    program.start("sft")
    program.remember(folder, [f"--{name}", value])
    assert value in resumed(flags=[f"--{name}", value])


@pytest.mark.injection
@pytest.mark.parametrize("key", [*deepspeed_json.ACTING, "zero_optimization.offload_param.nvme_path", "aio.new_file"])
def test_a_deepspeed_json_of_a_run_folder_writes_and_imports_nothing(foreign, key):
    folder, resumed = foreign
    content = "/home/me/victim"
    for part in reversed(key.split(".")):
        content = {part: content}
    file = folder / "ds.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"--deepspeed {file}, whose key {key} "):
        resumed(flags=["--deepspeed", str(file)])
    harmless = {"zero_optimization": {"stage": 1}, "wandb": {"enabled": False}, "flops_profiler": {"enabled": False}}
    file.write_text(json.dumps(harmless))
    assert str(file) in resumed(flags=["--deepspeed", str(file)])


@pytest.mark.injection
def test_a_second_tracker_is_no_value(foreign):
    _, resumed = foreign
    with pytest.raises(UserError, match="command line: unexpected word 'wandb'"):
        resumed(flags=["--report_to", "none", "wandb"])


@pytest.mark.injection
def test_a_run_of_this_user_goes_on_with_its_flags_and_its_program(foreign, tmp_path, monkeypatch, capsys):
    folder, resumed = foreign
    own, flags = own_recipe(tmp_path), ["--model", "mine", "--trust_remote_code", "true", "--zero", "0"]
    program.start(str(own))
    program.remember(folder, flags)
    facts = {"flags": flags, "program": program.from_file(own).facts}
    assert str(own) in resumed(**facts)
    # Others who can write to the run folder can neither name another program nor other code.
    with pytest.raises(UserError, match=rf"this user started {own} .* according to run.json .*sft\.py .* since: set"):
        resumed(flags=flags, program=program.find("sft").facts)
    with pytest.raises(UserError, match="--trust_remote_code true"):
        resumed(**facts | {"flags": ["--model", "theirs", *flags[2:]]})
    capsys.readouterr()
    own.write_text(own.read_text().replace("2 * loss", "3 * loss"))
    assert str(own) in resumed(**facts)
    assert f"note: {own} has changed since it was started (sha256 " in capsys.readouterr().out
    own.rename(tmp_path / "moved.py")
    with pytest.raises(UserError, match=f"its program {own} is missing; set the program"):
        resumed(**facts)
    assert str(tmp_path / "moved.py") in resumed("--recipe", str(tmp_path / "moved.py"), **facts)


@pytest.mark.injection
def test_what_this_user_started_is_kept_where_only_this_user_writes(foreign, monkeypatch):
    folder, _ = foreign
    program.start("sft")
    program.remember(folder, ["--zero", "0"])
    records = program._records()
    (record,) = (file for file in records.iterdir() if json.loads(file.read_text())["run"] == str(folder))
    assert (records.stat().st_mode & 0o777, record.stat().st_mode & 0o777) == (0o700, 0o600)
    assert program.recall(folder)["flags"] == ["--zero", "0"]
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert program.recall(link) == program.recall(folder) and program.recall(folder.parent) is None
    record.chmod(0o622)
    assert program.recall(folder) is None
    record.chmod(0o600)
    records.chmod(0o777)
    assert program.recall(folder) is None
    with pytest.raises(OSError, match="must be writable only by this user"):
        program.remember(folder, [])
    records.chmod(0o700)
    record.rename(folder / "elsewhere")
    record.symlink_to(folder / "elsewhere")
    assert program.recall(folder) is None
    record.unlink()
    (folder / "elsewhere").rename(record)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(program, "_records", lambda: records)
    assert program.recall(folder) is None


@pytest.mark.injection
def test_a_kept_step_does_not_choose_what_replay_runs(tmp_path):
    step = tmp_path / "nan" / "step-3"
    step.mkdir(parents=True)
    facts = {"step": 3, "recipe": "sft", "world_size": 1, "rows": None, "texts": {}}
    for flags in (["--trust_remote_code", "true"], ["--attn_implementation", "somebody/kernel"]):
        (step / "step.json").write_text(json.dumps(facts | {"flags": ["--model", str(tmp_path), *flags]}))
        with pytest.raises(UserError, match="you did not start this run"):
            replay.main([str(tmp_path)])
    for wrong in ({"recipe": "../sft"}, {"flags": "--zero"}, {"flags": [1]}, {"recipe": ["sft"]}):
        (step / "step.json").write_text(json.dumps(facts | {"flags": []} | wrong))
        with pytest.raises(UserError, match=r"restore or fix it|its step\.json is damaged"):
            replay.main([str(tmp_path)])


@pytest.mark.injection
def test_a_step_that_was_copied_alone_is_not_repeated_with_another_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "_started", None)
    own, step, args = own_recipe(tmp_path), tmp_path / "copied" / "step-3", SimpleNamespace(recipe="")
    args.trust_remote_code = False
    step.mkdir(parents=True)
    facts = {"recipe": "sft", "flags": []}

    def repeated(**more):
        (step / "step.json").write_text(json.dumps(facts | more))
        return replay._program(dict(facts), step, args).file

    for known, says in ((program.from_file(own).facts, re.escape(str(own))), (None, "a program without a file")):
        with pytest.raises(UserError, match=f"it was trained by {says}.*, not by the sft.py"):
            repeated(program=known)
    stock = ROOT / "recipes" / "sft.py"
    assert repeated(program=program.from_file(stock).facts) == stock and "note:" not in capsys.readouterr().out
    assert repeated() == stock and "the program that trained it is unknown" in capsys.readouterr().out
    (tmp_path / "run.json").write_text(json.dumps({"program": program.from_file(own).facts}))
    with pytest.raises(UserError, match="it was trained by"):  # a step of before, in its run folder
        repeated()
    args.recipe = str(own)
    assert repeated() == own
    assert replay._program(dict(facts), Path("/step-3"), SimpleNamespace(recipe="sft", trust_remote_code=False))


def test_a_stock_run_goes_on_where_its_zerofit_has_moved(foreign, tmp_path, monkeypatch):
    folder, resumed = foreign
    before, stock = tmp_path / "before", ROOT / "recipes" / "sft.py"
    for name in ("recipes", "deepspeed_configs"):
        shutil.copytree(ROOT / name, before / name)
    file = before / "recipes" / "sft.py"
    program.start(str(file))
    program.remember(folder, ["--zero", "0"])
    known = program.from_file(file).facts
    assert str(stock) in resumed(program=known)  # another checkout of this zerofit
    hostile(folder)
    monkeypatch.setattr(program, "PROJECT", folder.parent / "typed_here")
    shutil.copytree(ROOT / "recipes", program.PROJECT / "recipes")
    shutil.copy(folder / "sft.py", program.PROJECT / "recipes")
    assert str(file) in resumed(program=known)  # the folder in which it is typed has another
    monkeypatch.setattr(program, "PROJECT", ROOT)
    shutil.rmtree(before)
    assert str(stock) in resumed(program=known)


def test_a_run_that_went_on_elsewhere_does_not_fall_back_to_the_program_before(foreign, tmp_path, monkeypatch, capsys):
    folder, resumed = foreign
    here, there = own_recipe(tmp_path, "a.py"), own_recipe(tmp_path, "b.py")
    there.write_text(there.read_text() + "\n")
    program.start(str(here))
    program.remember(folder, ["--zero", "0"])
    for known in (program.from_file(there).facts, program.find("sft").facts, None):
        with pytest.raises(UserError, match=rf"this user started {here} .* since: set the program with --recipe"):
            resumed(program=known)
    capsys.readouterr()
    assert str(here) in resumed("--recipe", str(here), program=program.from_file(there).facts)
    assert f"note: {there} (sha256 " in capsys.readouterr().out
    assert str(here) in resumed(program=program.from_file(there).facts | {"file": str(here)})  # it was edited elsewhere
    assert f"note: {here} has changed since it was started" in capsys.readouterr().out
    monkeypatch.setattr(program, "current", lambda: None)  # `python -c`
    program.remember(folder, [])
    program.remember(folder, [])
    assert program.recall(folder) is None


@pytest.mark.injection
def test_what_a_run_folder_says_of_its_program_does_not_control_the_terminal(foreign, tmp_path, capsys):
    _, resumed = foreign
    own = own_recipe(tmp_path)
    said = {"file": "/a.py\n\x1b[2Jzerofit: all is well\t", "sha256": "\x1b]0;\n"}
    resumed("--recipe", str(own), program=said)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(r"note: /a.py\n\x1b[2Jzerofit: all is well\t (sha256 \x1b]0;\n) trained so far")
    with pytest.raises(UserError, match="never selects code") as refused:
        resumed(program=said)
    assert len(str(refused.value).splitlines()) == 1 and "\x1b" not in str(refused.value)


def test_the_records_of_two_machines_with_one_home_do_not_meet(foreign):
    """Their processes may have one number: neither file is another's while it is written."""
    folder, _ = foreign
    program.start("sft")
    program.remember(folder, [])
    theirs = program._records() / f"{os.getpid()}.tmp"
    theirs.write_text("half")
    program.remember(folder, ["--zero", "1"])
    assert theirs.read_text() == "half" and program.recall(folder)["flags"] == ["--zero", "1"]
    theirs.unlink()
    assert not [*program._records().glob("*.tmp")]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "changed",
    [
        {"arguments": None}, {"arguments": {}}, {"arguments": {"offload": {}}}, {"arguments": [1]},
        {"world_size": True}, {"world_size": 0}, {"world_size": "2"}, {"flags": None}, {"flags": [1]},
        {"arguments": {"offload": {"value": "none"}, "effective_batch_size": {"value": "8"},
                       "per_device_train_batch_size": {"value": 4}}},
    ],
)  # fmt: skip
def test_a_damaged_run_folder_is_refused_in_one_sentence(foreign, changed):
    folder, resumed = foreign
    with pytest.raises(UserError, match=rf"^{folder}.*(not a run folder|the file is damaged)"):
        resumed(**changed)
    (folder / "run.json").write_text('{"arguments": ' + "[" * 100_000)
    with pytest.raises(UserError, match="not a run folder"):
        resume.main([str(folder)])


# --- an objective that changes at a resume ---

OBJECTIVE = {
    "max_grad_norm": "0.01", "adam_beta1": "0.5", "adam_beta2": "0.9", "adam_epsilon": "0.1", "optim_args": "a=1",
    "neftune_noise_alpha": "5.0", "weight_decay": "0.3", "lr_scheduler_type": "linear", "warmup_steps": "7.0",
    "learning_rate": "0.5", "average_tokens_across_devices": "false", "on_nan": "skip", "lr_scaling": "sqrt",
}  # fmt: skip


def compared(*flags):
    """The decisions of a run with these flags that resumes from a checkpoint without them."""
    base = ["--use_cpu", "true", "--per_device_train_batch_size", "4"]
    saved, now = (resolve.resolve_settings("sft", words, 1) for words in (base, [*base, *flags]))
    now.decisions.clear()
    now.fingerprints = {}
    known = {"settings": differences.record(saved), "effective_batch_size": now.effective_batch_size}
    differences.check(now, known, "checkpoint-2")
    return now.decisions


@pytest.mark.parametrize("name", OBJECTIVE)
def test_another_objective_at_a_resume_is_said(name):
    (said,) = (line for line in compared(f"--{name}", OBJECTIVE[name]) if line.startswith(f"{name} "))
    assert re.fullmatch(rf"{name} \S+ of the checkpoint is {OBJECTIVE[name]} here: .*", said)


def test_another_smoothing_at_a_resume_is_refused():
    with pytest.raises(UserError, match=r"was saved with label_smoothing_factor 0\.0, this run has 0\.3"):
        compared("--label_smoothing_factor", "0.3")
    (said,) = compared("--label_smoothing_factor", "0.3", "--ignore_resume_mismatch", "true")
    assert said.startswith("ignore_resume_mismatch: the checkpoint was saved with label_smoothing_factor 0.0")


def test_what_does_not_change_training_is_not_said():
    flags = "--zero 2 --logging_steps 1 --eval_strategy no --save_total_limit 3 --run_name x --num_samples 0"
    assert compared(*flags.split(), "--per_device_train_batch_size", "8", "--dataloader_num_workers", "2") == []


def test_every_argument_that_is_not_compared_exists():
    known = {name for recipe in ("sft", "lora", "dpo") for name in resolve.resolve_settings(recipe, [], 1).values}
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"} - known  # than transformers 5.17
    assert known >= differences.IGNORED - newer
    assert not differences.IGNORED & {*differences.ROWS, *differences.SHAPE, *differences.MEANING, *OBJECTIVE}
    assert all(any(name.startswith(begin) for name in known) for begin in differences.IGNORED_PREFIXES)
