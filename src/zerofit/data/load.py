"""Load the training and evaluation sets that the settings name."""

from zerofit.data import dataset, encoding, sources
from zerofit.data.tokens import TokenizedDataset
from zerofit.errors import UserError


def load_datasets(settings, tokenizer) -> tuple[TokenizedDataset, TokenizedDataset | None]:
    """Return (training set, evaluation set or None), tokenized once and cached; every rank may call it.

    Raises: UserError for data that cannot be read or leaves no row to train on.
    """
    train, held_out = sources.find_files(settings.data, settings.data_config, settings.data_split, settings.streaming)
    if not train:
        raise UserError(f"--data {' '.join(settings.data)}: holds only evaluation files; training needs one more.")
    if settings.eval_data:
        named, marked = sources.find_files(settings.eval_data, settings.data_config, settings.data_split)
        held_out = marked or named  # the eval split of a folder or Hub dataset, else all of its files
    if settings.eval_fraction and held_out:
        raise UserError("--eval_fraction: the data already has an eval split; use one of the two.")
    encoder = encoding.Encoder(tokenizer, settings.train_on)
    if settings.streaming:
        from zerofit.data import streaming

        train_set = streaming.load(train, settings, encoder)
    else:
        train_set = dataset.prepare(train, settings, encoder, settings.max_samples)
    eval_set = dataset.prepare(held_out, settings, encoder, None) if held_out else None
    if settings.eval_fraction:
        train_set, eval_set = dataset.split(train_set, settings)
    return dataset.repeated(train_set), eval_set
