"""Write an export for a server, prove of it what can be proven here, and say the rest in export.json."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.base.paths import write_text
from zerofit.export import compare, ends, source
from zerofit.export import export as export_command
from zerofit.job import run_folder
from zerofit.model import generation
from zerofit.tools.servers import gguf, http, modelfile, reference
from zerofit.tools.servers.check import Check
from zerofit.tools.servers.reference import Prompt

FILE = "export.json"


@dataclass
class Server:
    """A server. takes_adapters: else an adapter is merged; command: how to start it on an export."""

    takes_adapters: bool
    is_gguf: bool
    command: Callable[["Export"], str]
    unproven: str  # what this program does not run


@dataclass
class Export:
    """An export that is being written. given: the command's arguments; out: its folder; folder: the one until then."""

    given: object
    saved: source.Saved
    folder: Path
    out: Path
    done: dict

    @property
    def name(self) -> str:
        """Return a name for the model that every server takes."""
        run = self.saved.run or self.saved.folder
        return (
            "".join(letter if letter.isalnum() else "-" for letter in run.resolve().name).strip("-").lower() or "model"
        )


def _vllm(export: Export) -> str:
    out, dtype = shlex.quote(str(export.out)), export.done["dtype"]
    exact = " --dtype float32" if dtype == "float32" else ""  # it would round to half precision
    if not export.done["adapter"]:
        return f"vllm serve {out} --served-model-name {export.name}{exact}"
    rank = max([export.saved.adapter.get("r") or 1, *(export.saved.adapter.get("rank_pattern") or {}).values()])
    template = f" --chat-template {out}/chat_template.jinja" if (export.folder / "chat_template.jinja").exists() else ""
    return (
        f"vllm serve {shlex.quote(export.saved.base)} --enable-lora --max-lora-rank {_lora_rank(rank)} "
        f"--lora-modules {export.name}={out} --generation-config {out}{template}{exact}"
    )


def _lora_rank(rank: int) -> int:
    """Return the least rank that vLLM can be started with for an adapter of this one."""
    return next((most for most in (8, 16, 32, 64, 128, 256, 320, 512) if rank <= most), rank)


def _sglang(export: Export) -> str:
    exact = " --dtype float32" if export.done["dtype"] == "float32" else ""
    return f"python -m sglang.launch_server --model-path {shlex.quote(str(export.out))}{exact}"


SERVERS = {
    "transformers": Server(
        False, False, lambda export: f"transformers serve {shlex.quote(str(export.out))}", "continuous batching"
    ),
    "vllm": Server(True, False, _vllm, "vLLM's kernels, which need a GPU: ask it a sample of export.json"),
    "sglang": Server(False, False, _sglang, "SGLang's kernels, which need a GPU: ask it a sample of export.json"),
    "llama.cpp": Server(
        False, True, lambda export: f"llama-server -m {shlex.quote(str(_best(export)))} --jinja",
        "llama-server's own engine for chat templates (llama-cpp-python has another)",
    ),
    "ollama": Server(
        False, True, lambda export: f"ollama create {export.name} -f {shlex.quote(str(export.out / modelfile.FILE))}",
        "ollama's reading of the Modelfile",
    ),
}  # fmt: skip


def _best(export: Export) -> Path:
    return export.out / f"model-{export.given.gguf[-1]}.gguf"


def main(argv: list[str]) -> None:
    """Run `zerofit export`, also for a server. Raises: as export.main."""
    export_command.main(argv, servers=sys.modules[__name__])


def add_arguments(parser) -> None:
    """Add the flags of an export for a server."""
    parser.add_argument(
        "--for", dest="server", default="", metavar="|".join(SERVERS), help="what is to serve the export"
    )
    parser.add_argument("--gguf", nargs="+", default=[*gguf.TYPES], metavar="|".join(gguf.TYPES), help="types of files")
    parser.add_argument(
        "--llama_cpp", default=os.environ.get("LLAMA_CPP", ""), help="a checkout of llama.cpp; default: $LLAMA_CPP"
    )


