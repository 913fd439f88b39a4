"""Write an export for a server, check its answers, and write export.json."""

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
from zerofit.tools.servers.check import ServerCheck
from zerofit.tools.servers.reference import Prompt

FILE = "export.json"


@dataclass
class Server:
    """A server. command: starts it on an export."""

    takes_adapters: bool  # otherwise adapters are merged
    is_gguf: bool
    command: Callable[["Export"], str]
    unchecked: str  # the part that this program does not run


@dataclass
class Export:
    """An export that is being written."""

    args: object  # the command's arguments
    saved: source.Saved
    folder: Path  # until the export is complete
    out: Path  # the final folder
    done: dict

    @property
    def name(self) -> str:
        """Return a model name that every server accepts."""
        run = self.saved.run or self.saved.folder
        return (
            "".join(letter if letter.isalnum() else "-" for letter in run.resolve().name).strip("-").lower() or "model"
        )


def _vllm(export: Export) -> str:
    out, dtype = shlex.quote(str(export.out)), export.done["dtype"]
    exact = " --dtype float32" if dtype == "float32" else ""  # the default is half precision
    if not export.done["adapter"]:
        return f"vllm serve {out} --served-model-name {export.name}{exact}"
    rank = max([export.saved.adapter.get("r") or 1, *(export.saved.adapter.get("rank_pattern") or {}).values()])
    template = f" --chat-template {out}/chat_template.jinja" if (export.folder / "chat_template.jinja").exists() else ""
    return (
        f"vllm serve {shlex.quote(export.saved.base)} --enable-lora --max-lora-rank {_lora_rank(rank)} "
        f"--lora-modules {export.name}={out} --generation-config {out}{template}{exact}"
    )


def _lora_rank(rank: int) -> int:
    """Return the smallest --max-lora-rank of vLLM that is at least `rank`."""
    return next((limit for limit in (8, 16, 32, 64, 128, 256, 320, 512) if rank <= limit), rank)


def _sglang(export: Export) -> str:
    exact = " --dtype float32" if export.done["dtype"] == "float32" else ""
    return f"python -m sglang.launch_server --model-path {shlex.quote(str(export.out))}{exact}"


SERVERS = {
    "transformers": Server(
        False, False, lambda export: f"transformers serve {shlex.quote(str(export.out))}", "continuous batching"
    ),
    "vllm": Server(True, False, _vllm, "vLLM's kernels need a GPU: send it a sample of export.json"),
    "sglang": Server(False, False, _sglang, "SGLang's kernels need a GPU: send it a sample of export.json"),
    "llama.cpp": Server(
        False, True, lambda export: f"llama-server -m {shlex.quote(str(_best(export)))} --jinja",
        "llama-server's chat template engine (llama-cpp-python has another)",
    ),
    "ollama": Server(
        False, True, lambda export: f"ollama create {export.name} -f {shlex.quote(str(export.out / modelfile.FILE))}",
        "ollama's Modelfile parser",
    ),
}  # fmt: skip


def _best(export: Export) -> Path:
    return export.out / f"model-{export.args.gguf[-1]}.gguf"


def main(argv: list[str]) -> None:
    """Run `zerofit export`, optionally for a server. Raises: like export.main."""
    export_command.main(argv, servers=sys.modules[__name__])


def add_arguments(parser) -> None:
    """Add the flags of an export for a server."""
    parser.add_argument("--for", dest="server", default="", metavar="|".join(SERVERS), help="server to export for")
    parser.add_argument("--gguf", nargs="+", default=[*gguf.TYPES], metavar="|".join(gguf.TYPES), help="GGUF types")
    parser.add_argument(
        "--llama_cpp", default=os.environ.get("LLAMA_CPP", ""), help="a checkout of llama.cpp (default: $LLAMA_CPP)"
    )


