"""Every argument of transformers' TrainingArguments: it acts under this trainer, or it is refused with a sentence."""

import importlib.util
from dataclasses import fields

import pytest
from conftest import TINY, Run, recipe_process
from transformers import TrainingArguments

from zerofit import args, flags, hub
from zerofit.errors import UserError

_READ = "works: transformers' Trainer reads it in code that KitTrainer leaves as it is (read, not run)"
_LOGS = "works: transformers' logging levels (read, not run)"
_HUB = "works: transformers' push to the hub, (read, not run)"
_TRACKERS = "works: transformers' callback of the tracker takes it (read, not run)"
_WORKERS = "works: goes to torch's DataLoader (read, not run)"
_DDP = "works: stage 0 hands it to DistributedDataParallel; the other stages have no such wrapper (read, not run)"
_SCHEDULE = "works: the learning rate of each step line follows it"
_BATCH = "works: test_args.py::test_batch"
_RECOMPUTE = "works: recompute.choose folds both names into one; test_attention.py, test_memory.py"
FIELDS = {
    "output_dir": "works: test_launch.py::test_make_and_the_run_folder",
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "per_device_eval_batch_size": "works: KitTrainer._get_eval_sampler",
    "num_train_epochs": "works: test_training.py",
    "max_steps": "works: test_launch.py",
    "learning_rate": "works: test_args.py::test_precedence_default_bundled_yaml_flag",
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler_kwargs": _SCHEDULE,
    "warmup_steps": _SCHEDULE,
    "optim": "works: test_optimizers.py",
    "optim_args": "works: test_optimizers.py",
    "optim_target_modules": "works: optimizers.choose",
    "weight_decay": "works: test_optimizers.py",
    "adam_beta1": "works: test_optimizers.py",
    "adam_beta2": "works: test_optimizers.py",
    "adam_epsilon": "works: test_optimizers.py",
    "average_tokens_across_devices": _READ,
    "max_grad_norm": "works: test_zero.py",
    "label_smoothing_factor": "works: test_loss.py",
    "bf16": "works: test_args.py::test_cpu_trains_in_fp32_unless_told",
    "fp16": "works: test_args.py::test_gpu_precision_follows_the_hardware_and_says_so",
    "tf32": _READ,
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_kwargs": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "torch_compile": _READ,
    "torch_compile_backend": _READ,
    "torch_compile_mode": _READ,
    "use_liger_kernel": "works: loss.py checks it; test_loss.py",
    "liger_kernel_config": "works: loss.py; test_loss.py",
    "use_cache": _READ,
    "neftune_noise_alpha": _READ,
    "torch_empty_cache_steps": _READ,
    "logging_strategy": _READ,
    "logging_steps": "works: test_launch.py::test_make_and_the_run_folder",
    "logging_first_step": _READ,
    "log_on_each_node": _LOGS,
    "log_level": _LOGS,
    "log_level_replica": _LOGS,
    "logging_nan_inf_filter": _READ,
    "include_num_input_tokens_seen": "works: test_flags.py::test_step_lines_with_the_tokens_seen",
    "disable_tqdm": "works: test_launch.py::test_a_bar_never_shares_a_terminal_with_the_step_lines",
    "report_to": "works: test_flags.py::test_a_tracker_that_is_missing_is_named",
    "run_name": _TRACKERS,
    "project": _TRACKERS,
    "trackio_space_id": _TRACKERS,
    "trackio_bucket_id": _TRACKERS,
    "trackio_static_space_id": _TRACKERS,
    "eval_strategy": "works: test_launch.py",
    "eval_steps": _READ,
    "eval_delay": _READ,
    "eval_on_start": _READ,
    "do_train": "refused: false; test_flags.py::test_do_train_and_do_eval",
    "do_eval": "refused: where it differs from the rows; test_flags.py::test_do_train_and_do_eval",
    "save_only_model": "works: saves no optimizer; a resume from such a checkpoint is refused (test_checkpoint.py)",
    "save_strategy": "works: test_checkpoint.py",
    "save_steps": "works: test_checkpoint.py",
    "save_total_limit": "works: test_checkpoint.py",
    "save_on_each_node": _READ,
    "push_to_hub": "works: transformers pushes; test_flags.py::test_a_push_that_cannot_work_is_refused",
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "load_best_model_at_end": "works: test_flags.py::test_the_best_model_and_its_loss",
    "metric_for_best_model": _READ,
    "greater_is_better": _READ,
    "ignore_data_skip": _READ,
    "full_determinism": _READ,
    "seed": "works: test_args.py::test_transformers_flags_work_unchanged",
    "data_seed": "works: test_data.py",
    "use_cpu": "works: every test",
    "accelerator_config": "refused: all but non_blocking; test_flags.py::test_accelerator_config",
    "dataloader_num_workers": _WORKERS,
    "dataloader_pin_memory": _WORKERS,
    "dataloader_persistent_workers": _WORKERS,
    "dataloader_prefetch_factor": _WORKERS,
    "dataloader_multiprocessing_context": _WORKERS,
    "dataloader_in_order": _WORKERS,
    "remove_unused_columns": "works: the collator names exactly what the model gets, so nothing is left to remove",
    "train_sampling_strategy": "works: test_data.py",
    "ddp_find_unused_parameters": "works: test_training.py",
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": _READ,
    "ddp_timeout": "works: test_args.py::test_a_hang_is_found_before_collectives_give_up",
    "deepspeed": "works: test_zero.py",
    "debug": _READ,
    "resume_from_checkpoint": "works: test_resume.py",
    "local_rank": "works: LOCAL_RANK of the launcher decides; transformers keeps the field for old launchers",
}
FIELDS |= dict.fromkeys(flags.REFUSED, "refused: test_flags.py::test_refused")
# A value of each refused argument that differs from its default.
VALUES = {
    "fsdp": "full_shard",
    "fsdp_config": '{"min_num_params": 1}',
    "parallelism_config": '{"tp_size": 2}',
    "eval_accumulation_steps": "1",
    "eval_do_concat_batches": "false",
    "include_for_metrics": "loss",
    "label_names": "labels",
    "length_column_name": "tokens",
    "skip_memory_metrics": "false",
}


