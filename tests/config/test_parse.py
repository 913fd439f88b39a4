"""Arguments: precedence, batch arithmetic, and one sentence for every mistake."""

import json
import os
import re
import subprocess
import sys
import typing
from dataclasses import fields

import pytest
from conftest import ROOT, TINY
from transformers import TrainingArguments

from zerofit.base.errors import UserError
from zerofit.checkpoint import save
from zerofit.config import arguments, help, resolve, synonyms, transformers_flags
from zerofit.config.offload import STAGE_3_DEFAULTS
from zerofit.entrypoint import check_early
from zerofit.job import batch_size, parallel_dims, program

DATA = str(TINY / "train.jsonl")


def parse(*flags, recipe="sft", ranks=1):
    return resolve.resolve_settings(recipe, list(flags), ranks)


def test_the_kits_own_flags_are_frozen():
    """A flag that vanishes or is renamed breaks somebody's script: change this list on purpose only."""
    frozen = {
        "RunArguments": """
            config zero offload offload_path effective_batch_size sp_size tp_size pp_size preset search_batch_size
            memory_limit plan ignore_plan gpu_type gpus show gradient_checkpointing_every gradient_checkpointing_policy
            activation_offload memory_report certificate save_every_minutes
            save_in_background save_model_in_checkpoints node_local_storage upload_to
            ignore_resume_mismatch early_stopping_patience early_stopping_threshold
            on_nan max_nan_steps max_tokens_per_sample eval_generation_rows num_samples
        """,
        "SupervisionArguments": """
            on_oom canary max_restarts hang_timeout verbose
        """,
        "ModelArguments": """
            model model_revision dtype attn_implementation experts_implementation towers trust_remote_code
            random_init new_tokens
        """,
        "DataArguments": """
            data eval_data eval_fraction data_format columns data_config data_split chat_template
            chat_template_kwargs train_on mask_generation_prompt max_length truncation bad_rows max_samples
            streaming shuffle_buffer_size shuffle_seed preprocessing_num_workers packing padding_free
            min_supervised_fraction max_truncated_fraction max_duplicate_fraction max_eval_overlap_fraction
        """,
        "MemoryArguments": """
            fused_loss tiled_mlp compile_layers whole_layers fp8
        """,
        "OptimizerArguments": """
            pure_bf16 freeze train_only embedding_learning_rate head_learning_rate lr_scaling
            lr_scaling_base_batch_size
        """,
        "PreferenceArguments": """
            beta loss_type label_smoothing rpo_alpha simpo_gamma desirable_weight undesirable_weight
            precompute_ref_log_probs
        """,
        "LoraArguments": """
            adapter initial_adapter adapter_config load_in_4bit load_in_8bit lora_r lora_alpha lora_dropout
            lora_target_modules lora_target_parameters use_dora use_rslora init_lora_weights fused_lora
            loraplus_lr_ratio num_virtual_tokens modules_to_save
        """,
    }
    groups = [group for recipe in program.kit() for group in arguments.kit_groups(recipe)]
    found = {group.__name__: [f.name for f in fields(group)] for group in groups}
    assert found == {name: words.split() for name, words in frozen.items()}


def test_every_flag_has_a_help_text():
    for group in arguments.kit_groups("dpo"):
        for field in fields(group):
            assert len(field.metadata.get("help", "")) > 10, field.name


