"""Mixtures of experts of every class of transformers: adapters of experts, router loss, ranks, kernels, MXFP4."""

import json
import shutil
import sys

import pytest
import torch
from conftest import ROOT, TINY, run_world, slow_but
from peft import PeftModel

sys.path.insert(0, str(ROOT / "tests" / "matrix"))
import tiny_models

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.export import export
from zerofit.model import adapters, experts, load
from zerofit.model.mixtures import adapted, kernels, weights
from zerofit.plan import candidates, formulas

# Those that issue trackers ask for most, and the other causal classes of transformers 5.23 with fused experts.
NAMED = ("qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss")
OTHERS = (
    "afmoe", "aria_text", "axk1", "cohere2_moe", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe_lite", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jamba",
    "jetmoe", "kimi_linear", "laguna", "lfm2_moe", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash",
    "minimax", "minimax_m2", "mistral4", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "solar_open",
)  # fmt: skip
ALL = (*NAMED, *OTHERS)


def configured(kind: str, **changes):
    """The configuration of a tiny model whose router prefers some experts; changes: of its fields."""
    config = tiny_models.config_of(kind)
    found = config.to_dict() | {"initializer_range": 0.2} | changes
    return type(config).from_dict(found)


def saved(kind: str, folder, **changes) -> str:
    """Write a tiny mixture of random weights with the bundled tokenizer."""
    torch.manual_seed(0)
    model = tiny_models.loader_of(kind).from_config(configured(kind, **changes), dtype=torch.float32)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "model" / file, folder)
    return str(folder)


def read(kind: str, folder):
    return tiny_models.loader_of(kind).from_pretrained(folder, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 35).view(2, 16), use_cache=False).logits


def settings_of(folder, *flags, recipe="lora", ranks=1):
    words = ["--model", str(folder), "--data", "unread", "--use_cpu", "true", "--zero", "0", *flags]
    settings = resolve.resolve_settings(recipe, words, ranks)
    resolve.resolve_for_model(settings)
    return settings


# --- LoRA ---

# Parts of names of linear layers without an adapter: weights that kernels or routers read, one that peft cannot reload.
LEFT = {"jamba": "dt_proj", "longcat_flash": "router.classifier", "laguna": "shared_experts"}

EXPERTS = ("--lora_target_modules", "all-linear", "--lora_target_parameters", "experts")


def randomized(kind, folder, *flags):
    """A model with the kit's adapter, whose B is not 0."""
    settings = settings_of(folder, *flags)
    model = adapters.add_adapter(read(kind, folder), settings).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    return model, settings


def adapted_names(model) -> set[str]:
    """The names of the base's weights that have A and B."""
    own = {
        name.partition(".lora_A")[0].removeprefix("base_model.model.") + ".weight"
        for name, _ in model.named_parameters()
        if ".lora_A." in name
    }
    parameters = adapted.wrappers(model)
    paths = {f"{name.rpartition('.')[0]}.weight" for name in parameters}
    return {name.replace(".base_layer", "") for name in own if name.replace(".base_layer", "") not in paths} | {
        *parameters
    }


@pytest.mark.oracle
@pytest.mark.parametrize("kind", slow_but(ALL, ("deepseek_v3", "gpt_oss")))
@pytest.mark.parametrize("flags", [(), EXPERTS], ids=["all-linear", "experts"])
def test_an_adapter_of_experts_is_plain_pefts(kind, flags, tmp_path):
    """Saved, it gives the same logits with plain peft, and merged; all-linear adapts every linear layer."""
    saved(kind, tmp_path / "base")
    model, settings = randomized(kind, tmp_path / "base", *flags)
    names, base = adapted_names(model), read(kind, tmp_path / "base")
    fused, before = set(weights.fused(base)), logits(base)
    if flags:
        assert fused and fused <= names
    else:
        head = base.get_output_embeddings()
        linear = {name for name, m in base.named_modules() if type(m) is torch.nn.Linear and m is not head}
        left = {name for name in linear if LEFT.get(kind, "out_proj") in name}
        assert {f"{name}.weight" for name in linear - left} <= names
    said = [line for line in settings.decisions if line.startswith("experts adapted by LoRA: ")]
    assert len(said) == 1 and (": none, " in said[0]) == (not fused & names)
    after = logits(model)
    assert (after - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(plain), after)
    plain.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(read(kind, tmp_path / "merged")), after, rtol=1e-4, atol=1e-4)


