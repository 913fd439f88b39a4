"""flex_attention's self-test on a CPU, by transformers' own function uncompiled; and who gets it on a stand-in GPU."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from gpu_machine import Card, in_process
from torch.nn.attention import flex_attention as torch_flex
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import flex_attention as integration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.model import attention
from zerofit.model.experimental import flex, flex_self_test
from zerofit.model.image_text import classes
from zerofit.plan import simulate

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 8, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 4096,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
KINDS = {"gemma2": {}, "gpt_oss": EXPERTS, "vaultgemma": {}, "granite_swa": {}, "granitemoe_swa": EXPERTS, "flint": {}}
KINDS = {
    kind: sizes for kind, sizes in KINDS.items() if kind in CONFIG_MAPPING
}  # flint is newer than transformers 5.17
TYPES = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]


def tiny(kind: str):
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    return config


def layers(kind: str) -> list[flex_self_test.Layer]:
    with torch.device("meta"):
        return flex_self_test.layers_of(AutoModelForCausalLM.from_config(tiny(kind), attn_implementation="eager"))


def of_transformers():
    """Return transformers' function with its sinks on a CPU too, where it refuses them."""
    source, names = inspect.getsource(integration.flex_attention_forward), dict(vars(integration))
    on_a_gpu = 'query.device.type != "cpu"'
    assert on_a_gpu in source
    exec(source.replace(on_a_gpu, "True"), names)
    return names["flex_attention_forward"]


@pytest.fixture(autouse=True)
def limit_of_torch():
    before = torch.compiler.config.recompile_limit  # monkeypatch would hide it afterwards
    yield
    torch.compiler.config.recompile_limit = before


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Let flex_attention run uncompiled on a CPU, forward and backward; return how to change the function."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    right = of_transformers()

    def changed(change=lambda right, *args, **kwargs: right(*args, **kwargs)):
        def function(*args, **kwargs):
            return change(right, *args, **kwargs)

        monkeypatch.setitem(AttentionInterface._global_mapping, flex_self_test.NAME, function)

    changed()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices are small
    with torch.compiler.set_stance("force_eager"):
        yield changed
    torch.set_num_threads(threads)


def failure(kind: str, dtype=torch.float32, autocast: bool = False) -> str | None:
    return flex_self_test.problem(
        layers(kind), flex_self_test.Dtypes(dtype, torch.float32 if autocast else dtype, autocast), CPU
    )


# --- the numbers ---


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize(("dtype", "autocast"), TYPES, ids=str)
def test_the_right_function_is_self_tested(kind, dtype, autocast, on_a_cpu):
    assert failure(kind, dtype, autocast) is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gemma2", "gpt_oss")])
def test_other_models_without_sdpa_are_self_tested(kind, on_a_cpu):
    assert attention.has_only_flex(tiny(kind)) and failure(kind) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_test_passes_on_what_the_models_layers_do(kind):
    """The heads, arguments and sinks of each layer are those of one of the self-test's."""
    seen = []

    def record(module, query, key, value, mask, **kwargs):
        given = {name: kwargs.get(name) for name in ("scaling", "softcap")}
        given |= {"window": kwargs.get("sliding_window") or 0, "has_sinks": kwargs.get("s_aux") is not None}
        seen.append((query.shape[1], key.shape[1], query.shape[3], *given.values()))
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("recorded", record)
    model = AutoModelForCausalLM.from_config(tiny(kind), attn_implementation="recorded").eval()
    model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    known = {dataclasses.astuple(layer)[:-1] for layer in layers(kind)}
    assert len(seen) == 2 and set(seen) == known


