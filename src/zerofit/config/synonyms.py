"""Map flags of TRL, axolotl, LLaMA-Factory and older transformers to the names used here."""

import difflib
import re

from zerofit.job import program
from zerofit.job.recipe import Recipe

# Our flag, with a remark in parentheses if its meaning differs -> names in other kits. difflib finds similar names
# (max_seq_length, gradient_accumulation).
_ELSEWHERE = {
    # Hugging Face, and earlier versions
    "--warmup_steps (a value below 1 is a ratio)": "warmup_ratio",
    "--dtype": "torch_dtype",
    "--use_cpu": "no_cuda",
    "--train_sampling_strategy group_by_length": "group_by_length",
    "--output_dir (name a new folder)": "overwrite_output_dir",
    "--plan": "dry_run",
    "--ignore_plan": "force",
    "--gpu_type": "gpu",
    "--output_dir": "out",
    "--per_device_train_batch_size auto": "probe",
    "--ignore_resume_mismatch": "resume_anyway",
    "--zero": "zero_stage",
    "recipes/sft.py or recipes/dpo.py (--zero is the ZeRO stage)": "stage",
    "launchers/ray (docs/multinode.md)": "use_ray",
    "--offload optimizer (deepspeed 0.19's ZenFlow computes wrong results)": "zenflow",
    # keys of the DeepSpeed JSON
    '"ratio" in deepspeed_configs/offload_optimizer.json': "offload_ratio",
    '"super_offload" in deepspeed_configs/offload_optimizer.json': "super_offload",
    '"zero_hpz_partition_size" in deepspeed_configs/zero3.json': "zero_hpz_partition_size",
    '"zero_quantized_weights" in deepspeed_configs/zero3.json': "zero_quantized_weights",
    '"zero_quantized_gradients" in deepspeed_configs/zero3.json': "zero_quantized_gradients",
    # models
    "--model": "model_name_or_path model_name base_model base_model_config",
    "--attn_implementation": "flash_attn flash_attention",
    "--attn_implementation flash_attention_2": "use_flash_attention_2",
    # rows
    "--data": "dataset datasets dataset_name dataset_dir dataset_path train_file",
    "--data_split": "dataset_train_split",
    "--columns text=...": "dataset_text_field",
    "--preprocessing_num_workers": "dataset_num_proc",
    "--eval_fraction": "val_size val_set_size",
    "--max_length": "max_seq_len cutoff_len sequence_len seq_length",
    "--packing": "sample_packing neat_packing",
    "--packing (does not split rows)": "packing_strategy",
    "--eval_strategy no": "no_eval",
    "--chat_template (trains its end tokens)": "eot_tokens",
    "--sp_size": "sequence_parallel_size sequence_parallel_degree ulysses_sequence_parallel_size",
    "--sp_size (splits heads, no ring)": "context_parallel_size",
    "--tp_size": "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size deepspeed_autotp_size",
    "--pp_size with recipes/pipeline.py": "pipeline_parallel_size pipeline_model_parallel_size",
    "--zero 3 (shards the experts; DeepSpeed's expert parallelism fails here)": "expert_parallel_size ep_size",
    "--train_on all": "train_on_prompt train_on_inputs",
    "--train_on assistant": "assistant_only_loss completion_only_loss",
    "--mask_generation_prompt (as ms-swift's ignore_empty_think; other scales are unsupported)": "loss_scale",
    # preference pairs
    "--beta": "pref_beta",
    "--loss_type": "pref_loss",
    "--label_smoothing": "dpo_label_smoothing",
    "--rpo_alpha": "pref_ftx",
    "--precompute_ref_log_probs (the reference is the model before training)": "ref_model",
    "--loss_type simpo (or orpo)": "reference_free",
    # steps
    "--per_device_train_batch_size (--effective_batch_size counts all ranks)": "batch_size",
    "--effective_batch_size": "train_batch_size global_batch_size",
    "--per_device_train_batch_size": "micro_batch_size",
    "--per_device_eval_batch_size": "eval_batch_size",
    "--num_train_epochs": "epochs",
    "--learning_rate": "lr",
    "--optim": "optimizer",
    "--lr_scheduler_type": "scheduler",
    "--max_grad_norm": "grad_clip gradient_clipping",
    "--report_to wandb (WANDB_PROJECT names the project)": "wandb_project",
    "--resume_from_checkpoint": "resume",
    # adapters
    "recipes/lora.py": "use_peft",
    "recipes/lora.py, or recipes/sft.py for all weights": "finetuning_type",
    "--lora_r": "lora_rank",
    "`zerofit eval RUN/checkpoint-N --tasks ...` during the run (plans reserve no memory for tasks)": "eval_tasks",
    "--initial_adapter": "adapter_name_or_path lora_model_dir",
    "--lora_target_modules": "lora_target target_modules",
    "--lora_target_modules all-linear": "lora_target_linear",
    "--modules_to_save": "additional_target lora_modules_to_save",
    "--load_in_4bit, or --load_in_8bit": "quantization_bit",
    "--loraplus_lr_ratio": "loraplus_lr_multiplier",
}

