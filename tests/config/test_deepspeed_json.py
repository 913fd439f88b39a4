"""The DeepSpeed JSON: what the file says is what runs, or one sentence says why not."""

import json
import re

import pytest
import torch
from conftest import TINY, run_world

from zerofit.base.errors import UserError
from zerofit.config import deepspeed_json, deepspeed_names, resolve
from zerofit.job.settings import merge_json


@pytest.fixture
def write(tmp_path):
    def _write(text):
        file = tmp_path / "my.json"
        file.write_text(text if isinstance(text, str) else json.dumps(text))
        return str(file)

    return _write


def parse(*flags, ranks=1):
    return resolve.resolve_settings("sft", list(flags), ranks)


BASE = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bundled_files_pass_the_lint_and_deepspeed(stage):
    from deepspeed.runtime.config import DeepSpeedConfig

    for overlay in (None, "optimizer", "all", "optimizer_nvme", "all_nvme"):
        config = deepspeed_json.read_json(deepspeed_json.CONFIGS / f"zero{stage}.json")
        assert config["zero_optimization"]["stage"] == stage
        if overlay:
            config = merge_json(config, deepspeed_json.read_json(deepspeed_json.CONFIGS / f"offload_{overlay}.json"))
        deepspeed_json.lint(config, "file")
        config = json.loads(re.sub(r'"\w+": "auto",?', "", json.dumps(config)).replace(", }", "}").replace(",}", "}"))
        DeepSpeedConfig({**config, "train_micro_batch_size_per_gpu": 1})


def test_readme_explains_every_key_of_every_file():
    text = (deepspeed_json.CONFIGS / "README.md").read_text()

    def keys(config):
        for key, value in config.items():
            yield key
            if isinstance(value, dict):
                yield from keys(value)

    for file in deepspeed_json.CONFIGS.glob("*.json"):
        for key in keys(deepspeed_json.read_json(file)):
            assert f"`{key}`" in text, f"{file.name}: {key}"


def test_stages_1_and_2_reduce_gradients_to_their_owners(write):
    """Not on many ranks, nor where overlap_comm would wait for the GPU, nor where the file says otherwise."""

    def all_reduces(*flags, ranks=2, recipe="sft"):
        settings = resolve.resolve_settings(recipe, list(flags), ranks)
        return settings.deepspeed["zero_optimization"].get("use_multi_rank_bucket_allreduce", True)

    assert [all_reduces("--zero", z) for z in "123"] == [False, False, True]
    assert not all_reduces("--zero", "2", ranks=64)
    assert all_reduces("--zero", "2", ranks=128)
    assert not all_reduces("--zero", "2", "--tp_size", "2", ranks=128)
    stages = ("--pp_size", "2", "--gradient_accumulation_steps", "8", "--per_device_train_batch_size", "1")
    assert not all_reduces(*stages, ranks=128, recipe="pipeline")
    for flags, ranks, on in (([], 128, True), ([], 64, False), (["--offload", "optimizer"], 128, False),
                             (["--tp_size", "2"], 256, False), (["--zero", "1"], 128, True)):  # fmt: skip
        settings = resolve.resolve_settings("sft", ["--zero", "2", *flags] if "--zero" not in flags else flags, ranks)
        assert settings.deepspeed["zero_optimization"].get("overlap_comm", False) is on, (flags, ranks)
        assert any("overlap_comm true" in line for line in settings.decisions) is on
    literal = write({"zero_optimization": {"stage": 2, "overlap_comm": False}})
    section = resolve.resolve_settings("sft", ["--deepspeed", literal], 128).deepspeed["zero_optimization"]
    assert section["overlap_comm"] is False and "use_multi_rank_bucket_allreduce" not in section
    for key in ("overlap_comm", "use_multi_rank_bucket_allreduce"):
        assert all_reduces("--deepspeed", write({"zero_optimization": {"stage": 2, key: True}}))