def check_arguments(args, saved: source.Saved) -> None:
    """Check the server's name and file formats; merge adapters for servers that need it. Raises: UserError."""
    if args.server not in SERVERS:
        raise UserError(f"--for {args.server}: unsupported server; use one of {', '.join(SERVERS)}.")
    server = SERVERS[args.server]
    if server.is_gguf:
        if unknown := [kind for kind in args.gguf if kind not in gguf.TYPES]:
            raise UserError(f"--gguf {unknown[0]}: unsupported type; use {' or '.join(gguf.TYPES)}.")
        gguf.converter(args.llama_cpp, args.server)
        if source.tokenizer(saved) is None:
            raise UserError(f"{saved.folder}: a GGUF file needs a tokenizer; copy it into this folder.")
    if saved.adapter and not server.takes_adapters:
        args.merge = True
    elif saved.adapter and not args.merge and (why := _not_plain(saved)):
        raise UserError(f"--for {args.server}: {why}; add --merge (MERGE=1).")


def _not_plain(saved: source.Saved) -> str:
    """Return why vLLM cannot serve an adapter as it was trained; "" if it can."""
    config = saved.adapter
    if saved.bits:
        return f"the adapter was trained on a base in {saved.bits} bits, but would be served on the unquantized base"
    if config.get("peft_type") != "LORA":
        return f"vLLM supports only LoRA adapters, and this one is {config.get('peft_type')}"
    names = {"use_dora": "DoRA", "modules_to_save": "full modules", "trainable_token_indices": "new tokens"}
    features = [name for key, name in names.items() if config.get(key)]
    features += ["biases"] if config.get("bias", "none") != "none" else []
    return f"vLLM supports only plain LoRA adapters, and this one has {' and '.join(features)}" if features else ""


def finish(args, saved: source.Saved, folder: Path, out: Path, done: dict) -> dict:
    """Add the server's files to a Hugging Face export, check them, and write export.json.

    Returns: {"checks", "files": GGUF files that replace the export, "command": to serve them from their folder}.
    Raises: UserError if the server's answers differ from the trained model's.
    """
    export, server = Export(args, saved, folder, out, done), SERVERS[args.server]
    tokenizer, prompts, checks = source.tokenizer(saved), [], []
    if tokenizer is not None:
        prompts, checks = reference.make_prompts(tokenizer, ends.samples(saved, tokenizer))
    if prompts and args.check == "true":
        reference.answer(_loaded(saved, args, server.is_gguf or not _is_exact(done)), tokenizer, prompts)
    checks += _gguf_files(export, tokenizer, prompts) if server.is_gguf else _folder(export, tokenizer, prompts)
    checks.append(ServerCheck(args.server, None, f"not run here: {server.unchecked}"))
    for check in checks:
        print(f"  {check.line}", flush=True)
    if failed := [check for check in checks if check.holds is False]:
        raise UserError(f"--for {args.server}: {failed[0].what}: " + failed[0].says + "; nothing is kept.")
    _report(export, server, checks, tokenizer, prompts)
    files = sorted(file.name for file in folder.glob("*.gguf"))
    return {"checks": checks, "files": files, "command": server.command(replace(export, out=Path())) if files else ""}


def _report(export: Export, server: Server, checks: list[ServerCheck], tokenizer, prompts: list[Prompt]) -> None:
    command = server.command(export)
    run_folder.write_json(export.folder / FILE, {
        "for": export.args.server,
        "command": command,
        "checks": [vars(check) for check in checks],
        "samples": [
            {"name": one.name, "messages": one.messages, "tools": one.tools, "ids": one.ids, "answer_ids": one.answer,
             "answer": tokenizer.decode(one.answer, skip_special_tokens=True), "ends_by_itself": one.ended}
            for one in prompts if one.answer
        ],
    })  # fmt: skip
    print(f"serve it with: {command}", flush=True)


# --- a Hugging Face folder ---


