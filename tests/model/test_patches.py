"""Each change to a library does what it is for, computes the same, and is still needed."""

import ast
import functools
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from conftest import ROOT, TINY
from packaging.version import Version
from safetensors.torch import load_file
from test_load import packed
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config, Trainer, TrainingArguments

from zerofit.base.errors import UserError
from zerofit.config import parse
from zerofit.model import attention, load, patches
from zerofit.model.image_text import classes
from zerofit.model.kernels import linear_attention
from zerofit.plan import simulate
from zerofit.train.pipeline_trainer import PipelineTrainer
from zerofit.train.trainer import ZerofitTrainer

PLAIN = bitsandbytes.matmul_4bit
LAYERS = (4, 8)
HIDDEN, INTERMEDIATE = 256, 512
PACKED_LAYER_BYTES = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE) // 2
# Nothing is kept gathered for later use: what stays is what somebody holds.
NOTHING_LIVE = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 1000,
    },
}  # fmt: skip


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(bitsandbytes, "matmul_4bit", PLAIN)
    patches.release_gathered_4bit_weights()
    yield bitsandbytes.matmul_4bit
    bitsandbytes.matmul_4bit = PLAIN


def packed_weight(rows: int, columns: int, **attributes):
    weight, state = bitsandbytes.functional.quantize_4bit(
        torch.randn(rows, columns),
        blocksize=64,
        compress_statistics=True,
        quant_type="nf4",
        quant_storage=torch.float32,
    )
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter, state


def test_bitsandbytes_still_keeps_a_view_of_the_weight():
    """When this fails, patches.release_gathered_4bit_weights can go."""
    weight, state = packed_weight(128, 64)
    out = PLAIN(torch.randn(2, 64, requires_grad=True), weight, quant_state=state)
    assert out.grad_fn.tensors[1].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


@pytest.mark.oracle
@pytest.mark.parametrize("bias", [True, False])
def test_a_gathered_4bit_product_is_the_same(patched, bias, record_property):
    torch.manual_seed(0)
    weight, state = packed_weight(128, 64, ds_id=7)
    results = []
    for product in (PLAIN, patched):
        x = torch.linspace(-1, 1, 3 * 5 * 64).view(3, 5, 64).requires_grad_()
        added = torch.linspace(0, 1, 128).requires_grad_() if bias else None
        out = product(x, weight, quant_state=state, bias=added)
        (out**2).sum().backward()
        results.append([out.detach(), x.grad])
        if product is patched:
            assert "Product" in type(out.grad_fn).__name__  # not the plain one by accident
            if bias:
                assert torch.allclose(added.grad, 2 * out.detach().flatten(0, 1).sum(0))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)
    record_property("relative_difference", 0.0)


def test_only_parameters_that_zero_3_gathers_are_taken(patched):
    weight, state = packed_weight(128, 64)
    out = patched(torch.randn(2, 64, requires_grad=True), weight, quant_state=state)
    assert "MatMul4Bit" in type(out.grad_fn).__name__


