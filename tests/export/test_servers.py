"""Exports for servers: what each reads, what is proven of it by the server's own code, and what is refused.

`pytest tests/export/test_servers.py -m slow` runs transformers' own server, and llama.cpp's converter and
llama-cpp-python where these are (LLAMA_CPP=a checkout; pip install llama-cpp-python).
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, run_world
from transformers import AutoTokenizer

from zerofit.base.errors import UserError
from zerofit.export import source
from zerofit.tools.servers import gguf, http, modelfile, reference, serve
from zerofit.tools.servers.check import ServerCheck
from zerofit.tools.servers.reference import Prompt

MODEL = TINY / "model"
TEMPLATES = ROOT / "src" / "zerofit" / "data" / "chat_templates"
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, \"東京\"?"},
        {"role": "assistant", "content": "Yes {{ .Content }}."}, {"role": "user", "content": "And\nthen?"}]  # fmt: skip


def tokenizer_with(template):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    return tokenizer


# --- refused, in a sentence ---


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--for", "tgi"],
            "unsupported server; use one of transformers, vllm, sglang, llama.cpp, ollama",
        ),
        (["--for", "llama.cpp"], "needs llama.cpp's converter.*LLAMA_CPP=path.*pip download"),
        (["--for", "ollama", "--llama_cpp", "nowhere"], "LLAMA_CPP=nowhere: does not contain convert_hf_to_gguf.py"),
        (["--for", "llama.cpp", "--gguf", "q4"], "--gguf q4: unsupported type; use f16 or q8_0"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, words, says):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with pytest.raises(UserError, match=says):
        serve.main([str(MODEL), "--output_dir", str(tmp_path / "out"), *words])
    assert not list(tmp_path.iterdir())


ADAPTER = {"peft_type": "LORA", "r": 16, "base_model_name_or_path": "m/base"}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"use_dora": True}, "this one has DoRA"),
        ({"modules_to_save": ["lm_head"], "bias": "all"}, "has full modules and biases"),
        ({"peft_type": "IA3"}, "this one is IA3"),
        ({"trainable_token_indices": [5]}, "new tokens"),
    ],
)
def test_adapters_that_vllm_would_serve_as_others_are_refused(tmp_path, more, says):
    saved, given = source.Saved(tmp_path, adapter=ADAPTER | more, base="b"), SimpleNamespace(server="vllm", merge=False)
    with pytest.raises(UserError, match=rf"{says}.*add --merge"):
        serve.check_arguments(given, saved)
    given.merge = True
    serve.check_arguments(given, saved)


def test_only_vllm_keeps_an_adapter(tmp_path):
    for name, merged in {"vllm": False, "sglang": True, "transformers": True}.items():
        given = SimpleNamespace(server=name, merge=False)
        serve.check_arguments(given, source.Saved(tmp_path, adapter=dict(ADAPTER), base="b"))
        assert given.merge == merged, name


def test_the_command_of_an_adapter_names_its_base_rank_and_ends(tmp_path):
    saved = source.Saved(
        tmp_path / "final", run=tmp_path / "My run", adapter=ADAPTER | {"rank_pattern": {"q": 40}}, base="b"
    )
    (tmp_path / "chat_template.jinja").write_text("x")
    done = {"adapter": True, "dtype": "bfloat16"}
    made = serve.Export(SimpleNamespace(), saved, tmp_path, tmp_path / "out", done)
    assert serve.SERVERS["vllm"].command(made) == (
        f"vllm serve b --enable-lora --max-lora-rank 64 --lora-modules my-run={tmp_path}/out --generation-config "
        f"{tmp_path}/out --chat-template {tmp_path}/out/chat_template.jinja"
    )
    made.done = {"adapter": False, "dtype": "float32"}  # which vLLM would round to half precision
    assert serve.SERVERS["vllm"].command(made).endswith("--served-model-name my-run --dtype float32")


# --- what counts as the same answer ---


def test_another_token_is_the_same_answer_only_within_the_error_of_the_logits():
    logits = torch.tensor([[3.0, 1.0, 2.9], [0.0, 5.0, 1.0]])
    prompt = Prompt("a", [7], answer=[0, 1], logits=logits, ended=True)
    assert reference.first_difference(prompt, [0, 1], 0.0) == ""
    assert reference.first_difference(prompt, [2, 2], 0.06) == ""  # 0.1 apart; what follows is another text
    assert "token 1 is 2 instead of 0, whose logit is 0.1 higher" in reference.first_difference(prompt, [2], 0.04)
    assert "token 2 is 2 instead of 1" in reference.first_difference(prompt, [0, 2], 1.9)
    assert "it continues after token 2" in reference.first_difference(prompt, [0, 1, 0], 9.0)
    check = reference.compare_answers([prompt, prompt], [[0, 1], [2]], 0.06, "here")
    assert check.holds and check.says.startswith("1 of 2 identical token by token, here; the others differ")
    assert reference.compare_answers([prompt], [[1]], 0.06, "here").holds is False


def test_an_end_that_the_trained_model_has_not_is_not_asked_of_a_server():
    asked, same = [Prompt("a", [], answer=[5], ended=True), Prompt("b", [], answer=[5])], [[5], [5, 6]]
    assert reference.check_ends(asked, same, [True, False], "x").holds
    assert reference.check_ends(asked, [[5, 7], [5]], [False, True], "x").holds is False
    assert reference.check_ends(asked[1:], same[1:], [False], "x").holds is None
    assert reference.check_ends(asked, [[6], [5]], [False, False], "x").holds is None  # it says something else


def test_what_a_template_does_not_render_is_said():
    refuses = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[-1].content }}"
    )
    found, left = reference.make_prompts(tokenizer_with(refuses), [([1, 2], [3])] * 5)
    assert [one.name for one in found] == ["one turn", "several turns", *(f"row {n} of the data" for n in (1, 2, 3))]
    assert [(check.what, check.holds) for check in left] == [("a system message", None), ("tools", None)]
    assert "no system" in left[0].says and "ignores tools" in left[1].says


# --- the Modelfile ---


def run_go(template, messages):
    """What Go's text/template makes of our templates in a Modelfile: written anew from its documentation."""
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    # re.split: text between actions (there is none but ""), then actions
    actions = re.findall(r'\{\{ ("(?:[^"\\]|\\.)*"|[^"{}]*(?:"[a-z]+")?) \}\}', template)
    assert "".join(f"{{{{ {action} }}}}" for action in actions) == template

    def block(place, scope, shown):
        out = ""
        while place < len(actions):
            action = actions[place]
            if action == "end" or action.startswith("else"):
                return out, place
            if action.startswith('"'):
                out += json.loads(action) if shown else ""
                place += 1
            elif action in (".System", ".Content"):
                out += ({".System": system} | scope)[action] if shown else ""
                place += 1
            elif action == "range .Messages":
                texts = [block(place + 1, {".Role": m["role"], ".Content": m["content"]}, shown) for m in messages]
                out, place = out + "".join(text for text, _ in texts), texts[0][1] + 1
            else:
                taken = False
                while actions[place] != "end":
                    condition = actions[place].removeprefix("else").strip()
                    role = re.fullmatch(r'if eq \.Role "(\w+)"', condition)
                    holds = role[1] == scope[".Role"] if role else bool(system) if condition == "if .System" else True
                    text, place = block(place + 1, scope, shown and holds and not taken)
                    out, taken = out + text, taken or holds
                place += 1
        return out, place

    return block(0, {}, True)[0]


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["chatml", "llama3", "phi4", "qwen2.5", "granite3", "plain"])
def test_the_template_in_go_renders_what_the_chat_template_does(name):
    tokenizer = tokenizer_with((TEMPLATES / f"{name}.jinja").read_text())
    parts = modelfile.parts_of(tokenizer)
    for talk in (TALK, TALK[1:], TALK[1:2], TALK[:2]):
        wanted = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert run_go(parts.go(), talk) == parts.render(talk) == wanted


