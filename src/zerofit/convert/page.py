"""Format a conversion: the zerofit YAML file and the summary in the terminal."""

import re
from typing import Any

import yaml

from zerofit.base.errors import one_line
from zerofit.convert.conversion import GPU_ONLY, Conversion, Line

# The order of the lines; other arguments follow alphabetically.
ORDER = (
    "model model_revision trust_remote_code random_init adapter load_in_4bit load_in_8bit lora_r lora_alpha "
    "lora_dropout lora_target_modules use_rslora use_dora init_lora_weights modules_to_save loss_type beta "
    "label_smoothing rpo_alpha simpo_gamma data data_config data_split columns eval_data eval_fraction "
    "max_samples chat_template chat_template_kwargs train_on mask_generation_prompt max_length truncation packing "
    "effective_batch_size per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps "
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm optim seed "
    "bf16 fp16 pure_bf16 gpus zero offload sp_size tp_size"
).split()

WIDTH = 44  # width of a line before its comment


def text(done: Conversion, command: str) -> str:
    """Return the converted file: lines with their origin, then GPU options, unsupported keys and differences."""
    names = sorted(done.lines, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    parts = [f"# From {one_line(done.file.name)} of {done.kit.name}, read as version {done.kit.version}."]
    parts += [f"# {one_line(command)}"]
    if done.chosen_by:
        parts += [f"# Recipe {done.recipe} ({', '.join(done.chosen_by)})."]
    parts += [_line(name, done.lines[name]) for name in names]
    if done.on_gpus:
        parts += ["", f"# {GPU_ONLY}:"]
        parts += ["# " + _line(name, line) for name, line in done.on_gpus.items()]
    if done.lost:
        parts += ["", "# Without a counterpart:"]
        parts += [f"# - {line}" for line in _losses(done)]
    if done.same:
        parts += ["", f"# {_same(done)}"]
    if done.differences:
        parts += ["", "# Differences in meaning:"]
        parts += [f"# - {one_line(sentence)}" for sentence in done.differences]
    return "\n".join(parts) + "\n"


def _line(name: str, line: Line) -> str:
    return f"{f'{name}: {written(line.value)}':<{WIDTH}}  # {one_line(line.origin)}"


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that escapes line breaks in texts."""


def _text_node(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = '"' if re.search("[\n\r\x85\u2028\u2029]", value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text_node)


def written(value: Any) -> str:
    """Return a value as YAML on one line."""
    dumped = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    return dumped.removesuffix("...\n").strip()


def _losses(done: Conversion) -> list[str]:
    """Return a line for each unsupported key; keys of a section with the same reason share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key, why in done.lost.items():
        group = key.partition(".")[0] if done.kit.nested else key
        groups.setdefault((group, why), []).append(key)
    return [
        _lost(done, keys[0], why)
        if len(keys) == 1
        else one_line(f"{group}: {', '.join(k[len(group) + 1 :] for k in keys)} -- {why}")
        for (group, why), keys in groups.items()
    ]


def _lost(done: Conversion, key: str, why: str) -> str:
    value = done.values.get(key)
    shown = "" if value is None or isinstance(value, list | dict) else f": {' '.join(str(value).split())}"
    return one_line(f"{key}{shown[:42]} -- {why}")


def _same(done: Conversion) -> str:
    """Return the sentence about keys that match the default."""
    return one_line(f"Set to the default: {', '.join(done.same)}")


def summary(done: Conversion, path: str, command: str) -> str:
    """Return the summary of a conversion for the terminal."""
    lines = [f"converted {done.file} ({done.kit.name}) to {path}: recipe {done.recipe}, {len(done.lines)} arguments"]
    if done.lost:
        lines += ["without a counterpart"]
        lines += [f"  - {line}" for line in _losses(done)]
    if done.same:
        lines += [_same(done)]
    if done.differences:
        lines += ["differences in meaning"]
        lines += [f"  - {one_line(sentence)}" for sentence in done.differences]
    lines += [f"next: {command}"] * ("model" in done.lines)  # the bundled model would be trained otherwise
    return "\n".join(lines)