def test_precedence_default_bundled_yaml_flag(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 3.0e-4\nmax_length: 64\nlora_target_modules: [q_proj, v_proj]\n")
    plain = parse("--data", DATA)
    assert (plain.learning_rate, plain.source["learning_rate"]) == (2e-5, "default")
    bundled = parse()
    assert (bundled.learning_rate, bundled.source["learning_rate"]) == (5e-4, "bundled task")
    assert bundled.bundled and not plain.bundled
    yaml = parse("--config", str(file), recipe="lora")
    assert (yaml.learning_rate, yaml.source["learning_rate"]) == (3e-4, str(file))
    assert yaml.lora_target_modules == ["q_proj", "v_proj"]
    flag = parse("--config", str(file), "--learning_rate", "1e-3", recipe="lora")
    assert (flag.learning_rate, flag.source["learning_rate"], flag.max_length) == (1e-3, "flag", 64)


def test_yaml_booleans_and_nulls_mean_what_flags_mean(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("save_strategy: no\neval-strategy: off\ninit_lora_weights: true\nbf16: no\nrun_name: null\n1:\n")
    found = parse("--config", str(file), recipe="lora")
    assert (found.save_strategy, found.eval_strategy, found.init_lora_weights) == ("no", "no", "true")
    assert found.bf16 is False and found.run_name is None


@pytest.mark.parametrize(("ranks", "solved"), [(1, (32, 16, 2)), (2, (32, 16, 1)), (8, (32, 4, 1))])
def test_a_preset_keeps_the_effective_batch(ranks, solved):
    found = parse("--data", DATA, "--preset", "gpu-141g", ranks=ranks)
    names = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    assert tuple(found.values[name] for name in names) == solved
    assert found.source[names[1]] == "preset gpu-141g"
    assert parse("--data", DATA, "--preset", "gpu-141g", f"--{names[2]}", "2", ranks=8).effective_batch_size == 256


def test_flags_beside_a_preset_win():
    found = parse("--preset", "gpu-24g", "--gradient_checkpointing", "false")
    assert found.gradient_checkpointing is False and found.gradient_checkpointing_every == 1
    assert found.optim == "adamw_8bit"


def test_transformers_flags_work_unchanged():
    found = parse(
        "--weight_decay", "0.1", "--seed", "7", "--no_logging_nan_inf_filter", "--lr-scheduler-type", "linear"
    )
    assert (found.weight_decay, found.seed, found.logging_nan_inf_filter) == (0.1, 7, False)
    assert found.lr_scheduler_type == "linear"


@pytest.mark.parametrize(("ranks", "expected"), [(1, (0, "none")), (2, (2, "none")), (4, (2, "none"))])
def test_zero_auto(ranks, expected):
    found = parse(ranks=ranks)
    assert (found.zero, found.offload) == expected
    assert found.source["zero"] == "decided" and any(d.startswith("zero ") for d in found.decisions)


def test_a_number_of_steps_is_the_strategy():
    given = resolve.resolve_settings("sft", ["--save_steps", "5", "--eval_steps", "2"], 1)
    assert (given.save_strategy, given.eval_strategy) == ("steps", "steps")
    assert "save_strategy steps: --save_steps is set" in given.decisions
    named = resolve.resolve_settings("sft", ["--save_steps", "5", "--save_strategy", "no"], 1)
    assert (named.save_strategy, named.eval_strategy) == ("no", "epoch")


def test_cpu_trains_in_fp32_unless_told(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert parse().precision == "fp32"
    assert parse("--bf16", "true").precision == "bf16"


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp16")])
def test_gpu_precision_follows_the_hardware_and_says_so(monkeypatch, has_bf16, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *a: "Test GPU")
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **k: has_bf16)
    found = parse("--zero", "2")
    assert found.precision == expected
    assert any("Test GPU" in d for d in found.decisions)


@pytest.mark.parametrize(
    ("effective", "micro", "accumulation", "ranks", "solved"),
    [
        (None, None, None, 1, (32, 8, 4)),
        (None, None, None, 3, (33, 1, 11)),
        (64, None, None, 4, (64, 8, 2)),
        (64, 4, None, 2, (64, 4, 8)),
        (64, None, 4, 2, (64, 8, 4)),
        (None, 4, 2, 2, (16, 4, 2)),
        (None, 3, None, 2, (30, 3, 5)),
        (6, None, None, 1, (6, 6, 1)),
        (16, 4, 2, 2, (16, 4, 2)),
    ],
)
def test_batch(effective, micro, accumulation, ranks, solved):
    assert batch_size.solve(effective, micro, accumulation, ranks) == solved
    assert solved[0] == solved[1] * solved[2] * ranks


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((33, 4, None, 1), "the nearest multiples are 32 and 36"),
        ((2, None, None, 4), "the nearest multiple is 4"),
        ((16, 4, 4, 2), "use --effective_batch_size 32"),
        ((0, None, None, 1), "must be 1 or more"),
    ],
)
def test_batch_refusals(numbers, says):
    with pytest.raises(UserError, match=says):
        batch_size.solve(*numbers)


