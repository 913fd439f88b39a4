"""Mixtures of experts: ranks whose tokens select other experts, --experts_implementation, a quantized base."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, run_world, runs_slow, slow_but
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from zerofit.base import hardware, log_filters
from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.model import experts
from zerofit.model.weights import converted
from zerofit.plan import candidates, formulas
from zerofit.plan.speed import kernels, step

# A block whose experts are modules of their own, as models that bring their own code have it.
ROUTED = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class Block(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = torch.nn.Linear(config.hidden_size, 32, bias=False)
        self.experts = torch.nn.ModuleList(LlamaMLP(config) for _ in range(32))

    def forward(self, hidden):
        tokens = hidden.flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            at = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, at, self.experts[number](tokens[at]) * weight[at, None])
        return out.view_as(hidden)


class RoutedForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Block(config)
        self.post_init()
"""
SIZES = {"vocab_size": 512, "hidden_size": 48, "intermediate_size": 32, "moe_intermediate_size": 32,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24,
         "num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2, "pad_token_id": 0,
         "bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.2}  # fmt: skip


def save_model(kind: str, folder: Path) -> str:
    """Write a tiny mixture of experts; kind: a model type of transformers, or "routed" for the class above."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    torch.manual_seed(0)
    if kind == "routed":
        scope = {"__name__": "routed"}
        exec(ROUTED, scope)
        scope["RoutedForCausalLM"](AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder)
        (folder / "modeling_routed.py").write_text(ROUTED)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_routed.RoutedForCausalLM"}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "model" / file, folder / file)
    return str(folder)


COMMON = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "12", "--max_steps", "3", "--effective_batch_size", "2",
    "--per_device_train_batch_size", "1", "--logging_steps", "1", "--save_strategy", "no", "--num_samples", "0",
    "--trust_remote_code", "true",
    # AdamW's momentum moves an expert whose gradient is 0 (stage 3) and not one that has none (stage 0).
    "--optim", "sgd", "--optim_args", "momentum=0", "--learning_rate", "0.1",
]  # fmt: skip


KINDS = ("routed", "qwen3_moe", "mixtral")
# {name: (recipe, kind of model, stage)}; each against one rank at stage 0
CASES = {
    f"{recipe}-{kind}-{zero}": (recipe, kind, zero)
    for recipe, zero in (("sft", "3"), ("lora", "3"), ("sft", "2"), ("sft", "0"))
    for kind in KINDS
    if (kind, zero) != ("routed", "2")  # refused
}  # fmt: skip
UNUSED = ["--ddp_find_unused_parameters", "true"]
SHORT = ("sft-routed-3",)  # what `make test` runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("experts")
    everything = runs_slow(request)
    chosen = {name: case for name, case in CASES.items() if everything or name in SHORT}
    models = {kind: save_model(kind, folder / f"model-{kind}") for kind in {kind for _, kind, _ in chosen.values()}}
    flags = {kind: [*COMMON, "--model", model] for kind, model in models.items()}
    alone = {f"{recipe}-{kind}": (recipe, [*flags[kind], "--zero", "0"]) for recipe, kind, _ in chosen.values()}
    two = {
        name: (recipe, [*flags[kind], "--zero", zero, *(UNUSED if (kind, zero) == ("routed", "0") else [])])
        for name, (recipe, kind, zero) in chosen.items()
    }
    return run_world(1, alone, folder) | run_world(2, two, folder)


@pytest.mark.parametrize("name", slow_but(CASES, SHORT))
def test_ranks_that_select_other_experts_train_what_one_rank_trains(runs, name):
    one, two = runs[name.rpartition("-")[0]], runs[name]
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert two.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


# --- checkpoints, whose files hold each expert by itself ---

SAVING = [
    *COMMON, "--max_steps", "4", "--zero", "0", "--optim_args", "momentum=0.9", "--save_strategy", "steps",
    "--save_steps", "2", "--save_total_limit", "2",
]  # fmt: skip
# A larger loss is said to be better: step 2's.
BEST = [
    "--load_best_model_at_end", "true", "--eval_data", str(TINY / "eval.jsonl"), "--eval_strategy", "steps",
    "--eval_steps", "2", "--greater_is_better", "true",
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A mixture at stage 0 whose best step is loaded at the end, and gone on with from step 2 at stages 0 and 3."""
    folder = tmp_path_factory.mktemp("saved")
    flags = [*SAVING, "--model", save_model("qwen3_moe", folder / "model")]
    goes_on = ["--resume_from_checkpoint", str(folder / "whole" / "checkpoint-2"), "--save_strategy", "no"]
    cases = {"whole": [*flags, *BEST], "0>0": [*flags, *goes_on], "0>3": [*flags, *goes_on, "--zero", "3"]}
    return run_world(1, {name: ("sft", words) for name, words in cases.items()}, folder)


@pytest.mark.slow
def test_a_resume_goes_on_with_the_experts_of_its_checkpoint(saved):
    """transformers' Trainer goes on with the base's: it finds none of these names in the files."""
    wanted = [line for line in saved["whole"].metrics if "loss" in line][2:]
    assert saved["0>0"].losses == [line["loss"] for line in wanted]
    assert saved["0>0"].grad_norms == [line["grad_norm"] for line in wanted]
    assert saved["0>3"].losses == pytest.approx([line["loss"] for line in wanted], rel=1e-5)


@pytest.mark.slow
def test_the_best_steps_experts_are_loaded(saved):
    files = [saved["whole"].folder / name / "model.safetensors" for name in ("final", "checkpoint-2", "checkpoint-4")]
    final, best, last = (load_file(file) for file in files)
    assert "model.layers.0.mlp.experts.15.down_proj.weight" in final and final.keys() == best.keys() == last.keys()
    assert all(torch.equal(tensor, best[name]) for name, tensor in final.items())
    assert not any(torch.equal(tensor, last[name]) for name, tensor in final.items() if "experts.0." in name)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [
    ["gate_proj", "up_proj", "down_proj"], ["q_proj", "down_proj"],
    ["q_proj", "--lora_target_parameters", "experts.gate_up_proj", "experts.down_proj"],
])  # fmt: skip
def test_an_adapter_of_experts_goes_on(targets, tmp_path):
    flags = [*SAVING, "--model", save_model("qwen3_moe", tmp_path / "model"), "--lora_target_modules", *targets]
    goes_on = [*flags, "--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-2"), "--save_strategy", "no"]
    cases = {"whole": [*flags, *BEST], "on": goes_on, "at 3": [*goes_on, "--zero", "3"]}
    runs = run_world(1, {name: ("lora", words) for name, words in cases.items()}, tmp_path)
    losses = [line["loss"] for line in runs["whole"].metrics if "loss" in line]
    assert runs["on"].losses == losses[2:] and len(losses) == 4
    assert runs["at 3"].losses == pytest.approx(losses[2:], rel=1e-5)
    files = [tmp_path / "whole" / name / "adapter_model.safetensors" for name in ("final", "checkpoint-2")]
    final, best = (load_file(file) for file in files)
    assert any("experts" in name for name in final)
    assert all(torch.equal(tensor, best[name]) for name, tensor in final.items())