def random_model(folder, layers: int):
    config = AutoConfig.from_pretrained(TINY / "model")
    config.update({"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers,
                   "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": HIDDEN // 4})  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "model").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("checkpointing", ["true", "false"])
@pytest.mark.slow
def test_a_qlora_step_at_stage_3_holds_no_gathered_layer(checkpointing, tmp_path):
    """Real packed weights, the real engine as rank 0 of 2: bytes beside the model's own do not grow with its depth."""
    (tmp_path / "live.json").write_text(json.dumps(NOTHING_LIVE))
    questions = []
    for layers in LAYERS:
        model = random_model(tmp_path / str(layers), layers)
        flags = ["--model", model, "--data", "none", "--zero", "3", "--load_in_4bit", "true", "--bf16", "true",
                 "--deepspeed", str(tmp_path / "live.json"), "--max_length", "64", "--per_device_train_batch_size", "1",
                 "--effective_batch_size", "2", "--lora_r", "1", "--gradient_checkpointing", checkpointing]  # fmt: skip
        questions.append(simulate.Question(parse.request("lora", flags), 2, device="cpu", fake=False))
    answers = simulate.run_all(questions)
    assert not [answer for answer in answers if isinstance(answer, Exception)], answers
    for phase in ("backward", "step"):
        few, many = (answer["peak"][phase]["buffers"] for answer in answers)
        grows = (many - few) / (LAYERS[1] - LAYERS[0])
        assert grows < 0.25 * PACKED_LAYER_BYTES, (phase, grows, PACKED_LAYER_BYTES)


def test_transformers_still_compares_with_a_partitioned_shape(monkeypatch):
    """When the first part fails, patches.compare_full_shapes can go."""
    from transformers.core_model_loading import Transpose

    monkeypatch.setattr(Transpose, "convert", getattr(Transpose.convert, "plain", Transpose.convert))
    partitioned = torch.nn.Parameter(torch.zeros(0))
    partitioned.ds_shape = torch.Size([2, 3, 4])
    model = SimpleNamespace(get_parameter={"experts": partitioned, "whole": torch.zeros(2, 3, 4)}.__getitem__)

    def shape_of(given, name="experts"):
        found = Transpose(1, 2, check_dims=True).convert(
            {"experts": torch.zeros(given)}, ["experts"], ["experts"], model=model, full_layer_name=name
        )
        return tuple(found["experts"].shape)

    assert shape_of((2, 3, 4)) == (2, 4, 3)  # in order, and transposed all the same
    patches.compare_full_shapes()
    assert shape_of((2, 3, 4)) == shape_of((2, 4, 3)) == shape_of((2, 4, 3), "whole") == (2, 3, 4)


def test_transformers_still_asks_the_device_for_documents(monkeypatch):
    """When the first part fails, patches.skip_document_search can go."""
    from test_fused_loss import NoWaits
    from transformers import masking_utils

    changed = masking_utils._preprocess_mask_arguments
    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", getattr(changed, "plain", changed))
    name = attention.register()
    changed = masking_utils._preprocess_mask_arguments
    config = AutoConfig.for_model("llama", num_hidden_layers=1)
    hidden, positions = torch.zeros(1, 6, 8), torch.tensor([[0, 1, 2, 0, 1, 2]])

    def mask(implementation, function):
        monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", function)
        config._attn_implementation = implementation
        return masking_utils.create_causal_mask(config, hidden, None, past_key_values=None, position_ids=positions)

    with pytest.raises(AssertionError, match="waits for the device"), NoWaits():
        mask(name, changed.plain)
    with NoWaits():
        assert mask(name, changed) is None
    assert mask(name, changed.plain) is None
    assert torch.equal(mask("sdpa", changed), mask("sdpa", changed.plain))  # others have their documents


def test_deepspeed_still_names_parameters_to_list_them(monkeypatch):
    """When this fails, patches.list_own_parameters_directly can go."""
    from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator

    plain = partitioned_param_coordinator.iter_params
    monkeypatch.setattr(partitioned_param_coordinator, "iter_params", plain)
    monkeypatch.setattr(parameter_offload, "iter_params", plain)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3, bias=False), torch.nn.ReLU())
    for module in net.modules():
        partition_parameters._init_external_params(module)
    net[2]._external_params[0] = net[0].weight
    calls = []
    named = torch.nn.Module.named_parameters
    monkeypatch.setattr(torch.nn.Module, "named_parameters", lambda *a, **kw: calls.append(a) or named(*a, **kw))
    wanted = {module: [list(plain(module, recurse)) for recurse in (False, True)] for module in net.modules()}
    assert len(calls) == 8
    patches.list_own_parameters_directly()
    ours = parameter_offload.iter_params
    assert ours is partitioned_param_coordinator.iter_params is not plain
    for module, (own, every) in wanted.items():
        assert all(a is b for a, b in zip(ours(module), own, strict=True))
        assert all(a is b for a, b in zip(ours(module, recurse=True), every, strict=True))
    assert len(calls) == 12 and len(wanted[net[2]][0]) == 1
    patches.list_own_parameters_directly()
    assert parameter_offload.iter_params is ours