def test_the_bundled_task_runs_on_any_number_of_processes():
    for ranks in range(1, 9):
        assert parse(ranks=ranks).effective_batch_size % ranks == 0


def test_changing_gpus_keeps_the_effective_batch():
    assert {parse(ranks=n).effective_batch_size for n in (1, 2, 4, 8)} == {32}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lerning_rate", "1"], "unknown flag --lerning_rate; did you mean --learning_rate"),
        (["--eval_tasks", "gsm8k"], "did you mean `zerofit eval RUN/checkpoint-N --tasks ...` during the run"),
        (["--warmup_ratio", "0.1"], "--warmup_steps"),
        (["--model_name_or_path", "x"], "did you mean --model"),
        (["--lora_r", "4"], "recipes/lora.py"),
        (["stray"], "unexpected word 'stray'"),
        (["--zero", "4"], "^--zero 4: must be one of auto, 0, 1, 2, 3.$"),
        (["--offload", "nvme"], "one of none, optimizer, all; did you mean --offload optimizer with"),
        (["--zero", "zero3"], r"--zero zero3: must be one of .*; did you mean --zero 3\?"),
        (["--zero", "stage-2"], r"did you mean --zero 2\?"),
        (["--offload", "cpu"], r"did you mean --offload optimizer\?"),
        (["--deepspeed", "zero3"], r"--deepspeed zero3: file not found; did you mean --zero 3\?"),
        (["--deepspeed", "/no/ds_z2_config.json"], r"did you mean --zero 2\?"),
        (["--deepspeed", "my.json"], "--deepspeed my.json: cannot be read"),
        (["--force", "true"], "did you mean --ignore_plan"),
        (["--gpu", "h100-80g"], "did you mean --gpu_type"),
        (["--zenflow", "true"], "did you mean --offload optimizer .*computes wrong results"),
        (["--batch_size", "4"], "did you mean --per_device_train_batch_size"),
        (["--micro_batch_size", "4"], "did you mean --per_device_train_batch_size"),
        (["--num_epochs", "4"], "did you mean --num_train_epochs"),
        (["--stage", "sft"], "did you mean recipes/sft.py or recipes/dpo.py"),
        (["--use_ray", "true"], "did you mean launchers/ray"),
        (["--no_eval", "true"], "did you mean --eval_strategy no"),
        (["--rdzv_backend", "static"], "unknown flag --rdzv_backend; --help all lists every flag"),
        (["--training", "x"], "unknown flag --training; --help all lists every flag"),
        (["--finetuning_type", "lora"], "did you mean recipes/lora.py"),
        (["--lora_target", "all"], r"did you mean recipes/lora.py \(make lora\) with --lora_target_modules\?"),
        (["--base_model", "x"], "did you mean --model"),
        (["--sequence_len", "8"], "did you mean --max_length"),
        (["--sample_packing", "true"], "did you mean --packing"),
        (["--learning_rate", "fast"], "^--learning_rate fast: must be a number.$"),
        (["--max_length", "long"], "^--max_length long: must be an integer.$"),
        (["--learning_rate", "-1"], "--learning_rate is -1.0: it must be 0 or more"),
        (["--bf16", "maybe"], "^--bf16 maybe: must be true or false.$"),
        (["--zero", "2", "--offload"], "^--offload: its value is missing.$"),
        (["--zero", "2", "--offload", "all"], "--offload all with ZeRO stage 2: .*use --zero 3"),
        (["--zero", "1", "--offload", "all"], "--offload all with ZeRO stage 1: .*use --zero 3"),
        (["--zero", "0", "--offload", "optimizer"], "stage 0 is plain DDP"),
        (["--gpus", "2"], "--gpus 2: this job has 1 process"),
        (["--max_length", "4"], "must be 8 or more"),
        (["--eval_fraction", "1.5"], "below 1"),
        (["--max_truncated_fraction", "1.5"], "must be from 0 to 1"),
        (["--min_supervised_fraction", "-0.1"], "must be from 0 to 1"),
        (["--bf16", "true", "--fp16", "true"], "choose one"),
        (["--model", "some/model"], "--data is missing"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_refusals(flags, says):
    with pytest.raises(UserError, match=says) as caught:
        parse(*flags)
    assert "\n" not in str(caught.value)


def _numbers(group) -> set[str]:
    """Return the arguments of a group whose values are numbers, by their annotations."""
    hints = typing.get_type_hints(group)
    kinds = {field.name: {hints[field.name], *typing.get_args(hints[field.name])} for field in fields(group)}
    return {name for name, kind in kinds.items() if kind & {int, float}}


def test_every_number_has_a_range():
    """A new numeric argument, here or in transformers, has a range in its annotation or in TRANSFORMERS_RANGES."""
    kit = {group for recipe in program.kit() for group in arguments.kit_groups(recipe)}
    names = set().union(*map(_numbers, kit)) | {"effective_batch_size"} | _numbers(TrainingArguments)
    assert names == {*arguments.ranges(tuple(kit)), *parallel_dims.size_flags()}


# Recipe -> values that no argument of this kind can have. A few of them trained rubbish to the end.
IMPOSSIBLE = {
    "sft": """learning_rate=nan learning_rate=inf weight_decay=nan weight_decay=-0.1 adam_beta1=nan adam_beta1=1
        adam_beta1=-1 adam_beta2=1.5 adam_epsilon=nan adam_epsilon=-1 adam_epsilon=0 max_grad_norm=nan max_grad_norm=-1
        label_smoothing_factor=-0.5 label_smoothing_factor=2 label_smoothing_factor=1 label_smoothing_factor=nan
        num_train_epochs=0 num_train_epochs=-1 num_train_epochs=nan num_train_epochs=inf max_steps=0 max_steps=-2
        warmup_steps=-1 warmup_steps=nan warmup_steps=10.5 logging_steps=nan logging_steps=-1 logging_steps=1.5
        save_steps=nan save_steps=-5 save_steps=2.5 eval_steps=nan eval_delay=-1 save_every_minutes=nan
        save_every_minutes=inf hang_timeout=nan hang_timeout=-1 neftune_noise_alpha=nan neftune_noise_alpha=-1 seed=-1
        seed=4294967296 data_seed=99999999999999999999 data_seed=-1 shuffle_seed=-3 ddp_timeout=0 ddp_timeout=-5
        ddp_timeout=99999999999999 max_tokens_per_sample=0 num_samples=-1 save_total_limit=-1 dataloader_num_workers=-1
        dataloader_prefetch_factor=0 torch_empty_cache_steps=0 eval_fraction=nan eval_fraction=1
        max_truncated_fraction=nan max_duplicate_fraction=2 memory_limit=nan gradient_checkpointing_every=0
        per_device_eval_batch_size=0 per_device_train_batch_size=0 effective_batch_size=-4
        max_length=99999999999 ddp_bucket_cap_mb=0""",
    "lora": """lora_alpha=0 lora_alpha=-8 lora_dropout=1 lora_dropout=2 lora_dropout=nan lora_r=0 loraplus_lr_ratio=nan
        loraplus_lr_ratio=inf loraplus_lr_ratio=0.5 num_virtual_tokens=0""",
    "dpo": """beta=inf beta=nan beta=-1 rpo_alpha=nan rpo_alpha=inf simpo_gamma=nan simpo_gamma=inf label_smoothing=nan
        label_smoothing=0.5""",
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("recipe", IMPOSSIBLE)
def test_an_impossible_number_is_refused(recipe):
    for word in IMPOSSIBLE[recipe].split():
        name = word.partition("=")[0]
        with pytest.raises(UserError, match=f"^--{name} is .*: it must be "):
            parse(f"--{word}", recipe=recipe)


def test_numbers_with_a_meaning_of_their_own_pass():
    """0 clips nothing, does not warm up and keeps every checkpoint; a share of the steps is below 1."""
    found = parse(
        "--max_grad_norm", "0", "--warmup_steps", "0", "--save_total_limit", "0", "--learning_rate", "0",
        "--save_steps", "0.25", "--logging_steps", "0.1", "--max_steps", "-1", "--seed", str(2**32 - 1),
        "--hang_timeout", "0", "--lr_scheduler_kwargs", '{"num_cycles": 2}',
    )  # fmt: skip
    assert (found.max_grad_norm, found.save_steps, found.logging_steps, found.seed) == (0, 0.25, 0.1, 2**32 - 1)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--learning_rate", "-1e-4"], "^--learning_rate is -0.0001: it must be 0 or more.$"),
        (["--learning_rate", "-inf"], "^--learning_rate is -inf: it must be a finite number.$"),
        (["--lr_scheduler_kwargs", '{"num_cycles": NaN}'], "--lr_scheduler_kwargs is .*: its numbers must be finite"),
        (["--optim", "sgd", "--optim_args", "momentum=nan"], "--optim_args momentum=nan: it must be a finite number"),
    ],
)
def test_numbers_inside_other_words_are_looked_at(flags, says):
    with pytest.raises(UserError, match=says):
        parse(*flags)