def test_peft_does_not_read_an_adapter_of_lagunas_shared_experts(tmp_path, monkeypatch):
    """Without it adapters.UNREADABLE is not needed any more. With it no target adapts them."""
    saved("laguna", tmp_path / "base")
    targets = ("--lora_target_modules", "q_proj", "up_proj")
    model, settings = randomized("laguna", tmp_path / "base", *targets)
    assert adapted_names(model) and not any("shared_experts" in name for name in adapted_names(model))
    assert any("cannot load their saved adapters in laguna" in line for line in settings.decisions)
    monkeypatch.setattr(adapters, "UNREADABLE", {})
    model, _ = randomized("laguna", tmp_path / "base", *targets)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match="missing adapter keys"):
        PeftModel.from_pretrained(read("laguna", tmp_path / "base"), tmp_path / "adapter")


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["deepseek_v3"])
def test_a_merge_of_adapted_experts_is_pefts(kind, tmp_path, capsys):
    """zerofit export --merge of a folder that a run would leave."""
    saved(kind, tmp_path / "base")
    model, _ = randomized(kind, tmp_path / "base", "--lora_target_modules", "all-linear")
    folder = tmp_path / "run" / "final"
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "model" / file, folder)
    export.main([str(folder), "--merge", "--dtype", "float32", "--output_dir", str(tmp_path / "merged")])
    assert torch.allclose(logits(read(kind, tmp_path / "merged")), logits(model), rtol=1e-4, atol=1e-4)


SHARED = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")


def test_a_path_to_a_linear_layer_adapts_no_experts(tmp_path):
    """peft reads the last word of a path only, and would adapt all routed experts."""
    saved("deepseek_v3", tmp_path / "base")
    model, settings = randomized("deepseek_v3", tmp_path / "base", "--lora_target_modules", *SHARED)
    assert adapted_names(model) == {f"model.layers.1.{name}.weight" for name in SHARED}
    assert any("adapted by LoRA: none" in line for line in settings.decisions)


@pytest.mark.bad_input
@pytest.mark.parametrize(("kind", "flags", "said"), [
    ("llama", EXPERTS, "LlamaForCausalLM does not have fused experts"),
    ("gpt_oss", ("--lora_target_parameters", "experts.w1"), "experts.w1: .*experts are .*mlp.experts.down_proj, mlp.e"),
    ("gpt_oss", ("--adapter_config", "target_parameters=[a]"), "use --lora_target_parameters instead"),
    ("gpt_oss", ("--lora_target_modules", "qkv", *EXPERTS[2:]), "qkv: it matches no module.*k_proj o_proj q_"),
    ("qwen3_moe", ("--lora_target_modules", r".*\.0\.self_attn\.q_proj"), "also adapt model.layers.1.self_attn.q_proj"),
    ("qwen3_moe", ("--lora_target_modules", r".*\.0\..*(gate|up)_proj"), "would also adapt .*gate_up_proj of Qwen3Moe"),
    ("gpt_oss", ("--adapter", "loha", *EXPERTS[2:]), "peft's LoHaConfig does not support it"),
    *((kind, flags, f"{flags[0]} {flags[1]}: peft does not support it for fused experts.*linear layers only: .*o_proj")
      for kind, flags in (("olmoe", ("--lora_dropout", "0.1")), ("olmoe", ("--use_dora", "true")),
                          ("deepseek_v3", ("--init_lora_weights", "pissa")))),
])  # fmt: skip
def test_an_adapter_that_experts_cannot_have_is_refused(kind, flags, said, tmp_path):
    configured(kind).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        load.check_model(settings_of(tmp_path, *flags))