def test_deepspeed_still_waits_in_the_order_of_a_set(monkeypatch):
    """When the first assertion fails, patches.wait_for_parameters_in_order can go."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    fetch = partitioned_param_coordinator.PartitionedParameterCoordinator._fetch_sub_module_impl
    fetch = inspect.unwrap(fetch)
    assert "for param in params_to_fetch:" in inspect.getsource(fetch) and "set" in fetch.__code__.co_names
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(64)]
    for number, parameter in enumerate(parameters):
        parameter.ds_id = number
    monkeypatch.setattr(partitioned_param_coordinator, "set", set, raising=False)
    patches.wait_for_parameters_in_order()
    waited = fetch.__globals__["set"](reversed(parameters))
    assert all(a is b for a, b in zip(waited, parameters, strict=True))
    assert waited == set(parameters) and list(fetch.__globals__["set"]([70, 3, 9])) == [3, 9, 70]


def test_deepspeed_still_begins_a_trace_with_each_forward():
    """When this fails, patches.same_trace can go."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    begun = []

    class Offload(DeepSpeedZeRoOffload):
        def __init__(self):  # without sharding
            self.module = torch.nn.Linear(2, 2)

        def get_param_coordinator(self):
            return coordinator

        def _register_deepspeed_module(self, module, count=None):
            pass

    class Coordinator:
        def reset_step(self):
            begun.append(1)

    coordinator, offload = Coordinator(), Offload()
    offload.setup_zero_stage3_hooks()
    with patches.same_trace(SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload))):
        offload.module(torch.zeros(2))
    assert begun == []
    offload.module(torch.zeros(2))
    assert begun == [1]


def test_deepspeed_still_keeps_releases_of_a_dropped_trace(monkeypatch):
    """When this fails, patches.clear_releases_with_trace can go."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator

    coordinator_class = partitioned_param_coordinator.PartitionedParameterCoordinator
    plain = coordinator_class._clear_trace_structures
    plain = getattr(plain, "__wrapped__", plain)
    monkeypatch.setattr(coordinator_class, "_clear_trace_structures", plain)
    monkeypatch.setattr(coordinator_class, "__hash__", object.__hash__)
    layer, coordinator = torch.nn.Linear(2, 2, bias=False), object.__new__(coordinator_class)
    partition_parameters._init_external_params(layer)
    layer.weight.ds_id, layer.weight.ds_persist, layer.weight.ds_numel = 7, False, 4

    def released_after_its_first_use(uses: int) -> set:
        """Of a trace in which the layer is used so many times."""
        coordinator._clear_trace_structures()
        mode = partitioned_param_coordinator.ZeRoTraceMode.COMPLETE
        values = {"trace_mode": mode, "submodule_order": (layer,) * uses, "max_reuse_dist_in_numel": 100}
        for name, value in values.items():
            setattr(coordinator, f"_PartitionedParameterCoordinator__{name}", value)
        return coordinator._PartitionedParameterCoordinator__params_to_release(layer, 1)

    assert released_after_its_first_use(1) == released_after_its_first_use(2) == {7}
    patches.clear_releases_with_trace()
    patches.clear_releases_with_trace()
    assert coordinator_class._clear_trace_structures.__wrapped__ is plain
    assert released_after_its_first_use(1) == {7} and released_after_its_first_use(2) == set()


# --- a library that has changed ---


def test_a_patch_for_speed_or_memory_falls_away_with_one_line(capsys):
    for purpose in ("speed", "memory"):
        calls = []

        def patch(calls=calls):
            calls.append(1)
            raise AttributeError("module has no attribute 'gone'")

        apply = patches.only_for(purpose, "torch", f"{purpose} is lost")(patch)
        apply(), apply()
        said = capsys.readouterr()
        assert len(calls) == 2 and said.out == ""
        assert said.err == (
            f"note: torch {metadata.version('torch')} has changed (patch: module has no attribute 'gone'): "
            f"{purpose} is lost\n"
        )


@pytest.mark.bad_input
def test_a_patch_for_numbers_refuses():
    @patches.only_for("numbers", "torch", "the loss would be wrong; install an earlier torch")
    def patch():
        raise KeyError("gone")

    with pytest.raises(UserError, match=r"torch \S+ has changed \(patch: .*gone.*\): the loss would be wrong; install"):
        patch()


MISSING = {  # patch: what a newer library may lack
    "release_gathered_4bit_weights": "bitsandbytes.matmul_4bit",
    "list_own_parameters_directly": "deepspeed.runtime.zero.partitioned_param_coordinator.iter_params",
    "clear_releases_with_trace":
        "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator",
    "skip_document_search": "transformers.masking_utils._preprocess_mask_arguments",
    "compare_full_shapes": "transformers.core_model_loading.Transpose",
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("name", MISSING)
def test_a_run_goes_on_or_is_refused_where_a_name_is_gone(name, monkeypatch, capsys):
    patches._print_once.cache_clear()
    patch, arguments = getattr(patches, name), ["x"] * (name == "skip_document_search")
    monkeypatch.setattr(patches, "_WITH_BOUNDS", set())
    monkeypatch.delattr(MISSING[name])
    if patch.purpose == "numbers":
        with pytest.raises(UserError, match=f"has changed \\({name}: "):
            patch(*arguments)
    else:
        patch(*arguments)
        assert f"has changed ({name}: " in capsys.readouterr().err


def test_a_trace_of_another_form_goes_on(capsys):
    patches._print_once.cache_clear()
    for offload in (SimpleNamespace(), SimpleNamespace(get_param_coordinator=SimpleNamespace)):
        with patches.same_trace(SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload))):
            pass
    assert capsys.readouterr().err.count("lacks reset_step") == 1


@pytest.mark.bad_input
def test_a_method_that_would_never_be_called_is_refused(monkeypatch):
    """transformers' Trainer is no abstract class: one of its methods that has another name calls none of ours."""
    patches.check_overrides(ZerofitTrainer)
    monkeypatch.delattr(Trainer, "_load_best_model")
    with pytest.raises(UserError, match=r"Trainer\._load_best_model: transformers \S+ no longer has it"):
        patches.check_overrides(ZerofitTrainer)