@pytest.mark.bad_input
def test_all_unknown_flags_are_told_at_once():
    with pytest.raises(UserError) as caught:
        parse("--lr", "-1", "--epochs=3", "--zero", "2", "--qwerty", "--lr", "2")
    assert str(caught.value) == (
        "command line: unknown flag --lr; did you mean --learning_rate? unknown flag --epochs; did you mean "
        "--num_train_epochs? unknown flag --qwerty; --help all lists every flag."
    )


def test_every_synonym_names_an_argument_that_exists():
    names = {f.name for f in fields(TrainingArguments)} | {
        f.name for group in arguments.kit_groups("dpo") for f in fields(group)
    }
    for word, meant in synonyms.RENAMED.items():
        assert word not in names, word
        if meant.startswith('"'):  # a key of the DeepSpeed JSON
            assert meant.split('"')[1] in {key.rpartition(".")[2] for key in STAGE_3_DEFAULTS}
        else:
            assert meant.startswith(("recipes/", "launchers/", "`zerofit ")) or meant.split()[0].strip("-,") in names, (
                meant
            )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "zero: 2\nbase_model: x\nlr: 1\n",
            r"run.yaml:2: unknown key 'base_model'; did you mean model\? \S*:3: unknown key 'lr'; did you mean l",
        ),
        ("zero: 2\nfoo: 3\n", "run.yaml:2: unknown key 'foo'"),
        ("zero: 3\nmax_steps: 1\nzero: 2\n", "run.yaml:3:1: not valid YAML: 'zero' is also in line 1"),
        ("max-length: 4\nmax_length: 5\n", "run.yaml:2:1: not valid YAML: 'max_length' is also in line 1"),
        ("zero: 2\nsave_total_limit: null\n", "run.yaml:2: save_total_limit is null.* 0 keeps every"),
        ("learning_rate:\n", "run.yaml:1: learning_rate is null; set a value, or delete the line \\(default 2e-05"),
        ("zero: [2\n", r"run.yaml:2:1: not valid YAML"),
        ("- a\n- b\n", "must contain `argument: value`"),
        ("# stage\nzero: 9\n", "run.yaml:2: zero 9: must be one of auto, 0, 1, 2, 3"),
        ("learning_rate: fast\n", "run.yaml:1: learning_rate fast: must be a number"),
        ("zero: 2\nrun_name: no\n", 'run.yaml:2: run_name: no is false in YAML; write "no" in quotes, or false'),
        ("data: [a, ON]\n", 'run.yaml:1: data: ON is true in YAML; write "ON" in quotes, or true'),
        ("a: &a [*a]\n", "run.yaml:1:8: not valid YAML: an alias of an enclosing value"),
        ("data: " + "[" * 3000, "run.yaml:1:26: not valid YAML: more than 20 levels of nesting"),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
            "run.yaml:5:5: not valid YAML: more than 10,000 values including aliases",
        ),
        ("x" * 2**20 + ": 1\n", "cannot be read: it has 1,048,580 bytes, the limit is 1,048,576"),
        ("zero: 2\nlearning_rate: [1, 2]\n", "run.yaml:2: learning_rate is a list, but takes one value.$"),
        ("learning_rate: .nan\n", "run.yaml: learning_rate is nan: it must be a finite number.$"),
        ("adam_beta2: -1e-3\n", "run.yaml: adam_beta2 is -0.001: it must be at least 0 and below 1.$"),
    ],
)
def test_yaml_refusals(tmp_path, text, says):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        parse("--config", str(file))


