"""Check the data before a run: limits on lost or repeated rows, end tokens, positions, template tokens."""

from zerofit.base import distributed
from zerofit.data import encoding, end_tokens, inspection
from zerofit.job.settings import Check, Decision
from zerofit.model import load


def check_data(settings, train_set, eval_set, tokenizer) -> None:
    """Refuse data that exceeds a limit before any GPU time is spent.

    Two limits use the statistics. The limits on repeated rows and on overlap decode every row, only if they are set.
    Evaluation rows that occur token by token in the training data are always reported.
    Raises: UserError naming the flag.
    """
    settings.decisions += note(settings, train_set, eval_set, tokenizer).sentences
    settings.decisions += inspection.eval_rows_in_training(train_set, eval_set) if distributed.rank() == 0 else []
    inspection.enforce(settings, inspection.fractions(train_set))
    if settings.max_duplicate_fraction == settings.max_eval_overlap_fraction == 1:
        return
    train = inspection.scan(train_set.dataset, tokenizer)
    settings.decisions += inspection.skipped(settings, eval_set)
    checks_overlap = settings.max_eval_overlap_fraction < 1 and eval_set is not None
    held_out = inspection.scan(eval_set.dataset, tokenizer) if checks_overlap else None
    everything = inspection.scan_all_epochs(train_set, train, tokenizer) if checks_overlap else train
    inspection.enforce(settings, inspection.fractions(train_set, train, held_out, everything))


def note(settings, train_set, eval_set, tokenizer) -> end_tokens.Ends:
    """Add decisions about labels, positions and the template to the settings, and return the end tokens of answers."""
    settings.decisions += settings.objective.check_rows(settings, train_set)
    _note_positions(train_set, eval_set, settings)
    _check_template_text(settings, train_set, tokenizer)
    ends = train_set.statistics.get("ends", [])
    eos_only = {entry["token"] for entry in ends} <= {tokenizer.eos_token}
    return end_tokens.decide(ends, tokenizer, () if eos_only else load.known_ends(settings))


def _note_positions(train_set, eval_set, settings) -> None:
    """Add a decision if rows are longer than the model's max_position_embeddings."""
    most = getattr(load.load_config(settings).get_text_config(), "max_position_embeddings", None)
    longest = max(rows.statistics["longest"] for rows in (train_set, eval_set) if rows is not None)
    if most and longest > most:
        sentence = (
            f"rows have up to {longest:,} tokens, but the model supports {most:,} (max_position_embeddings): use "
            f"--max_length {most}"
        )
        settings.decisions.append(Decision(sentence, "max_length"))


def _check_template_text(settings, train_set, tokenizer) -> None:
    """Add the certificate's line about template tokens in the loss, and suggest --mask_generation_prompt.

    The tokens were counted on the first rows of each source while the data were tokenized.
    """
    counted = train_set.statistics["template_text"]
    rows, supervised, openings = (counted[name] for name in ("rows", "supervised", "openings"))
    if not rows:
        sentence = "not counted: the rows use no chat template, or all of their text is trained on"
        settings.checks.append(Check("template_tokens", None, f"template tokens: {sentence}"))
        return
    numbers = {
        "rows": rows,
        "supervised_tokens": supervised,
        "end_tokens": counted["end"],
        "template_tokens": counted["template"],
        "share": counted["template"] / max(1, supervised),
        "maskable_tokens": openings,
    }
    sentence = (
        f"template tokens: {counted['template']:,} of {supervised:,} tokens in the loss of {rows:,} sampled rows "
        f"({numbers['share']:.1%}), in addition to {counted['end']:,} end tokens; {openings:,} of them are an empty "
        "wrapper or belong to the generation prompt"
    )
    holds = not (openings and settings.mask_generation_prompt)
    settings.checks.append(Check("template_tokens", holds, sentence, numbers))
    if openings and holds:
        written = " or ".join(map(repr, encoding.Encoder(tokenizer).openings))
        sentence = (
            f"chat template: {openings / supervised:.1%} of the tokens in the loss are {written}, which the data do "
            "not contain; --mask_generation_prompt true excludes them (docs/templates.md)"
        )
        settings.decisions.append(Decision(sentence, "chat_template"))
