"""Chats: exactly the tokens that the assistant wrote are learned, whichever template and tokenizer write them."""

import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data import tokenizer, tokenizing
from megatron.trainer.data.build import build_splits, index_entries, open_entry
from megatron.trainer.data.chat_reader import build_chat_reader
from megatron.trainer.data.lines import LineError
from tests.unit.data.helpers import assert_line_refused, config
from tests.unit.data.made_tokenizers import MARKED_TEMPLATE, PLAIN_TEMPLATE, TEXTS, write_tokenizer

CHATS = [
    [("system", "Be brief."), ("user", "What runs past the mill?"), ("assistant", " The river.\n")],
    [("user", "naïve ☃?"), ("assistant", "Yes."), ("user", ""), ("assistant", ""), ("user", "The river?")],
    [("user", "x" * 50), ("assistant", "ü" * 30), ("tool", "assistant"), ("assistant", "assistant\n\n")],
]
PROMPT = "{% if add_generation_prompt %}assistant:{% endif %}"
TEMPLATES = {"plain": PLAIN_TEMPLATE, "marked": MARKED_TEMPLATE}


def messages_of(chat):
    return [{"role": role, "content": content} for role, content in chat]


def line_of(chat, **more):
    return json.dumps({"messages": messages_of(chat)} | more).encode()


def flags(*paths, **changes):
    values = {"sft": True, "overlong": "error", "seq_length": 512} | changes
    return config(*(paths or ("x",)), **values)


def reader_of(one):
    return build_chat_reader(one, tokenizer.build(one))


def reader_with(tmp_path, template):
    """Return a reader of bytes with a template of this text."""
    path = tmp_path / "t.jinja"
    path.write_text(template)
    return reader_of(flags(chat_template=str(path)))


def tokens_of(reader, line):
    """Return the tokens of a line that is one document, and which of them are learned."""
    (one,) = reader.read(line)
    return one.tokens, one.is_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_tokenizer(root / name, template) for name, template in TEMPLATES.items()}


def hugging_face(folder, *paths, **changes):
    return flags(*paths, tokenizer="HuggingFaceTokenizer", tokenizer_model=str(folder), **changes)


def expected_pieces(chat):
    """Return (text, is it learned) one after the other, as a reader of chatml would cut a chat."""
    for role, content in chat:
        yield f"<|im_start|>{role}\n", False
        yield f"{content}<|im_end|>", role == "assistant"
        yield "\n", False


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("kind", ["bytes", "plain", "marked", "named"])
def test_exactly_what_the_assistant_wrote_is_learned(folders, kind, chat):
    one = flags() if kind == "bytes" else hugging_face(folders["plain" if kind == "named" else kind])
    if kind == "named":
        one = hugging_face(folders["plain"], chat_template="chatml")
    reader = reader_of(one)
    tokens, is_target = tokens_of(reader, line_of(chat))
    pieces = [(tokenizer.build(one).encode(text.encode()), learned) for text, learned in expected_pieces(chat)]
    assert tokens.tolist() == np.concatenate([ids for ids, _ in pieces]).tolist()
    assert is_target.tolist() == [learned for ids, learned in pieces for _ in ids]
    assert 0 < is_target.sum() < len(tokens)


@pytest.mark.parametrize("kind", ["bytes", *TEMPLATES])
def test_answers_of_weight_0_are_not_learned(folders, kind):
    one = flags() if kind == "bytes" else hugging_face(folders[kind])
    chat = [("user", "What?"), ("assistant", "Mill."), ("user", "No."), ("assistant", "The river."), ("assistant", "!")]
    messages = messages_of(chat)
    messages[0]["weight"] = 0.5  # of no meaning here
    for message, weight in zip(messages[1::2], (0, 1), strict=True):
        message["weight"] = weight
    messages[4]["weight"] = None
    reader = reader_of(one)
    tokens, is_target = tokens_of(reader, json.dumps({"messages": messages}).encode())
    as_without, all_answers = tokens_of(reader, line_of(chat))
    assert tokens.tolist() == as_without.tolist()
    of_first = all_answers.copy()
    of_first[int(np.flatnonzero(all_answers)[0] + len(tokenizer.build(one).encode(b"Mill.<|im_end|>"))) :] = False
    assert of_first.any()
    assert is_target.tolist() == (all_answers & ~of_first).tolist()


