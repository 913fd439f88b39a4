"""Check the data before a run: limits on what is lost or repeated, end tokens, positions, tokens of the template."""

from zerofit.base import distributed
from zerofit.data import encoding, end_tokens, inspection
from zerofit.job.settings import Check, Decision
from zerofit.model import load


def check_data(settings, train_set, eval_set, tokenizer) -> None:
    """Refuse data beyond a limit, before any GPU time is spent.

    Two limits use the statistics; those on repeated rows and overlap decode every row, and only if they are set.
    Eval rows that are trained on token by token are always said.
    Raises: UserError naming the flag.
    """
    settings.decisions += note(settings, train_set, eval_set, tokenizer).said
    settings.decisions += inspection.trained_on(train_set, eval_set) if distributed.rank() == 0 else []
    inspection.enforce(settings, inspection.fractions(train_set))
    if settings.max_duplicate_fraction == settings.max_eval_overlap_fraction == 1:
        return
    train = inspection.scan(train_set.dataset, tokenizer)
    settings.decisions += inspection.skipped(settings, eval_set)
    checks_overlap = settings.max_eval_overlap_fraction < 1 and eval_set is not None
    held_out = inspection.scan(eval_set.dataset, tokenizer) if checks_overlap else None
    everything = inspection.of_all_epochs(train_set, train, tokenizer) if checks_overlap else train
    inspection.enforce(settings, inspection.fractions(train_set, train, held_out, everything))


def note(settings, train_set, eval_set, tokenizer) -> end_tokens.Ends:
    """Add what the rows say about labels, positions and template to the settings, and return where answers end."""
    settings.decisions += settings.objective.check_rows(settings, train_set)
    _note_positions(train_set, eval_set, settings)
    _check_template_text(settings, train_set, tokenizer)
    ends = train_set.statistics.get("ends", [])
    own_end_only = {entry["token"] for entry in ends} <= {tokenizer.eos_token}
    return end_tokens.decide(ends, tokenizer, () if own_end_only else load.known_ends(settings))


def _note_positions(train_set, eval_set, settings) -> None:
    """Add a decision if rows are longer than the model's max_position_embeddings."""
    most = getattr(load.load_config(settings).get_text_config(), "max_position_embeddings", None)
    longest = max(rows.statistics["longest"] for rows in (train_set, eval_set) if rows is not None)
    if most and longest > most:
        said = (
            f"rows have up to {longest:,} tokens, but the model was made for {most:,} (max_position_embeddings): use "
            f"--max_length {most}"
        )
        settings.decisions.append(Decision(said, "max_length"))


def _check_template_text(settings, train_set, tokenizer) -> None:
    """Add the certificate's line about tokens in the loss that the chat template wrote, and say what can be left out.

    Counted while the data were tokenized, on the first rows of each source.
    """
    counted = train_set.statistics["template_text"]
    rows, supervised, openings = (counted[name] for name in ("rows", "supervised", "openings"))
    if not rows:
        sentence = "no row was counted: they have no chat template, or all of their text is trained on"
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
        f"({numbers['share']:.1%}), besides {counted['end']:,} end tokens; {openings:,} of them are an empty wrapper "
        "or belong to the generation prompt"
    )
    holds = not (openings and settings.mask_generation_prompt)
    settings.checks.append(Check("template_tokens", holds, sentence, numbers))
    if openings and holds:
        written = " or ".join(map(repr, encoding.Encoder(tokenizer).openings))
        said = (
            f"chat template: {openings / supervised:.1%} of the tokens in the loss are {written}, which no row holds; "
            "--mask_generation_prompt true leaves them out (docs/templates.md)"
        )
        settings.decisions.append(Decision(said, "chat_template"))
