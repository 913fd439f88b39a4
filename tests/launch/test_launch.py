"""The ways of use: make, accelerate launch, torchrun, deepspeed, python; what they refuse; what they leave behind."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, TINY, Run, python, recipe_process
from datasets import Dataset

from zerofit.base import command_line, distributed, log_filters
from zerofit.base.errors import UserError
from zerofit.checkpoint import resumable
from zerofit.config import resolve, show
from zerofit.data import dataset, tokens
from zerofit.data.batches import Share
from zerofit.data.tokens import TokenizedDataset
from zerofit.job import run_folder
from zerofit.launch import prepare
from zerofit.objective.causal_lm import CausalLM
from zerofit.train import progress

BIN = Path(sys.executable).parent
SHORT = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "24", "--effective_batch_size", "8",
    "--learning_rate", "1e-3", "--num_train_epochs", "1", "--logging_steps", "1", "--save_strategy", "no",
    "--num_samples", "0",
]  # fmt: skip
CACHED_CONFIGS = {
    "DEEPSPEED": """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 7, offload_optimizer_device: cpu, zero3_init_flag: true}
mixed_precision: fp16
num_machines: 1
num_processes: 2
machine_rank: 0
""",
    "FSDP": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: bf16
num_machines: 1
num_processes: 2
machine_rank: 0
""",
    "MULTI_GPU": """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp16
num_machines: 1
num_processes: 2
machine_rank: 0
gpu_ids: all
""",
}


def run(words, cwd=None, **env):
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(w) for w in words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=os.environ | {"PATH": path} | env,
    )


def make(*words, **env):
    return run(["make", "-C", ROOT, "ENV=active", f"PYTHON={python()}", *words], **env)