def test_a_template_that_marks_some_answers_cannot_have_weights(tmp_path):
    reader = reader_with(
        tmp_path,
        "{% for m in messages %}{{ m.role }}"
        "{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}",
    )
    messages = messages_of([("user", "x"), ("assistant", "y"), ("assistant", "z")])
    tokens_of(reader, json.dumps({"messages": messages}).encode())
    messages[1]["weight"] = 0
    with pytest.raises(LineError, match=r"message 2 has weight 0, but .* marks 1 answers of 2"):
        tokens_of(reader, json.dumps({"messages": messages}).encode())


def test_turns_without_a_token_at_their_end_keep_their_newline(tmp_path):
    reader = reader_with(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}" + PROMPT)
    tokens, is_target = tokens_of(reader, line_of([("user", "a"), ("assistant", "b ")]))
    assert bytes(tokens.astype(np.uint8)) == b"user: a\nassistant: b\n"
    assert bytes(tokens[is_target].astype(np.uint8)) == b" b\n"


def test_templates_get_special_tokens_tools_and_the_date_of_the_run(folders, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(
        "{{ eos_token }}{{ tools | tojson }}{{ strftime_now('%d %b %Y, %H:%M') }};"
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    )
    reader = reader_of(hugging_face(folders["plain"], chat_template=str(path), chat_date="2026-11-25"))
    ((text, spans),) = reader.chat_format.texts(
        messages_of([("user", "<q>"), ("assistant", "a")]), {"tools": [{"n": "<é>"}]}
    )
    assert text == '<|endoftext|>[{"n": "<é>"}]25 Nov 2026, 00:00;<q>;a;'
    assert [text[span.start : span.stop] for span in spans] == ["<q>", "a"]


def test_chats_with_tools_have_the_template_for_them(folders, tmp_path):
    folder = write_tokenizer(tmp_path / "two", PLAIN_TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}:" + PLAIN_TEMPLATE)
    reader = reader_of(hugging_face(folder))
    plain, with_tools = reader.read(line_of(CHATS[0])), reader.read(line_of(CHATS[0], tools=["add"]))
    added = tokenizer.build(hugging_face(folder)).encode(b"add:").tolist()
    assert with_tools[0].tokens.tolist() == added + plain[0].tokens.tolist()
    of_another = reader_of(hugging_face(write_tokenizer(tmp_path / "one", PLAIN_TEMPLATE))).chat_format.digest
    assert reader.chat_format.digest != of_another


BAD_LINES = [
    (b'{"messages": [{"role": "user"', "is not JSON"),
    (b'{"text": "x"}', "has no field 'messages' (it has 'text')"),
    (b'{"messages": []}', "field 'messages' is 0 messages: at least one"),
    (b'{"messages": ["x"]}', "message 1 is a str, not an object"),
    (line_of([("user", "x"), ("bot", "y")]), "message 2 has role 'bot': use one of system, developer, user"),
    (b'{"messages": [{"content": "x"}]}', "message 1 has role None"),
    (b'{"messages": [{"role": "user"}]}', "message 1 (user): its content is missing"),
    (b'{"messages": [{"role": "user", "content": ["x"]}]}',
     'a part of its content is {"type": "text", "text": ...}, not \'x\''),
    (line_of([("system", "x")]), "has no assistant message to learn, 1 of system"),
    (line_of([("user", "\ufdd0"), ("assistant", "y")]), "message 1 (user) has the noncharacter"),
    (json.dumps({"messages": [{"role": "assistant", "content": "y", "tool_calls": [{"a\ufdd1": 1}]}]}).encode(),
     "message 1 (assistant) has the noncharacter"),
    (line_of([("assistant", "y")], tools=[{"name": "\ufdd0"}]), "field 'tools' has the noncharacter"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}', "has weight 0.5: 0, which is not"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}', "has no assistant message to learn"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), BAD_LINES)
