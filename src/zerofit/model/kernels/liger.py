"""Choose Liger's norms, rotary embeddings and gated MLPs, and self-test them on the GPU before the model is loaded.

transformers applies the kernels to the model (integrations/liger.py). Zerofit's fused loss has priority over Liger's.
"""

import contextlib
import copy
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from zerofit.base import command_line, distributed, hardware
from zerofit.base.errors import UserError
from zerofit.job import parallel_dims
from zerofit.job.settings import Decision, decide, withdraw
from zerofit.job.technique import Conflict, Technique
from zerofit.model import load, self_test
from zerofit.model.image_text import classes

# Dense models for which tests/model/test_liger.py compares the kernels with transformers' modules.
TESTED = frozenset(
    """
    exaone4 gemma gemma2 gemma3_text glm4 granite hunyuan_v1_dense llama ministral mistral olmo2 olmo3 phi3 qwen2 qwen3
    smollm3
    """.split()
)

# Turns Liger's losses off; the loss for granite is on by default.
NO_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}

# Liger replaces the forward of each MLP after --tiled_mlp has replaced it.
NO_MLP = {"swiglu": False, "geglu": False}

# Liger replaces the forward of peft's wrapper, whose `weight` is the base model's.
FROZEN_NORMS = "Liger's norms would use the frozen weights, not the trained ones"

TOKENS = 64  # tokens in the self-test

# Keys of config.json that the self-test's layer depends on.
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters",
)  # fmt: skip

# Bounds of relative errors. Rounding causes up to 0.017 in bf16 and 0.002 in fp16 in the tested models at width 512, a
# missing rotation 0.18 or more.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}


def resolve(settings) -> None:
    """Check --use_liger_kernel. Raises: UserError without liger-kernel, or on a CPU."""
    if not settings.use_liger_kernel:
        return
    if importlib.util.find_spec("liger_kernel") is None:
        why = "liger-kernel is not installed (its wheels are for Linux)"
        raise UserError(f"--use_liger_kernel: {why}: {command_line.install()}.")
    if settings.use_cpu:
        raise UserError("--use_liger_kernel: its Triton kernels need a GPU; leave the flag out on a CPU.")


def resolve_for_model(settings, config) -> None:
    """Decide --use_liger_kernel if it is not set, and which of Liger's kernels are used."""
    unset = settings.source["use_liger_kernel"] == "transformers default"
    if unset and not settings.use_cpu:
        if why_not := _why_not(settings, config):
            settings.decisions.append(Decision(f"use_liger_kernel False: {why_not}", "use_liger_kernel"))
        else:
            why = f"norms, rotary embeddings and MLPs of {config.model_type} (off: --use_liger_kernel false)"
            decide(settings, "use_liger_kernel", True, why)
    if not settings.use_liger_kernel:
        return
    kernels = {}
    if unset or settings.fused_loss or settings.parallel_size("tokens") > 1:  # Liger's loss has far smaller chunks
        kernels |= NO_LOSS
        if settings.fused_loss:
            settings.decisions.append("the loss is zerofit's fused loss, not Liger's")
        elif not unset:
            settings.decisions.append("the loss is transformers', not Liger's, which was tested on full rows only")
    if settings.tiled_mlp != 1:
        kernels |= NO_MLP
        sentence = "Liger's MLP is off: it would replace the tiles of --tiled_mlp"
        settings.decisions.append(Decision(sentence, "liger_kernel_config"))
    if settings.gradient_checkpointing and settings.gradient_checkpointing_policy == "selective":
        # The recomputation would rotate the kept products a second time.
        kernels["rope"] = False
        sentence = "Liger's rotary kernel is off: it overwrites products that selective checkpointing keeps"
        settings.decisions.append(Decision(sentence, "liger_kernel_config"))
    # Users cannot set this flag: argparse does not parse dicts.
    decide(settings, "liger_kernel_config", kernels or None)


