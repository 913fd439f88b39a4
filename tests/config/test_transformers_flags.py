"""Every argument of transformers' TrainingArguments: it acts under this trainer, or it is refused with a sentence."""

import importlib.util
import json
import re
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, TINY, Run, process_as_before, recipe_process, run_world
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

from zerofit import recipe
from zerofit.base import hub
from zerofit.base.errors import UserError
from zerofit.config import resolve, transformers_flags
from zerofit.data.load import load_datasets
from zerofit.model.load import load_model, load_tokenizer
from zerofit.train.trainer import ZerofitTrainer

_LOGS = "works: test_transformers_flags.py::test_log_levels"
_HUB = "works: test_transformers_flags.py::test_what_a_hub_is_sent"
_TRACKERS = "works: test_transformers_flags.py::test_what_a_tracker_is_told"
_MANY = "works: test_transformers_flags.py::test_a_run_with_many_flags"
_WORKERS = "works: test_transformers_flags.py::test_settings_of_the_data_loader"
_DDP = "works: test_transformers_flags.py::test_settings_of_ddp; stages 1 to 3 have no such wrapper"
_SCHEDULE = "works: the learning rate of each step line follows it"
_BATCH = "works: test_parse.py::test_batch"
_RECOMPUTE = "works: gradient_checkpointing.choose folds both names into one; test_attention.py, test_memory_tracker.py"
FIELDS = {
    "output_dir": "works: test_launch.py::test_make_and_the_run_folder",
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "per_device_eval_batch_size": "works: ZerofitTrainer.get_eval_dataloader",
    "num_train_epochs": "works: test_training.py",
    "max_steps": "works: test_launch.py",
    "learning_rate": "works: test_parse.py::test_precedence_default_bundled_yaml_flag",
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler_kwargs": _SCHEDULE,
    "warmup_steps": _SCHEDULE,
    "optim": "works: test_optimizers.py",
    "optim_args": "works: test_optimizers.py",
    "optim_target_modules": "works: test_optimizers.py",
    "weight_decay": "works: test_optimizers.py",
    "adam_beta1": "works: test_optimizers.py",
    "adam_beta2": "works: test_optimizers.py",
    "adam_epsilon": "works: test_optimizers.py",
    "average_tokens_across_devices": "works: test_transformers_flags.py::test_tokens_counted_by_each_rank_alone",
    "max_grad_norm": "works: test_deepspeed_json.py",
    "label_smoothing_factor": "works: test_transformers_flags.py::test_label_smoothing",
    "bf16": "works: test_parse.py::test_cpu_trains_in_fp32_unless_told",
    "fp16": "works: test_parse.py::test_gpu_precision_follows_the_hardware_and_says_so",
    "tf32": "refused: on a CPU; test_transformers_flags.py::test_what_the_trainer_decides; on a GPU transformers sets "
    "it (read, not run)",
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_kwargs": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "torch_compile": "works: test_transformers_flags.py::test_a_compiled_model",
    "torch_compile_backend": "works: test_transformers_flags.py::test_a_compiled_model",
    "torch_compile_mode": "works: test_transformers_flags.py::test_a_compiled_model",
    "use_liger_kernel": "works: liger.py decides and proves it; test_liger.py",
    "liger_kernel_config": "works: liger.py; test_liger.py",
    "use_cache": _MANY,
    "neftune_noise_alpha": _MANY,
    "torch_empty_cache_steps": _MANY,
    "logging_strategy": "works: test_transformers_flags.py::test_a_run_that_goes_on",
    "logging_steps": "works: test_launch.py::test_make_and_the_run_folder",
    "logging_first_step": _MANY,
    "log_on_each_node": _LOGS,
    "log_level": _LOGS,
    "log_level_replica": _LOGS,
    "logging_nan_inf_filter": "refused: true; test_transformers_flags.py::test_what_the_trainer_decides",
    "include_num_input_tokens_seen": "works: test_transformers_flags.py::test_step_lines_with_the_tokens_seen",
    "disable_tqdm": "works: test_progress.py::test_lines_stand_above_the_progress_line",
    "report_to": "works: test_transformers_flags.py::test_a_tracker_that_is_missing_is_named",
    "run_name": _TRACKERS,
    "project": _TRACKERS,
    "trackio_space_id": _TRACKERS,
    "trackio_bucket_id": _TRACKERS,
    "trackio_static_space_id": "works: transformers' callback of trackio names the space in the card (read, not run)",
    "eval_strategy": "works: test_launch.py",
    "eval_steps": _MANY,
    "eval_delay": _MANY,
    "eval_on_start": _MANY,
    "do_train": "refused: false; test_transformers_flags.py::test_do_train_and_do_eval",
    "do_eval": "refused: where it differs from the rows; test_transformers_flags.py::test_do_train_and_do_eval",
    "save_only_model": "works: saves no optimizer; a resume from such a checkpoint is refused (test_checkpoint.py)",
    "save_strategy": "works: test_checkpoint.py",
    "save_steps": "works: test_checkpoint.py",
    "save_total_limit": "works: test_checkpoint.py",
    "push_to_hub": "works: transformers pushes; test_transformers_flags.py::test_a_push_that_cannot_work_is_refused",
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "load_best_model_at_end": "works: test_transformers_flags.py::test_the_best_model_and_its_loss",
    "metric_for_best_model": _MANY,
    "greater_is_better": "works: test_transformers_flags.py::test_the_best_model_and_its_loss",
    "ignore_data_skip": "works: test_transformers_flags.py::test_a_run_that_goes_on",
    "full_determinism": "works: test_transformers_flags.py::test_full_determinism",
    "seed": "works: test_parse.py::test_transformers_flags_work_unchanged",
    "data_seed": "works: test_dataset.py",
    "use_cpu": "works: every test",
    "dataloader_num_workers": _WORKERS,
    "dataloader_pin_memory": _WORKERS,
    "dataloader_persistent_workers": _WORKERS,
    "dataloader_prefetch_factor": _WORKERS,
    "dataloader_multiprocessing_context": _WORKERS,
    "dataloader_in_order": _WORKERS,
    "remove_unused_columns": "works: the collator names exactly what the model gets, so nothing is left to remove",
    "train_sampling_strategy": "works: test_dataset.py",
    "ddp_find_unused_parameters": "works: test_training.py",
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": "works: test_optimizers.py::test_ddp_settings_reach_the_module",
    "ddp_backend": "refused: another than the device's; test_transformers_flags.py::test_what_the_trainer_decides",
    "ddp_timeout": "works: test_parse.py::test_a_hang_is_found_before_collectives_give_up",
    "deepspeed": "works: test_deepspeed_json.py",
    "debug": _MANY,
    "resume_from_checkpoint": "works: test_resume.py",
    "local_rank": "works: LOCAL_RANK of the launcher decides; transformers keeps the field for old launchers",
}
FIELDS |= dict.fromkeys(transformers_flags.REFUSED, "refused: test_transformers_flags.py::test_refused")
# A value of each refused argument that differs from its default.
VALUES = {
    "accelerator_config": '{"split_batches": true}',
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
    return resolve.resolve_settings("sft", list(words), 1)


def test_the_table_has_every_field():
    names = {field.name for field in fields(TrainingArguments) if field.init}
    assert names <= set(FIELDS)
    assert set(FIELDS) - names <= {"activation_checkpointing", "activation_checkpointing_kwargs"}  # from 5.20 on
    assert all(said.startswith(("works: ", "refused: ")) for said in FIELDS.values())


def test_the_tests_that_the_table_names_exist():
    texts = {file.name: file.read_text() for file in (ROOT / "tests").glob("*/test_*.py")}
    for file, test in re.findall(r"(test_\w+\.py)(?:::(\w+))?", " ".join(FIELDS.values())):
        assert f"def {test}" in texts[file]


@pytest.mark.bad_input
@pytest.mark.parametrize("name", transformers_flags.REFUSED)
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
        (["--do_train", "false"], "--do_train false: recipes always train"),
        (
            ["--torch_compile_backend", "x"],
            "--torch_compile_backend x: unknown to accelerate; .*inductor",
        ),
        (["--do_eval", "true", "--data", "x.jsonl"], "--do_eval true: eval rows are missing; add --eval_data"),
        (
            ["--do_eval", "false", "--eval_fraction", "0.1", "--data", "x.jsonl"],
            "eval rows are set; leave out --eval_data",
        ),
    ],
)
def test_do_train_and_do_eval(words, says):
    with pytest.raises(UserError, match=says):
        parse(*words)
    parse("--do_train", "true", "--do_eval", "true")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wandb", "--report_to wandb: is not installed: pip install wandb"),
        ("tensorboard", "pip install tensorboard"),
        ("trackio", "pip install trackio"),
        ("mlflow", "pip install mlflow"),
        ("comet_ml", "pip install comet-ml"),
        ("wandbb", "unknown tracker; did you mean wandb?"),
    ],
)
def test_a_tracker_that_is_missing_is_named(monkeypatch, name, says):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *a: None)
    with pytest.raises(UserError) as caught:
        transformers_flags.check_trackers([name])
    assert says in str(caught.value)