def test_bad_chats_name_file_and_line(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line_of(CHATS[0]) + b"\n\n" + line + b"\n")
    assert_line_refused(flags(path), path, 3, said)


EACH = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
REWRITING = EACH.replace("m.content", "m.content if loop.last or m.role == 'user' else 'cut'") + PROMPT
TWO_TURNS = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]


def as_bytes(one):
    """Return the text of a document, what is learned of it in brackets."""
    marked = "".join(f"[{chr(token)}]" if learned else chr(token) for token, learned in zip(*one[:2], strict=True))
    return marked.replace("][", "")


def test_each_answer_is_learned_behind_its_own_prompt(tmp_path):
    """Templates drop the reasoning of earlier answers: then a turn has a text of its own, as it is generated."""
    reader = reader_with(tmp_path, REWRITING)
    texts = ["user:a;assistant:[b;]", "user:a;assistant:cut;user:c;assistant:[d;]"]
    for chat in (TWO_TURNS, [*TWO_TURNS, ("user", "e")]):
        assert [as_bytes(one) for one in reader.read(line_of(chat))] == texts
    unlearned = messages_of(TWO_TURNS)
    unlearned[1]["weight"] = 0
    (last,) = reader.read(json.dumps({"messages": unlearned}).encode())
    assert as_bytes(last) == texts[1]


def test_texts_of_a_chat_are_documents_of_one_line(tmp_path, monkeypatch):
    """They have its name, are read apart, and lie in one split; the log says how many there are."""
    monkeypatch.setattr(tokenizing, "TOKENIZED_PIECE_BYTES", 150)
    template = tmp_path / "t.jinja"
    template.write_text(REWRITING)
    path, chat = tmp_path / "a.jsonl", TWO_TURNS
    lines = [line_of(chat), b"", line_of(chat[:2]), line_of(chat), line_of([*chat, ("user", "e"), ("assistant", "f")])]
    path.write_bytes(b"\n".join(lines))
    one = flags(path, chat_template=str(template), split="50,50,0")
    (entry,) = index_entries(one)
    source = open_entry(str(path), entry, tokenizer.build(one), reader_of(one).chat_format)
    names = [source.document_name(document).rpartition(" ")[2] for document in range(8)]
    assert names == ["1", "1", "3", "4", "4", "5", "5", "5"]
    expected = [text for line in lines if line for text in map(as_bytes, reader_of(one).read(line))]
    documents = [source.read_targeted(document, 0, int(source.lengths[document])) for document in range(8)]
    assert [*map(as_bytes, documents)] == expected
    splits = build_splits(one)
    assert [splits.train.num_samples, splits.valid.num_samples] == [3, 5], "4 and 4 would part a chat"
    assert "4 chats by the chat template" in splits.train.describe()
    assert "in 8 texts, since it writes earlier answers otherwise once later messages follow" in splits.train.describe()


def identity_of(one):
    """Return what a checkpoint remembers of the data."""
    from megatron.trainer.setup.run import data_identity

    return data_identity(one, build_splits(one))