def exact(query, key, value, sinks, scaling, cap, seen):
    """Attention in fp64, written out: scores, cap, softmax with the sinks, values."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * scaling
    scores = cap * torch.tanh(scores / cap) if cap else scores
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[None, :, None, None]
    return torch.einsum("bhij,bhjd->bihd", weights / total, value)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_outputs_and_gradients_of_the_sinks_are_those_of_fp64(kind, on_a_cpu, record_property):
    """transformers' flex_attention and the self-test's reference, of packed documents with a window."""
    layer = next(layer for layer in map(flex_self_test._shortened, layers(kind)) if layer.window)
    dtypes = flex_self_test.Dtypes(torch.float64, torch.float64, False)
    tokens = sum(flex_self_test.PACKED)
    inputs = flex_self_test._leaves(flex_self_test._inputs(layer, 1, tokens, dtypes, CPU))
    documents = torch.arange(3).repeat_interleave(torch.tensor(flex_self_test.PACKED))[None]
    real = torch.ones_like(documents, dtype=torch.bool)
    seen = flex_self_test._visible(documents, real, layer.window)
    as_in_a_loop = torch.zeros(tokens, tokens, dtype=torch.bool)
    start = 0
    for length in flex_self_test.PACKED:
        for i in range(length):
            as_in_a_loop[start + i, start + max(0, i - layer.window + 1) : start + i + 1] = True
        start += length
    assert torch.equal(seen[0, 0], as_in_a_loop)
    block_mask = flex_self_test._block_mask(layer, documents, real, True, CPU)
    sinks = inputs[3] if layer.has_sinks else None
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    outputs = [
        exact(*inputs[:3], sinks, layer.scaling, layer.softcap, seen),
        flex_self_test._flex(layer, dtypes, block_mask, *inputs),
        flex_self_test._eager(layer, added, *inputs),
    ]
    upstream = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted, *found = [(out, *torch.autograd.grad(out, inputs, upstream)) for out in outputs]
    errors = [((a - b).norm() / b.norm()).item() for of_one in found for a, b in zip(of_one, wanted, strict=True)]
    record_property("relative_difference", max(errors))
    assert len(errors) == 2 * (len(inputs) + 1) and max(errors) < 1e-6  # Gemma-2's eager has a softmax in fp32


# --- what is wrong is found ---


def without(name):
    def change(right, *args, **kwargs):
        return right(*args, **{**kwargs, name: None})

    return change


def sinks_half_trained(right, *args, s_aux, **kwargs):
    return right(*args, s_aux=(s_aux + s_aux.detach()) / 2, **kwargs)


def sinks_frozen(right, *args, s_aux, **kwargs):
    return right(*args, s_aux=s_aux.detach(), **kwargs)


def another(**changes):
    def change(right, *args, **kwargs):
        return right(*args, **{name: kwargs[name] * factor if name in changes else kwargs[name]
                               for name, factor in {**dict.fromkeys(kwargs), **changes}.items()})  # fmt: skip

    return change


def values_gradient_scaled(right, module, query, key, value, *args, **kwargs):
    return right(module, query, key, 1.1 * value - 0.1 * value.detach(), *args, **kwargs)


def wrong_in_an_evaluation(right, module, query, *args, **kwargs):
    return right(module, query if module.training else 1.2 * query, *args, **kwargs)


def not_finite(right, *args, **kwargs):
    out, sums = right(*args, **kwargs)
    return out * float("nan"), sums


@pytest.mark.fault
@pytest.mark.parametrize(("kind", "change", "why"), [
    ("gemma2", without("softcap"), "the outputs of flex_attention differ"),
    ("gemma2", another(softcap=0.9), "the outputs of flex_attention differ"),
    ("gemma2", another(scaling=1.1), "of flex_attention differ"),
    ("gpt_oss", without("s_aux"), "the outputs of flex_attention differ"),
    ("gpt_oss", sinks_frozen, "the gradients of the sinks of flex_attention differ from eager by 100.0%"),
    ("gpt_oss", sinks_half_trained, "the gradients of the sinks of flex_attention differ from eager by 50"),
    ("gpt_oss", values_gradient_scaled, "the gradients of the values of flex_attention differ"),
    ("gpt_oss", wrong_in_an_evaluation, "the outputs of an evaluation of flex_attention differ"),
    ("gemma2", not_finite, "the outputs of flex_attention differ from eager by nan"),
])  # fmt: skip
def test_a_wrong_function_fails_its_self_test(kind, change, why, on_a_cpu):
    on_a_cpu(change)
    assert why in failure(kind, torch.bfloat16)


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("window", [0, flex_self_test.WINDOW - 1, flex_self_test.WINDOW + 1])
def test_a_wrong_window_fails_its_self_test(kind, window, on_a_cpu, monkeypatch):
    right = flex_self_test._block_mask
    other = lambda layer, *args: right(dataclasses.replace(layer, window=layer.window and window), *args)  # noqa: E731
    monkeypatch.setattr(flex_self_test, "_block_mask", other)
    assert "(bound 3.0%)" in failure(kind, torch.bfloat16)


def one_token_late(documents):
    return torch.cat([documents[:, :1], documents[:, :-1]], 1)


@pytest.mark.fault
@pytest.mark.parametrize("change", [torch.zeros_like, one_token_late])
def test_wrong_documents_fail_their_self_test(change, on_a_cpu, monkeypatch):
    right = flex_self_test._block_mask
    monkeypatch.setattr(
        flex_self_test, "_block_mask", lambda layer, documents, *args: right(layer, change(documents), *args)
    )
    assert failure("gemma2", torch.bfloat16) == "documents in one row attend to each other with flex_attention"


@pytest.mark.fault
def test_padding_that_is_attended_to_fails_its_self_test(on_a_cpu, monkeypatch):
    """Padding is behind all tokens, so a causal mask hides it; here that is turned round."""
    right = flex_self_test._block_mask

    def turned(layer, documents, real, packed, device):
        return right(layer, documents, real if packed else real.flip(1), packed, device)

    monkeypatch.setattr(flex_self_test, "_block_mask", turned)
    assert "differ from eager" in failure("gpt_oss", torch.bfloat16)


def test_layers_that_the_self_test_does_not_know_are_no_self_test(on_a_cpu):
    assert flex_self_test.layers_of(torch.nn.Linear(1, 1)) == []
    dtypes = flex_self_test.Dtypes(torch.float32, torch.float32, False)
    assert flex_self_test.problem([], dtypes, CPU) == "the self-test does not cover this model's attention"


def test_flex_attention_may_be_compiled_for_all_lengths():
    torch.compiler.config.recompile_limit = 8
    flex_self_test.compile_all_lengths()
    assert torch.compiler.config.recompile_limit == torch._dynamo.config.recompile_limit == flex_self_test.COMPILATIONS


# --- who gets it, on a stand-in GPU ---


@pytest.fixture
def h100(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path, [Card()], ZEROFIT_CACHE=str(tmp_path / "cache"))


def resolved(*flags, config="gemma2", recipe="sft", ranks=1, gpu=None):
    found = resolve.resolve_settings(recipe, ["--model", "m", "--data", "none", *flags], ranks, gpu)
    resolve.resolve_for_model(found, tiny(config) if isinstance(config, str) else config)
    return found


def chosen(settings) -> tuple:
    return settings.attn_implementation, settings.padding_free


def last_line(settings) -> str:
    return [line for line in settings.decisions if line.startswith("attn_implementation ")][-1]


def start(monkeypatch, settings, why=None, config="gemma2"):
    """Let the ranks start with a self-test that returns `why`; return the settings."""
    asked = []

    def run(compare, *words):
        asked.append(compare.keywords if hasattr(compare, "keywords") else compare)
        return why(compare) if callable(why) else why

    monkeypatch.setattr(flex.self_test, "run", run)
    monkeypatch.setattr(flex.load, "check_model", lambda settings, config: SimpleNamespace(
        modules=lambda: [SimpleNamespace()] if config is None else of_meta(config).modules()))  # fmt: skip
    flex.self_test_on_ranks(settings, tiny(config) if isinstance(config, str) else config)
    return settings


def of_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_the_first_start_proves_and_the_next_is_planned_with_it(kind, h100, monkeypatch):
    words = ("--zero", "2")
    first = resolved(*words, config=kind)
    assert chosen(first) == ("eager", False)
    assert "does not support sdpa; flex_attention" in last_line(first)
    start(monkeypatch, first, config=kind)
    assert chosen(first) == ("flex_attention", False)  # the plan has counted padded rows
    assert "flex_attention: matches eager on this GPU, with gradients (self-test: 0 s); " in last_line(first)
    for gpu in (None, hardware.find("detect")):  # of the ranks, and of a plan and its simulations
        following = resolved(*words, config=kind, gpu=gpu)
        assert chosen(following) == ("flex_attention", True)
        assert "passed its self-test on this GPU (off: --attn_implementation eager)" in last_line(following)
    assert chosen(resolved(*words, "--packing", config=kind)) == ("flex_attention", True)
    assert chosen(resolved(*words, "--padding_free", "false", config=kind)) == ("flex_attention", False)
    assert chosen(resolved(*words, "--attn_implementation", "eager", config=kind)) == ("eager", False)
    again = start(monkeypatch, resolved(*words, config=kind), config=kind)
    assert chosen(again) == ("flex_attention", True) and "flex_attention matches eager" in again.decisions[-1]


def test_a_self_test_is_of_one_gpu_and_one_shape(h100, monkeypatch):
    start(monkeypatch, resolved())
    wider = tiny("gemma2")
    wider.head_dim = 64
    others = [
        resolved(gpu=hardware.GPUS["a100-80g"]), resolved(config=wider), resolved("--bf16", "false"),
        resolved(config="vaultgemma"), resolved("--zero", "0"),
    ]  # fmt: skip
    assert [chosen(one)[0] for one in others] == ["eager"] * 4 + ["flex_attention"]  # stage 0 is one rank's default
    monkeypatch.setattr(flex_self_test.metadata, "version", lambda package: "0.0.1")
    assert chosen(resolved())[0] == "eager"


def test_a_simulation_is_not_remembered_beyond_a_self_test(h100, monkeypatch):
    question = simulate.Question(resolved().request, 1, gpu=hardware.find("detect"))
    before = simulate.key(question)
    start(monkeypatch, resolved())
    assert simulate.key(question) != before


def fails(compare):
    return "it raised an error (out of resource: shared memory, Required: 163840, Hardware limit: 101376)"


@pytest.mark.fault
def test_a_start_whose_self_test_fails_trains_with_eager(h100, monkeypatch):
    first = start(monkeypatch, resolved(), fails)
    assert chosen(first) == ("eager", False) and chosen(resolved()) == ("eager", False)
    assert "eager: flex_attention failed its self-test: it raised an error (out of resource" in last_line(first)
    start(monkeypatch, resolved())
    planned = resolved()
    assert chosen(planned) == ("flex_attention", True)
    start(monkeypatch, planned, fails)
    assert chosen(planned) == ("eager", False)
    assert "; rows are padded; the plan did not count its scores" in last_line(planned)
    assert not any(line.startswith("padding_free true") for line in planned.decisions)
    assert chosen(resolved()) == ("eager", False)  # forgotten


@pytest.mark.fault
def test_an_error_of_the_kernel_is_a_failed_self_test(h100, monkeypatch):
    """The stand-in computes nothing, and has no compiler: the real self-test ends in an exception."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    first = resolved()
    flex.self_test_on_ranks(first, tiny("gemma2"))
    assert chosen(first) == ("eager", False)
    assert "eager: flex_attention failed its self-test: it raised an error (" in last_line(first)