def _folder(export: Export, tokenizer, prompts: list[Prompt]) -> list[ServerCheck]:
    """Check the folder with transformers, whose tokenizer and template vLLM and SGLang share."""
    if not prompts or not prompts[0].answer:
        return [ServerCheck("answers", None, "not compared with the trained model (--check false, or no tokenizer)")]
    written = source.find(str(export.folder), export.saved.base, export.saved.remote)
    written.facts = export.saved.facts if written.adapter else {}
    theirs = source.tokenizer(written)
    rendered = [one for one in prompts if one.messages]
    options = {"add_generation_prompt": True, "return_dict": True}
    ids = [theirs.apply_chat_template(one.messages, tools=one.tools, **options)["input_ids"] for one in rendered]
    wrong = [one.name for one, exported in zip(rendered, ids, strict=True) if exported != one.ids]
    message = f"{len(rendered) - len(wrong)} of {len(rendered)} identical with the exported tokenizer"
    checks = [ServerCheck("token ids of rendered prompts", not wrong, "; ".join([message, *wrong]))] if rendered else []
    as_served, exported = ([Prompt(*one.question_fields) for one in prompts] for _ in range(2))
    model = _loaded(written, export.args)
    if over_http := export.args.server == "transformers":
        reference.answer(model, theirs, as_served, as_served=True)
    reference.answer(model if _is_exact(export.done) or written.bits else model.float(), theirs, exported)
    del model
    error, where = export.done["agreement"]["max"], "with transformers' generate"
    answers = [one.answer for one in exported]
    checks.append(reference.compare_answers(prompts, answers, error, where))
    checks.append(reference.check_ends(prompts, answers, [one.ended for one in exported], where))
    return checks + (_check_over_http(export.folder, theirs, as_served) if over_http else [])


def _check_over_http(folder: Path, tokenizer, prompts: list[Prompt]) -> list[ServerCheck]:
    """Check transformers' server; if it parses answers by a wrong template, add ours to the folder and retry."""
    checks = http.check_server(folder, tokenizer, prompts)
    if all(check.holds is not False for check in checks) or getattr(tokenizer, "response_template", None):
        return checks
    config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    stops = tokenizer.convert_ids_to_tokens(generation.ids_of(config.get("eos_token_id")))
    if http.write_response_template(folder, prompts, stops):
        checks = http.check_server(folder, tokenizer, prompts)
        checks[0].says += f"; {http.SETTING} in tokenizer_config.json prevents wrong parsing of the answers"
    return checks


def _is_exact(done: dict) -> bool:
    """Return whether the export's logits match the trained model's bit for bit."""
    return bool(done["agreement"] and done["agreement"]["exact"])


def _loaded(saved: source.Saved, args, in_fp32: bool = False):
    """Load a model for generation. in_fp32: for a comparison with another dtype (export/compare.py)."""
    model = source.load(saved, args.device)
    model.config.get_text_config().use_cache = True
    return model.float() if in_fp32 and not saved.bits else model


# --- GGUF files ---


def _gguf_files(export: Export, tokenizer, prompts: list[Prompt]) -> list[ServerCheck]:
    """Replace the folder's model by GGUF files."""
    model_folder = export.folder / "huggingface"
    model_folder.mkdir()
    for file in [file for file in export.folder.iterdir() if file != model_folder]:
        file.rename(model_folder / file.name)
    sampling = json.loads((model_folder / "generation_config.json").read_text(encoding="utf-8"))
    script = gguf.converter(export.args.llama_cpp, export.args.server)
    files = gguf.write(model_folder, export.folder, export.args.gguf, script, export.name)
    shutil.rmtree(model_folder)
    checks = []
    if export.args.server == "ollama":
        stops = tokenizer.convert_ids_to_tokens(generation.ids_of(sampling.get("eos_token_id")))
        model = _best(export).name
        text, checks = modelfile.text(model, tokenizer, prompts, stops, sampling if sampling.get("do_sample") else {})
        write_text(export.folder / modelfile.FILE, text)
    if not prompts or not prompts[0].answer:
        return [*checks, ServerCheck("answers", None, "not compared with the trained model (--check false)")]
    rounded = compare.rounding(export.args, export.saved, export.done)
    for kind, file in files.items():
        checks += gguf.check_file(file, kind, prompts, rounded)
    return checks