def asked_by(tokenizer):
    return reference.make_prompts(tokenizer, [])[0]


def test_a_template_that_go_cannot_say_is_left_out_and_said():
    """Gemma puts the system message into the user's turn."""
    tokenizer = tokenizer_with((TEMPLATES / "gemma.jinja").read_text())
    text, checks = modelfile.text("m.gguf", tokenizer, asked_by(tokenizer), ["<end>"], {})
    assert text == 'FROM ./m.gguf\nPARAMETER stop "<end>"\n'
    assert checks[0].holds is None and "left out: it would render a system message differently" in checks[0].says


@pytest.mark.injection
def test_words_of_a_foreign_folder_are_no_lines_of_the_modelfile():
    bad = 'x"\nFROM /etc/passwd\nSYSTEM """no"""{{ .Secret }}'
    literal = json.dumps(bad).replace("{{", "{{ '{{' }}")
    template = "{% for m in messages %}[{{ m.role }}]{{ " + json.dumps(bad) + " }}{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_with(template)
    text, _ = modelfile.text("m.gguf", tokenizer, asked_by(tokenizer), [bad], {"temperature": bad, "top_k": 5})
    assert literal and [line.split()[0] for line in text.splitlines()] == ["FROM", "TEMPLATE", "PARAMETER", "PARAMETER"]
    assert "temperature" not in text and text.splitlines()[-1] == "PARAMETER top_k 5"