@pytest.mark.fault
def test_what_was_asked_for_is_refused_where_its_self_test_fails(h100, monkeypatch):
    asked = resolved("--attn_implementation", "flex_attention")
    with pytest.raises(UserError, match=r"--attn_implementation flex_attention: .*out of resource.*; leave it out\.$"):
        start(monkeypatch, asked, fails)
    start(monkeypatch, resolved())
    packed = resolved("--packing")
    with pytest.raises(UserError, match="--packing: it needs flex_attention for this model, and it raised an error"):
        start(monkeypatch, packed, fails)


def test_other_attention_is_not_self_tested(h100, monkeypatch):
    llama = AutoConfig.for_model("llama")
    for flags, config in (
        (("--attn_implementation", "eager"), "gemma2"),
        ((), llama),
        (("--use_cpu", "true"), "gemma2"),
    ):
        settings = resolved(*flags, config=config)
        before = chosen(settings), list(settings.decisions)
        start(monkeypatch, settings, lambda compare: pytest.fail("a self-test"), config)
        assert (chosen(settings), settings.decisions) == before


def test_a_request_for_a_model_that_the_self_test_does_not_know_is_said(h100, monkeypatch):
    settings = resolved("--attn_implementation", "flex_attention", config=AutoConfig.for_model("llama"))
    monkeypatch.setattr(flex.load, "check_model", lambda settings, config: torch.nn.Linear(1, 1))
    flex.self_test_on_ranks(settings, AutoConfig.for_model("llama"))
    assert settings.decisions[-1].startswith("flex_attention: the self-test was skipped")