def check_asked(given, saved: source.Saved) -> None:
    """Check a server's name and what it can read, and merge an adapter for those that take none. Raises: UserError."""
    if given.server not in SERVERS:
        raise UserError(f"--for {given.server}: is no server that is written for; name one of {', '.join(SERVERS)}.")
    server = SERVERS[given.server]
    if server.is_gguf:
        if unknown := [kind for kind in given.gguf if kind not in gguf.TYPES]:
            raise UserError(f"--gguf {unknown[0]}: is no type that is written; name {' or '.join(gguf.TYPES)}.")
        gguf.converter(given.llama_cpp, given.server)
        if source.tokenizer(saved) is None:
            raise UserError(f"{saved.folder}: has no tokenizer, and a GGUF file holds one; put it beside the weights.")
    if saved.adapter and not server.takes_adapters:
        given.merge = True
    elif saved.adapter and not given.merge and (why := _not_plain(saved)):
        raise UserError(f"--for {given.server}: {why}; add --merge (MERGE=1).")


def _not_plain(saved: source.Saved) -> str:
    """Return why vLLM does not serve an adapter as it was trained; "" if it does."""
    config = saved.adapter
    if saved.bits:
        return f"the adapter was trained on a base in {saved.bits} bits, and would be served on the whole one"
    if config.get("peft_type") != "LORA":
        return f"vLLM reads LoRA adapters, and this one is {config.get('peft_type')}"
    kinds = {"use_dora": "DoRA", "modules_to_save": "whole modules in it", "trainable_token_indices": "new tokens"}
    found = [words for key, words in kinds.items() if config.get(key)]
    found += ["biases"] if config.get("bias", "none") != "none" else []
    return f"vLLM reads plain LoRA adapters, and this one has {' and '.join(found)}" if found else ""


def finish(given, saved: source.Saved, folder: Path, out: Path, done: dict) -> dict:
    """Write what the server of --for reads beside a Hugging Face export, try it, and write export.json.

    Returns: {"checks": of it, "files": GGUF files instead of the export, "command": that serves them in their folder}.
    Raises: UserError if the server's code does not do what the trained model does.
    """
    export, server = Export(given, saved, folder, out, done), SERVERS[given.server]
    tokenizer = source.tokenizer(saved)
    asked, checks = reference.prompts(tokenizer, ends.samples(saved, tokenizer)) if tokenizer is not None else ([], [])
    if asked and given.check == "true":
        reference.answer(_loaded(saved, given, server.is_gguf or not _is_exact(done)), tokenizer, asked)
    checks += _gguf_files(export, tokenizer, asked) if server.is_gguf else _folder(export, tokenizer, asked)
    checks.append(Check(given.server, None, f"not run here: {server.unproven}"))
    for check in checks:
        print(f"  {check.line}", flush=True)
    if failed := [check for check in checks if check.holds is False]:
        raise UserError(f"--for {given.server}: {failed[0].what}: {failed[0].says}; nothing is kept.")
    _report(export, server, checks, tokenizer, asked)
    files = sorted(file.name for file in folder.glob("*.gguf"))
    return {"checks": checks, "files": files, "command": server.command(replace(export, out=Path())) if files else ""}


def _report(export: Export, server: Server, checks: list[Check], tokenizer, asked: list[Prompt]) -> None:
    command = server.command(export)
    run_folder.write_json(export.folder / FILE, {
        "for": export.given.server,
        "command": command,
        "checks": [vars(check) for check in checks],
        "samples": [
            {"name": one.name, "messages": one.messages, "tools": one.tools, "ids": one.ids, "answer_ids": one.answer,
             "answer": tokenizer.decode(one.answer, skip_special_tokens=True), "ends_by_itself": one.ended}
            for one in asked if one.answer
        ],
    })  # fmt: skip
    print(f"serve it with: {command}", flush=True)


# --- a folder of Hugging Face ---