def parse(*words):
    return args.parse("sft", list(words), 1)


def test_the_table_has_every_field():
    names = {field.name for field in fields(TrainingArguments) if field.init}
    assert set(FIELDS) == names
    assert all(said.startswith(("works: ", "refused: ")) for said in FIELDS.values())


@pytest.mark.bad_input
@pytest.mark.parametrize("name", flags.REFUSED)
def test_refused(name):
    with pytest.raises(UserError, match=f"--{name} .*: .{{20}}") as caught:
        parse(f"--{name}", VALUES.get(name, "true"))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_the_default_of_a_refused_argument_passes():
    parse("--dataloader_drop_last", "false", "--bf16_full_eval", "false", "--fsdp", "", "--skip_memory_metrics", "true")
    parse("--fsdp", "False", "--fsdp_config", "{}", "--parallelism_config", "none")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--do_train", "false"], "--do_train false: a recipe trains"),
        (["--do_eval", "true", "--data", "x.jsonl"], "--do_eval true: there are no rows"),
        (["--do_eval", "false", "--eval_fraction", "0.1", "--data", "x.jsonl"], "--do_eval false: there are rows"),
    ],
)
def test_do_train_and_do_eval(words, says):
    with pytest.raises(UserError, match=says):
        parse(*words)
    parse("--do_train", "true", "--do_eval", "true")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"split_batches": true}', "split_batches true: each rank would train on a part"),
        ('{"dispatch_batches": true}', "dispatch_batches true: each rank reads"),
        ('{"gradient_accumulation_kwargs": {"num_steps": 2}}', "use --gradient_accumulation_steps"),
        ('{"even_batches": false}', "even_batches false"),
        ('{"split_batch": true}', "unknown key 'split_batch'; did you mean split_batches"),
        ("[1]", "must hold a JSON object"),
        ("{1", "cannot be read as JSON"),
        ("/no/such.json", "cannot be read as JSON"),
    ],
)
def test_accelerator_config(config, says):
    with pytest.raises(UserError, match=says):
        parse("--accelerator_config", config)
    parse("--accelerator_config", '{"split_batches": false, "non_blocking": true, "even_batches": true}')


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wandb", "--report_to wandb: is not installed: pip install wandb"),
        ("tensorboard", "pip install tensorboard"),
        ("trackio", "pip install trackio"),
        ("mlflow", "pip install mlflow"),
        ("comet_ml", "pip install comet-ml"),
        ("wandbb", "no such tracker; did you mean wandb?"),
    ],
)
def test_a_tracker_that_is_missing_is_named(monkeypatch, name, says):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *a: None)
    with pytest.raises(UserError) as caught:
        flags.check_trackers([name])
    assert says in str(caught.value)


def test_trackers_are_those_of_transformers():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert set(flags.TRACKERS) == set(INTEGRATION_TO_CALLBACK)
    parse("--report_to", "none")


@pytest.mark.bad_input
def test_a_push_that_cannot_work_is_refused(monkeypatch):
    for name in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_TOKEN",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    hub.check_push(parse())
    with pytest.raises(UserError, match="--push_to_hub: there is no token"):
        hub.check_push(parse("--push_to_hub", "true"))
    with pytest.raises(UserError, match=r"--push_to_hub: 127.0.0.1 cannot be reached .*make export"):
        hub.check_push(parse("--push_to_hub", "true", "--hub_token", "x"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        hub.check_push(parse("--push_to_hub", "true"))


SHORT = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "16", "--effective_batch_size", "8", "--logging_steps", "1",
    "--num_samples", "0", "--max_steps", "3",
]  # fmt: skip


def test_step_lines_with_the_tokens_seen(tmp_path):
    words = ["--include_num_input_tokens_seen", "true", "--save_strategy", "no", "--output_dir", str(tmp_path / "run")]
    done = recipe_process("sft", *SHORT, *words)
    assert done.returncode == 0, done.stderr
    found = Run(tmp_path / "run")
    assert len(found.losses) == 3 and done.stdout.count("tok/s") == 3
    assert found.metrics[-1]["num_input_tokens_seen"] > found.metrics[0]["num_input_tokens_seen"] > 0
    assert (tmp_path / "run" / "loss.png").exists()


def test_the_best_model_and_its_loss(tmp_path):
    """The first evaluation is the best, since a larger loss is said to be better here."""
    words = [
        "--load_best_model_at_end", "true", "--eval_data", str(TINY / "eval.jsonl"), "--eval_strategy", "steps", "--eval_steps",
        "1", "--save_strategy", "steps", "--save_steps", "1", "--learning_rate", "1e-3", "--warmup_steps", "0",
        "--greater_is_better", "true", "--output_dir", str(tmp_path / "run"),
    ]  # fmt: skip
    done = recipe_process("sft", *SHORT, *words)
    assert done.returncode == 0, done.stderr
    found = Run(tmp_path / "run")
    evaluations = [entry["eval_loss"] for entry in found.metrics if "eval_loss" in entry][:3]
    assert len(evaluations) == 3 and evaluations[0] == max(evaluations) > evaluations[-1]
    assert found.json("result.json")["eval_loss"] == pytest.approx(evaluations[0], rel=1e-5)