@pytest.mark.slow
def test_overlapped_communication_gives_the_same_bits(tmp_path):
    """Two ranks, several buckets. A CPU has no streams, so this is about the bookkeeping alone."""
    cases = {}
    for zero in "12":
        for overlap in (False, True):
            config = json.loads((deepspeed_json.CONFIGS / f"zero{zero}.json").read_text())
            config["zero_optimization"] |= {"overlap_comm": overlap, "reduce_bucket_size": 50_000}
            file = tmp_path / f"{zero}-{overlap}.json"
            file.write_text(json.dumps(config))
            flags = ["--data", str(TINY / "train.jsonl"), "--max_samples", "64", "--max_steps", "4", "--num_samples",
                     "0", "--effective_batch_size", "8", "--per_device_train_batch_size", "2", "--logging_steps", "1",
                     "--save_strategy", "no", "--deepspeed", str(file)]  # fmt: skip
            cases[f"{zero}-{overlap}"] = ("sft", flags)
    runs = run_world(2, cases, tmp_path)
    for zero in "12":
        plain, overlapped = runs[f"{zero}-False"], runs[f"{zero}-True"]
        assert overlapped.json("deepspeed.json")["zero_optimization"]["overlap_comm"] is True
        assert (overlapped.losses, overlapped.grad_norms) == (plain.losses, plain.grad_norms)
        logits = [torch.load(run.folder / "logits.pt")["logits"] for run in (plain, overlapped)]
        assert torch.equal(*logits)


def test_literals_in_the_file_win_over_defaults_and_are_said(write):
    path = write(
        BASE | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5}
    )
    found = parse("--deepspeed", path)
    assert (found.zero, found.per_device_train_batch_size, found.gradient_accumulation_steps) == (2, 2, 3)
    assert (found.effective_batch_size, found.max_grad_norm) == (6, 0.5)
    assert found.source["max_grad_norm"] == "deepspeed JSON"
    assert any("gradient_clipping" in d for d in found.decisions)


def test_a_file_that_leaves_keys_out_runs_with_the_arguments(write):
    """DeepSpeed would stop without a batch, clip nothing, and compute in fp32."""
    found = parse("--deepspeed", write(BASE | {"fp16": {"hysteresis": 1}}))
    assert {name: found.deepspeed[name] for name in found.deepspeed if name != "zero_optimization"} == {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "hysteresis": 1},
    }  # fmt: skip
    assert any("gradient_clipping" in decision and "lacks them" in decision for decision in found.decisions)
    own = parse("--deepspeed", write(BASE | {"gradient_clipping": 0, "torch_autocast": {"enabled": True}})).deepspeed
    assert own["gradient_clipping"] == 0 and "bf16" not in own and "fp16" not in own


def test_optimizer_and_scheduler_of_the_file_are_what_runs(write):
    """transformers compares these with its arguments after the model has been loaded."""
    adam = {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0}}
    warmup = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": "auto"}}
    found = parse("--deepspeed", write(BASE | {"optimizer": adam, "scheduler": warmup}))
    assert (found.adam_beta1, found.adam_beta2, found.adam_epsilon, found.weight_decay) == (0.8, 0.95, 1e-7, 0)
    assert (found.learning_rate, found.warmup_steps) == (1e-5, 5)
    assert any("--lr_scheduler_type is not used" in decision for decision in found.decisions)


