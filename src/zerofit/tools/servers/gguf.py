"""Write GGUF files with llama.cpp's converter, and check them with llama-cpp-python if it is installed."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from zerofit.base.errors import UserError
from zerofit.export import compare
from zerofit.tools.servers import reference
from zerofit.tools.servers.check import ServerCheck
from zerofit.tools.servers.reference import Prompt

SCRIPT = "convert_hf_to_gguf.py"

TYPES = ("f16", "q8_0")

# Relative error of one rounding (export/compare.py); q8_0 rounds weights and activations to 8 bits.
UNIT = {"f16": compare.UNIT["float16"], "q8_0": compare.INT8}

GET_CONVERTER = (
    "set LLAMA_CPP=path to a checkout of llama.cpp (the folder of convert_hf_to_gguf.py), or unpack the source of "
    "llama-cpp-python, which contains one in vendor/llama.cpp: pip download --no-deps --no-binary :all: "
    "llama-cpp-python"
)

# Expression in tokenizer.json -> llama.cpp's name of the pre-tokenizer. llama.cpp identifies published tokenizers by a
# hash, which fails for newly trained ones.
_TO_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PRE_TOKENIZERS = {
    _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TO_LINES: "qwen2",
    _WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TO_LINES: "llama-bpe",
}

# Run the converter with a default name for unknown tokenizers.
_RUN = """
import runpy, sys
script, name, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
sys.path.insert(0, script.rpartition("/")[0])
try:
    from conversion.base import TextModel
except ImportError:
    TextModel = None
if TextModel is not None and name:
    original = TextModel.get_vocab_base_pre
    def named(self, tokenizer):
        try:
            return original(self, tokenizer)
        except NotImplementedError:
            return name
    TextModel.get_vocab_base_pre = named
runpy.run_path(script, run_name="__main__")
"""


def converter(place: str, server: str) -> Path:
    """Return llama.cpp's converter. Raises: UserError without one."""
    if not place:
        raise UserError(f"--for {server} needs llama.cpp's converter, which pip does not provide: {GET_CONVERTER}.")
    script = Path(place).expanduser().absolute() / SCRIPT
    if not script.is_file():
        raise UserError(f"LLAMA_CPP={place}: does not contain {SCRIPT}; {GET_CONVERTER}.")
    return script


def write(folder: Path, out: Path, types: list[str], script: Path, name: str) -> dict[str, Path]:
    """Write model-TYPE.gguf for each type; return the files. Raises: UserError if the conversion fails."""
    _set_eos_token(folder)
    pre_tokenizer, files = _pre_tokenizer(folder), {}
    for kind in types:
        files[kind] = out / f"model-{kind}.gguf"
        words = [sys.executable, "-c", _RUN, str(script), pre_tokenizer, str(folder), "--outfile", str(files[kind])]
        words += ["--outtype", kind, "--model-name", name]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not files[kind].is_file():
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no output"]
            missing = re.search(r"No module named '(\w+)'", lines[-1])
            fix = f"pip install {missing[1]}; " if missing else ""
            raise UserError(f"llama.cpp's converter failed ({lines[-1].strip()[:200]}); {fix}nothing is kept.")
        print(f"  {files[kind].name}  {files[kind].stat().st_size / 1e9:.3g} GB", flush=True)
    return files


def _set_eos_token(folder: Path) -> None:
    """Make the token that ends trained answers the tokenizer's eos_token, since a GGUF file has only one."""
    config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    first = config.get("eos_token_id")
    first = first[0] if isinstance(first, list) else first
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if first is not None and tokenizer.eos_token_id != first:
        tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(first)})
        tokenizer.save_pretrained(folder)


