"""Load the training and evaluation sets that the settings specify."""

from zerofit.base.errors import UserError
from zerofit.data import dataset, encoding, sources, streaming
from zerofit.data.tokens import TokenizedDataset
from zerofit.job.settings import as_typed


def load_datasets(settings, tokenizer) -> tuple[TokenizedDataset, TokenizedDataset | None]:
    """Return (training set, evaluation set or None), tokenized once and cached; every rank may call it.

    Raises: UserError for data that cannot be read or leaves no row to train on.
    """
    train, held_out = sources.find_files(settings.data, settings.data_config, settings.data_split, settings.streaming)
    if not train:
        raise UserError(f"--data {' '.join(settings.data)}: contains only evaluation files; add a training file.")
    if settings.eval_data:
        named, marked = sources.find_files(settings.eval_data, settings.data_config, settings.data_split)
        held_out = marked or named  # the eval split of a folder or Hub dataset, else all of its files
    if settings.eval_fraction and held_out:
        raise UserError("--eval_fraction: the data already has an eval split; use one of the two.")
    if not held_out and not settings.eval_fraction:
        for name, off in {"eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False}.items():
            if (value := settings.values[name]) != off:
                raise UserError(
                    f"--{name} {as_typed(name, getattr(value, 'value', value))}: evaluation rows are missing; "
                    "set --eval_data or --eval_fraction, or remove the flag."
                )
    _check_names(settings, train + held_out)
    encoder = encoding.Encoder(tokenizer, settings.train_on, settings.mask_generation_prompt, settings.data_format)
    if settings.streaming:
        train_set = streaming.load(train, settings, encoder)
    else:
        train_set = dataset.prepare(train, settings, encoder, settings.max_samples)
    eval_set = dataset.prepare(held_out, settings, encoder, None) if held_out else None
    if settings.eval_fraction:
        train_set, eval_set = dataset.split(train_set, settings)
    return dataset.repeat_by_weight(train_set), eval_set


def _check_names(settings, files: list[sources.Source]) -> None:
    """Raise UserError for a --data_split or --data_config that no source supports."""
    unsupported = {
        "data_split": settings.data_split != "train"
        and not any(source.has_splits and source.entry.split is None for source in files),
        "data_config": settings.data_config is not None and not any(source.hub for source in files),
    }
    for flag in (flag for flag, is_unsupported in unsupported.items() if is_unsupported):
        what = "splits" if flag == "data_split" else "configurations"
        raise UserError(
            f"--{flag} {settings.values[flag]}: {files[0]} is a local file without {what}; remove the flag, or "
            "pass the intended file with --data."
        )
