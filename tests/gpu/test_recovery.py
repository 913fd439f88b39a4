"""Test a full GPU, a killed rank, SIGTERM, the canary, and resuming at every other stage."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
from conftest import Run
from gpu_job import Job, launch_command, recipe_command, write_model, write_rows

from . import cases

pytestmark = pytest.mark.gpu
CONFIG = {  # 0.2B parameters: 3.2 GiB of weights, gradients and states, whatever the batch
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
FREE_MIB = 8 * 1024  # left by the filler, so that the same batch is too large for every GPU
FILLER = """
import sys, torch
torch.zeros(1, device="cuda")
free_mib = int(sys.stdin.readline())
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(1, free - free_mib * 2**20), dtype=torch.uint8, device="cuda")
print("filled", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def fill():
    """Return a function that has another process hold all of the GPU's memory but some MiB, until the test ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", FILLER], stdin=pipe, stdout=pipe, text=True)

    def leave(free_mib: int) -> None:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < (free_mib + 1024) * 2**20:
            pytest.skip(f"needs a GPU with more than {free_mib + 1024} MiB of free memory")
        process.stdin.write(f"{free_mib}\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == "filled"

    yield leave
    process.kill()
    process.communicate()


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a job with a cache of its own, so that it does not change the plans of others."""
    jobs = []

    def begin(words: list[str], **variables: str) -> Job:
        jobs.append(Job(words, tmp_path / "run", {"ZEROFIT_CACHE": str(tmp_path / "cache")} | variables))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def model_and_rows(folder, lengths: list[int]) -> str:
    """Write a model folder and rows of these lengths; return the flags that use them."""
    write_model(folder / "model", json.dumps(CONFIG))
    write_rows(folder / "rows.jsonl", lengths)
    return (
        f"--model {folder / 'model'} --random_init true --data {folder / 'rows.jsonl'} --max_length {max(lengths)} "
        "--logging_steps 1 --gradient_checkpointing false --num_samples 0 "
    )


def launch_words(folder, flags: str) -> list[str]:
    return launch_command("sft", [*shlex.split(flags), "--canary", "false"], folder / "run")


# --- a full GPU ---


@pytest.mark.fault
def test_out_of_memory_goes_on_with_half_the_batch(tmp_path, start, fill):
    flags = model_and_rows(tmp_path, [1024] * 60) + "--per_device_train_batch_size 16 --effective_batch_size 16 "
    fill(FREE_MIB)
    job = start(launch_words(tmp_path, flags + "--max_steps 3 --save_strategy no --ignore_plan true"))
    assert job.finish(240) == 0, job.output[-4000:]
    kinds = [attempt["kind"] for attempt in job.json("report.json")["attempts"]]
    assert kinds == ["out of memory"] * (len(kinds) - 1) + ["finished"] and len(kinds) > 1
    values = {name: entry["value"] for name, entry in job.json("run.json")["arguments"].items()}
    assert values["per_device_train_batch_size"] == 16 // 2 ** (len(kinds) - 1)
    assert values["effective_batch_size"] == 16
    assert "ran out of GPU memory" in job.output
    assert {file.name for file in job.folder.rglob("oom-rank0.*")} >= {"oom-rank0.txt", "oom-rank0.pickle"}


@pytest.mark.fault
def test_out_of_memory_goes_on_from_the_checkpoint(tmp_path, start, fill):
    """Take eight steps of short rows and three of rows that do not fit."""
    flags = (
        model_and_rows(tmp_path, [128] * 64 + [2048] * 24) + "--train_sampling_strategy sequential --ignore_plan true "
    )
    flags += "--per_device_train_batch_size 8 --effective_batch_size 8 --max_steps 11 "
    flags += "--save_strategy steps --save_steps 4"
    fill(FREE_MIB)
    job = start(launch_words(tmp_path, flags))
    assert job.finish(240) == 0, job.output[-4000:]
    assert job.json("report.json")["attempts"][0]["kind"] == "out of memory"
    assert "from checkpoint-8" in job.output
    assert [step["step"] for step in job.steps()] == list(range(1, 12))


@pytest.mark.fault
@pytest.mark.parametrize(("free_mib", "zero"), [(300, "0"), (600, "0"), (900, "2")])
def test_memory_that_another_process_holds_is_out_of_memory(free_mib, zero, tmp_path, start, fill):
    """Expect exit code 3 whichever library runs out first (CUDA, cuBLAS, cuDNN), or 0 where the rest is enough."""
    flags = shlex.split(f"{cases.TINY} --max_steps 2 --num_samples 0 --zero {zero}")
    fill(free_mib)
    job = start(recipe_command("sft", flags, tmp_path / "run"), ZEROFIT_PLAN="0")
    assert job.finish(90) in (0, 3), job.output[-4000:]


def test_probe_finds_the_largest_batch_that_fits(tmp_path, start):
    flags = model_and_rows(tmp_path, [1024] * 60) + "--effective_batch_size 64 --memory_limit 8"
    job = start([sys.executable, "-m", "zerofit", "batch-size", "--recipe", "sft", "--gpus", "1", "--args", flags])
    assert job.finish(240) == 0, job.output[-4000:]
    assert "does not fit" in job.output and "largest micro batch that fits: " in job.output


def test_launcher_leaves_no_context_on_the_gpu(tmp_path):
    """Let the launcher check a job, and compare the GPU's used memory before and after."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks/gpu'); from gpu_job import used_bytes\n"
        "from zerofit.config import resolve\nfrom zerofit.launch import prepare\nfrom zerofit.plan import preflight\n"
        "before = used_bytes()\n"
        "settings = resolve.resolve_settings('sft', sys.argv[1:], 1); prepare.prepare(settings); "
        "preflight.check(settings)\nprint('grown by', used_bytes() - before, 'of', before)"
    )
    job = Job(
        [sys.executable, "-c", code, *shlex.split(cases.TINY), "--output_dir", str(tmp_path / "run")],
        tmp_path / "child",
    )
    assert job.finish(120) == 0, job.output
    grown, before = map(int, re.search(r"^grown by (-?\d+) of (\d+)$", job.output, re.M).groups())
    assert before > 0 and grown < 50 * 2**20


# --- killed, stopped, tried beforehand ---


def kinds_of(outcome) -> list[str]:
    return [attempt["kind"] for attempt in Run(outcome.folder).json("report.json")["attempts"]]


@pytest.mark.fault
@pytest.mark.parametrize("case", [cases.KILLED], ids=lambda case: case.name)
def test_a_killed_rank_is_started_again(case, outcomes):
    outcome = outcomes[case.name]
    cases.check(case, outcome)
    assert kinds_of(outcome) == ["lost rank", "finished"]
    assert [step["step"] for step in outcome.steps] == list(range(1, 61))


@pytest.mark.fault
@pytest.mark.parametrize("case", [cases.STOPPED], ids=lambda case: case.name)
def test_sigterm_saves_and_ends(case, outcomes):
    outcome = outcomes[case.name]
    cases.check(case, outcome)
    (checkpoint,) = outcome.folder.glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{outcome.steps[-1]['step']}"


@pytest.mark.parametrize("case", [cases.CANARY], ids=lambda case: case.name)
def test_canary_passes_and_the_run_follows(case, outcomes):
    outcome = outcomes[case.name]
    cases.check(case, outcome)
    assert [step["step"] for step in outcome.steps] == list(range(1, 7))


# --- from every stage to every stage ---


@pytest.mark.parametrize("case", cases.RESUMED, ids=lambda case: case.name)
def test_resume_at_another_stage(case, outcomes):
    """Compare losses and learning rates of steps 7 to 12 with those of the run that was not interrupted."""
    before, after = outcomes[case.after], outcomes[case.name]
    cases.check(cases.ALL[case.after], before)
    cases.check(case, after)
    wanted = before.steps[cases.SAVED_STEP :]
    for name in ("step", "learning_rate"):
        assert [step[name] for step in after.steps] == [step[name] for step in wanted]
    assert after.losses == pytest.approx([step["loss"] for step in wanted], rel=0.03)