def _folder(export: Export, tokenizer, asked: list[Prompt]) -> list[Check]:
    """Try the folder by transformers, whose tokenizer and template vLLM and SGLang use too."""
    if not asked or not asked[0].answer:
        return [Check("answers", None, "not compared with what was trained (--check false, or no tokenizer)")]
    written = source.find(str(export.folder), export.saved.base, export.saved.remote)
    written.facts = export.saved.facts if written.adapter else {}
    theirs = source.tokenizer(written)
    rendered = [one for one in asked if one.messages]
    words = {"add_generation_prompt": True, "return_dict": True}
    ids = [theirs.apply_chat_template(one.messages, tools=one.tools, **words)["input_ids"] for one in rendered]
    wrong = [one.name for one, own in zip(rendered, ids, strict=True) if own != one.ids]
    says = f"{len(rendered) - len(wrong)} of {len(rendered)} the same, by transformers from the exported folder"
    checks = [Check("token ids of rendered prompts", not wrong, "; ".join([says, *wrong]))] if rendered else []
    as_served, own = ([Prompt(*one.as_asked) for one in asked] for _ in range(2))
    model = _loaded(written, export.given)
    if is_asked := export.given.server == "transformers":
        reference.answer(model, theirs, as_served, as_served=True)
    reference.answer(model if _is_exact(export.done) or written.bits else model.float(), theirs, own)
    del model
    error, answers, where = export.done["agreement"]["max"], [one.answer for one in own], "by transformers' generate"
    checks.append(reference.compared(asked, answers, error, where))
    checks.append(reference.ends(asked, answers, [one.ended for one in own], where))
    return checks + (_over_http(export.folder, theirs, as_served) if is_asked else [])


def _over_http(folder: Path, tokenizer, asked: list[Prompt]) -> list[Check]:
    """Ask transformers' server; where it takes answers apart as another chat template has them, tell it ours."""
    checks = http.prove(folder, tokenizer, asked)
    if all(check.holds is not False for check in checks) or getattr(tokenizer, "response_template", None):
        return checks
    config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    stops = tokenizer.convert_ids_to_tokens(generation.ids_of(config.get("eos_token_id")))
    if http.write_response_template(folder, asked, stops):
        checks = http.prove(folder, tokenizer, asked)
        checks[0].says += f"; with {http.SETTING} in tokenizer_config.json, or this family's answers are taken apart"
    return checks


def _is_exact(done: dict) -> bool:
    """Return whether the export's logits are those of what was trained, bit for bit."""
    return bool(done["agreement"] and done["agreement"]["exact"])


def _loaded(saved: source.Saved, given, in_fp32: bool = False):
    """Load a model to generate with. in_fp32: where another type is compared with it, as export/compare.py does."""
    model = source.load(saved, given.device)
    model.config.get_text_config().use_cache = True
    return model.float() if in_fp32 and not saved.bits else model


# --- GGUF files ---


def _gguf_files(export: Export, tokenizer, asked: list[Prompt]) -> list[Check]:
    """Turn the folder's model into GGUF files, and leave these alone in it."""
    whole = export.folder / "huggingface"
    whole.mkdir()
    for file in [file for file in export.folder.iterdir() if file != whole]:
        file.rename(whole / file.name)
    sampling = json.loads((whole / "generation_config.json").read_text(encoding="utf-8"))
    script = gguf.converter(export.given.llama_cpp, export.given.server)
    files = gguf.write(whole, export.folder, export.given.gguf, script, export.name)
    shutil.rmtree(whole)
    checks = []
    if export.given.server == "ollama":
        stops = tokenizer.convert_ids_to_tokens(generation.ids_of(sampling.get("eos_token_id")))
        model = _best(export).name
        text, checks = modelfile.text(model, tokenizer, asked, stops, sampling if sampling.get("do_sample") else {})
        write_text(export.folder / modelfile.FILE, text)
    if not asked or not asked[0].answer:
        return [*checks, Check("answers", None, "not compared with what was trained (--check false)")]
    rounded = compare.rounding(export.given, export.saved, export.done)
    for kind, file in files.items():
        checks += gguf.prove(file, kind, asked, rounded)
    return checks