def test_the_date_is_logged_and_what_a_checkpoint_remembers(tmp_path):
    path = write_chats(tmp_path / "a.jsonl", CHATS[:1])
    template = tmp_path / "t.jinja"
    template.write_text("{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }};{% endfor %}")
    identities = []
    for day in ("2026-11-25", "2026-11-26"):
        one = flags(path, chat_template=str(template), chat_date=day)
        assert f" with the date {day}, loss on" in build_splits(one).train.describe()
        identities.append(identity_of(one))
    assert identities[0]["chat date"] == "2026-11-25"
    changed = {name for name in identities[0] if identities[0][name] != identities[1][name]}
    assert changed == {"chat date", "samples and their order (hash)"}
    assert "chat date" not in identity_of(flags(path, chat_template="chatml", chat_date="2026-11-25"))


def test_what_answers_do_not_stand_behind_is_logged(tmp_path):
    """DeepSeek-R1's template opens <think> in the prompt, and writes answers without it."""
    template = tmp_path / "t.jinja"
    template.write_text(REWRITING.replace("%}assistant:{", "%}assistant:<think>{").replace("'cut'", "m.content"))
    path = write_chats(tmp_path / "a.jsonl", [CHATS[0]])
    described = build_splits(flags(path, chat_template=str(template))).train.describe()
    assert "without the '<think>' that ends its generation prompt" in described


def test_an_answer_that_begins_nowhere_is_refused(tmp_path):
    template = EACH + PROMPT.replace("assistant", "Answer")
    (one,) = reader_with(tmp_path, template).read(line_of(TWO_TURNS[:2]))
    assert as_bytes(one) == "user:a;[assistant:b;]", "nothing of that prompt is in the text"
    with pytest.raises(LineError, match=r"message 2 \(assistant\): the chat template .* does not write its generation"):
        reader_with(tmp_path, "{{ messages | length }}" + template).read(line_of(TWO_TURNS[:2]))


CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}ARGUMENTS{% endfor %}"
WITH_ARGUMENTS = CALLS.replace("ARGUMENTS", "({{ c.function.arguments | tojson(ensure_ascii=True) }})")
THINKING = "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}"
CONTENT = "{{ m.content or '' }}"
ALL = THINKING + CONTENT + WITH_ARGUMENTS
TURN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role != 'developer' %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}OPENBODYCLOSE{% else %}{{ m.content }}{% endif %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [("user", "2 plus 3?"), ("assistant", "I add them. Add!"), ("tool", "5"), ("assistant", "It is 5.")]
LEFT_OUT = {  # what a template writes of an answer -> what it is refused for
    "calls": (THINKING + CONTENT, "message 2 (assistant): ... leaves out its call of 'add'"),
    "arguments": (THINKING + CONTENT + CALLS.replace("ARGUMENTS", ""),
        "message 2 (assistant): ... leaves out its call of 'add' (argument 'a')"),
    "content beside calls": (
        THINKING + "{% if m.tool_calls %}" + WITH_ARGUMENTS + "{% else %}{{ m.content }}{% endif %}",
        "message 2 (assistant): ... leaves out its content"),
    "reasoning": (CONTENT + WITH_ARGUMENTS, "message 2 (assistant): ... leaves out its reasoning"),
    "reasoning within the content": (THINKING + "{{ m.content.split('!')[-1] }}" + WITH_ARGUMENTS,
        "message 2 (assistant): ... leaves out part of its content, and writes"),
}  # fmt: skip


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("what", [None, *LEFT_OUT, "a role"])
def test_a_template_that_leaves_out_what_is_said_is_refused(tmp_path, what, marked):
    """Though the words are elsewhere: in the tools, in another message."""
    body, says = LEFT_OUT.get(what, (ALL, "message 1 (developer): ... leaves out its content where message"))
    marks = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    reader = reader_with(tmp_path, TURN.replace("BODY", body).replace("OPEN", marks[0]).replace("CLOSE", marks[1]))
    chat = [("developer", "Add!"), *ASKED] if what == "a role" else ASKED
    messages = messages_of(chat)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages[-3] |= {"tool_calls": [call], "reasoning": "Add!"}
    line = json.dumps({"messages": messages, "tools": [{"name": "add", "parameters": {"a": {}}}]}).encode()
    if what is None:
        end = "" if marked else "<end>"
        (one,) = reader.read(line)
        assert bytes(one.tokens[one.is_target].tolist()).decode() == (
            f'<think>Add!</think>I add them. Add!add({{"a": 2}}){end}It is 5.{end}'
        )
        return
    with pytest.raises(LineError, match=".*".join(map(re.escape, says.split("...")))):
        reader.read(line)
    messages[-3]["weight"] = 0
    if what.startswith("reasoning"):  # of what is not learned, templates may drop it
        reader.read(json.dumps({"messages": messages}).encode())


def test_a_system_message_that_stands_only_before_questions_is_named(tmp_path):
    """As Mistral's: the prompt has it, the answer's text does not."""
    reader = reader_with(
        tmp_path,
        "{% for m in messages %}{% if m.role == 'user' %}[Q]{{ messages[0].content if loop.last }} {{ m.content }}[/Q]"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}",
    )
    chat = [("system", "Be brief."), *TWO_TURNS]
    for last in (3, 5):
        says = rf"message 1 \(system\): .* leaves out its content where message {last} is the last: use a template"
        with pytest.raises(LineError, match=says):
            reader.read(line_of(chat[:last]))


