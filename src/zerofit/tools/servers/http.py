"""Start transformers' own server on an export, and ask it over HTTP what the trained model was asked."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from zerofit.base import distributed
from zerofit.base.errors import first_line
from zerofit.job import run_folder
from zerofit.tools.servers import reference
from zerofit.tools.servers.check import Check
from zerofit.tools.servers.reference import Prompt

START_SECONDS, ANSWER_SECONDS = 300.0, 300.0

SETTING = "response_template"  # of tokenizer_config.json

NEEDS = ("fastapi", "uvicorn", "openai", "starlette", "rich")  # transformers' extra `serving`


def prove(folder: Path, tokenizer, asked: list[Prompt]) -> list[Check]:
    """Ask `transformers serve`. Args: asked: with the export's answers in this process, whose text the server gives."""
    what, where = "`transformers serve` over HTTP", "finish_reason is `stop`, by `transformers serve`"
    asked_by_turns = [one for one in asked if one.messages and not one.tools]
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        return [Check(what, None, f"{', '.join(missing)} not installed here (pip install 'transformers[serving]')")]
    if not asked_by_turns:
        return [Check(what, None, "the tokenizer has no chat template")]
    wanted = {one.name: tokenizer.decode(one.answer, skip_special_tokens=True) for one in asked}
    wrong, late = [], []
    try:
        with _server(folder) as address:
            for one in asked_by_turns:
                text, reason = _ask(address, folder, one.messages)
                if text != wanted[one.name]:
                    wrong.append(f"{one.name}: {text[:60]!r}, not {wanted[one.name][:60]!r}")
                late += [one.name] if one.ended and reason != "stop" else []
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        return [Check(what, None, f"it could not be asked: {first_line(error)}")]
    right = len(asked_by_turns) - len(wrong)
    says = f"{right} of {len(asked_by_turns)} answers are the text of the same tokens"
    where += f", not of {', '.join(late)}" if late else ""
    return [Check(what, not wrong, "; ".join([says, *wrong])), Check("ends by itself", not late, where)]


def write_response_template(folder: Path, asked: list[Prompt], stops: list[str]) -> bool:
    """Tell transformers that an answer is all content, up to a token that ends it; return whether that can be said.

    Without it the answers of some families (Qwen) are taken apart by their own chat template, not by the tokenizer's.
    """
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    content = {"close": stops, "content": "text"}
    ends = [one.text[::-1] for one in asked if one.text]
    before = os.path.commonprefix(ends)[::-1] if len(ends) > 1 else ""  # noqa: RUF071  what all prompts end with
    if not before:
        return False
    fields = {"content": content}
    config[SETTING] = {"defaults": {"role": "assistant"}, "start_anchor": before, "fields": fields}
    run_folder.write_json(file, config)
    return True


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Run the server on this machine's own address until the body has ended; yield its address."""
    port = distributed.free_port()
    # `transformers.cli.transformers` is what the command of that name calls.
    code = "from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-P", "-c", code, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port),
             "--device", "cpu"]  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while not _answers(address):
            if process.poll() is not None:
                raise RuntimeError(f"it ended with code {process.returncode} before it answered")
            if time.monotonic() > end:
                raise RuntimeError(f"it did not answer within {START_SECONDS:.0f} s")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), _open(f"{address}/health", 5.0) as answer:
        return answer.status == 200
    return False


def _open(request, seconds: float):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment is not for this
    return opener.open(request, timeout=seconds)


def _ask(address: str, folder: Path, messages: list[dict]) -> tuple[str, str]:
    """Return (the server's greedy answer, why it ended)."""
    body = {"model": str(folder), "messages": messages, "max_tokens": reference.MOST_TOKENS, "temperature": 0.0,
            "stream": False}  # fmt: skip
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _open(request, ANSWER_SECONDS) as answer:
            choice = json.loads(answer.read())["choices"][0]
    except urllib.error.HTTPError as error:
        return f"error {error.code}: {error.read()[:200]!r}", "error"
    return choice["message"]["content"], choice["finish_reason"]