@pytest.mark.bad_input
def test_a_pipe_is_no_file_of_settings(tmp_path):
    """The first process to read it would wait, or leave nothing for the ranks."""
    os.mkfifo(tmp_path / "pipe")
    for flag in ("--config", "--deepspeed"):
        with pytest.raises(UserError, match=f"{flag} .*pipe: cannot be read: it must be a regular file"):
            parse(flag, str(tmp_path / "pipe"))


def test_texts_of_a_yaml_file_are_as_they_stand_there(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        'run_name: 3.10\nhub_model_id: "no"\ndata: [007, 1_000, 2024-01-01, *a]\n'.replace("*a", DATA)
        + "output_dir: &b 0x10\nlogging_dir: *b\n".replace("logging_dir", "chat_template")
    )
    found = parse("--config", str(file))
    assert (found.run_name, found.hub_model_id, found.output_dir, found.chat_template) == ("3.10", "no", "0x10", "0x10")
    assert found.data == ["007", "1_000", "2024-01-01", DATA]


@pytest.mark.bad_input
def test_every_illegal_pair_is_refused_and_every_legal_one_passes():
    for recipe in ("sft", "lora", "dpo"):  # pipeline: tests/pipeline/test_pipeline.py
        for zero in "0123":
            for offload in ("none", "optimizer", "all"):
                legal = offload == "none" or (offload == "optimizer" and zero != "0") or zero == "3"
                if legal:
                    found = parse("--zero", zero, "--offload", offload, recipe=recipe)
                    assert (found.deepspeed is None) == (zero == "0")
                else:
                    with pytest.raises(UserError, match="use --zero"):
                        parse("--zero", zero, "--offload", offload, recipe=recipe)