@pytest.mark.parametrize("cls", [ZerofitTrainer, PipelineTrainer])
def test_each_private_method_of_the_trainer_that_is_overridden_is_marked(cls):
    marked = {name for name, value in vars(cls).items() if getattr(value, "__override__", False)}
    assert marked == {name for name in vars(cls) if is_private(name) and callable(getattr(Trainer, name, None))}


@pytest.mark.bad_input
def test_an_attribute_that_nothing_would_read_is_refused():
    arguments = TrainingArguments(use_cpu=True)
    patches.write(arguments, "_n_gpu", 1)
    with pytest.raises(UserError, match=r"TrainingArguments\._gpus: transformers \S+ no longer has it"):
        patches.write(arguments, "_gpus", 1)


# --- the list of all patches and private names, docs/patches.toml ---

SRC = ROOT / "src" / "zerofit"
LISTED = tomllib.loads((ROOT / "docs" / "patches.toml").read_text())["patch"]
TREES = {file.relative_to(SRC).as_posix(): ast.parse(file.read_text()) for file in sorted(SRC.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """The private functions and classes of the package, without those that override a library's."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    overridden = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
    }
    return defined - overridden


OWN = own_names()


def private_names(tree) -> set[str]:
    """The private names of other modules that a file imports, reads or sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {*node.module.split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            found |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    return {name for name in found if is_private(name)} - OWN - {"_exit"}  # os._exit is documented


@pytest.mark.parametrize("file", TREES)
def test_every_private_name_of_a_library_is_listed(file):
    listed = {name for patch in LISTED if patch["file"] == file for name in patch["names"]}
    assert private_names(TREES[file]) <= listed, "list it in docs/patches.toml, with the reason"


@functools.cache
def source_of(module: str) -> str:
    """The text of a library's module; of a package, of all its files with their names."""
    origin = Path(importlib.util.find_spec(module).origin)
    files = [origin] if origin.name != "__init__.py" else sorted(origin.parent.rglob("*.py*"))
    return "\n".join(f"{file}\n{file.read_text(errors='replace')}" for file in files if file.suffix in (".py", ".pyi"))


@pytest.mark.parametrize("patch", LISTED, ids=lambda patch: f"{patch['file']}-{patch['names'][0]}")
def test_what_is_listed_is_still_needed_and_still_there(patch):
    ours, theirs = (SRC / patch["file"]).read_text(), source_of(patch["of"])
    for name in patch["names"]:
        assert name in ours, f"{patch['file']} has no {name}: take it off the list"
        last = name.rpartition(".")[2]
        library, _, first = patch.get("since", {}).get(name, "").partition(" ")
        if library and Version(metadata.version(library)) < Version(first):
            continue
        assert last in theirs, f"{patch['of']} has no {last} any more"
        if is_private(last) and theirs.count("\n") < 10_000:  # of a module, not of a whole package
            public = last.lstrip("_")
            assert not re.search(rf"(?<!@property\n    )def {public}\(", theirs), f"{patch['of']} has a public {public}"
    assert patch["purpose"] in ("speed", "memory", "numbers", "report", "plan")
    applied = [getattr(getattr(patches, call), "purpose", None) for call in vars(patches)]
    if patch["file"] == "model/patches.py" and patch["names"] != ["get_param_coordinator", "reset_step"]:
        assert patch["purpose"] in applied
    file, _, function = patch["test"].partition("::")
    assert f"def {function}(" in (ROOT / file).read_text(), f"there is no {patch['test']}"


def test_deepspeed_would_still_compile_its_inference_op():
    """When this fails, distributed.skip_inference_op can go."""
    import deepspeed

    from zerofit.base import distributed

    compatible = deepspeed.ops.__compatible_ops__
    distributed.skip_inference_op()
    assert compatible["deepspeed_shm_comm"] is False
    assert "__compatible_ops__.get(builder.NAME" in source_of("deepspeed.comm.torch")


def test_transformers_still_keeps_documents_apart_by_kernels_alone():
    """When this fails, model/kernels/linear_attention.py can call less for each document."""
    for kind in ("qwen3_next", "granitemoehybrid"):
        config = AutoConfig.for_model(kind)
        of_module = vars(sys.modules[classes.text_class(config).__module__])
        for name, (kernel, package) in linear_attention.kernels_of(config).items():
            if kernel in linear_attention.TOKEN_AXIS and not importlib.util.find_spec(package):
                assert linear_attention._is_in_pytorch(kernel, package)
                # 5.20 and later refuse boundaries, 5.17 drops them: its function then lacks the other arguments
                with pytest.raises((ValueError, TypeError)):
                    of_module[name](seq_idx=torch.zeros(1, 2))
    # Its kernel reads cu_seqlens, which is told to no layer; transformers drops cu_seq_lens_q before the kernel.
    assert "cu_seqlens" not in source_of("transformers.models.kimi_linear.modeling_kimi_linear")


def test_transformers_still_saves_unpacked_experts_under_packed_names(tmp_path):
    """When this fails, complete.save_unpacked can go. It is a matter of 5.23, which a floor above it leaves behind."""
    if Version(metadata.version("transformers")).release[:2] != (5, 23):
        pytest.skip("transformers 5.17 and 5.24 save unpacked experts under their own names")
    folder = packed(tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))
    model.save_pretrained(tmp_path / "saved")
    assert any(name.endswith("_blocks") for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_transformers_still_reads_image_outputs_that_llama4_has_not():
    """When this fails, patches.give_llama4_image_outputs can go. 5.23 and earlier do not need it."""
    if Version(metadata.version("transformers")) < Version("5.24"):
        pytest.skip("transformers before 5.24 does not read image_outputs")
    modeling = importlib.import_module("transformers.models.llama4.modeling_llama4")
    assert "outputs.image_outputs" in inspect.getsource(modeling.Llama4ForConditionalGeneration.forward)
    assert "image_outputs" not in modeling.MoeCausalLMOutputWithPast.__dataclass_fields__


def test_the_commit_of_a_hub_model_is_in_its_fingerprint(monkeypatch):
    config = AutoConfig.from_pretrained(TINY / "model")
    monkeypatch.setattr(load, "load_config", lambda settings: config)
    found = set()
    for config._commit_hash in (None, "5e1f3c", "0a9d27"):
        found.add(load.model_fingerprint(SimpleNamespace(model="somebody/some-model", random_init=False)))
    assert len(found) == 3