def _pre_tokenizer(folder: Path) -> str:
    """Return llama.cpp's name of the tokenizer's pre-tokenizer; "" if unknown."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        pre_tokenizer = config["pre_tokenizer"]
        if (config.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
            return ""
        parts = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
        cuts = [part["pattern"]["Regex"] for part in parts if part["type"] == "Split"]
        if [part["type"] for part in parts] == ["ByteLevel"] and parts[0].get("use_regex", True):
            return "" if parts[0].get("add_prefix_space") else "gpt-2"
        if len(cuts) == 1:
            return PRE_TOKENIZERS.get(cuts[0], "")
    return ""


# --- checking a file ---


def check_file(file: Path, kind: str, prompts: list[Prompt], rounded: float) -> list[ServerCheck]:
    """Compare a GGUF file's answers in llama-cpp-python with the trained model's.

    Args: rounded: the coarsest rounding between the trained and the converted model.
    """
    where = f"{kind}, in llama-cpp-python"
    try:
        import llama_cpp
    except ImportError:
        return [ServerCheck(file.name, None, "llama-cpp-python is not installed (pip install llama-cpp-python)")]
    length = max(len(one.ids) for one in prompts) + reference.MAX_TOKENS + 8
    model = llama_cpp.Llama(
        str(file), n_ctx=length, n_batch=length, logits_all=True, verbose=False, n_gpu_layers=0,
    )  # fmt: skip
    rendered = [one for one in prompts if one.text]
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    texts = [_render(llama_cpp, model, vocab, one) for one in rendered]
    ids = [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    wrong = [one.name for one, theirs in zip(rendered, ids, strict=True) if theirs != one.ids]
    message = f"{len(rendered) - len(wrong)} of {len(rendered)} identical with the file's template ({where})"
    checks = [ServerCheck("token ids of rendered prompts", not wrong, "; ".join([message, *wrong]))] if rendered else []
    error, deviation, agree = _logit_error(model, prompts)
    answers = [_greedy(llama_cpp, model, vocab, one.ids) for one in prompts]
    checks.append(_logits_check(model, max(UNIT[kind], rounded), error, deviation, agree, where))
    texts, endings = zip(*answers, strict=True)
    checks.append(reference.compare_answers(prompts, texts, error, where))
    checks.append(reference.check_ends(prompts, texts, endings, where))
    model.close()
    return checks


def _render(llama_cpp, model, vocab, prompt: Prompt) -> str:
    bos, eos = (_text_of(llama_cpp, vocab, token) for token in (model.token_bos(), model.token_eos()))
    template = model.metadata["tokenizer.chat_template"]
    formatter = llama_cpp.llama_chat_format.Jinja2ChatFormatter(template=template, bos_token=bos, eos_token=eos)
    return formatter(messages=prompt.messages, tools=prompt.tools).prompt


def _text_of(llama_cpp, vocab, token: int) -> str:
    return llama_cpp.llama_vocab_get_text(vocab, token).decode() if token >= 0 else ""


def _logit_error(model, prompts: list[Prompt]) -> tuple[float, float, float]:
    """Return (largest logit difference along the trained answers, their deviation, share of identical top tokens)."""
    largest, agree, count, all_logits = 0.0, 0, 0, []
    for one in prompts:
        model.reset()
        model.eval([*one.ids, *one.answer[:-1]])
        steps = slice(len(one.ids) - 1, len(one.ids) - 1 + len(one.answer))
        theirs = torch.from_numpy(model.scores[steps].copy())[:, : one.logits.shape[1]]
        largest = max(largest, float((theirs - one.logits).abs().max()))
        agree += int((theirs.argmax(-1) == one.logits.argmax(-1)).sum())
        count += len(one.answer)
        all_logits.append(one.logits.flatten())
    return largest, float(torch.cat(all_logits).std()), agree / count


def _logits_check(model, unit: float, error: float, deviation: float, agree: float, where: str) -> ServerCheck:
    """Check that logits differ only by rounding (see export/compare.py for the bound)."""
    layers = next(int(value) for name, value in model.metadata.items() if name.endswith(".block_count"))
    bound = compare.bounds(unit, layers, deviation, scale=0.0, merged=True)["bound_max"]
    message = f"largest difference {error:.3g}, bound {bound:.3g} (standard deviation of the logits {deviation:.3g})"
    return ServerCheck("logits", error <= bound, f"{message}; {agree:.1%} of the top tokens identical, {where}")


def _greedy(llama_cpp, model, vocab, ids: list[int]) -> tuple[list[int], bool]:
    """Return (greedy answer, whether it ended by itself)."""
    tokens: list[int] = []
    model.reset()
    for token in model.generate(ids, temp=0.0, top_k=1):
        tokens.append(token)
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            return tokens, True
        if len(tokens) == reference.MAX_TOKENS:
            break
    return tokens, False
