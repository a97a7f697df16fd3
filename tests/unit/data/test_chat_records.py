"""Chats in every public form, and records in gzip, JSON arrays and parquet, train what lines of OpenAI's train."""

import gzip
import json
import os
from pathlib import Path

import pytest

from megatron.decide.token_lengths import token_lengths
from megatron.trainer.data.build import build_splits
from tests.unit.data.helpers import assert_line_refused, config, open_documents, refusal, write_records
from tests.unit.data.made_tokenizers import MARKED_TEMPLATE, write_tokenizer
from tests.unit.data.test_chat import CHATS, flags, line_of, messages_of, reader_of, reader_with

QUESTION = [("system", "Be brief."), ("user", "What runs past the mill?"), ("assistant", "The river.")]
AGAIN = [*QUESTION, ("user", "Is it far?"), ("assistant", "No.")]
CALL = {"name": "add", "arguments": {"a": 2, "b": [3]}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def spoken(chat):
    """Return a chat in the words of ShareGPT."""
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names.get(role, role), "value": text} for role, text in chat]


def in_parts(text):
    return [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]


SYSTEM = {"system": "Be brief."}
ANOTHER_NAME = [spoken(AGAIN)[1], {"from": "chatgpt", "value": AGAIN[2][1]}]
HISTORY = {"history": [[AGAIN[1][1], AGAIN[2][1]]], "instruction": AGAIN[3][1], "output": "No.", "input": None}
FORMS = {
    "sharegpt": ({"id": 7, "conversations": spoken(AGAIN)}, AGAIN),
    "sharegpt_with_system": ({"conversations": ANOTHER_NAME, "messages": None, **SYSTEM}, QUESTION),
    "conversations_in_openai's_words": ({"conversations": messages_of(AGAIN)}, AGAIN),
    "messages_with_system": ({"messages": messages_of(AGAIN[1:]), **SYSTEM}, AGAIN),
    "prompt_and_completion": ({"prompt": "Is it far?", "completion": "No."}, AGAIN[3:]),
    "prompt_and_completion_with_system": ({"prompt": AGAIN[1][1], "completion": AGAIN[2][1], **SYSTEM}, QUESTION),
    "messages_and_completion": (
        {"prompt": messages_of(QUESTION[:2]), "completion": messages_of(QUESTION[2:]), "label": None}, QUESTION),
    "alpaca": ({"instruction": "Is it far?", "input": "", "output": "No."}, AGAIN[3:]),
    "alpaca_with_input": ({"instruction": "Answer.", "input": "Is it far?", "output": "No."},
        [("user", "Answer.\nIs it far?"), ("assistant", "No.")]),
    "alpaca_with_history": (HISTORY | SYSTEM, AGAIN),
    "parts": ({"messages": [{"role": role, "content": in_parts(text)} for role, text in AGAIN]}, AGAIN),
}  # fmt: skip


def read(record, reader=None):
    (one,) = (reader or reader_of(flags())).read(json.dumps(record).encode())
    return one.tokens.tolist(), one.is_target.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_chat(form):
    record, chat = FORMS[form]
    tokens, is_target = read(record)
    assert (tokens, is_target) == read({"messages": messages_of(chat)})
    assert sum(is_target) == sum(len(text) + len("<|im_end|>") for role, text in chat if role == "assistant")


def test_answers_within_a_prompt_are_not_learned():
    tokens, is_target = read({"prompt": messages_of(AGAIN[:4]), "completion": messages_of(AGAIN[4:])})
    assert tokens == read({"messages": messages_of(AGAIN)})[0]
    assert bytes(token for token, learned in zip(tokens, is_target, strict=True) if learned) == b"No.<|im_end|>"


def test_texts_of_prompts_and_completions_need_no_template(tmp_path):
    question = {"prompt": "What runs?", "completion": "The river."}
    path = write_records(tmp_path / "a.jsonl", question, {"prompt": "ab", "responses": ["c"]})
    documents = open_documents(path)
    assert bytes(documents.read_targeted(0, 0, 20)[0][:20].tolist()) == b"What runs?The river."
    assert documents.read_targeted(0, 0, 99)[1].tolist() == [False] * 10 + [True] * 11
    write_records(path, question)
    assert open_documents(path, json_key="prompt").lengths.tolist() == [11], "a field that is named is read"


# The first writes arguments as JSON of whatever they are, as Llama's do; the second as the text that they are.
CALLS_AS_JSON = "{{ c.function.name }}({{ c.function.arguments | tojson }})"
CALLS_AS_TEXT = "{{ c.function.name }}({{ '' + c.function.arguments }})"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content if m.content else '' }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<end>{% endgeneration %}"
    "{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)