@pytest.mark.parametrize(("flags", "more", "why"), [
    ((), {"gpu": hardware.GPUS["t4-16g"]}, "Triton has no kernels for GPUs before Ampere"),
    (("--compile_layers", "true"), {}, "--compile_layers"),
    (("--torch_compile", "true"), {}, "--torch_compile"),
    (("--full_determinism", "true"), {}, "--full_determinism"),
    (("--tp_size", "2", "--zero", "2"), {"ranks": 2}, "--tp_size splits its rows"),
    (("--adapter", "prompt_tuning"), {"recipe": "lora"}, "--adapter prompt_tuning lengthens the rows"),
    ((), {"config": "dropout"}, "attention_dropout 0.1: flex_attention does not support dropout"),
])  # fmt: skip
def test_where_eager_stays_it_is_said_why(flags, more, why, h100, monkeypatch):
    monkeypatch.setattr(flex_self_test, "has_passed", lambda settings, config: True)
    if more.get("config") == "dropout":
        more = {"config": tiny("gemma2")}
        more["config"].attention_dropout = 0.1
    settings = resolved(*flags, **more)
    assert settings.attn_implementation == "eager"
    assert "flex_attention" in last_line(settings) and last_line(settings).endswith(why)


def test_nodes_follow_the_first_rank(h100, monkeypatch):
    """A self-test is kept on each node; that of the first decides."""
    monkeypatch.setattr(flex.distributed, "broadcast", lambda own: ("flex_attention", True))
    other = resolved()
    flex.follow_first_rank(other)
    assert chosen(other) == ("flex_attention", True)
    for own in (resolved("--attn_implementation", "eager"), resolved(config=AutoConfig.for_model("llama"))):
        before = chosen(own)
        flex.follow_first_rank(own)
        assert chosen(own) == before