@pytest.mark.parametrize(
    ("opening", "end"), [("<|turn|><|{}|>", "<|end|>"), ("<|turn|>{}\n", "<|end|>\n"), ("<|{}|>", "<|end|>")]
)
@pytest.mark.parametrize("preamble", ["", "system"])
def test_what_opens_the_next_turn_is_not_learned(tmp_path, opening, end, preamble):
    """Command A writes the next prompt behind every chat, whether one is asked for or not."""

    def turn(role, content):
        return opening.replace("{}", role) + content + end

    first = turn(preamble, "Be brief.") if preamble else ""
    every = "{% for m in messages %}" + turn("{{ m.role }}", "{{ m.content }}") + "{% endfor %}"
    prompt = opening.replace("{}", "assistant") + "{% if add_generation_prompt %}<|reply|>{% endif %}"
    reader = reader_with(tmp_path, "<s>" + first + every + prompt)
    chat = [("user", "2 plus 3?"), ("assistant", "5."), ("user", "Sure?"), ("assistant", "Yes.")]
    for messages in (chat, [*chat, ("user", "Thanks.")]):
        (one,) = reader.read(line_of(messages))
        assert re.findall(r"\[(.*?)\]", as_bytes(one)) == ["5.<|end|>", "Yes.<|end|>"]


ENDLESS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_where_a_template_ends_no_turn_the_next_role_does(folders, tmp_path):
    """As GLM-4's does; where its roles have no token either, the tokenizer's end of text ends a turn."""
    (one,) = reader_with(tmp_path, ENDLESS).read(line_of(TWO_TURNS))
    assert as_bytes(one) == "<user>a<assistant>[b<user>]c<assistant>[d<user>]"
    reader = reader_with(tmp_path, ENDLESS.replace("<", "\n").replace(">", "\n"))
    with pytest.raises(LineError, match=r"message 4 \(assistant\): .* writes nothing behind an answer, so the model"):
        reader.read(line_of(TWO_TURNS))
    made = hugging_face(folders["plain"], chat_template=str(tmp_path / "t.jinja"))
    documents = reader_of(made).read(line_of(TWO_TURNS))
    assert [one.tokens[-1] for one in documents] == [tokenizer.build(made).eod] * 2
    assert all(one.is_target[-1] for one in documents)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("reads", ["text", "parts", "both"])