RENAMED = {name: flag for flag, names in _ELSEWHERE.items() for name in names.split()}

NO_GUESS = ("train", "training", "lora_query", "rdzv_backend")  # the closest name has another meaning

# Argument -> value in other kits -> our flag.
VALUES = {
    "offload": {
        "cpu": "--offload optimizer", "optim": "--offload optimizer", "nvme": "--offload optimizer with --offload_path",
        "param": "--offload all", "params": "--offload all", "parameters": "--offload all", "full": "--offload all",
        "true": "--offload optimizer", "false": "--offload none", "no": "--offload none",
    },
}  # fmt: skip

_STAGE = re.compile(
    r"(?:ds|deepspeed)?[-_]?(?:zero|z|stage)?[-_]?(?:stage)?[-_]?([0-3])(?:[-_]config)?(?:\.json)?", re.IGNORECASE
)


def stage(word: str) -> str | None:
    """Return the ZeRO stage in a word like zero3, stage-2 or ds_z3_config.json, or None."""
    match = _STAGE.fullmatch(word)
    return match and match[1]


def explain_value(message: str) -> str | None:
    """Return argparse's message on a wrong value as "name value: must be ...", or None for other messages."""
    if missing := re.fullmatch(r"argument --(\w+)\S*: expected (one|at least one) argument", message):
        return f"{missing[1]}: its value is missing."
    if flag := re.match(r"argument --(\w+)\S*: Truthy value expected: got (.*) but expected", message):
        return f"{flag[1]} {flag[2]}: must be true or false."
    match = re.fullmatch(r"argument --(\w+)\S*: invalid (\w+)(?: value)?: '(.*?)'(?: \(choose from (.*)\))?", message)
    if not match:
        return None
    name, kind, value, choices = match.groups()
    if kind != "choice":
        required = {"int": "an integer", "float": "a number"}.get(kind)
        return required and f"{name} {value}: must be {required}."
    choices = choices.replace("'", "").replace("True, False", "true, false")  # argparse prints Python values
    guess = f"--zero {stage(value)}" if name == "zero" and stage(value) else VALUES.get(name, {}).get(value.lower())
    return f"{name} {value}: must be one of {choices}{f'; did you mean {guess}?' if guess else '.'}"


def explain_unknown(unknown: list[str], recipe: Recipe, names: list[str], origin: str) -> str:
    """Return a sentence for each unknown flag; the words after a flag are its values.

    Args: unknown: words left over by argparse; names: all arguments of the recipe; origin: "command line" or file.
    """
    sentences, inside = [], False
    for word in unknown:
        is_flag = bool(re.match(r"--?[A-Za-z]", word))
        if not is_flag and inside:
            continue
        inside = is_flag
        name = word.lstrip("-").split("=")[0].replace("-", "_")
        guess = hint(name, recipe, names)
        what = f"unknown flag --{name}" if is_flag else f"unexpected word {word!r}"
        if origin != "command line":
            what, guess = f"unknown key {name!r}", guess and guess.removeprefix("--")
        sentence = f"{what}; did you mean {guess}?" if guess else f"{what}; --help all lists every flag."
        if sentence not in sentences:
            sentences.append(sentence)
    return " ".join(sentences)


def hint(name: str, recipe: Recipe, names: list[str]) -> str | None:
    """Return the likely flag or recipe for an unknown argument, or None."""
    close = difflib.get_close_matches(name, names, 1, 0.75) if name not in NO_GUESS else []
    guess = f"--{name}" if name in names else RENAMED.get(name) or (f"--{close[0]}" if close else None)
    for other in sorted(program.kit().values(), key=lambda other: len(other.arguments)):
        other_names = {*other.own_arguments} - {*names}
        if name in other_names or (guess or "").split()[:1] in [[f"--{n}"] for n in other_names]:
            return f"recipes/{other}.py (make {other}){f' with {guess}' if guess and name not in other_names else ''}"
    return guess