@pytest.mark.injection
@pytest.mark.parametrize("verb", ["show", "slurm", "plan", "batch-size", "data"])
@pytest.mark.parametrize("code", ["$(shell touch MARK)", "`touch MARK`", "sft;touch MARK;", "$$(touch MARK)"])
def test_a_recipe_name_is_no_code(tmp_path, verb, code):
    """It reaches the interpreter, a stub here, in one word."""
    python, mark = tmp_path / "bin" / "python", tmp_path / "ran"
    python.parent.mkdir()
    kit = f'case $* in -c*|*make_variables*) exec {sys.executable} "$@";; esac'
    python.write_text(f'#!/bin/sh\n{kit}\nprintf "<%s>" "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".zerofit-installed").touch()
    code = code.replace("MARK", str(mark))
    words = ["make", "-C", ROOT, f"ENV={tmp_path}", verb, f"RECIPE={code}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert not mark.exists() and done.returncode == 0, done.stdout + done.stderr
    assert f"<recipes/{code}.py>" in done.stdout or f"<--recipe={code}>" in done.stdout


@pytest.mark.fault
def test_output_that_nobody_reads_any_more_ends_no_run(tmp_path):
    """`make sft | head`, or a terminal that has closed: what is printed is in the log alone."""
    reading, writing = os.pipe()
    terminal = os.fdopen(writing, "w", buffering=1)
    os.close(reading)
    with (tmp_path / "log").open("w", buffering=1) as log:
        tee = run_folder._Tee(terminal, log)
        for _ in range(2):
            print("step 1  loss 2.0", file=tee, flush=True)
    terminal.close()  # what it had not written yet is no error either
    assert (tmp_path / "log").read_text() == 2 * "step 1  loss 2.0\n"


def test_text_without_utf_8_is_printed_escaped():
    """A file name in another encoding, or half of a surrogate pair in a JSON file from elsewhere."""
    code = "from zerofit.entrypoint import guard; guard(lambda: print('a\\udcffb'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "a\\udcffb\n"), done.stderr


def found_size(name):
    """Two where two were asked for, by flag or by the cached configuration."""
    return 2 if "2" in name or "-" in name else 1


@pytest.mark.slow  # each launcher also runs, shorter, as a command of the README
@pytest.mark.parametrize("kinds", [["DEEPSPEED"], ["FSDP", "MULTI_GPU"]])
def test_every_launcher_trains_the_same(tmp_path, kinds):
    recipe = ROOT / "recipes" / "lora.py"
    commands = {
        "python": [sys.executable, recipe],
        "accelerate": [BIN / "accelerate", "launch", recipe],
        "accelerate2": [BIN / "accelerate", "launch", "--use_deepspeed", "--num_processes", "2", recipe],
        "torchrun2": [BIN / "torchrun", "--nproc_per_node", "2", recipe],
        "deepspeed2": [BIN / "deepspeed", "--num_gpus", "2", recipe],
        **{f"accelerate-{kind}": [BIN / "accelerate", "launch", recipe] for kind in kinds},
    }
    curves = {}
    for name, command in commands.items():
        home = tmp_path / f"home-{name}"
        (home / "accelerate").mkdir(parents=True)
        if name.startswith("accelerate-"):
            (home / "accelerate" / "default_config.yaml").write_text(CACHED_CONFIGS[name.split("-")[1]])
        done = run([*command, *SHORT, "--zero", "2", "--output_dir", tmp_path / name], HF_HOME=str(home))
        assert done.returncode == 0, name + done.stdout + done.stderr
        found = Run(tmp_path / name)
        assert found.json("result.json")["world_size"] == found_size(name)
        curves[name] = found.losses
        if name == "accelerate-DEEPSPEED":
            assert "of accelerate is not used: it sets" in done.stdout
    for name, losses in curves.items():
        assert losses == pytest.approx(curves["python"], rel=1e-4), name
        if found_size(name) == 2:
            assert losses == curves["torchrun2"], name


def test_make_and_the_run_folder(tmp_path):
    out = tmp_path / "my run; 'quoted'"
    done = make(
        "sft", "GPUS=2", "ZERO=3", "OFFLOAD=optimizer", f"OUT={out}", f"ARGS={shlex.join(SHORT)} --eval_fraction 0.2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = Run(out)
    facts, result = found.json("run.json"), found.json("result.json")
    assert facts["arguments"]["zero"] == {"value": "3", "source": "flag"}
    assert facts["arguments"]["gradient_accumulation_steps"]["source"] == "decided"
    assert set(facts["versions"]) >= {"torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "python"}
    assert "zerofit.launch.torchrun" in facts["command"] and facts["world_size"] == 2
    assert facts["data"]["training"]["fingerprint"] and facts["decisions"]
    resolved = found.json("deepspeed.json")
    assert "auto" not in json.dumps(resolved)
    assert resolved["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    steps = [m for m in found.metrics if "loss" in m]
    wanted = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_bytes", "epoch"}
    assert wanted <= set(steps[0]) and [m["step"] for m in steps] == list(range(1, len(steps) + 1))
    assert result["status"] == "finished" and result["steps"] == len(steps) and result["eval_loss"] > 0
    assert {"train_loss", "tokens_per_second", "peak_memory_bytes", "world_size"} <= set(result)
    assert (out / "logs" / "rank0.log").read_text() and (out / "logs" / "rank1.log").exists()
    saved = {file.name for file in (out / "final").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= saved
    assert not (out / "final" / "training_args.bin").exists()


def test_show_prints_everything_and_starts_nothing(tmp_path):
    words = [
        "lora",
        "GPUS=2",
        "ZERO=2",
        f"OUT={tmp_path / 'never'}",
        "MODEL=no/such; touch pwned",
        "DATA=$(touch pwned)",
    ]
    done = make("show", *words, "ARGS=--hub_token secret123 --lora_r 4")
    assert done.returncode == 0, done.stderr
    assert "--nproc_per_node 2" in done.stdout and "OMP_NUM_THREADS=1" in done.stdout
    assert "lora_r" in done.stdout and "effective batch 32" in done.stdout
    assert "secret123" not in done.stdout
    assert "no/such; touch pwned" in done.stdout and "$(touch pwned)" in done.stdout
    assert not (tmp_path / "never").exists() and not list(ROOT.glob("**/pwned"))


def test_help_lists_every_verb_and_flag():
    verbs = make().stdout
    for verb in ("sft", "lora", "show", "install", "lint", "test", "test-all"):
        assert f"make {verb} " in verbs
    flags = make("lora", "ARGS=--help").stdout
    for flag in ("--zero", "--lora_r", "--effective_batch_size", "--learning_rate", "--packing"):
        assert flag in flags


def test_commands_place_processes_and_nothing_else():
    for launcher in prepare.LAUNCHERS:
        words = prepare.command(launcher, 4, 1234, Path("recipes/sft.py"), ["--model", "a 'b' ; c"])
        assert words[-3:] == ["recipes/sft.py", "--model", "a 'b' ; c"] and "4" in words and "1234" in words
        placement = " ".join(words[: words.index("recipes/sft.py")])
        assert "zero_stage" not in placement and "json" not in placement and "bf16" not in placement
    assert prepare.command("torchrun", 1, 1, Path("r.py"), [])[1:] == ["r.py"]


def test_secrets_are_hidden():
    assert (
        command_line.hide_secrets(["a", "--hub_token", "x", "--hub-token=y"])
        == "a --hub_token '<hidden>' '--hub-token=<hidden>'"
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["GPUS=0"], "GPUS=0: must be a positive integer"),
        (["GPUS=many"], "GPUS=many"),
        (["ARGS=--zero '3"], "no closing quotation"),
        (["MODEL=/no/such", f"DATA={TINY / 'train.jsonl'}"], "no such model folder"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # six seconds each
            for case in (
                (["GPUS=500"], "GPUS=500: this machine has only"),
                (["PORT=99999"], "PORT=99999: must be a number"),
                (["LAUNCHER=mpi"], "LAUNCHER=mpi: must be one of"),
                (["ZERO=2", "OFFLOAD=all"], "use --zero 3"),
                (["DATA=/no/such.jsonl"], "no such file or folder"),
                (["ARGS=--attn_implementation nonsense"], "nonsense"),
            )
        ),
    ],
)
def test_make_refuses_with_one_sentence_and_no_folder(tmp_path, words, says):
    done = make("sft", f"OUT={tmp_path / 'run'}", *words)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and len(errors) == 1 and says in errors[0], done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.bad_input
def test_taken_port_is_named(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not distributed.port_is_free(port)
        done = make("sft", f"PORT={port}", f"OUT={tmp_path / 'run'}")
        assert f"PORT={port} is in use" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.bad_input
@pytest.mark.slow
def test_taken_port_of_a_launcher_is_named(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = recipe_process("sft", "--zero", "1", "--output_dir", str(tmp_path / "run"), MASTER_PORT=str(port))
        assert done.returncode == 2 and f"MASTER_PORT={port} is in use" in done.stderr


@pytest.mark.bad_input
def test_threads_that_accelerate_cannot_read_are_named(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2,1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="OMP_NUM_THREADS=2,1: accelerate reads a single integer"):
        distributed.start(SimpleNamespace(deepspeed=None, use_cpu=True))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("recipe", "flags", "says"),
    [
        ("sft", ["--model", "tiny", "--data", "bad.jsonl"], "bad.jsonl:2: column 'answer'"),
        ("sft", ["--load_best_model_at_end", "--save_strategy", "steps"], "transformers rejects"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # seven seconds each
            for case in (
                ("lora", ["--lora_target_modules", "nonsense"], "nonsense"),
                ("sft", ["--gpus", "2"], "this job has 1"),
            )
        ),
    ],
)
def test_recipe_refuses_without_traceback_and_folder(tmp_path, recipe, flags, says):
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": "a"}\n')
    done = recipe_process(recipe, *flags, "--output_dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.bad_input
def test_accelerate_starting_fewer_processes_than_asked_is_refused(tmp_path):
    command = [BIN / "accelerate", "launch", "--cpu", "--num_processes", "2", ROOT / "recipes" / "sft.py"]
    done = run([*command, "--output_dir", tmp_path / "run"])
    assert done.returncode != 0 and "--num_processes 2 started 1 " in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.bad_input
@pytest.mark.slow
def test_a_finished_run_is_not_overwritten(tmp_path):
    flags = [*SHORT, "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    assert recipe_process("sft", *flags).returncode == 0
    before = (tmp_path / "run" / "result.json").read_bytes()
    done = recipe_process("sft", *flags)
    assert done.returncode == 2 and "already holds a run" in done.stderr
    assert (tmp_path / "run" / "result.json").read_bytes() == before


@pytest.mark.fault
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--learning_rate", "1e30", "--max_grad_norm", "0"], 4, "the weights are unusable"),
        pytest.param(["--load_best_model_at_end", "--save_strategy", "steps"], 2, "evaluation rows are missing",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_two_ranks_keep_the_exit_code_and_show_no_traceback(tmp_path, flags, code, says):
    done = make("sft", "GPUS=2", f"OUT={tmp_path / 'run'}", f"ARGS={shlex.join([*SHORT, *flags])}")
    assert says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert f"Error {code}" in done.stderr  # make's own word for the exit code


def test_a_machine_without_git_trains(tmp_path):
    flags = [*SHORT, "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    assert recipe_process("sft", *flags, PATH=str(BIN)).returncode == 0
    facts = Run(tmp_path / "run").json("run.json")
    assert facts["git_commit"] is None
    assert sum("OMP_WAIT_POLICY passive: " in sentence for sentence in facts["decisions"]) == 1


@pytest.mark.slow
def test_modules_to_save_train_in_fp32_at_stage_0(tmp_path):
    from safetensors.torch import load_file

    flags = [*SHORT, "--max_steps", "2", "--bf16", "true", "--modules_to_save", "lm_head", "--use_dora", "true"]
    done = recipe_process("lora", *flags, "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    saved = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert {str(t.dtype) for t in saved.values()} == {"torch.float32"}
    assert any("lm_head" in name for name in saved) and any("magnitude" in name for name in saved)


@pytest.mark.fault
@pytest.mark.parametrize("zero", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_divergence_stops_with_its_own_code(tmp_path, zero):
    flags = [*SHORT, "--learning_rate", "1e30", "--max_grad_norm", "0", "--output_dir", str(tmp_path / "run")]
    done = recipe_process("sft", *flags, "--zero", zero)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "the weights are unusable" in done.stderr and "Traceback" not in done.stderr
    assert Run(tmp_path / "run").json("result.json")["status"] == "failed"


def test_the_mean_row_of_a_plan_does_not_depend_on_weights():
    rows = Dataset.from_dict({"input_ids": [[1] * 10] * 4, "labels": [[1] * 10] * 4})
    weighted = TokenizedDataset(rows, {"tokens": 40, "kept": 4}, "", weights=[Share(3.0)] * 4)
    train_set = dataset.repeat_by_weight(weighted)
    assert tokens.row_tokens(SimpleNamespace(packing=False, objective=CausalLM), train_set) == 10
    packed = SimpleNamespace(max_steps=-1, packing=True, max_length=20, num_train_epochs=1, effective_batch_size=2)
    assert tokens.number_of_steps(packed, train_set) == 3  # 12 rows in 6 packs


@pytest.mark.parametrize(
    ("rows", "flags", "says"),
    [
        (
            108,
            [],
            "few optimizer steps: 11 for 3 epochs .* of 32; --effective_batch_size 4 .* 88",
        ),
        (6, [], "few optimizer steps: 1 .*; --effective_batch_size 2 .* 16"),
        (108, ["--effective_batch_size", "32"], ""),  # chosen by the user
        (108, ["--max_steps", "5"], ""),
        (400, [], ""),
    ],
)
def test_a_small_file_of_the_users_own_is_told_of_its_few_steps(rows, flags, says):
    words = ["--data", str(TINY / "train.jsonl"), "--num_train_epochs", "3", *flags]
    settings = resolve.resolve_settings("lora", words, 2)
    train_set = TokenizedDataset([{}] * rows, {"tokens": rows, "kept": rows}, "")
    found = tokens.few_steps(settings, train_set)
    assert bool(found) == bool(says) and all(re.fullmatch(says, sentence) for sentence in found), found


@pytest.mark.slow
def test_resume_continues_where_the_run_stopped(tmp_path):
    flags = [*SHORT, "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "9", "--zero", "2"]
    assert recipe_process("sft", *flags, "--output_dir", str(tmp_path / "whole")).returncode == 0
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    done = recipe_process(
        "sft", *flags, "--output_dir", str(tmp_path / "rest"), "--resume_from_checkpoint", str(checkpoint)
    )
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "rest").losses == Run(tmp_path / "whole").losses[2:]
    result = Run(tmp_path / "whole").json("result.json")
    assert result["train_loss"] == pytest.approx(sum(Run(tmp_path / "whole").losses) / 3)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("value", "says"),
    [("true", "does not hold a complete checkpoint"), ("..", "cannot be resumed: trainer_state.json is missing")],
)
def test_there_is_nothing_to_resume(tmp_path, value, says):
    flags = [*SHORT, "--output_dir", str(tmp_path / "new"), "--resume_from_checkpoint", value]
    with pytest.raises(UserError, match=says):
        resumable.choose_folder(resolve.resolve_settings("sft", flags, 1))
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_two_ranks_resume_the_newest_checkpoint_of_their_folder(tmp_path):
    flags = [*SHORT, "--save_strategy", "steps", "--save_steps", "1", "--zero", "2"]
    torchrun = [
        BIN / "torchrun",
        "--nproc_per_node",
        "2",
        ROOT / "recipes" / "lora.py",
        "--output_dir",
        tmp_path / "run",
    ]
    assert run([*torchrun, *flags, "--max_steps", "2"]).returncode == 0
    done = run([*torchrun, *flags, "--resume_from_checkpoint", "true"])
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in Run(tmp_path / "run").metrics] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.fault
def test_interrupt_leaves_no_process_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "my run"
    words = [
        "-m",
        "zerofit",
        "launch",
        "--gpus",
        "2",
        "recipes/sft.py",
        "--data",
        str(TINY / "train.jsonl"),
        "--max_samples",
        "64",
        "--effective_batch_size",
        "8",
        "--num_samples",
        "0",
        "--num_train_epochs",
        "5000",
        "--save_strategy",
        "steps",
        "--save_steps",
        "1",
        "--logging_steps",
        "1",
        "--output_dir",
        str(out),
    ]
    job = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.time() + 120
    while not (out / "checkpoint-2").exists() and not (out / "checkpoint-3").exists():
        assert time.time() < deadline and job.poll() is None
        time.sleep(0.2)
    ranks = psutil.Process(job.pid).children(recursive=True)
    assert len(ranks) >= 3
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    lines = [line for line in err.splitlines() if "it/s" not in line and line.strip()]
    assert re.fullmatch(
        r"zerofit: interrupted at step \d+; saved up to step \d+\. Continue: make resume RUN='.*/my run'", lines[-1]
    )
    assert "death signal" not in err and "Traceback" not in err and err.count("interrupted") == 1, err
    assert Run(out).json("result.json")["status"] == "interrupted"
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive


@pytest.mark.parametrize(
    ("out", "err", "flags", "wanted"),
    [
        (True, True, (), True),
        (False, True, (), True),
        (False, True, ("--disable_tqdm", "true"), False),
        (True, False, (), False),
    ],
)
def test_a_progress_line_is_drawn_on_a_terminal(monkeypatch, out, err, flags, wanted):
    settings = resolve.resolve_settings("sft", list(flags), 1)
    monkeypatch.setattr(progress.sys, "stdout", SimpleNamespace(isatty=lambda: out, write=len, flush=lambda: None))
    monkeypatch.setattr(progress.sys, "stderr", SimpleNamespace(isatty=lambda: err, write=len, flush=lambda: None))
    assert progress.wants_bar(settings) is wanted


def test_bars_of_transformers_are_off_on_a_terminal_too(monkeypatch):
    from transformers.utils import logging as transformers_logging

    transformers_logging.enable_progress_bar()
    monkeypatch.setattr(log_filters.sys, "stderr", SimpleNamespace(isatty=lambda: True, write=len, flush=lambda: None))
    log_filters.libraries()
    assert not transformers_logging.is_progress_bar_enabled()


def test_how_threads_wait_is_the_users_to_say(monkeypatch):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert prepare.environment(1)["OMP_WAIT_POLICY"] == "passive"
    assert prepare.environment(1)["GOMP_SPINCOUNT"] == "1000"
    for name in names:
        with monkeypatch.context() as context:
            context.setenv(name, "active")
            assert "OMP_WAIT_POLICY" not in prepare.environment(1)


def test_files_are_readable_by_whom_the_umask_says(tmp_path):
    """safetensors makes its files for their owner alone."""
    import torch
    from safetensors.torch import save_file

    (tmp_path / "final").mkdir()
    before = os.umask(0o027)
    try:
        save_file({"x": torch.zeros(1)}, tmp_path / "final" / "model.safetensors")
        (tmp_path / "final" / "config.json").touch()
        run_folder.apply_umask(tmp_path / "final")
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in (tmp_path / "final").iterdir()} == {"0o640"}


def test_the_arguments_are_shown_by_group(tmp_path):
    missing = tmp_path / "none.jsonl"
    text = show.summary(
        resolve.resolve_settings("lora", ["--model", "org/model", "--data", str(missing), "--lora_r", "4"], 1)
    )
    lines = text.splitlines()
    headings = [line.strip() for line in lines if line.startswith(" ") and not line.startswith("  ")]
    assert headings == ["run", "supervision", "model", "data", "memory", "optimizer", "lora", "transformers"]
    assert re.search(r"^  warmup_steps +0\.03 of all steps +default$", text, re.M)
    assert re.search(r"^  effective_batch_size +32 +default$", text, re.M)
    assert f"  note: --data {missing}: no such file or folder." in lines
    assert not any("note: " in line for line in show.summary(resolve.resolve_settings("sft", [], 1)).splitlines())


@pytest.mark.bad_input
def test_a_folder_that_takes_no_file_is_refused():
    with pytest.raises(UserError, match=r"--output_dir /proc/x: /proc cannot be written to: "):
        resumable.choose_folder(resolve.resolve_settings("sft", ["--output_dir", "/proc/x"], 1))
