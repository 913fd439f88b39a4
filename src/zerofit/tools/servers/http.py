"""Start transformers' server on an export, and compare its answers over HTTP with the trained model's."""

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
from zerofit.tools.servers.check import ServerCheck
from zerofit.tools.servers.reference import Prompt

START_SECONDS, ANSWER_SECONDS = 300.0, 300.0

SETTING = "response_template"  # in tokenizer_config.json

NEEDS = ("fastapi", "uvicorn", "openai", "starlette", "rich")  # transformers' extra `serving`


def check_server(folder: Path, tokenizer, prompts: list[Prompt]) -> list[ServerCheck]:
    """Check `transformers serve`. Args: prompts: with the export's answers in this process."""
    title, where = "`transformers serve` over HTTP", "finish_reason is `stop`, in `transformers serve`"
    conversations = [one for one in prompts if one.messages and not one.tools]
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        return [ServerCheck(title, None, f"{', '.join(missing)} not installed (pip install 'zerofit[serving]')")]
    if not conversations:
        return [ServerCheck(title, None, "the tokenizer does not have a chat template")]
    expected = {one.name: tokenizer.decode(one.answer, skip_special_tokens=True) for one in prompts}
    wrong, late = [], []
    try:
        with _server(folder) as address:
            for one in conversations:
                text, reason = _ask(address, folder, one.messages)
                if text != expected[one.name]:
                    wrong.append(f"{one.name}: {text[:60]!r} instead of {expected[one.name][:60]!r}")
                late += [one.name] if one.ended and reason != "stop" else []
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        return [ServerCheck(title, None, f"the server did not answer: {first_line(error)}")]
    right = len(conversations) - len(wrong)
    message = f"{right} of {len(conversations)} answers have the same text"
    where += f", except for {', '.join(late)}" if late else ""
    return [ServerCheck(title, not wrong, "; ".join([message, *wrong])), ServerCheck("ends by itself", not late, where)]


def write_response_template(folder: Path, prompts: list[Prompt], stops: list[str]) -> bool:
    """Declare the full answer up to its end token as content for transformers; return whether this is possible.

    Otherwise transformers parses answers of some families (Qwen) by their built-in template instead of the tokenizer's.
    """
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    content = {"close": stops, "content": "text"}
    ends = [one.text[::-1] for one in prompts if one.text]
    before = os.path.commonprefix(ends)[::-1] if len(ends) > 1 else ""  # noqa: RUF071  the end of all prompts
    if not before:
        return False
    fields = {"content": content}
    config[SETTING] = {"defaults": {"role": "assistant"}, "start_anchor": before, "fields": fields}
    run_folder.write_json(file, config)
    return True


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Run the server on localhost for the duration of the context; yield its address."""
    port = distributed.free_port()
    code = "from transformers.cli.transformers import main; main()"  # the command `transformers`
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
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignore the environment's proxy
    return opener.open(request, timeout=seconds)


def _ask(address: str, folder: Path, messages: list[dict]) -> tuple[str, str]:
    """Return (greedy answer, finish_reason)."""
    body = {"model": str(folder), "messages": messages, "max_tokens": reference.MAX_TOKENS, "temperature": 0.0,
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
