"""The first lines of every recipe: arguments in, processes and run folder up, everything decided said once."""

import sys

from . import args, model, world

model.quiet_libraries()


def settings(recipe: str) -> args.Settings:
    """The arguments of this process's command line, resolved and checked; --show prints them and ends here.

    Raises: UserError for the user's mistakes, before a GPU or a process group is touched.
    """
    taken = world.take_over_environment()
    world.check_size()
    found = args.parse(recipe, sys.argv[1:], world.size())
    if taken:
        found.decisions.append(
            f"accelerate's own settings are not used ({', '.join(taken)}): the recipe decides; see --zero, --bf16"
        )
    if found.packing:
        _choose_packed_attention(found)
    if found.show:
        from . import report

        print(f"{recipe}, {found.world_size} process(es)\n{report.table(found)}")
        print("\n".join(f"  - {sentence}" for sentence in found.decisions))
        raise SystemExit(0)
    return found


def run(settings: args.Settings, tokenizer, train_set, eval_set):
    """Open the process group and the run folder; return transformers' TrainingArguments."""
    from . import data, report, train

    world.start(settings)
    report.open_folder(settings)
    arguments = train.training_arguments(settings)
    if world.rank() == 0:
        print(f"zerofit {settings.recipe}: {settings.world_size} process(es), ZeRO {settings.zero}, offload "
              f"{settings.offload}, {settings.precision}; run folder {settings.output_dir}")  # fmt: skip
        for sentence in settings.decisions:
            print(f"  - {sentence}")
        print(f"  - {data.describe('training', train_set)}")
        if eval_set is not None:
            print(f"  - {data.describe('evaluation', eval_set)}", flush=True)
        report.write_run(settings, train.facts(settings, tokenizer, train_set, eval_set))
    return arguments


def _choose_packed_attention(settings: args.Settings) -> None:
    """Packing needs attention that keeps documents apart.

    Raises: UserError for an implementation that would mix them.
    """
    from . import attention
    from .errors import UserError

    chosen = settings.attn_implementation
    if chosen == "sdpa":
        name = attention.register()
        args.decide(settings, "attn_implementation", name, "plain sdpa would let packed documents read each other")
    elif not chosen.startswith("flash_attention"):
        raise UserError(
            f"--packing with --attn_implementation {chosen}: packed documents would read each other; use sdpa or "
            "flash_attention_2."
        )