def call_messages(arguments):
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]
    return [
        {"role": "user", "content": "2 plus 3?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "assistant", "content": "5."},
    ]


@pytest.mark.parametrize("kind", ["text", "object", "sharegpt"])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tool_calls_go_through_the_template(tmp_path, kind, tools):
    arguments = CALL["arguments"]
    record = {"messages": call_messages(json.dumps(arguments) if kind == "text" else arguments), "tools": tools}
    if kind == "sharegpt":
        speakers = [("human", "2 plus 3?"), ("function_call", json.dumps(CALL)), ("observation", "5"), ("gpt", "5.")]
        record = {"conversations": [{"from": role, "value": text} for role, text in speakers], "tools": tools}
    tokens, is_target = read(record, reader_with(tmp_path, TEMPLATE.replace("CALL", CALLS_AS_JSON)))
    expected = 'add({"a": 2, "b": [3]})<end>'
    chat = f"<user>2 plus 3?<end><assistant>{expected}<tool>5<end><assistant>5.<end>"
    assert bytes(tokens).decode() == json.dumps(TOOLS) + chat
    learned = bytes(token for token, is_learned in zip(tokens, is_target, strict=True) if is_learned)
    assert learned.decode() == f"{expected}5.<end>"


def test_arguments_stay_text_where_a_template_wants_text(tmp_path):
    template = TEMPLATE.replace("CALL", CALLS_AS_TEXT)
    tokens, _ = read({"messages": call_messages('{"b":[3],  "a":2}')}, reader_with(tmp_path, template))
    assert 'add({"b":[3],  "a":2})<end>' in bytes(tokens).decode()


THINKS = (
    "{% if enable_thinking is defined and not enable_thinking %}/no{% endif %}{{ documents[0] if documents }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
)


@pytest.mark.parametrize("of_table", [False, True])
@pytest.mark.parametrize("form", ["messages", "prompt"])
def test_variables_of_a_record_go_to_its_template(tmp_path, of_table, form):
    variables = {"enable_thinking": False, "documents": ["D"]}
    record = {"chat_template_kwargs": json.dumps(variables) if of_table else variables}
    chat = {"prompt": "a", "completion": "b"} if form == "prompt" else {"messages": messages_of([*AGAIN[:2], AGAIN[2]])}
    plain, given = (bytes(read(chat | more, reader_with(tmp_path, THINKS))[0]) for more in ({}, record))
    assert given == b"/noD" + plain


def test_keys_that_nothing_reads_are_named_once(tmp_path):
    records = [{**record, "id": 3, "score": 1, "none": None} for record, _ in FORMS.values()]
    records[0] |= {"prompt": "x"}
    path = write_records(tmp_path / "a.jsonl", *records)
    said = f"keys without effect (lines): 'prompt' (1), 'score' ({len(FORMS)})"
    described = build_splits(flags(path)).train.describe()
    assert sorted(described.partition("(lines): ")[2].split(", ")) == sorted(said.partition("(lines): ")[2].split(", "))
    write_records(path, {"text": "ab", "score": 1, "url": "x"}, {"prompt": "ab", "responses": ["c"], "tools": []})
    assert "keys without effect (lines): 'score' (1), 'tools' (1)" in build_splits(config(path)).train.describe()
    write_records(path, *({"text": "ab", str(number): 1} for number in range(40)))
    assert build_splits(config(path)).train.describe().count(" (1)") == 32


PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
PAIR = {"chosen": "y", "rejected": "z"}
COMPLETION = {"prompt": "x", "completion": "y"}
BAD = {
    "variables": ({"messages": messages_of(QUESTION), "chat_template_kwargs": "[1]"},
        "field 'chat_template_kwargs' is a list, not an object"),
    "no variable": ({"messages": messages_of(QUESTION), "chat_template_kwargs": {"add_generation_prompt": True}},
        "field 'chat_template_kwargs' has 'add_generation_prompt', which is no variable of templates: leave it out"),
    "calls that the template drops": (
        {"messages": call_messages("{}")},
        "message 2 (assistant): the template chatml leaves out its call of 'add' where message 4 is the last: "
        "use a template that",
    ),
    "arguments": ({"messages": call_messages('{"a": ')},
        "message 2 (assistant): the arguments of a tool call are not JSON"),
    "a call": ({"messages": [{"role": "assistant", "tool_calls": ["add"]}]},
        'message 1 (assistant): a tool call is {"function": {"name": ...'),
    "no text and no call": ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        'message 1 (assistant): its content is null and it has no tool_calls: write its text ("" for none), or leave'),
    "no text": ({"messages": [{"role": "user", "content": None}]},
        "message 1 (user): its content is null: write its text"),
    "a picture": ({"messages": [PICTURE, {"role": "assistant", "content": "y"}]},
        "message 1 (user): its content has parts of type image_url: texts alone are learned"),
    "tools": ({"messages": messages_of(QUESTION), "tools": "[{"}, "field 'tools' is not JSON"),
    "speaker": ({"conversations": [{"from": "narrator", "value": "x"}]}, "message 1 has role 'narrator': use one of"),
    "two forms": ({"conversations": messages_of(QUESTION), "instruction": "x", "output": "y"},
        "has 'conversations' and 'instruction' with 'output': leave one of them out"),
    "two systems": ({"conversations": messages_of(QUESTION), "system": "Be long."},
        "field 'system' differs from the chat's own system message"),
    "alpaca": ({"instruction": "x", "output": 3}, "field 'output' is a int, not a string"),
    "history": ({"instruction": "x", "output": "y", "history": [["a"]]}, "entry 1 of 'history' is ['a']: pairs of"),
    "preference": ({**PAIR, "prompt": "x"}, "is a preference pair ('chosen', 'rejected'), which"),
    "unpaired preference": ({**COMPLETION, "label": False}, "is a preference ('completion', 'label')"),
    "none of these": (
        {"question": "x", "answer": "y"},
        "has no field 'messages' (it has 'question', 'answer'): --sft reads chats (messages, conversations, prompt "
        "with completion, instruction with output, or prompt with responses)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_chat_names_its_line(tmp_path, case):
    record, says = BAD[case]
    path = write_records(tmp_path / "a.jsonl", {"messages": messages_of(QUESTION)}, record)
    assert_line_refused(flags(path), path, 2, says)


def test_texts_say_what_to_do_with_chats_and_preferences(tmp_path):
    for record, says in (
        ({"conversations": []}, "or read chats with --sft"),
        ({"prompt": messages_of(QUESTION[:2]), "completion": messages_of(QUESTION[2:])}, "or read chats with --sft"),
        ({"instruction": "x", "output": "y"}, "or read chats with --sft"),
        ({"chosen": "x", "rejected": "y"}, "is a preference pair"),
    ):
        assert says in refusal(config(write_records(tmp_path / "a.jsonl", record)))


@pytest.mark.parametrize("sft", [True, False])
def test_keys_that_come_twice_and_half_characters_name_their_line(tmp_path, sft):
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "text": "c"}\n'
    path = tmp_path / "a.jsonl"
    for line, says in (
        (good.replace('"text"', '"text": "x", "text"'), "has the key 'text' 2 times in one object"),
        (good.replace('"b"', r'"b\ud800"').replace('"c"', r'"c\ud800"'), r"is \ud800, half of a surrogate pair"),
        (good.replace('"b"', r'"\ude00b"').replace('"c"', r'"\ude00c"'), r"is \ude00, half of a surrogate pair"),
    ):
        path.write_text(good + line)
        assert_line_refused(flags(path) if sft else config(path), path, 2, says)
    path.write_text(good.replace('"b"', r'"b\ud83d\ude00"').replace('"c"', r'"c\ud83d\ude00"'))
    assert build_splits(flags(path) if sft else config(path)).train is not None


KINDS = (".jsonl.gz", ".json.gz", ".json", ".parquet")
RECORDS = [json.loads(line_of(chat)) | {"text": f"text {number} ☃"} for number, chat in enumerate(CHATS)]


def write(path: Path, records: list[object]) -> Path:
    """Write records in the way that the suffix says; arrays as people indent them."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(arrow.Table.from_pylist(records), path, row_group_size=2)
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.name.endswith(".json.gz"):
        path.write_bytes(gzip.compress(json.dumps(records).encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=2, ensure_ascii=False), encoding="utf-8-sig")
    else:
        path.write_text(lines)
    return path


def documents(one, entries=None):
    """Return tokens, labels and loss masks of an epoch, in the order of training."""
    train = build_splits(one, entries).train
    assert train is not None
    samples = [train.read(sample.sample_id) for sample in train.global_batch(0, train.num_samples)]
    return [(each.tokens.tolist(), each.labels.tolist(), each.loss_mask.tolist()) for each in samples]


@pytest.mark.parametrize("sft", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_records_are_those_of_lines(tmp_path, kind, sft):
    flags_of = flags if sft else config
    lines = documents(flags_of(write(tmp_path / "a.jsonl", RECORDS)))
    (tmp_path / "b").mkdir()
    path = write(tmp_path / "b" / f"a{kind}", RECORDS)
    assert documents(flags_of(path)) == lines
    assert len(lines) == len(RECORDS)
    if kind != ".json":
        assert documents(flags_of(tmp_path / "b")) == lines, "a folder of such files"


def test_a_changed_file_is_indexed_again(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", RECORDS)
    first = documents(flags(path))
    write(path, RECORDS[::-1])
    os.utime(path, ns=(1, 10**18))
    second = documents(flags(path))
    assert second != first
    assert sorted(second) == sorted(first)


@pytest.mark.parametrize(
    ("kind", "unit"), [(".jsonl.gz", "line"), (".json.gz", "entry"), (".json", "entry"), (".parquet", "row")]
)
def test_what_is_wrong_is_named_in_the_file(tmp_path, kind, unit):
    bad = {"messages": messages_of([("bot", "x")]), "text": None}
    path = write(tmp_path / f"a{kind}", [*RECORDS, bad])
    for cache_path in (None, str(tmp_path / "cache")):
        said = refusal(flags(path, cache_path=cache_path))
        assert f"{path} {unit} {len(RECORDS) + 1} message 1 has role 'bot'" in said
    write(path, RECORDS)
    assert f"{path} {unit} 1 predicts" in refusal(flags(path, seq_length=3))


DAMAGED = {
    "cut.jsonl.gz": (gzip.compress(b'{"text": "x"}\n' * 99)[:-9], "is no whole gzip file"),
    "not.jsonl.gz": (b'{"text": "x"}\n', "is no whole gzip file"),
    "cut.json": (b'[{"text": "x"},\n{"text": ', "line 2, entry 2 is not JSON"),
    "open.json": (b'[{"text": "x"}\n', "a comma or ] is missing behind the entry before"),
    "more.json": (b'[{"text": "x"}]\n[]', "something follows the array"),
    "latin.json": (b'[{"text": "\xe9"}]', "save it as UTF-8"),
    "twice.json": (b'[{"text": "x", "text": "y"}]', "twice.json entry 1 has the key 'text' 2 times"),
    "not.parquet": (b"PAR1 or not", "copy it again"),
    "empty.json": (b"[ ]", "no documents found"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path, name):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="pip install pyarrow")
    content, says = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    said = refusal(config(tmp_path / name))
    assert name in said
    assert says in said
    assert not list(tmp_path.rglob("*.tmp"))


def test_keys_that_a_table_fills_with_nulls_are_missing(tmp_path):
    """One struct type for all messages gives each the keys of all."""
    pytest.importorskip("pyarrow", reason="pip install pyarrow")
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.keys() | list }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% generation %}{{ m.role }}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {"b": "x"}}}]
    answers = [{"content": None, "tool_calls": calls}, {"content": "y", "weight": 1}]
    record = {"messages": [{"role": "user", "content": "x"}, *({"role": "assistant"} | one for one in answers)]}
    found = documents(flags(write(tmp_path / "a.parquet", [record]), chat_template=str(template)))
    assert found == documents(flags(write(tmp_path / "a.jsonl", [record]), chat_template=str(template)))


def test_lengths_are_counted_and_nothing_is_kept(tmp_path, monkeypatch):
    folder = str(write_tokenizer(tmp_path / "tokenizer", MARKED_TEMPLATE))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    chats = [{"conversations": messages_of(chat)} for chat in CHATS]
    expected = token_lengths(str(write(Path("a.jsonl"), chats)), folder).tolist()
    assert len(expected) == len(CHATS)
    for kind in KINDS:
        path = write(Path(f"b{kind}"), chats)
        assert token_lengths(str(path), folder).tolist() == expected
    assert {path.suffix for path in Path().iterdir()} <= {".jsonl", ".gz", ".json", ".parquet"}


@pytest.mark.parametrize(("kind", "unit"), [(".jsonl.gz", "line"), (".parquet", "row")])
def test_the_tool_that_tokenizes_reads_them(tmp_path, monkeypatch, capsys, kind, unit):
    from tools import preprocess_data

    monkeypatch.chdir(tmp_path)
    words = ["--tokenizer-type", "ByteTokenizer", "--workers", "1", "--append-eod", "--force"]
    packed = Path(f"b{kind}")
    for name, path in (("lines", write(Path("a.jsonl"), RECORDS)), ("packed", write(packed, RECORDS))):
        assert preprocess_data.main(["--input", str(path), "--output-prefix", name, *words]) == 0
    for suffix in (".bin", ".idx"):
        assert Path(f"packed_text_document{suffix}").read_bytes() == Path(f"lines_text_document{suffix}").read_bytes()
    write(packed, [*RECORDS, {"text": None, "id": 1}])
    assert preprocess_data.main(["--input", str(packed), "--output-prefix", "packed", *words]) == 2
    assert f"error: {packed} {unit} {len(RECORDS) + 1}: field 'text' is" in capsys.readouterr().err