def test_a_content_reaches_the_template_as_it_reads_it(tmp_path, reads, parts):
    written = {
        "text": "{{ m.content }}",
        "parts": "{% for part in m.content %}{{ part.text }}{% endfor %}",
        "both": "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
    }
    reader = reader_with(tmp_path, "{% for m in messages %}{{ m.role }}:" + written[reads] + ";{% endfor %}" + PROMPT)
    messages = messages_of([("user", "a"), ("assistant", "b c")])
    if parts:
        messages[1]["content"] = [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}]
    ((text, spans),) = reader.chat_format.texts(messages)
    assert text == "user:a;assistant:b c;"
    assert [text[span.start : span.stop] for span in spans] == ["b c;"]
    messages[0]["content"] = [{"type": "image"}, {"type": "text", "text": "a"}]
    with pytest.raises(LineError, match=r"message 1 \(user\): its content has parts of type image, text: texts alone"):
        reader.chat_format.texts(messages)


def test_a_token_across_the_beginning_of_an_answer_is_refused(tmp_path):
    """Without special tokens a tokenizer may merge the end of the prompt with the answer's first letters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator([*TEXTS, "A:yes a|b " * 50], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    made.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}{{ 'Q: ' + m.content + ' ' if m.role == 'user' else 'A:' + m.content + '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    one = hugging_face(tmp_path, chat_template=str(path), eod_id=0)
    assert [made.id_to_token(i) for i in made.encode("A:yes").ids] == ["▁A:yes"]
    with pytest.raises(LineError, match=r"message 2 \(assistant\): a token lies across its beginning \(near .*A:yes"):
        tokens_of(reader_of(one), line_of([("user", "is it"), ("assistant", "yes")]))
    # Pieces begin with a space that the whole does not have there, but beginnings of the whole agree.
    path.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} A:{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}|{% endif %}{% endfor %}"
    )
    tokens, is_target = tokens_of(reader_of(one), line_of([("user", "is it"), ("assistant", " mill")]))
    assert [made.id_to_token(i) for i in tokens[is_target]] == ["▁mill"]
    assert made.id_to_token(tokens[-1]) == "|"
    assert len(made.encode("|").ids) == 2


def write_chats(path, chats):
    path.write_bytes(b"".join(line_of(chat) + b"\n" for chat in chats))
    return path


def test_the_fingerprint_sees_what_is_learned(tmp_path):
    path, prints = tmp_path / "a.jsonl", set()
    for weight in (0, 1):
        messages = messages_of(TWO_TURNS)
        messages[1]["weight"] = weight
        path.write_text(json.dumps({"messages": messages}))
        prints.add(build_splits(flags(path)).train.fingerprint())
    assert len(prints) == 2


@pytest.mark.parametrize("kind", ["bytes", "plain"])
def test_samples_carry_the_mask_of_their_labels(folders, tmp_path, kind):
    path = write_chats(tmp_path / "a.jsonl", CHATS)
    one = flags(path) if kind == "bytes" else hugging_face(folders["plain"], path)
    stream = build_splits(one).train
    expected = {}
    for chat in CHATS:
        tokens, is_target = tokens_of(reader_of(one), line_of(chat))
        expected[tuple(tokens)] = is_target
    seen = set()
    for sample in stream.global_batch(0, stream.num_samples):
        values = stream.read(sample.sample_id)
        whole = (*values.tokens, values.labels[-1])
        assert sample.seqlen == len(whole) - 1
        assert values.loss_mask.dtype == np.float32
        assert values.loss_mask.tolist() == expected[whole][1:].astype(float).tolist()
        assert values.labels.tolist() == list(whole[1:])
        seen.add(whole)
    assert seen == set(expected)
    total = sum(int(mask.sum()) for mask in expected.values())
    assert f"loss on the {total} of {sum(map(len, expected))} tokens that assistants wrote" in stream.describe()


def test_overlong_chats(tmp_path):
    path = write_chats(tmp_path / "a.jsonl", CHATS)
    documents = [document for chat in CHATS for document in reader_of(flags()).read(line_of(chat))]
    firsts = [int(document.is_target.argmax()) for document in documents]
    limit = min(firsts) + 3
    assert min(len(document.tokens) for document in documents) - 1 > limit
    assert sum(first <= limit for first in firsts) == 1
    says = rf"line 1 predicts \d+ tokens, --seq-length is {limit} .* --overlong truncate or drop$"
    with pytest.raises(DataError, match=says):
        build_splits(flags(path, seq_length=limit))
    with pytest.raises(DataError, match="0 samples"):
        build_splits(flags(path, seq_length=limit, overlong="drop"))
    with pytest.raises(InvalidInputError, match="--sft and --overlong split exclude each other"):
        flags(path, overlong="split")
    stream = build_splits(flags(path, seq_length=limit, overlong="truncate")).train
    assert stream.num_samples == 1, "only one chat has an answer within the limit"
    assert "2 left out because no assistant's token is left of them" in stream.describe()
    values = stream.read(0)
    assert len(values.tokens) == limit
    assert 0 < values.loss_mask.sum() < limit


def test_index_is_cached_by_template(tmp_path, monkeypatch):
    path = write_chats(tmp_path / "a.jsonl", CHATS)
    real, asked = tokenizing.map_in_processes, []
    monkeypatch.setattr(tokenizing, "map_in_processes", lambda f, t, n: asked.append(n) or real(f, t, n))
    first, again = (index_entries(flags(path))[0].index for _ in range(2))
    assert (len(asked), again.path) == (1, first.path), "the second time it comes from the cache"
    other = tmp_path / "t.jinja"
    other.write_text("{% for m in messages %}{% generation %}{{ m.content }}.{% endgeneration %}{% endfor %}")
    index = index_entries(flags(path, chat_template=str(other)))[0].index
    assert len(asked) == 2
    assert index.columns["lengths"].tolist() != first.columns["lengths"].tolist()


def test_a_checkpoint_remembers_the_template(tmp_path):
    """Another template is another run, also when no probe of the contents shows it."""
    path = write_chats(tmp_path / "a.jsonl", CHATS[:1])
    template, longer = tmp_path / "t.jinja", tmp_path / "longer.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    longer.write_text(f"{template.read_text()}{{% if messages|length > 9 %}}.{{% endif %}}")
    first, other = (identity_of(flags(path, chat_template=str(one))) for one in (template, longer))
    assert [name for name in first if first[name] != other[name]] == ["chat template"]
    moved = template.rename(tmp_path / "moved.jinja")
    assert identity_of(flags(path, chat_template=str(moved))) == first


def test_flags_that_contradict_chats(folders, tmp_path):
    path = write_chats(tmp_path / "a.jsonl", CHATS)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "p.idx").write_text("x")
    (tmp_path / "bad.jinja").write_text("{% for %}")
    none = write_tokenizer(tmp_path / "none", template=None)
    cases = [
        (lambda: config(path, chat_template="chatml"), "--chat-template chatml needs --sft"),
        (lambda: config(mock=True, sft=True, overlong="drop"), "--sft and --mock-data exclude each other"),
        (lambda: index_entries(flags(tmp_path / "a.txt")), "--sft reads chats from JSONL, .* has 1 other files"),
        (lambda: index_entries(flags(tmp_path / "p")), r"is \.bin/\.idx data, which has no loss mask"),
        (lambda: reader_of(flags(chat_template="chatlm")), "chatlm is neither a file nor one of chatml"),
        (lambda: reader_of(flags(chat_template=str(tmp_path / "bad.jinja"))), "is not a Jinja template, line 1"),
        (lambda: reader_of(hugging_face(none)), "has no chat template: name a file or chatml"),
        (lambda: reader_of(flags(tokenizer="NullTokenizer", vocab_size=9)), "--sft needs a tokenizer that reads text"),
    ]
    for make, said in cases:
        with pytest.raises(InvalidInputError, match=said):
            make()
    with pytest.raises(DataError, match=r"has no field 'text' .* or read chats with --sft"):
        build_splits(config(path))