def test_trackers_are_those_of_transformers():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert set(transformers_flags.TRACKERS) == set(INTEGRATION_TO_CALLBACK)
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
    with pytest.raises(UserError, match="--push_to_hub: a token is missing"):
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


@pytest.mark.slow
def test_the_best_model_and_its_loss(tmp_path):
    """The first evaluation is the best, since a larger loss is said to be better here."""
    words = [
        "--load_best_model_at_end", "true", "--eval_data", str(TINY / "eval.jsonl"),
        "--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1",
        "--learning_rate", "1e-3", "--warmup_steps", "0",
        "--greater_is_better", "true", "--output_dir", str(tmp_path / "run"),
    ]  # fmt: skip
    done = recipe_process("sft", *SHORT, *words)
    assert done.returncode == 0, done.stderr
    found = Run(tmp_path / "run")
    evaluations = [entry["eval_loss"] for entry in found.metrics if "eval_loss" in entry][:3]
    assert len(evaluations) == 3 and evaluations[0] == max(evaluations) > evaluations[-1]
    assert found.json("result.json")["eval_loss"] == pytest.approx(evaluations[0], rel=1e-5)


# --- what the others do, in this process ---


def trainer_of(folder, *words, ranks=1) -> ZerofitTrainer:
    """The trainer of a recipe's command line, before its first step."""
    settings = resolve.resolve_settings(
        "sft", [*SHORT, "--zero", "0", "--save_strategy", "no", "--output_dir", str(folder), *words], 1
    )
    tokenizer = load_tokenizer(settings)
    sets = load_datasets(settings, tokenizer)
    arguments = recipe.start_processes(settings, *sets)
    folder.mkdir(exist_ok=True)
    return ZerofitTrainer(settings, load_model(settings, tokenizer), tokenizer, arguments, *sets)