@pytest.mark.injection
@pytest.mark.parametrize(("change", "said"), [
    ({"model.norm.weight": None}, r"lacks model\.norm\.weight; it is incomplete or of another model"),
    ({"more.weight": [3]}, r"unexpected weights: more\.weight"),
    ({"model.norm.weight": [7]}, r"has model\.norm\.weight in shape \[7\] instead of \[48\]"),
    ({"model.layers.0.mlp.experts.3.up_proj.weight": None}, "cannot be loaded as Qwen3MoeFor"),
])  # fmt: skip
def test_a_checkpoint_of_experts_that_is_not_whole_is_refused(change, said, tmp_path):
    save_model("qwen3_moe", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file) | {name: shape and torch.zeros(shape) for name, shape in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})
    with pytest.raises(UserError, match=said):
        converted.load(model, tmp_path / "model")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_with_the_names_of_its_model_is_read_by_transformers():
    model = AutoModelForCausalLM.from_pretrained(TINY / "model")
    assert converted.load(model, TINY / "model") is False


# --- which modules, how many weights ---


def mixture(kind: str = "qwen3_moe", **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes))


def routed():
    from transformers import AutoConfig

    scope = {"__name__": "routed"}
    exec(ROUTED, scope)
    return scope["RoutedForCausalLM"](AutoConfig.for_model("llama", **SIZES))


def test_blocks_with_experts_of_their_own_are_leaves():
    from deepspeed.utils import get_z3_leaf_modules

    model = routed()
    experts.install(resolve.resolve_settings("sft", ["--zero", "3"], 2), model)
    assert experts.blocks(model) == get_z3_leaf_modules(model) == [layer.mlp for layer in model.model.layers]
    assert experts.blocks(mixture()) == []  # one module for all experts


@pytest.mark.bad_input
@pytest.mark.parametrize("zero", ["0", "1", "2"])
def test_stages_that_reduce_only_the_gradients_of_a_rank_are_refused(zero):
    settings = resolve.resolve_settings("sft", ["--zero", zero], 2)
    with pytest.raises(UserError, match=f"--zero {zero}: the experts of RoutedForCausalLM are separate modules"):
        experts.install(settings, routed())
    experts.install(settings, mixture())


def test_weights_of_fused_experts():
    model = mixture()
    assert experts.count(model.config) == 16
    assert experts.fused_weights(model) == 2 * 16 * 3 * 48 * 32 and experts.fused_weights(routed()) == 0
    assert experts.count(LlamaConfig()) == 0