def _why_not(settings, config) -> str | None:
    """Return why Liger's kernels are off by default for this run; None if they are on."""
    excluded = (
        f"--{way.flag}: {conflict.why}"
        for way, _ in parallel_dims.active(settings.values)
        for conflict in way.conflicts
        if conflict.argument == "use_liger_kernel"
    )
    split = next(excluded, None)
    reasons = {
        "liger-kernel is not installed": importlib.util.find_spec("liger_kernel") is None,
        f"not tested with {config.model_type}": config.model_type not in TESTED or classes.text_class(config) is None,
        "Triton has no kernels for GPUs before Ampere": not hardware.is_ampere_or_later(settings.planned_gpu),
        f"--adapter ln_tuning: {FROZEN_NORMS}": settings.values.get("adapter") == "ln_tuning",
        split: split,
        "--torch_compile fuses the same operations": settings.torch_compile,
        "--full_determinism": settings.full_determinism,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def self_test_kernels(settings, config) -> None:
    """Compare Liger's kernels with transformers' modules on this GPU, before the model is loaded. Collective.

    A failure on any rank turns them off on all ranks, with a decision.
    Args: config: the model's.
    Raises: UserError for a failure if --use_liger_kernel was set, or if the GPU is unusable afterwards.
    """
    if not settings.use_liger_kernel:
        return
    device = torch.device("cpu" if settings.use_cpu else "cuda")
    problem = self_test.run(lambda: _problem(settings, config, device), "--use_liger_kernel", "use false")
    if not settings.use_cpu and distributed.rank() == 0:
        self_test.store_result(_result_files(settings, config, torch.cuda.get_device_name()), problem is None)
    if problem is None:
        return
    if settings.source["use_liger_kernel"] != "decided":
        raise UserError(f"--use_liger_kernel: {problem}; leave it out.")
    withdraw(settings, "use_liger_kernel", "liger_kernel_config")
    settings.decisions.append(Decision(f"use_liger_kernel False: {problem}", "use_liger_kernel"))
    settings.use_liger_kernel = False


def will_run(settings, gpu_name: str) -> bool:
    """Return whether a job will use Liger's kernels: on request, or by default after a self-test of an earlier start.

    Args: settings: resolved for the model; gpu_name: torch's name of the GPUs.
    """
    if not settings.use_liger_kernel or settings.source["use_liger_kernel"] != "decided":
        return settings.use_liger_kernel
    return any(file.exists() for file in _result_files(settings, load.load_config(settings), gpu_name))


def _result_files(settings, config, gpu_name: str) -> list[Path]:
    """Return the files that mark a passed self-test: of the kernels in use, and of all kernels, which includes them.

    A file's name is a hash of all conditions of the result.
    """
    text = config.get_text_config()
    sizes = [str(getattr(text, name, None)) for name in SIZES]
    versions = [metadata.version(name) for name in ("torch", "triton", "transformers", "liger-kernel")]
    conditions = [gpu_name, *versions, text.model_type, *sizes, load.weight_dtype(settings), settings.precision]
    off = [sorted((settings.liger_kernel_config or {}).keys() | NO_LOSS), sorted(NO_LOSS)]
    return [self_test.result_file("liger", *conditions, *kernels) for kernels in off]


def _problem(settings, config, device: torch.device) -> str | None:
    """Return the failure of Liger's kernels on this rank's device, or None."""
    dtype = getattr(torch, load.weight_dtype(settings))
    compute = load.DTYPES[settings.precision]
    bound = max(BOUNDS[dtype], BOUNDS[compute])
    with torch.autocast(device.type, compute, enabled=settings.keeps_fp32 and compute != torch.float32):
        measured = errors(config, dtype, settings.liger_kernel_config, device)
    wrong = {what: error for what, error in measured.items() if not error <= bound}
    if not wrong:
        return None
    what, error = max(wrong.items(), key=lambda pair: pair[1])
    return f"its {what} differ from transformers' by {error:.1%} (bound {bound:.1%})"


def errors(config, dtype: torch.dtype, kernels: dict | None, device: torch.device) -> dict[str, float]:
    """Return the relative errors of Liger's kernels for a layer with random weights and the model's sizes.

    Args: config: the model's; kernels: Liger's arguments, as in --liger_kernel_config.
    Returns: the errors of {"outputs", "gradients of the inputs", "gradients of the norms"}.
    """
    from transformers.integrations.liger import apply_liger_kernel

    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), _layer(config, dtype, device) as model:
        width = model.config.hidden_size
        inputs, upstream = (torch.randn(1, TOKENS, width, device=device) for _ in range(2))
        expected = _results(model, inputs.to(dtype), upstream)
        apply_liger_kernel(model, (kernels or {}) | NO_LOSS)
        results = _results(model, inputs.to(dtype), upstream)
    return {what: ((results[what] - expected[what]).norm() / expected[what].norm()).item() for what in expected}


@contextlib.contextmanager
def _layer(config, dtype: torch.dtype, device: torch.device):
    """Context with a model of one layer; afterwards the names of its module that Liger replaced are restored."""
    unset_hf_deepspeed_config()  # the configuration of an earlier run in this process would shard the model
    config = copy.deepcopy(config)
    config.update(dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) | {"vocab_size": 8})
    config.update({"num_hidden_layers": 1, "use_cache": False})
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # make attention and gates nonlinear
            is_matrix = parameter.ndim > 1
            parameter.requires_grad_(not is_matrix)
            parameter.normal_(0 if is_matrix else 1, parameter.shape[-1] ** -0.5 if is_matrix else 0.1)
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        yield model
    finally:
        vars(module).update(before)


def _results(model, inputs, upstream) -> dict[str, torch.Tensor]:
    """Return the outputs of the layers for the inputs, and the gradients of their product with `upstream`."""
    inputs = inputs.clone().requires_grad_()
    norms = [parameter for parameter in model.parameters() if parameter.requires_grad]
    outputs = model.base_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    d_inputs, *d_norms = torch.autograd.grad((outputs.float() * upstream).sum(), [inputs, *norms])
    return {
        "outputs": outputs.detach().float(),
        "gradients of the inputs": d_inputs.float(),
        "gradients of the norms": torch.cat([gradient.float() for gradient in d_norms]),
    }


def simulated(settings, question) -> dict[str, bool]:
    """Simulate without default kernels that have not passed a self-test yet, as the start may turn them off."""
    is_default = settings.source["use_liger_kernel"] == "decided"
    return {"use_liger_kernel": False} if is_default and not question.liger else {}


TECHNIQUE = Technique(
    simulated=simulated,
    name="Liger kernels",
    flag="use_liger_kernel",
    example="--use_liger_kernel true",
    conflicts=(Conflict("adapter", ("ln_tuning",), FROZEN_NORMS),),
    resolve=resolve,
    resolve_for_model=resolve_for_model,
    self_test=self_test_kernels,
)