# --- GGUF ---


@pytest.mark.parametrize(
    ("cut", "name"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, "gpt-2"),
        ({"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}, ""),
        ({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": next(iter(gguf.PRE_TOKENIZERS))}}, {"type": "ByteLevel"}]}, "qwen2"),
        ({"type": "Split", "pattern": {"Regex": "x"}}, ""), ({"type": "Metaspace"}, ""), (None, ""),
    ],
)  # fmt: skip
def test_how_a_tokenizer_cuts_is_named_only_where_it_is_known(tmp_path, cut, name):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"pre_tokenizer": cut}))
    assert gguf._pre_tokenizer(tmp_path) == name


def test_a_gguf_file_has_the_name_of_its_run(tmp_path):
    """The converter takes that of the folder that it reads, a temporary one."""
    run, checkout = shutil.copytree(MODEL, tmp_path / "My run"), tmp_path / "llama.cpp"
    checkout.mkdir()
    lines = ("import pathlib, sys", "words = sys.argv", "out = pathlib.Path(words[words.index('--outfile') + 1])")
    (checkout / gguf.SCRIPT).write_text("\n".join([*lines, "out.write_text(' '.join(words[-2:]))"]))
    words = ["--for", "llama.cpp", "--llama_cpp", str(checkout), "--check", "false"]
    serve.main([str(run), *words, "--output_dir", str(tmp_path / "out")])
    assert {file.read_text() for file in (tmp_path / "out").glob("*.gguf")} == {"--model-name my-run"}


@pytest.mark.fault
def test_a_converter_that_fails_leaves_nothing(tmp_path):
    checkout = tmp_path / "llama.cpp"
    checkout.mkdir()
    (checkout / gguf.SCRIPT).write_text("raise SystemExit('this model is unknown to me')")
    words = [
        "--for",
        "llama.cpp",
        "--llama_cpp",
        str(checkout),
        "--check",
        "false",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    with pytest.raises(UserError, match=r"converter failed .this model is unknown to me.; nothing is kept"):
        serve.main([str(MODEL), *words])
    assert [file.name for file in tmp_path.iterdir()] == ["llama.cpp"]


# What is checked here of each server's files, and what the card must not say of them.
CARDS = {server: gguf.TYPES if made.is_gguf else () for server, made in serve.SERVERS.items()}


@pytest.mark.parametrize("server", CARDS)
def test_a_card_describes_the_files_beside_it_and_what_was_checked_of_them(tmp_path, monkeypatch, server):
    def converted(folder, out, types, script, name):
        assert (folder / "README.md").exists()  # which the converter reads
        files = {kind: out / f"model-{kind}.gguf" for kind in types}
        for file in files.values():
            file.write_text("GGUF")
        return files

    def proven(file, kind, asked, rounded):
        return [ServerCheck(f"logits of {file.name}", True, "bound 1"), ServerCheck(file.name, None, "not tried")]

    monkeypatch.setattr(gguf, "converter", lambda *_: tmp_path)
    monkeypatch.setattr(gguf, "write", converted)
    monkeypatch.setattr(gguf, "check_file", proven)
    monkeypatch.setattr(http, "check_server", lambda *_: [ServerCheck("over HTTP", None, "not installed")])
    out = tmp_path / "out"
    report = exported(MODEL, server, out)
    card, beside = (out / "README.md").read_text(), {file.name for file in out.iterdir()}
    for check in report["checks"]:
        assert f"- {ServerCheck(**check).line}" in card
    files = [f"model-{kind}.gguf" for kind in CARDS[server]]
    assert set(files) <= beside and all(file in card for file in files)
    assert ("bit for bit the same" in card) == ("from_pretrained" in card) == (not files)
    assert ("library_name: gguf" in card) == bool(files) == ("config.json" not in beside)
    assert str(tmp_path) not in card and str(MODEL) not in card
    if files:
        used = shlex.split(card.partition("```bash\n")[2].partition("\n")[0])
        assert {"llama.cpp": ("llama-server", files[-1]), "ollama": ("ollama", "Modelfile")}[server] == (
            used[0], next(word for word in used if word in beside)
        )  # fmt: skip


# --- really run ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{architecture: run folder} of a tiny Llama (LoRA) and a tiny Qwen that say "Hello there." and end."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("servers")
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, eos_token_id=1,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
                         max_position_embeddings=1024, pad_token_id=0)  # fmt: skip
    qwen = folder / "qwen"
    Qwen3ForCausalLM(config).save_pretrained(qwen)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(MODEL / file, qwen / file)
    rows = [{"question": f"Say hello to {name}.", "answer": "Hello there."} for name in ("Ada", "Kai", "Gil", "Pia")]
    (folder / "hello.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--data", str(folder / "hello.jsonl"), "--effective_batch_size", "4", "--max_steps", "40", "--zero", "0",
             "--num_samples", "0"]  # fmt: skip
    runs = run_world(1, {
        "llama": ("lora", ["--model", "tiny", *flags, "--learning_rate", "1e-2"]),
        "qwen": ("sft", [*flags, "--model", str(qwen), "--learning_rate", "1e-2"]),
    }, folder)  # fmt: skip
    return {name: run.folder for name, run in runs.items()}