def test_a_plan_counts_the_arithmetic_of_the_selected_experts():
    """8 of 128 experts: three products of each used weight and token, and a third of a dense model's time at most."""
    settings = resolve.resolve_settings("sft", [*QWEN, "--zero", "3"], 1, hardware.GPUS["h100-80g"])
    shape, gpu = candidates.shape_of(settings), hardware.GPUS["h100-80g"]
    setting = formulas.PlanPoint(3, "none", 0, 1, 2048, 1, 1)
    unused = 48 * (128 - 8) * 3 * 2048 * 768  # layers, experts that a token does not select, their matrices
    used = shape.parameters - unused - shape.embedding
    assert step.operations(shape, setting) == pytest.approx(6 * used * 2048, rel=0.01)
    dense = formulas.Shape(30_000_000_000, 0, 10**9, 6144, 48, 64, 8, 128, 24576, 151936)
    routed_, whole = (step.estimate_step(one, setting, gpu, 2048) for one in (shape, dense))
    assert routed_.products + routed_.experts < whole.products / 3


# --- arguments ---

QWEN = ["--model", str(ROOT / "tests" / "configs" / "qwen3-moe-30b"), "--data", "unread"]


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (["--zero", "2", "--bf16", "true"], "auto"),
        (["--zero", "0"], "auto"),
        (["--zero", "0", "--bf16", "true"], "eager"),
        (["--zero", "0", "--bf16", "true", "--pure_bf16", "true"], "auto"),
        (["--zero", "2", "--experts_implementation", "eager"], "eager"),
    ],
)
def test_the_implementation_is_chosen_and_said(flags, chosen):
    settings = resolve.resolve_settings("sft", [*QWEN, *flags], 2)
    resolve.resolve_for_model(settings)
    assert settings.experts_implementation == chosen
    said = any(sentence.startswith(f"experts_implementation {chosen}: ") for sentence in settings.decisions)
    assert said == ("--experts_implementation" not in flags)


def test_nothing_is_said_of_experts_in_a_dense_model():
    settings = resolve.resolve_settings("sft", ["--zero", "0", "--bf16", "true"], 2)
    resolve.resolve_for_model(settings)
    assert settings.experts_implementation == "auto" and not any("experts" in said for said in settings.decisions)


@pytest.mark.slow
def test_qlora_says_what_stays_in_16_bits():
    settings = resolve.resolve_settings("lora", [*QWEN, "--zero", "3", "--load_in_4bit", "true", "--bf16", "true"], 2)
    resolve.resolve_for_model(settings)
    (said,) = [sentence for sentence in settings.decisions if "fused experts" in sentence]
    assert said.startswith("load_in_4bit: 97% of the base's bytes are fused experts, which stay in 16 bits")
    assert candidates.shape_of(settings).frozen_bytes > 1.9  # not the 0.55 of packed weights


def test_the_rank_of_fused_experts_is_applied_without_a_warning(recwarn):
    """peft doubles the rank of the fused gate and up, and warns that it ignores its own pattern, which it does not."""
    config = AutoConfig.from_pretrained(
        ROOT / "tests" / "configs" / "qwen3-moe-30b", num_hidden_layers=1, hidden_size=32, num_experts=4, head_dim=16,
        moe_intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
    )  # fmt: skip
    model, adapter = AutoModelForCausalLM.from_config(config), LoraConfig(r=4, target_modules=["gate_proj", "up_proj"])
    log_filters.libraries()
    shapes = {name: p.shape for name, p in get_peft_model(model, adapter).named_parameters() if "lora_A" in name}
    assert [*shapes.values()] == [(4 * 2 * 4, 32)]
    assert not [warning for warning in recwarn if "_pattern keys" in str(warning.message)]


@pytest.mark.parametrize("gpu, flags, says", [
    ("h100-80g", [], "grouped_mm, one product for the 128 experts"),
    ("h100-80g", ["--fp16", "true"], "a loop over the 128 experts of a layer on this GPU in fp16"),
    ("rtx5090-32g", [], "a loop over the 128 experts of a layer on this GPU in bf16"),
])  # fmt: skip
def test_a_grouped_product_is_one_kernel_on_some_gpus_only(gpu, flags, says):
    """torch's GroupedBlas.cpp: compute capability 9 or 10, in bf16. A plan prices what will run."""
    words = ["--data", "none", "--model", str(ROOT / "tests" / "configs" / "qwen3-moe-30b"), *flags]
    settings = resolve.resolve_settings("lora", words, 1, hardware.GPUS[gpu])
    resolve.resolve_for_model(settings)
    assert [says in line for line in settings.decisions if "experts_implementation auto" in line] == [True]
    assert kernels.kernels_for(settings).kernel_per_expert is ("a loop over" in says)
