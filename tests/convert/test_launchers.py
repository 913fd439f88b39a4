"""accelerate's and DeepSpeed's files, alone and beside a job's: stage, offload, precision, batch."""

import json

import pytest
from converted import Case, check

from zerofit.base.errors import UserError
from zerofit.tools import convert

ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
    },
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}

CASES = [
    Case(
        "accelerate with DeepSpeed",
        """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 8
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'bf16'
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
""",
        "sft",
        "sft GPUS=8",
        {"zero": 2, "offload": "optimizer", "bf16": True, "gpus": 8, "gradient_accumulation_steps": 8},
        ranks=8,
    ),
    Case(
        "accelerate with FSDP",
        """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_offload_params: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: fp16
num_machines: 1
num_processes: 4
""",
        "sft",
        "sft GPUS=4",
        {"zero": 3, "offload": "all", "gpus": 4},
        ranks=4,
        on_gpus={"fp16": True},
    ),
    Case(
        "accelerate with plain DDP",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n",
        "sft",
        "sft GPUS=2",
        {"zero": 0, "gpus": 2},
        ranks=2,
    ),
    Case("DeepSpeed", json.dumps(ZERO3), "sft", "sft", {"zero": 3, "offload": "all"}, ranks=2, file="ds.json"),
    Case(
        "DeepSpeed with everything in it",
        json.dumps({
            "zero_optimization": {"stage": 1},
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 50}},
            "steps_per_print": 10,
        }),
        "sft",
        "sft",
        {"zero": 1, "offload": "none", "effective_batch_size": 12, "max_grad_norm": 0.5, "bf16": True,
         "learning_rate": 1e-5, "adam_beta2": 0.95, "weight_decay": 0.1, "lr_scheduler_type": "linear",
         "warmup_steps": 50},
        ranks=2,
        file="ds.json",
        lost=("steps_per_print",),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_trains_the_same(case, tmp_path):
    check(case, tmp_path)


def test_a_launchers_file_beside_a_jobs(tmp_path):
    """Its processes make the effective batch, its sharding is added, and the job's own values stay."""
    job, launcher = tmp_path / "config.yaml", tmp_path / "zero3.yaml"
    job.write_text("model_name_or_path: a/b\ndataset_name: c/d\nper_device_train_batch_size: 2\n"
                   "gradient_accumulation_steps: 4\n")  # fmt: skip
    launcher.write_text("distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
                        "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 1}\n")  # fmt: skip
    done = convert.convert_files([str(launcher), str(job)])
    values = {name: line.value for name, line in done.lines.items()}
    assert done.kit.name == "TRL"
    assert (values["effective_batch_size"], values["zero"], values["bf16"]) == (64, 3, True)
    assert convert._command(done, "x") == "make sft GPUS=8 CONFIG=x"
    with pytest.raises(UserError, match="one job at a time"):
        convert.convert_files([str(job), str(job)])


@pytest.mark.parametrize("form", ["beside", "text", "object", "name", "missing"])
def test_a_deepspeed_configuration_in_a_file(form, tmp_path):
    """A path beside the file, JSON as a text, an object, and a name alone give the stage; another name is listed."""
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "mine.json").write_text(json.dumps(ZERO3))
    value = {
        "beside": "ds/mine.json",
        "text": json.dumps(json.dumps(ZERO3)),
        "object": json.dumps(ZERO3),
        "name": "cache/ds_z3_offload_config.json",
        "missing": "cache/mine.json",
    }[form]
    job = tmp_path / "job.yaml"
    job.write_text(f"stage: sft\nfinetuning_type: full\ndataset: a.json\nmodel_name_or_path: a\ndeepspeed: {value}\n")
    done = convert.convert_files([str(job)])
    if form == "missing":
        assert "zero" not in done.lines and "deepspeed" in done.lost
    else:
        assert (done.lines["zero"].value, done.lines["offload"].value) == (3, "all")