# --- the router's loss ---


def balance(outputs, mask, selected: int) -> torch.Tensor:
    """The load-balancing loss of Switch Transformer (arXiv 2101.03961, eq. 4 to 6) over all layers, by hand.

    The number of experts times the sum over them of (assignments per token x mean probability), of tokens in the mask.
    """
    rows = torch.cat([layer.float()[mask.reshape(-1).bool()] for layer in outputs.router_logits])
    shares = rows.softmax(-1)
    assigned = torch.zeros_like(shares).scatter_(1, shares.topk(selected).indices, 1.0)
    return shares.shape[1] * (assigned.mean(0) * shares.mean(0)).sum()


def with_router_loss(kind: str):
    torch.manual_seed(0)
    config = configured(kind, output_router_logits=True, router_aux_loss_coef=0.5)
    return tiny_models.loader_of(kind).from_config(config, dtype=torch.float32)


ROUTED = (
    "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "ernie4_5_moe", "flex_olmo", "granitemoe", "granitemoehybrid",
    "granitemoeshared", "jamba", "laguna", "mellum", "minimax", "minimax_m2", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_next",
)  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("kind", slow_but(ROUTED, NAMED))
def test_the_router_loss_is_that_of_the_tokens_that_are_no_padding(kind):
    """The class's own term against one written by hand; the model's loss is left without it; checkpointing keeps it."""
    from zerofit.model import fused_loss

    model, ids, mask = with_router_loss(kind).eval(), torch.arange(3, 35).view(2, 16), torch.ones(2, 16).long()
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    whole = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    expected = balance(whole, mask, model.config.num_experts_per_tok)
    assert float(whole.aux_loss) == pytest.approx(float(expected), rel=1e-5)
    router = fused_loss.router_loss(model)
    assert router.coefficient in (0.5, 0.001, 0.01)
    own = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    assert float(own.loss) == pytest.approx(float(whole.loss - router.coefficient * expected), rel=1e-4)
    gradients = {}
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        again = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        (again.loss + router.share(again, torch.tensor(4), torch.tensor(8))).backward()
        gradients[checkpointing] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients[True].keys() == gradients[False].keys()
    for name, gradient in gradients[True].items():
        assert torch.allclose(gradient, gradients[False][name], rtol=1e-4, atol=1e-6), name


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "llama4_text"])
def test_a_router_loss_that_the_class_does_not_have_is_refused(kind, tmp_path):
    """DeepSeek-V3 and GLM-4.5 balance their experts by a bias of the router, which training leaves as it is."""
    configured(kind, output_router_logits=True).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"does not have a router loss .* set output_router_logits to false"):
        load.check_model(settings_of(tmp_path, recipe="sft"))


# --- kernels ---


