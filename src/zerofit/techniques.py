"""Which memory technique goes with which, at which ZeRO stage: the data behind the refusals and the table in the docs.

Single techniques against stages, offload and packages are data of their own modules (optimizers.OPTIMIZERS, offload,
quantized). Here are the techniques by name, and the pairs that no single module can know about.
"""

from dataclasses import dataclass

from .errors import UserError

STAGES = ("0", "2", "3")  # 1 goes with what 2 goes with, but for the stage's own memory


@dataclass(frozen=True)
class Technique:
    """`flags` turn it on; `recipe`: the one that it belongs to (None: both); `cuda`: needs a GPU."""

    flags: str
    recipe: str | None = None
    cuda: bool = False


TECHNIQUES: dict[str, Technique] = {
    "accumulation": Technique("--gradient_accumulation_steps 2"),
    "no checkpointing": Technique("--gradient_checkpointing false"),
    "every 2nd layer": Technique("--gradient_checkpointing_every 2"),
    "selective": Technique("--gradient_checkpointing_policy selective"),
    "activation offload": Technique("--activation_offload true"),
    "bf16": Technique("--bf16 true"),
    "fp16": Technique("--fp16 true"),
    "pure bf16": Technique("--pure_bf16 true"),
    "packing": Technique("--packing true"),
    "padding-free": Technique("--padding_free true"),
    "streaming": Technique("--streaming true"),
    "fused loss": Technique("--fused_loss true"),
    "tiled MLP": Technique("--tiled_mlp 2"),
    "8-bit Adam": Technique("--optim adamw_8bit"),
    "paged 8-bit Adam": Technique("--optim paged_adamw_8bit", cuda=True),
    "Adafactor": Technique("--optim adafactor"),
    "Lion": Technique("--optim lion_32bit"),
    "SGD": Technique("--optim sgd"),
    "Muon": Technique("--optim muon"),
    "Sophia": Technique("--optim sophia"),
    "offload optimizer": Technique("--offload optimizer"),
    "offload all": Technique("--offload all"),
    "LoRA": Technique("", "lora"),
    "DoRA": Technique("--use_dora true", "lora"),
    "LoRA+": Technique("--loraplus_lr_ratio 4", "lora"),
    "PiSSA": Technique("--init_lora_weights pissa", "lora"),
    "IA3": Technique("--adapter ia3", "lora"),
    "prompt tuning": Technique("--adapter prompt_tuning", "lora"),
    "QLoRA": Technique("--load_in_4bit true --bf16 true", "lora"),
    "8-bit base": Technique("--load_in_8bit true --bf16 true", "lora"),
}


@dataclass(frozen=True)
class Rule:
    """A pair that is refused where both are on. one, other: (argument, values that count as on)."""

    one: tuple[str, tuple]
    other: tuple[str, tuple]
    why: str
    fix: str


RULES = (
    Rule(
        ("loraplus_lr_ratio", ("*",)),
        ("optim", ("sophia", "muon")),
        "LoRA+ gives A and B rates of their own, and this optimizer makes its own groups",
        "use an AdamW or leave --loraplus_lr_ratio out",
    ),
    Rule(
        ("loraplus_lr_ratio", ("*",)),
        ("pure_bf16", (True,)),
        "the optimizer that rounds stochastically is not built with LoRA+'s groups",
        "leave one of the two out",
    ),
)


def check(settings) -> None:
    """Raises: UserError for a pair of RULES."""
    for rule in RULES:
        if all(_on(settings, *part) for part in (rule.one, rule.other)):
            one, other = (f"--{name} {settings.values[name]}" for name, _ in (rule.one, rule.other))
            raise UserError(f"{one} with {other}: {rule.why}; {rule.fix}.")


def _on(settings, name: str, values: tuple) -> bool:
    value = settings.values.get(name)
    return value in values or (values == ("*",) and value is not None)