def exported(run, server, out, *more):
    serve.main([str(run), "--for", server, "--output_dir", str(out), *more])
    return json.loads((out / serve.FILE).read_text())


def holds(report):
    found = {}
    for check in report["checks"]:
        found.setdefault(check["what"], []).append(check["holds"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_transformers_own_server_gives_the_answers_of_the_trained_model(trained, tmp_path, name, capsys):
    missing = [package for package in http.NEEDS if importlib.util.find_spec(package) is None]
    report = exported(trained[name], "transformers", tmp_path / "out")
    found = holds(report)
    assert found["token ids of rendered prompts"] == [True] and found["greedy answers"] == [True]
    assert any("Hello there." in sample["answer"] and sample["ends_by_itself"] for sample in report["samples"])
    if missing:
        assert found["`transformers serve` over HTTP"] == [None] and "not installed" in capsys.readouterr().out
        pytest.skip(f"not installed: {', '.join(missing)}")
    assert found["`transformers serve` over HTTP"] == [True] and found["ends by itself"] == [True, True]
    told = "response_template" in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert told == (name == "qwen")  # whose answers the server would take apart as ChatML, which they are not
    assert found["transformers"] == [None] and report["command"] == f"transformers serve {tmp_path / 'out'}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_llama_cpp_gives_the_answers_of_the_trained_model(trained, tmp_path, name):
    if not os.environ.get("LLAMA_CPP") or importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("needs LLAMA_CPP=a checkout of llama.cpp, and llama-cpp-python")
    report = exported(trained[name], "ollama", tmp_path / "out")
    found = holds(report)
    for what in ("token ids of rendered prompts", "logits", "greedy answers", "ends by itself"):
        assert found[what] == [True, True], what  # f16 and q8_0
    assert found["the Modelfile's template"] == [True] and found["ollama"] == [None]
    names = {"Modelfile", "README.md", "export.json", "model-f16.gguf", "model-q8_0.gguf"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert (tmp_path / "out" / "model-q8_0.gguf").stat().st_size < (tmp_path / "out" / "model-f16.gguf").stat().st_size


@pytest.mark.slow
def test_vllm_gets_the_adapter_and_what_was_not_run_is_said(trained, tmp_path):
    report = exported(trained["llama"], "vllm", tmp_path / "out")
    assert holds(report)["vllm"] == [None] and holds(report)["greedy answers"] == [True]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() and "--enable-lora" in report["command"]


@pytest.mark.slow
@pytest.mark.fault
def test_a_server_that_answers_otherwise_is_refused(trained, tmp_path, monkeypatch):
    wrong = [ServerCheck("`transformers serve` over HTTP", False, "1 of 3 answers are the text of the same tokens")]
    monkeypatch.setattr(http, "check_server", lambda *_: wrong)
    with pytest.raises(UserError, match=r"--for transformers: .* over HTTP: 1 of 3 answers.*nothing is kept"):
        exported(trained["qwen"], "transformers", tmp_path / "out")
    assert not list(tmp_path.iterdir())