@pytest.mark.oracle
@pytest.mark.parametrize("kind", slow_but(ALL, NAMED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_is_self_tested_before_its_use(kind, dtype):
    with torch.device("meta"):
        model = tiny_models.loader_of(kind).from_config(configured(kind))
    modules = [module for module in model.modules() if hasattr(module, "is_concatenated")]
    assert bool(modules) == weights.has_kernels(model) == (kind not in ("jetmoe", "llama4_text", "longcat_flash"))
    for name in ("grouped_mm", "batched_mm") if modules else ():
        assert kernels.difference(modules[0], name, dtype, torch.device("cpu")) is None


@pytest.mark.injection
@pytest.mark.parametrize("asked", ["auto", "grouped_mm"])
def test_a_kernel_that_computes_something_else_is_not_used(asked, tmp_path, monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    saved("qwen3_moe", tmp_path / "base")
    settings = settings_of(tmp_path / "base", "--experts_implementation", asked, recipe="sft")
    kernels.self_test_grouped(settings, load.load_config(settings))
    assert settings.experts_implementation == asked
    assert settings.decisions[-1].startswith("experts_implementation grouped_mm: matches the experts' loop")
    right = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", lambda self, x, i, w: 1.01 * right(self, x, i, w)
    )
    with pytest.raises(UserError, match=r"grouped_mm differs .* by [0-9.]+% .*use --exp.* eager"):
        kernels.self_test_grouped(settings, load.load_config(settings))


# --- ranks whose tokens go to different experts ---

ROWS = [{"question": "Tell me.", "answer": "No."}, {"question": "Abc 123?", "answer": "xyz"}] * 6
COMMON = [
    "--max_steps", "3", "--effective_batch_size", "2", "--per_device_train_batch_size", "1", "--logging_steps", "1",
    "--save_strategy", "no", "--num_samples", "0", "--train_sampling_strategy", "sequential",
    # AdamW's momentum moves an expert whose gradient is 0 (stage 3) and not one that has none (stage 0).
    "--optim", "sgd", "--optim_args", "momentum=0", "--learning_rate", "0.1",
]  # fmt: skip


def of_many(kind: str, folder) -> str:
    """A model of 64 experts in a layer, with the router loss where its class has one, at 500 times the usual weight."""
    found = tiny_models.config_of(kind).to_dict()
    changes = {name: 64 for name in weights.COUNT if isinstance(found.get(name), int)}
    if kind in ROUTED:
        changes |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return saved(kind, folder, **changes)


def chosen(model, rows) -> list[set[int]]:
    """The experts of all layers that each row's tokens go to."""
    seen, found = [], []
    for name, module in model.named_modules():
        if weights.is_routed(name):
            module.register_forward_hook(lambda module, given, out: seen.append(given[1]))
    for row in rows:
        seen.clear()
        with torch.no_grad():
            model(input_ids=torch.tensor([row]), use_cache=False)
        found.append({(i, e) for i, layer in enumerate(seen) for e in layer.reshape(-1).tolist()})
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, request):
    """{name: Run}: each selected class at 2 ranks, stages 0 and 3, full or LoRA of its experts; and at 1 rank."""
    folder = tmp_path_factory.mktemp("worlds")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    cases = {}
    selected = [item.callspec.params for item in request.session.items if "worlds" in item.fixturenames]
    for kind in dict.fromkeys(params["kind"] for params in selected):
        flags = [*COMMON, "--data", str(folder / "rows.jsonl"), "--model", of_many(kind, folder / f"model-{kind}")]
        for recipe in {params["recipe"]: None for params in selected if params["kind"] == kind}:
            more = ("--lora_target_parameters", "experts") if recipe == "lora" else ()
            for zero in ("0", "3"):
                cases[f"{recipe}-{kind}-{zero}"] = (recipe, [*flags, *more, "--zero", zero])
    alone = {f"{name}-alone": case for name, case in cases.items() if name.endswith("0")}
    return run_world(1, alone, folder) | run_world(2, cases, folder)


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("recipe", ["sft", "lora"])
def test_ranks_of_other_experts_train_what_one_rank_trains(worlds, kind, recipe):
    """The router loss too, and a saved adapter is plain peft's."""
    alone = worlds[f"{recipe}-{kind}-0-alone"]
    base = alone.folder.parent / f"model-{kind}"
    tokenizer = load.load_tokenizer(settings_of(base, recipe="sft"))
    texts = [f"{row['question']} {row['answer']}" for row in ROWS[:2]]
    first, second = chosen(read(kind, base), [tokenizer(text).input_ids for text in texts])
    assert first - second and second - first
    for zero in ("0", "3"):
        two = worlds[f"{recipe}-{kind}-{zero}"]
        assert two.losses == pytest.approx(alone.losses, rel=1e-5), zero
        assert two.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4), zero
        kept = torch.load(two.folder / "logits.pt", weights_only=True)
        model = read(kind, base if recipe == "lora" else two.folder / "final")
        if recipe == "lora":
            model = PeftModel.from_pretrained(model, two.folder / "final").eval()
        with torch.no_grad():
            found = model(input_ids=kept["input_ids"]).logits
        assert torch.allclose(found, kept["logits"].float(), rtol=1e-4, atol=1e-4), zero


