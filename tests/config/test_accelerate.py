"""`accelerate launch`: settings that differ from the run are reported, or stop the start."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, TINY

from zerofit.base.errors import UserError
from zerofit.config import accelerate_env, resolve

DEEPSPEED = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 1}

# accelerate's file -> (the flags of the recipe that do the same, flags that a run has beside them).
FILES = {
    "DeepSpeed file": (DEEPSPEED | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "--deepspeed ds.json"),
    "stage": (DEEPSPEED | {"deepspeed_config": {"zero_stage": 3}}, "--zero 3"),
    "offload": (
        DEEPSPEED | {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}},
        "--zero 3 --offload optimizer",
    ),
    "offload of both": (
        DEEPSPEED | {"deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}}, "--zero 3 --offload all",
    ),
    "clipping": (DEEPSPEED | {"deepspeed_config": {"gradient_clipping": 0.3}}, "--max_grad_norm 0.3"),
    "accumulation": (
        DEEPSPEED | {"deepspeed_config": {"gradient_accumulation_steps": 16}}, "--gradient_accumulation_steps 16",
    ),
    "FSDP": ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}}, "--zero 3 --offload all"),
    "context parallel": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
         "parallelism_config": {"parallelism_config_cp_size": 2}},
        "--zero 3 --sp_size 2",
    ),
    "tensor parallel": ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "--tp_size 2"),
    "precision": ({"mixed_precision": "bf16"}, "--bf16 true"),
    "8 bits": ({"mixed_precision": "fp8"}, "--fp8 true"),
    "Megatron": ({"distributed_type": "MEGATRON_LM"}, "--zero 3"),
}  # fmt: skip

NOTHING = {
    "processes alone": {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "no"},
    "defaults": DEEPSPEED | {"deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 1,
                                                  "gradient_clipping": 1.0, "offload_param_device": "none"}},
    "auto": DEEPSPEED | {"deepspeed_config": {"zero_stage": 2, "gradient_clipping": "auto"}},
}  # fmt: skip


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Return what is said of a run that `accelerate launch` started with a file, named or its default, and options."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))

    def said(config: dict | str, named: bool, *flags, options=()):
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        file = tmp_path / ("mine.yaml" if named else "home/accelerate/default_config.yaml")
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        argv = ["python", "/bin/accelerate", "launch", *(["--config_file", str(file)] if named else []), *options]
        monkeypatch.setattr(accelerate_env, "_accelerate_command", lambda: argv)
        settings = resolve.resolve_settings("sft", ["--data", "none", "--zero", "2", "--use_cpu", *flags], 2)
        return accelerate_env.compare(settings)

    return said


@pytest.mark.injection
@pytest.mark.parametrize("what", FILES)
def test_a_file_of_accelerate_that_is_named_and_contradicts_the_run_stops_it(compare, what):
    """Its DeepSpeed file, offload, clipping and context parallel were dropped without a line."""
    config, flags = FILES[what]
    with pytest.raises(UserError, match=r"--config_file .*mine.yaml sets .* the recipe decides") as refused:
        compare(config, True)
    assert f"Give the recipe {flags}, or remove" in str(refused.value)
    (line,) = compare(config, False)  # of `accelerate config`, which the user may have made for other jobs
    assert "default_config.yaml of accelerate is not used" in line and line.endswith(f"use {flags}")


@pytest.mark.bad_input
@pytest.mark.parametrize("named", [True, False])
def test_a_key_that_stands_twice_in_a_file_of_accelerate_is_refused(compare, named):
    text = "deepspeed_config:\n  zero_stage: 2\n  zero_stage: 3\n"
    with pytest.raises(UserError, match=r"\.yaml:3:3: not valid YAML: 'zero_stage' is also in line 2"):
        compare(text, named)


@pytest.mark.parametrize("what", NOTHING)
def test_a_file_of_accelerate_that_asks_for_nothing_else_is_not_said(compare, what):
    assert compare(NOTHING[what], True) == compare(NOTHING[what], False) == []


def test_a_run_that_does_the_same_starts(compare):
    assert compare(FILES["clipping"][0], True, "--max_grad_norm", "0.3") == []
    assert compare(FILES["accumulation"][0], True, "--gradient_accumulation_steps", "16") == []
    said = compare({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, True)
    assert said == [
        "mine.yaml of accelerate: dynamo_config is not used; compile_layers: true compiles the decoder layers"
    ]


OPTIONS = {
    "--zero_stage 3 --offload_param_device cpu": "--zero 3 --offload all",
    "--deepspeed_config_file=ds.json": "--deepspeed ds.json",
    "--gradient_clipping 0.3": "--max_grad_norm 0.3",
    "--use_fsdp": "--zero 3",
    "--mixed_precision bf16": "--bf16 true",
}


@pytest.mark.injection
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_accelerate_that_contradict_the_run_stop_it(compare, options):
    with pytest.raises(UserError, match=f"accelerate launch sets .*Give the recipe {OPTIONS[options]}, or"):
        compare({}, False, options=options.split())
    assert compare({}, False, options=["--use_deepspeed", "--num_processes", "2"]) == []


@pytest.mark.slow
def test_accelerate_itself_starts_the_recipe_that_is_compared(tmp_path):
    """The command line is that of the process above, and clipping is dropped from the environment too."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(FILES["offload"][0] | {"use_cpu": True}))
    words = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "mine.yaml")]
    words += [str(ROOT / "recipes" / "sft.py"), "--use_cpu", "true", "--data", str(TINY / "train.jsonl")]
    words += ["--output_dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *words], env=os.environ, text=True, capture_output=True, timeout=300)
    assert done.returncode != 0 and "Give the recipe --zero 3 --offload optimizer, or remove" in done.stderr
    assert not Path(tmp_path / "run").exists()