def test_offload_in_the_file_is_what_runs(write):
    path = write({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    found = parse("--deepspeed", path)
    assert (found.zero, found.offload) == (3, "optimizer")
    assert "offload_param" not in found.deepspeed["zero_optimization"]


def test_an_edited_bundled_file_is_what_runs(monkeypatch, tmp_path):
    config = deepspeed_json.read_json(deepspeed_json.CONFIGS / "zero2.json")
    config["zero_optimization"]["reduce_bucket_size"] = 12345
    (tmp_path / "zero2.json").write_text(json.dumps(config))
    monkeypatch.setattr(deepspeed_json, "CONFIGS", tmp_path)
    assert parse("--zero", "2").deepspeed["zero_optimization"]["reduce_bucket_size"] == 12345


def test_a_literal_that_equals_the_default_still_binds(write):
    """Accumulation 1 is also the default, so a derived 4 would contradict the file without a word."""
    path = write(BASE | {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "fp16": {"enabled": "auto"}})
    found = parse("--deepspeed", path)
    assert found.gradient_accumulation_steps == 1 and found.effective_batch_size == found.per_device_train_batch_size
    assert found.source["bf16"] == "deepspeed JSON" and found.precision == "fp32"


def test_timers_and_parallelism_that_is_off_pass(write):
    off = {"tensor_parallel": {"autotp_size": 1}, "expert_parallel": {"enabled": False}, "pipeline": {"stages": 1}}
    path = write(BASE | off | {"timers": {"throughput": {"enabled": False}}, "sequence_parallel_size": 1})
    assert parse("--deepspeed", path).deepspeed["timers"] == {"throughput": {"enabled": False}}


def test_same_value_in_both_places_is_no_contradiction(write):
    path = write(BASE | {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2})
    found = parse("--deepspeed", path, "--max_grad_norm", "1.0", "--gradient_accumulation_steps", "2", "--zero", "2")
    assert found.gradient_accumulation_steps == 2


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        (
            BASE | {"checkpoint": {"writer": {"type": "python", "decoupled": True}}},
            [],
            'checkpoint.writer = {"type": "python", "decoupled": true}: this writer may not have finished when the '
            "checkpoint",
        ),
        (BASE | {"gradient_cliping": 1}, [], "unknown key 'gradient_cliping'; did you mean 'gradient_clipping'"),
        (BASE | {"tensor_parallel": {"autotp_size": 2}}, [], "tensor_parallel.autotp_size = 2: the batch would be"),
        (BASE | {"tensor_parallel": {"tp": {"tp_size": 4}}}, [], "tensor_parallel.tp.tp_size = 4"),
        (BASE | {"expert_parallel": {"enabled": True}}, [], "expert_parallel.enabled = true: DeepSpeed's AutoEP"),
        (BASE | {"pipeline": {"stages": 2}}, [], "pipeline.stages = 2"),
        (BASE | {"sequence_parallel_size": 2}, [], "sequence_parallel_size = 2"),
        (BASE | {"autotuning": {"enabled": True}}, [], "autotuning.enabled = true: DeepSpeed would end the run"),
        (BASE | {"autotuning": True}, [], "autotuning = true: must be an object"),
        (BASE | {"amp": {"enabled": True}}, [], "amp: "),
        (BASE | {"elasticity": {}}, [], "elasticity"),
        (BASE | {"bf16": {"loss_scale": 0}}, [], "unknown key 'bf16.loss_scale'"),
        (BASE | {"fp16": {"min_loss_scale": 0.5}}, [], "fp16.min_loss_scale = 0.5"),
        (BASE | {"bf16": True}, [], "bf16 must be an object"),
        (
            {"zero_optimization": {"stage": 2, "overlapcomm": True}},
            [],
            "unknown key 'zero_optimization.overlapcomm'; did you mean 'overlap_comm'",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_size": 1}},
            [],
            "did you mean 'stage3_prefetch_bucket_size'",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"pin_memry": True}}}, [], "did you mean 'pin_memory'"),
        ({"zero_optimization": {"stage": 3, "qwerty": 1}}, [], "unknown key 'zero_optimization.qwerty'"),
        ({"zero_optimization": {"stage": "two"}}, [], 'stage = "two": must be one of 0, 1, 2, 3.'),
        ({"zero_optimization": {"stage": 7}}, [], "zero_optimization.stage = 7"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "gpu"}}}, [], "offload_optimizer.device"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": "auto"}}, [], 'overlap_comm does not support "auto"'),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, [], "offload_param needs stage 3"),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, [], "mics_shard_size"),
        ({"train_batch_size": 8}, [], '"zero_optimization" section is missing'),
        (BASE | {"gradient_accumulation_steps": "4"}, [], 'gradient_accumulation_steps = "4": must be an integer'),
        (BASE | {"train_batch_size": 2.0}, [], "train_batch_size = 2.0: must be an integer"),
        (BASE | {"train_micro_batch_size_per_gpu": True}, [], "= true: must be an integer"),
        (BASE | {"gradient_clipping": "1.0"}, [], 'gradient_clipping = "1.0": must be a number'),
        (BASE | {"zero_force_ds_cpu_optimizer": "false"}, [], '= "false": must be true or false'),
        (BASE | {"optimizer": "AdamW"}, [], 'optimizer = "AdamW": must be an object'),
        (BASE | {"optimizer": {"type": "AdamW", "params": {"lr": "3e-5"}}}, [], 'lr = "3e-5": must be a number'),
        (BASE | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, [], "betas = [0.9]: must be two numbers"),
        (
            BASE | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
            ["--adam_beta2", "0.99"],
            "optimizer.params.betas = [0.9, 0.95], but --adam_beta2 is 0.99",
        ),
        (
            BASE | {"scheduler": {"type": "WarmupLR", "params": {}}},
            ["--lr_scheduler_type", "linear"],
            'has a "scheduler" section (WarmupLR), but --lr_scheduler_type is',
        ),
        (
            BASE | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.5]}}},
            [],
            "optimizer.params.betas = [0.9, 1.5]: it must be at least 0 and below 1",
        ),
        (BASE | {"optimizer": {"type": "AdamW", "params": {"eps": -1}}}, [], "params.eps = -1: it must be above 0"),
        (BASE | {"gradient_clipping": float("nan")}, [], "my.json: NaN is not finite"),
        (BASE | {"gradient_clipping": -1.0}, [], "gradient_clipping = -1.0: it must be 0 or more"),
        ('{"zero_optimization": {"stage": 2}, "gradient_clipping": 1e999}', [], "1e999 is not finite"),
        (BASE | {"scheduler": {"params": {"total_num_steps": 9}}}, [], 'total_num_steps = 9: write "auto"'),
        (BASE, ["--zero", "3"], "zero_optimization.stage = 2, but --zero is 3"),
        (BASE | {"gradient_accumulation_steps": 4}, ["--gradient_accumulation_steps", "2"], "but --gradient_acc"),
        (BASE | {"train_batch_size": 64}, ["--effective_batch_size", "32"], "but --effective_batch_size is 32"),
        (BASE | {"gradient_clipping": 1.0}, ["--max_grad_norm", "0.5"], "but --max_grad_norm is 0.5"),
        (BASE | {"bf16": {"enabled": True}}, ["--bf16", "false"], "but --bf16 is False"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            ["--offload", "none"],
            "but --offload is none",
        ),
        ('{\n "zero_optimization": {"stage": 2 3}\n}', [], "my.json:2:35: not valid JSON"),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', [], "'stage' appears twice"),
        ("[]", [], "must contain a JSON object"),
        ("", [], "my.json:1:1: not valid JSON"),
    ],
)
def test_refusals(write, config, flags, says):
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        parse("--deepspeed", write(config), *flags)
    assert "\n" not in str(caught.value) and "my.json" in str(caught.value)