@pytest.mark.parametrize(("kind", "name"), [("gemma2", "eager"), ("llama", "sdpa")])
def test_answers_are_generated_by_another_attention(kind, name):
    config = AutoConfig.for_model(kind, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flex_attention")
    settings = SimpleNamespace(attn_implementation="flex_attention")
    with attention.for_generation(settings, model):
        assert model.config._attn_implementation == name
    assert model.config._attn_implementation == "flex_attention"
    with attention.for_generation(SimpleNamespace(attn_implementation="sdpa"), model):
        assert model.config._attn_implementation == "flex_attention"


def test_a_class_from_elsewhere_generates_by_another_attention_too():
    """The class of --trust_remote_code is in none of transformers' lists."""

    class OwnConfig(LlamaConfig):
        model_type = "from_elsewhere"

    class OwnModel(LlamaForCausalLM):
        config_class = OwnConfig

    model = OwnModel._from_config(OwnConfig(**SIZES), attn_implementation="flex_attention")
    assert classes.text_class(model.config) is None
    with attention.for_generation(SimpleNamespace(attn_implementation="flex_attention"), model):
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_plan_counts_no_scores_for_flex_attention(tmp_path):
    """gpt-oss of two layers at 8,192 tokens: scores of 4 heads in bf16 are 0.5 GiB."""
    tiny("gpt_oss").save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--data", "none", "--max_length", "8192", "--zero", "2",
             "--per_device_train_batch_size", "1", "--gradient_checkpointing", "true"]  # fmt: skip
    asked = [
        simulate.Question(resolve.parse.request("sft", [*words, "--attn_implementation", name]), 1,
                          gpu=hardware.GPUS["h100-80g"])
        for name in ("eager", "flex_attention")
    ]  # fmt: skip
    eager, without_scores = (sum(answer["peak"]["backward"].values()) for answer in simulate.run_all(asked))
    assert eager - without_scores > 2**29