def test_a_hang_is_found_before_collectives_give_up():
    assert parse().hang_timeout == parse().ddp_timeout - 60
    for limit, expected in (("7200", 7140), ("600", 540), ("60", 30)):
        found = parse("--ddp_timeout", limit)
        assert found.hang_timeout == expected
        assert any(d.startswith(f"hang_timeout {expected}") and f"--ddp_timeout {limit}" in d for d in found.decisions)
    assert parse("--ddp_timeout", "600", "--hang_timeout", "900").hang_timeout == 900
    assert parse("--ddp_timeout", "600", "--hang_timeout", "0").hang_timeout == 0


@pytest.mark.parametrize(
    ("flags", "env", "several_nodes", "minutes"),
    [
        ([], {}, True, 30),
        ([], {"SLURM_JOB_ID": "7"}, False, 30),
        ([], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False, 30),
        ([], {}, False, 0),
        (["--save_steps", "100"], {}, True, 0),
        (["--save_strategy", "epoch"], {}, True, 0),
        (["--save_strategy", "no"], {}, True, 0),
        (["--save_only_model", "true"], {}, True, 0),
        (["--save_every_minutes", "0"], {}, True, 0),
        (["--save_every_minutes", "5"], {"SLURM_JOB_ID": "7"}, True, 5),
    ],
)
def test_a_job_of_a_cluster_saves_every_half_hour(monkeypatch, flags, env, several_nodes, minutes):
    for name in save.SCHEDULERS:
        monkeypatch.delenv(name, raising=False)
    settings = parse(*flags)
    for name, value in (env | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2" if several_nodes else "4"}).items():
        monkeypatch.setenv(name, value)
    save.choose_clock(settings)
    assert settings.save_every_minutes == minutes
    assert any(line.startswith("save_every_minutes 30") for line in settings.decisions) == (minutes == 30)


# Words behind `zerofit` -> what is said before torch is imported; a folder of the test's own stands for {tmp}.
EARLY = {
    "launch recipes/sft.py --data nope.jsonl": "--data nope.jsonl: no such file or folder.",
    "launch recipes/sft.py --model {tmp}/nope --data org/set": "nope: no such model folder.",
    "launch recipes/sft.py --model {tmp}": "config.json is missing in the folder.",
    "launch recipes/sft.py --output_dir {tmp}": "already holds a run",
    "launch recipes/sft.py --output_dir=/proc/x": "--output_dir /proc/x: /proc cannot be written to",
    "launch recipes/sft.py --preset gpu-1g": "--preset gpu-1g: must be one of gpu-12g",
    "data --data nope.jsonl --output_dir x": "--data nope.jsonl: no such file or folder.",
    "launch recipes/sft.py --config {tmp}/nope.yaml": "nope.yaml: cannot be read: No such file",
    "launch recipes/sft.py --config {tmp}/names.yaml": "is local data without a revision",
    "launch recipes/sft.py --config {tmp}/no.yaml": 'no.yaml:2: model: no is false in YAML; write "no" in quotes',
    # and nothing to say here
    "launch recipes/sft.py --config {tmp}/names.yaml --show": "",
    "launch recipes/sft.py --config {tmp}/names.yaml --data org/set": "",
    "launch recipes/sft.py --output_dir {tmp} --resume-from_checkpoint auto --no_bf16 --weight_decay -1 --optim x": "",
    "launch --nnodes 2 recipes/sft.py --output_dir {tmp}": "",
    "launch --nnodes= --args= recipes/sft.py --zero 2": "",
    "launch '--args=--run_name my_sft.py' recipes/sft.py": "",
    "launch --args '--run_name my_sft.py' recipes/sft.py --run_name other.py": "",
    "launch sft --run_name my_sft.py": "",
    "slurm recipes/sft.py --model /elsewhere/model --data /elsewhere/rows.jsonl": "",
    "data --recipe lora --lora_r 4 --columns a=b --per_device_train_batch_size auto --output_dir x": "",
    # words that the parser refuses
    "launch recipes/sft.py --zero 4 --data": "",
    "launch recipes/sft.py --modle org/model --data org/set": "",
    "launch recipes/sft.py --config {tmp}/bad.yaml": "",
    "launch recipes/sft.py --config {tmp}/list.yaml": "",
    "launch recipes/sft.py --config {tmp}/theirs.yaml": "",
}

# What the one parser refuses, whichever verb asks it.
REFUSED = {
    "launch recipes/sft.py --zero 4": "--zero 4: must be one of",
    "launch --args='--zero=zero3' recipes/lora.py": "did you mean --zero 3?",
    "launch recipes/sft.py --lerning_rate 1 --epochs 2": "did you mean --learning_rate? unknown flag --epochs; did you "
    "mean",
    "launch recipes/sft.py --lora_r 4": "recipes/lora.py (make lora)",
    "launch recipes/sft.py --modle org/model --data org/set": "unknown flag --modle; did you mean --model?",
    "launch recipes/sft.py --config {tmp}/bad.yaml": "bad.yaml:2: offload disk: must be one of",
    "launch recipes/sft.py --config {tmp}/list.yaml": "list.yaml: must contain `argument: value` lines",
    "launch recipes/sft.py --config {tmp}/theirs.yaml": "unknown key 'base_model'; did you mean model?",
    "launch --show recipes/sft.py --zeero 2": "did you mean --zero?",
    "launch --nnodes 2 --node_rank 0 --master_addr host recipes/sft.py --zeero 2": "did you mean --zero?",
    "slurm recipes/sft.py --max_length long": "--max_length long: must be an integer.",
    "hosts --hosts {tmp}/hosts recipes/sft.py --max_length long": "--max_length long: must be an integer.",
    "kubernetes --image i --name n --nodes 2 recipes/sft.py --foo 1": "unknown flag --foo",
    "data --foo 1": "unknown flag --foo",
    "batch-size --zero 4": "--zero 4: must be one of",
    "plan --gpus 4 --gpu_type h100-80g --zero 4": "--zero 4: must be one of",
    "plan --gpus 4 --gpu_type h100-80g --foo 1": "unknown flag --foo",
}

# Runs the words of the first argument; prints what is said of each, and what has been imported.
SAID = """
import json, shlex, sys
from zerofit import cli
from zerofit.base.errors import UserError
from zerofit.config import early_check
said = []
for words in json.loads(sys.argv[1]):
    verb, *words = shlex.split(words)
    try:
        said.append({run} or "")
    except UserError as error:
        said.append(str(error))
print(json.dumps([said, [*sys.modules]]))
"""


def said_of(cases: dict[str, str], run: str, tmp_path) -> list[str]:
    """Hold what is said of each of the cases; return the modules that have been imported."""
    (tmp_path / "run.json").touch()
    (tmp_path / "bad.yaml").write_text("learning_rate: 1\noffload: disk\n")
    (tmp_path / "list.yaml").write_text("- learning_rate\n")
    (tmp_path / "theirs.yaml").write_text("base_model: org/model\ndata: org/set\n")
    (tmp_path / "names.yaml").write_text(f"model: tiny\ndata: [{{path: {DATA}, revision: 3.10}}]\n")
    (tmp_path / "no.yaml").write_text("zero: 2\nmodel: no\n")
    (tmp_path / "hosts").write_text("host1 slots=2\n")
    commands = [words.format(tmp=tmp_path) for words in cases]
    words = [sys.executable, "-c", SAID.replace("{run}", run), json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said, modules = json.loads(done.stdout.splitlines()[-1])
    for words, wanted, found in zip(cases, cases.values(), said, strict=True):
        assert (wanted in found) if wanted else not found, (words, found)
    return modules


@pytest.mark.bad_input
def test_what_is_told_before_torch_is_imported(tmp_path):
    modules = said_of(EARLY, "early_check.command(verb, words)", tmp_path)
    assert not {"torch", "transformers"} & {*modules}


@pytest.mark.slow
@pytest.mark.bad_input
def test_each_verb_refuses_what_the_parser_does_not_take(tmp_path):
    verbs = "(early_check.command(verb, words), cli.importlib.import_module(f'zerofit.{cli.VERBS[verb]}').main(words))"
    said_of(REFUSED, verbs, tmp_path)


@pytest.mark.bad_input
def test_a_recipe_of_any_launcher_looks_early(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sft.py", "--data", "nope.jsonl"])
    with pytest.raises(SystemExit, match="2"):
        check_early(program.kit()["sft"])
    assert capsys.readouterr().err.count("--data nope.jsonl: no such file or folder.") == 1
    for recipe in program.kit():
        assert "entrypoint.check_early(RECIPE)" in (ROOT / "recipes" / f"{recipe}.py").read_text()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(
            "--lerning_rate 1", "unknown flag --lerning_rate; did you mean --learning_rate?", marks=pytest.mark.slow
        ),
        ("--config {tmp}/run.yaml", "run.yaml:2: unknown key 'foo'; --help all lists every flag."),
    ],
)
def test_a_recipe_refuses_a_wrong_flag_itself(words, says, tmp_path):
    (tmp_path / "run.yaml").write_text("zero: 0\nfoo: 1\n")
    words = [sys.executable, "recipes/sft.py", *words.format(tmp=tmp_path).split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(says)


def test_the_short_help_has_what_most_runs_need():
    help_of = {recipe: re.findall(r"^  --(\w+)", help.text(recipe), re.M) for recipe in program.kit()}
    assert 20 <= len(help_of["sft"]) <= 30 and set(help_of["sft"]) < set(help_of["lora"])
    assert help.text("sft").count("\n") < 60 and "--help all" in help.text("sft")
    for name, recipe in program.kit().items():
        words = [word for names in help.COMMON.values() for word in names.split()]
        assert {*words, *recipe.common} <= set(help_of[name]), name


@pytest.mark.parametrize("recipe", program.kit())
def test_the_whole_help_has_each_flag_once_and_the_kits_first(recipe):
    found = re.findall(r"^  --([\w-]+)", help.text(recipe, every_flag=True), re.M)
    kit = [f.name for group in arguments.kit_groups(recipe) for f in fields(group)]
    theirs = {f.name for f in fields(TrainingArguments) if f.init} - set(transformers_flags.REFUSED)
    assert found[: len(kit)] == kit and set(found) == {*kit, *theirs} and len(found) == len(set(found))
