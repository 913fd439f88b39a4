"""Say what of `make models` held for a model's type: classes.json has the results."""

import functools
import json
from pathlib import Path

from zerofit.job.technique import Technique

PAGE = "docs/models.md"


@functools.cache
def results() -> dict:
    """Return {"transformers": version, "types": {model type: {column that does not hold: why}}}."""
    return json.loads((Path(__file__).parent / "classes.json").read_text())


def sentence(model_type: str) -> str:
    """Return what was tried with a model type, as one sentence."""
    version, failed = results()["transformers"], results()["types"].get(model_type)
    if failed is None:
        return f"model type {model_type}: never tried with zerofit; {PAGE} lists those that were"
    what = f"not {', '.join(failed)}" if failed else "all columns hold"
    return f"model type {model_type}: tried with a tiny model, transformers {version}: {what} ({PAGE})"


def _say(settings, config) -> None:
    settings.decisions.append(sentence(config.model_type))


TECHNIQUE = Technique(name="tried classes", resolve_for_model=_say)