def test_stage_3_always_saves_whole_weights(write):
    key = "stage3_gather_16bit_weights_on_model_save"
    found = parse("--deepspeed", write({"zero_optimization": {"stage": 3}}))
    assert found.deepspeed["zero_optimization"][key] is True and any(key in d for d in found.decisions)
    with pytest.raises(UserError, match="final/ would lack the weights; write true"):
        parse("--deepspeed", write({"zero_optimization": {"stage": 3, key: False}}))


@pytest.mark.bad_input
def test_missing_and_binary_files(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        parse("--deepspeed", str(tmp_path / "none.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a UTF-8"):
        parse("--deepspeed", str(tmp_path / "binary.json"))


# --- older names, comments, and what the installed DeepSpeed lacks ---

CPU = {"device": "cpu"}

# zero_optimization as people write it -> (as it is read, --offload).
OLDER = {
    "cpu_offload": ({"stage": 2, "cpu_offload": True}, {"offload_optimizer": CPU}, "optimizer"),
    "cpu_offload off": ({"stage": 2, "cpu_offload": False}, {}, "none"),
    "cpu_offload_param": ({"stage": 3, "cpu_offload_param": True}, {"offload_param": CPU}, "all"),
    "cpu_offload_params": (
        {"stage": 3, "cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": True},
        {"offload_optimizer": CPU | {"pin_memory": True}, "offload_param": CPU | {"pin_memory": True}}, "all",
    ),
    "without stage3_": (
        {"stage": 3, "gather_16bit_weights_on_model_save": True, "prefetch_bucket_size": "auto"},
        {"stage3_gather_16bit_weights_on_model_save": True, "stage3_prefetch_bucket_size": "auto"}, "none",
    ),
    "fp16 for 16bit": (
        {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True},
        {"stage3_gather_16bit_weights_on_model_save": True}, "none",
    ),
    "comments": ({"stage": 2, "_comment": "ours", "//": {"x": "auto"}}, {"stage": 2}, "none"),
}  # fmt: skip


@pytest.mark.injection
@pytest.mark.parametrize("what", OLDER)
def test_older_and_shorter_names_are_read_as_what_they_are(write, what):
    """The start said "offload none" and DeepSpeed offloaded; a second name of a key was added beside the first."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section, read, offload = OLDER[what]
    settings = parse("--deepspeed", write({"_comment": "zero", "zero_optimization": section}))
    found = settings.deepspeed["zero_optimization"]
    assert {key: found.get(key) for key in read} == read and settings.offload == offload
    assert not {*section} - {*read, "stage"} & {*found} and "_comment" not in settings.deepspeed
    assert any("read older or shorter names" in line for line in settings.decisions) is (what != "comments")
    literals = {key: value for key, value in found.items() if value != "auto"}
    assert not [key for key in DeepSpeedZeroConfig(**literals).model_fields_set if key.startswith("cpu_")]


def test_bfloat16_is_read_as_bf16(write):
    settings = parse("--deepspeed", write(BASE | {"bfloat16": {"enabled": False}}))
    assert settings.deepspeed["bf16"] == {"enabled": False} and "bfloat16" not in settings.deepspeed


LACKING = {
    "optimizer": (
        {"optimizer": {"type": "OneBitAdam"}},
        "optimizer.type = 'OneBitAdam': unknown to the installed DeepSpeed",
    ),
    "optimizer of torch": ({"optimizer": {"type": "lr_scheduler"}}, "unknown to .*; use one of adagrad, adam"),
    "its setting": (
        {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentun": 0.9}}},
        "optimizer.params.momentun: SGD does not support it; supported are lr, momentum",
    ),
    "package": ({"optimizer": {"type": "MuAdam"}}, "the package mup is not installed: pip install mup"),
    "scheduler": ({"scheduler": {"type": "Cosine"}}, "unknown to .*; use one of LRRangeTest, OneCycle"),
    "setting of a scheduler": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        "warmup_steps: WarmupLR does not support it",
    ),
    "setting that is needed": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3}}},
        "total_num_steps: WarmupDecayLR requires it",
    ),
    "monitor": ({"tensorboard": {"enabled": True}}, "tensorboard: its package is not installed: pip install tensorb"),
    "comet": ({"comet": {"enabled": True}}, "comet: its package is not installed: pip install comet-ml"),
    "twice": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": CPU}},
        "cpu_offload and offload_optimizer are the same setting; keep offload_optimizer",
    ),
    "twice, shorter": (
        {"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 1}},
        "max_live_parameters and stage3_max_live_parameters are the same setting",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("what", LACKING)
def test_what_the_installed_deepspeed_lacks_is_refused_before_anything_is_loaded(write, monkeypatch, what):
    section, said = LACKING[what]
    of_package = deepspeed_names.importlib.util.find_spec
    hidden = ("tensorboard", "comet_ml", "mup")
    monkeypatch.setattr(deepspeed_names.importlib.util, "find_spec", lambda n: None if n in hidden else of_package(n))
    with pytest.raises(UserError, match=said):
        parse("--deepspeed", write(BASE | section))