class Watch(TrainerCallback):
    """What is on while a step is made."""

    def __init__(self, trainer):
        self.model, self.during = trainer.model, []

    def on_step_begin(self, args, state, control, **kwargs):
        hooks = sum(len(module._forward_hooks) for module in self.model.modules())
        self.during.append((hooks, self.model.config.use_cache))


MANY = """--max_steps 6 --logging_steps 2 --logging_first_step true --eval_strategy steps --eval_steps 2 --eval_delay 3
--eval_on_start true --save_strategy steps --save_steps 2 --save_total_limit 3 --neftune_noise_alpha 5 --use_cache true
--torch_empty_cache_steps 3 --debug underflow_overflow --load_best_model_at_end true
--metric_for_best_model eval_perplexity --learning_rate 1e-3 --warmup_steps 2 --lr_scheduler_type linear
--gradient_checkpointing false --adam_beta1 0.8 --weight_decay 0.1"""


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """(trainer after a run with many flags at once, what was on in its steps, the cache's clearings, its folder)."""
    folder, cleared = tmp_path_factory.mktemp("many"), []
    with process_as_before(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.trainer.clear_device_cache", lambda *a, **kw: cleared.append(1))
        rows = (TINY / "eval.jsonl").read_text().splitlines(keepends=True)
        (folder / "eval.jsonl").write_text("".join(rows[:8]))
        trainer = trainer_of(folder, *MANY.split(), "--eval_data", str(folder / "eval.jsonl"))
        watch = Watch(trainer)
        trainer.add_callback(watch)
        trainer.train()
    return trainer, watch.during, cleared, folder


def test_a_run_with_many_flags(many):
    trainer, during, cleared, folder = many
    entries = Run(folder).metrics
    steps = [entry["step"] for entry in entries if "loss" in entry]
    assert steps == [1, 2, 4, 6]  # the first beside every second
    evaluations = {entry["step"]: entry["eval_perplexity"] for entry in entries if "eval_loss" in entry}
    assert list(evaluations) == [0, 4, 6]  # on start; not before step 3
    assert trainer.state.best_metric == pytest.approx(min(evaluations[4], evaluations[6]))  # eval_perplexity, the lower
    assert sorted(f.name for f in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    hooks, use_cache = zip(*during, strict=True)
    assert all(use_cache)
    assert min(hooks) > len(list(trainer.model.modules()))  # debug's hook on each module, and NEFTune's
    assert not any("neftune" in str(hook) for hook in trainer.model.get_input_embeddings()._forward_hooks.values())
    assert len(cleared) == 2 * trainer.args.gradient_accumulation_steps  # before the steps after 0 and 3
    groups = {group["weight_decay"]: group["betas"] for group in trainer.optimizer.param_groups}
    assert groups == {0.1: (0.8, 0.999), 0.0: (0.8, 0.999)}
    rates = {entry["step"]: entry["learning_rate"] for entry in entries if "loss" in entry}
    assert rates == pytest.approx({1: 0, 2: 0.5e-3, 4: 0.75e-3, 6: 0.25e-3})


def test_a_run_that_goes_on(many, tmp_path):
    """With --ignore_data_skip from the first rows of its epoch, else from where the checkpoint stood in it."""
    *_, folder = many
    rows = {}
    for skip in ("true", "false"):
        run = tmp_path / skip
        words = ["--max_steps", "7", "--max_samples", "32", "--logging_strategy", "epoch", "--ignore_data_skip", skip]
        trainer = trainer_of(run, *words, "--resume_from_checkpoint", str(folder / "checkpoint-6"))
        step, seen = trainer.training_step, []

        def note(net, inputs, *more, step=step, seen=seen):
            seen.append(inputs["input_ids"].sum().item())
            return step(net, inputs, *more)

        trainer.training_step = note
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        assert trainer.state.global_step == 7
        assert [entry["step"] for entry in Run(run).metrics] == [7]  # the epoch's end
        rows[skip] = seen
    assert rows["true"] != rows["false"] and len(rows["true"]) == len(rows["false"])


def test_no_step_is_left(many, tmp_path):
    """A run that was killed between its last checkpoint and final/ makes no further step."""
    *_, folder = many
    words = ["--max_steps", "5", "--max_samples", "32", "--resume_from_checkpoint", str(folder / "checkpoint-6")]
    again = trainer_of(tmp_path / "run", *words)
    again.train(resume_from_checkpoint=again.args.resume_from_checkpoint)
    assert again.state.global_step == 6


def test_settings_of_the_data_loader(tmp_path):
    words = """--max_steps 1 --dataloader_num_workers 2 --dataloader_prefetch_factor 3
    --dataloader_persistent_workers true --dataloader_multiprocessing_context fork
    --dataloader_in_order false""".split()
    loader = trainer_of(tmp_path / "run", *words).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert loader.multiprocessing_context.get_start_method() == "fork" and loader.in_order is False
    assert loader.pin_memory is False  # of a CPU's run
    gpu = resolve.resolve_settings("sft", ["--dataloader_pin_memory", "false"], 1, args_gpu())
    assert gpu.training_values()["dataloader_pin_memory"] is False


@pytest.mark.parametrize("more", [(), ("--streaming",)])
def test_a_data_loader_draws_no_random_number(tmp_path, more):
    """Dropout must not depend on how often a loader is opened: by an evaluation, a new epoch or a resumed run."""
    words = ["--max_steps", "1", "--eval_data", str(TINY / "eval.jsonl"), *more]
    trainer = trainer_of(tmp_path / "run", *words)
    before = torch.get_rng_state()
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def args_gpu():
    from zerofit.base import hardware

    return hardware.GPUS["h100-80g"]


def test_log_levels(tmp_path, monkeypatch):
    before = transformers.logging.get_verbosity()
    words = "--max_steps 1 --log_level error --log_level_replica critical --log_on_each_node false".split()
    try:
        arguments = trainer_of(tmp_path / "run", *words).args
        assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    finally:
        transformers.logging.set_verbosity(before)
    for name, rank in (("process_index", 1), ("local_process_index", 0)):
        monkeypatch.setattr(type(arguments), name, property(lambda self, rank=rank: rank))
    assert arguments.get_process_log_level() == transformers.logging.CRITICAL  # of another node's first process
    arguments.log_on_each_node = True
    assert arguments.get_process_log_level() == transformers.logging.ERROR


def test_full_determinism(tmp_path):
    try:
        trainer_of(tmp_path / "run", "--max_steps", "1", "--full_determinism", "true")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_compiled_model(tmp_path):
    words = "--max_steps 1 --torch_compile true --torch_compile_backend eager --torch_compile_mode reduce-overhead"
    trainer = trainer_of(tmp_path / "run", *words.split())
    plugin = trainer.accelerator.state.dynamo_plugin
    assert (plugin.backend.value.lower(), plugin.mode) == ("eager", "reduce-overhead")
    assert isinstance(trainer.accelerator.prepare_model(trainer.model), torch._dynamo.eval_frame.OptimizedModule)


def test_settings_of_ddp(tmp_path, monkeypatch):
    """What transformers hands to accelerate for torch's wrapper."""
    words = "--max_steps 1 --ddp_bucket_cap_mb 7 --ddp_broadcast_buffers true"
    trainer = trainer_of(tmp_path / "run", *words.split())
    monkeypatch.setattr(type(trainer.args), "parallel_mode", transformers.training_args.ParallelMode.DISTRIBUTED)
    trainer._wrap_model(trainer.model)
    assert (trainer.accelerator.ddp_handler.bucket_cap_mb, trainer.accelerator.ddp_handler.broadcast_buffers) == (
        7,
        True,
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ddp_backend", "mpi"], "--ddp_backend mpi: this run uses gloo; leave it out."),
        (["--tf32", "true"], "--tf32 true: TF32 needs an NVIDIA GPU"),
        (
            ["--metric_for_best_model", "accuracy"],
            "--metric_for_best_model accuracy: an evaluation of sft computes eval_loss and",
        ),
        (["--logging_nan_inf_filter", "true"], "--logging_nan_inf_filter true: --on_nan already excludes"),
    ],
)
def test_what_the_trainer_decides(words, says):
    with pytest.raises(UserError, match=says):
        parse(*words)
    parse("--ddp_backend", "gloo", "--logging_nan_inf_filter", "false")


def row_losses(file, smoothing: float = 0.0) -> list[tuple[float, int]]:
    """Return (summed loss, supervised tokens) of each row of `file` under the bundled model."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32)
    settings = parse("--data", str(file))
    found = []
    for row in load_datasets(settings, tokenizer)[0].dataset:
        labels = torch.tensor(row["labels"])[1:]
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        found.append((loss.item(), int((labels != -100).sum())))
    return found


@pytest.fixture
def three_rows(tmp_path):
    """Three rows of different lengths: the second step of two ranks is half filler."""
    answers = ("Hana has a parrot.", "Lima.", "Ada works as a nurse, and Enzo works as a baker.")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "Who?", "completion": answer}) + "\n" for answer in answers))
    return file


def few_steps(file, *words) -> list[str]:
    """Return the flags of a run on the rows as they stand in the file, whose weights hardly move."""
    return [
        "--model", "tiny", "--data", str(file), "--train_sampling_strategy", "sequential",
        "--effective_batch_size", "2", "--zero", "0",
        "--per_device_train_batch_size", "1", "--max_steps", "2", "--num_samples", "0", "--save_strategy", "no",
        "--logging_steps", "1", "--learning_rate", "1e-12", *words,
    ]  # fmt: skip


def test_tokens_counted_by_each_rank_alone(tmp_path, three_rows):
    """With --average_tokens_across_devices false the loss is the mean of the ranks' means."""
    cases = {
        value: ("sft", few_steps(three_rows, "--average_tokens_across_devices", value)) for value in ("true", "false")
    }
    runs = run_world(2, cases, tmp_path)
    (first, n), (second, m), (third, k) = row_losses(three_rows)
    assert runs["true"].losses == pytest.approx([(first + second) / (n + m), third / k], rel=1e-4)
    assert runs["false"].losses == pytest.approx([(first / n + second / m) / 2, third / k / 2], rel=1e-4)


def test_label_smoothing(tmp_path, three_rows):
    runs = run_world(1, {"run": ("sft", few_steps(three_rows, "--label_smoothing_factor", "0.2"))}, tmp_path)
    (first, n), (second, m), (third, k) = row_losses(three_rows, 0.2)
    assert runs["run"].losses == pytest.approx([(first + second) / (n + m), third / k], rel=1e-4)


def test_label_smoothing_of_a_class_that_transformers_does_not_know(tmp_path, monkeypatch):
    """As of --trust_remote_code: the labels are shifted all the same."""
    with process_as_before():
        trainer = trainer_of(tmp_path / "run", "--label_smoothing_factor", "0.2")
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model.eval()
        with torch.no_grad():
            known = trainer.compute_loss(trainer.model, dict(batch)).item()
            monkeypatch.setattr("transformers.trainer.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
            assert trainer.compute_loss(trainer.model, dict(batch)).item() == known


def test_what_a_hub_is_sent(tmp_path, monkeypatch):
    """A stand-in for the hub's client notes what transformers asks it for."""
    asked = []

    class Hub:
        def __getattr__(self, name):
            def call(*positional, **named):
                asked.append((name, positional, named))
                return SimpleNamespace(repo_id="me/tiny", done=lambda: True)

            return call

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    words = """--push_to_hub true --hub_model_id me/tiny --hub_token hf_x --hub_private_repo true --hub_revision next
    --hub_strategy checkpoint --hub_always_push true --save_strategy steps --save_steps 1 --max_steps 2""".split()
    trainer = trainer_of(tmp_path / "run", *words)
    name, (repo,), named = asked[0]
    assert (name, repo, named["token"], named["private"]) == ("create_repo", "me/tiny", "hf_x", True)
    trainer.train()
    sent = [named for name, _, named in asked if name == "upload_folder"]
    assert {one["revision"] for one in sent} == {"next"} and {one["repo_id"] for one in sent} == {"me/tiny"}
    assert {one.get("path_in_repo") for one in sent} == {None, "last-checkpoint"}  # --hub_strategy checkpoint
    assert len(sent) == 4  # of both steps
    trainer.args.hub_strategy = transformers.trainer_utils.HubStrategy.END
    asked.clear()
    trainer._push_from_checkpoint(str(tmp_path / "run" / "checkpoint-2"))
    assert not asked


def test_what_a_tracker_is_told(tmp_path, monkeypatch):
    """A stand-in for trackio notes how it is started."""
    started = {}
    context = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: started["space_id"]))
    stub = SimpleNamespace(
        init=lambda **named: started.update(named),
        config={},
        context_vars=context,
        __spec__=importlib.util.spec_from_loader("trackio", None),
    )
    monkeypatch.setitem(sys.modules, "trackio", stub)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_trackio_available", lambda: True)
    words = """--max_steps 1 --run_name mine --project kit --trackio_space_id me/space
    --trackio_bucket_id me/bucket""".split()
    trainer = trainer_of(tmp_path / "run", *words)
    callback = transformers.integrations.TrackioCallback()
    callback.setup(trainer.args, trainer.state, trainer.model)
    assert (started["name"], started["project"], started["space_id"]) == ("mine", "kit", "me/space")
    assert "me/bucket" in started.values()