@pytest.mark.parametrize("kind", slow_but(ALL, ("gpt_oss",)))
def test_fused_experts_are_one_module_and_need_no_leaf(kind):
    """All ranks gather the same tensors; a class with a list of experts would be a leaf (tests/model/test_experts)."""
    with torch.device("meta"):
        model = tiny_models.loader_of(kind).from_config(configured(kind))
    assert experts.blocks(model) == []
    assert experts.fused_weights(model) > 0
    total = sum(weight.numel() for weight in weights.routed(model).values())
    assert total - experts.fused_weights(model) < 0.1 * total  # biases


# --- MXFP4 ---


@pytest.mark.injection
def test_weights_that_are_not_packed_though_config_says_so_are_trained_as_they_are(tmp_path):
    """A gpt-oss whose files hold 16-bit experts and whose config.json still has the quantization of the original."""
    saved("gpt_oss", tmp_path / "base")
    expected = logits(read("gpt_oss", tmp_path / "base"))
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    settings = settings_of(tmp_path / "base", recipe="sft")
    load.check_weights(settings)
    model = load.load_model(settings, load.load_tokenizer(settings)).eval()
    assert torch.equal(logits(model), expected) and not hasattr(model.config, "quantization_config")
    random = settings_of(tmp_path / "base", "--random_init", "true", recipe="sft")
    model = load.load_model(random, load.load_tokenizer(random))
    assert not hasattr(model.config, "quantization_config")


# --- what a plan counts ---


@pytest.mark.oracle
@pytest.mark.parametrize("kind", slow_but(ALL, (*NAMED, "llama4_text")))
def test_a_plan_counts_all_experts_and_those_of_a_token(kind):
    """Weights of all experts, arithmetic of the selected ones; Llama 4's class computes all of them."""
    config = configured(kind)
    with torch.device("meta"):
        model = tiny_models.loader_of(kind).from_config(config)
    fused = sum(weight.numel() for weight in weights.fused(model).values())
    work = formulas.shape(config, model).work
    routed = [product for product in work.products if product.experts]
    assert work.loops_experts == (kind in ("jetmoe", "longcat_flash"))
    if kind == "longcat_flash":  # its first tensor has rows for experts that compute nothing
        return
    assert sum(product.weights for product in routed) == pytest.approx(fused, rel=0.01)
    share = 1.0 if kind == "llama4_text" else weights.selected(config) / weights.count(config)
    assert sum(product.flops(10) for product in routed) == pytest.approx(20 * fused * share, rel=0.01)


@pytest.mark.parametrize(("flags", "said"), [
    ((), "mlp.experts.down_proj (rank 16), mlp.experts.gate_up_proj (rank 32), for each of 4: "),
    (("--lora_target_modules", "q_proj"), "none, because they are fused tensors; --lora_target_parameters"),
    (EXPERTS[2:], "mlp.experts.down_proj (rank 16), mlp.experts.gate_up_proj (rank 16), for each of 4: "),
])  # fmt: skip
def test_a_plan_says_which_experts_are_adapted(flags, said, tmp_path):
    configured("qwen3_moe").save_pretrained(tmp_path)
    flags = ("--lora_target_modules", "q_proj", *flags) if flags[:1] == EXPERTS[2:3] else flags
    shape = candidates.shape_of(
        resolve.resolve_settings("lora", ["--model", str(tmp_path), "--data", "none", *flags], 1)
    )
    assert shape.adapted.startswith(said)
    added = 2 * 4 * 3 * 32 * 16  # of two layers with four experts of three matrices
    assert shape.adapted_experts * 2 == (0 if "none" in said else added + 2 * 4 * 32 * (not flags))  # and the router
