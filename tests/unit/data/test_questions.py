"""Prompts with several responses, or with a preferred one: one document that trains what its pairs apart would."""

import gzip
import json

import numpy as np
import pytest

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.types import SharedQuestion
from megatron.dynamic_cp.data.sample_tokens import shared_question
from megatron.integrations.preferences import preference_pairs
from megatron.trainer.data import tokenizing
from megatron.trainer.data.build import build_splits, index_entries
from megatron.trainer.data.tokenizer import ByteTokenizer
from tests.unit.data.helpers import EOD, assert_line_refused, config, open_documents, refusal, write_records
from tests.unit.data.made_tokenizers import MARKED_TEMPLATE, PLAIN_TEMPLATE, write_tokenizer
from tests.unit.data.test_chat import flags, reader_of, tokens_of
from tests.unit.data.test_chat_records import call_messages

LINES = [
    {"prompt": "What runs past the mill?", "responses": ["The river.", "A boy ☃", ""]},
    {"text": "plain text"},
    {"prompt": "Is it far?", "responses": ["No."]},
    {"prompt": "ab", "responses": ["c", "d"], "tools": None, "id": 7},
]
TREES = [
    LINES[1],
    {
        "turns": {
            "text": "Find the mill. ",
            "learned": False,
            "children": [
                {"text": "I ask. ", "children": [{"text": "A boy.", "learned": False}, {"text": ""}, {"text": "☃"}]},
                {"text": "I look. ", "children": [{"text": "And see.", "children": [{"text": " It."}]}]},
                {"text": "No."},
            ],
        }
    },
    {"turns": {"text": "ab", "children": [{"text": "c", "learned": False}, {"text": "d", "learned": False}]}},
    {"turns": {"text": "abc", "learned": False, "children": [{"text": "def", "children": [{"text": "g"}]}]}},
    LINES[0],
]
TWO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What runs past the mill?"}]
CHATS = [
    {"prompt": TWO, "responses": ["The river.", "ü" * 9, "x"]},
    {"messages": [*TWO, {"role": "assistant", "content": "The river."}]},
    {"prompt": "Is it far?", "responses": ["No."], "system": "Be brief."},
    {"prompt": [*TWO, {"role": "assistant", "content": "The river."}, TWO[1]], "responses": ["I said it.", "Ask."]},
]


def write(path, lines):
    return write_records(path, *lines)


def chat_flags(path, **changes):
    return config(path, sft=True, **({"overlong": "error", "seq_length": 512} | changes))


def learned(stream, sample):
    """Return each token that is learned, and what it follows: the input tokens that it sees, in order of position."""
    values = stream.read(sample.sample_id)
    mask = sample.mask
    positions = None if mask is None else mask.positions(sample.seqlen)
    ranges = None if mask is None else mask.key_ranges(sample.seqlen)
    assert len(values.tokens) == len(values.labels) == len(values.loss_mask) == sample.seqlen
    found = []
    for place in np.flatnonzero(values.loss_mask).tolist():
        seen = list(range(place + 1))
        if mask is not None:
            seen = [key for begin, end in ranges[place].reshape(-1, 2).tolist() for key in range(begin, end)]
            assert [int(positions[key]) for key in seen] == list(range(len(seen)))
        found += [(tuple(values.tokens[seen].tolist()), int(values.labels[place]))] * int(values.loss_mask[place])
    return found


def all_learned(one):
    stream = build_splits(one).train
    return sorted(pair for sample in stream.global_batch(0, stream.num_samples) for pair in learned(stream, sample))


def apart(lines):
    """Return the same lines, each response with a prompt of its own."""
    for line in lines:
        if "messages" in line:
            yield line
        elif "turns" in line:
            yield from branches(line["turns"])
        elif "responses" in line:
            for response in line["responses"]:
                yield line | {"responses": [response]}
        else:
            yield line


def branches(turn, *above):
    """Yield each branch of a tree as a line, without a branching."""
    way = (*above, turn)
    for child in turn.get("children", []):
        yield from branches(child, *way)
    if not turn.get("children") and any(one.get("learned", True) for one in way):
        line = []
        for one in reversed(way):
            line = [one | {"children": line}]
        yield {"turns": line[0]}


def nested(levels):
    turn = {"text": "x"}
    for _ in range(levels - 1):
        turn = {"text": "abc", "children": [{"text": "y"}, turn]}
    return {"turns": turn}


def as_chats(lines):
    for line in apart(lines):
        if "messages" in line:
            yield line
            continue
        prompt = line["prompt"]
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = [*TWO[:1] * ("system" in line), *prompt]
        shared = [one | {"weight": 0} if one["role"] == "assistant" else one for one in prompt]
        yield {"messages": [*shared, {"role": "assistant", "content": line["responses"][0]}]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    templates = {"plain": PLAIN_TEMPLATE, "marked": MARKED_TEMPLATE}
    return {name: write_tokenizer(root / name, text) for name, text in templates.items()}


def with_tokenizer(kind, folders):
    if kind == "bytes":
        return {}
    return {"tokenizer": "HuggingFaceTokenizer", "tokenizer_model": str(folders[kind])}


@pytest.mark.parametrize("lines", [LINES, TREES], ids=["responses", "trees"])
@pytest.mark.parametrize("kind", ["bytes", "plain"])
def test_every_token_follows_what_it_follows_in_its_branches(tmp_path, folders, kind, lines):
    """And as often: what branches share counts once for each."""
    changes = with_tokenizer(kind, folders) | {"seq_length": 512}
    one = config(write(tmp_path / "a.jsonl", lines), **changes)
    together = all_learned(one)
    assert together == all_learned(config(write(tmp_path / "b.jsonl", [*apart(lines)]), **changes))
    assert len(together) > 30
    if kind == "bytes":
        assert (tuple(b"What runs past the mill?"), EOD) in together
        assert (tuple(b"What runs past the mill?The river"), ord(".")) in together
        assert not [seen for seen, _ in together if bytes(seen).startswith(b"What runs") and len(seen) < 24]
    if kind == "bytes" and lines is TREES:
        stream = build_splits(one).train
        assert "4 prompts with 12 responses or turns of" in stream.describe()
        assert together.count((tuple(b"Find the mill. "), ord("I"))) == 4
        assert together.count((tuple(b"Find the mill. I "), ord("a"))) == 3
        assert (tuple(b"Find the mill. I ask. "), EOD) in together
        assert (tuple(b"Find the mill. I ask. "), ord("A")) not in together
        masks = {str(sample.mask) for sample in stream.global_batch(0, 5)}
        assert masks == {"None", "tree:14(7(7,1,4),21,4)", "shared_question:1,2,2", "shared_question:23,11,10,1"}


def test_a_null_of_a_turn_is_a_missing_key(tmp_path):
    children = [{"text": "c"}, {"text": "d", "children": [{"text": "e"}]}]
    filled = [{"text": "c", "children": None}, {"text": "d", "learned": None, "children": children[1]["children"]}]
    lines = [{"turns": {"text": "ab", "children": of}} for of in (children, filled)]
    bare, with_nulls = (all_learned(config(write(tmp_path / "a.jsonl", [line]))) for line in lines)
    assert with_nulls == bare
    assert len(bare) == 7


def test_a_tree_has_as_many_levels_as_masks(tmp_path):
    path = write(tmp_path / "a.jsonl", [nested(128)])
    (sample,) = build_splits(config(path, seq_length=1024)).train.global_batch(0, 1)
    assert max(sample.mask.depths) == 127


def test_a_tree_is_truncated_by_its_last_turns(tmp_path):
    """As prompts with responses are; of a tree of one branch nothing is left to hide."""
    path = write(tmp_path / "a.jsonl", TREES[1:2])
    whole = all_learned(config(path, seq_length=64))
    expected = {30: "tree:14(7(7,1,1))", 29: "tree:14(7(7,1))", 28: "None", 47: "tree:14(7(7,1,4),14)", 12: None}
    for seq_length, mask in expected.items():
        one = config(path, seq_length=seq_length, overlong="truncate")
        if mask is None:
            with pytest.raises(DataError):
                build_splits(one)
            continue
        (sample,) = build_splits(one).train.global_batch(0, 1)
        assert (sample.seqlen, str(sample.mask)) == (seq_length, mask)
        kept = all_learned(one)
        assert kept
        assert set(kept) <= set(whole)


@pytest.mark.parametrize("kind", ["bytes", "plain", "marked"])
def test_with_sft_a_response_is_learned_as_in_its_chat(tmp_path, folders, kind):
    changes = with_tokenizer(kind, folders)
    together = all_learned(chat_flags(write(tmp_path / "a.jsonl", CHATS), **changes))
    assert together == all_learned(chat_flags(write(tmp_path / "b.jsonl", [*as_chats(CHATS)]), **changes))
    assert len(together) > 30


def test_lengths_masks_and_words_come_from_the_index(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", LINES)
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 100)  # rows are numbered through the pieces
    assert open_documents(path).first_targets is not None
    stream = build_splits(config(path)).train
    batch = stream.global_batch(0, 4)
    masks = {(sample.seqlen, str(sample.mask)) for sample in batch}
    first = shared_question([*LINES[0]["prompt"].encode()], [[*r.encode(), EOD] for r in LINES[0]["responses"]])
    assert masks == {(len(first[0].tokens), str(first[1])), (10, "None"), (13, "None"), (5, "shared_question:1,2,2")}
    assert all(mask.why_unfit(seqlen) is None for seqlen, mask in zip(batch.seqlens, batch.masks, strict=True) if mask)
    assert "4 JSON lines, 3 prompts with 6 responses of" in stream.describe()
    (place,) = [sample.sample_id for sample in batch if str(sample.mask) == str(first[1])]
    values = stream.read(place)
    for name in ("tokens", "labels", "loss_mask"):
        np.testing.assert_array_equal(getattr(values, name), getattr(first[0], name))


def test_data_without_responses_are_what_they_were(tmp_path):
    """Their index, their fingerprint and their batches know nothing of questions."""
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two", "prompt": "said before"}])
    (entry,) = index_entries(config(path))
    assert not {"learned", "first_targets"} & set(entry.index.columns)
    assert not any(map(len, (entry.index.columns[name] for name in ("questions", "num_answers", "answers", "depths"))))
    assert open_documents(path).first_targets is None
    stream = build_splits(config(path)).train
    assert stream.global_batch(0, 2).masks is None
    assert not stream.has_masks
    single = build_splits(config(write(tmp_path / "b.jsonl", LINES[1:3]))).train
    assert single.global_batch(0, 2).masks is None
    assert not single.has_masks


def test_what_decides_the_masks_decides_the_fingerprint(tmp_path):
    def fingerprint(responses):
        path = write(tmp_path / "a.jsonl", [{"prompt": "abc", "responses": responses}])
        return build_splits(config(path)).train.fingerprint()

    assert fingerprint(["de", "fgh"]) == fingerprint(["de", "fgh"])
    assert len({fingerprint(one) for one in (["de", "fgh"], ["def", "gh"], ["de", "fgx"])}) == 3


@pytest.mark.parametrize(
    ("seq_length", "overlong", "expected"),
    [
        (14, "truncate", (14, "shared_question:3,6,5")),
        (9, "truncate", (9, "None")),
        (10, "truncate", (10, "shared_question:3,6,1")),
        (4, "truncate", (4, "None")),
        (16, "split", (16, "shared_question:3,6,7")),
    ],
)
def test_a_long_line_is_cut_where_that_is_asked_for(tmp_path, seq_length, overlong, expected):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1234", "responses": ["abcde", "fghijk"]}, {"text": "x"}])
    stream = build_splits(config(path, seq_length=seq_length, overlong=overlong)).train
    (sample,) = (one for one in stream.global_batch(0, 2) if one.seqlen > 1)
    assert (sample.seqlen, str(sample.mask)) == expected
    whole = all_learned(config(path, seq_length=64))
    kept = learned(stream, sample)
    assert len(kept) == sample.seqlen - 3
    assert set(kept) <= set(whole)


@pytest.mark.parametrize("overlong", ["split", "error"])
def test_a_line_that_is_too_long_is_refused_with_both_numbers(tmp_path, overlong):
    lines = [{"text": "x" * 14}, {"prompt": "1234", "responses": ["abcde", "fghijk"]}]
    lines += [{"text": "x" * 40}] if overlong == "split" else []
    path = write(tmp_path / "a.jsonl", lines)
    said = refusal(config(path, seq_length=15, overlong=overlong))
    why = ", and --overlong split would part its responses from their prompt" if overlong == "split" else ""
    assert said == (
        f"{path} line 2 predicts 16 tokens, --seq-length is 15 (1 such documents){why}: raise --seq-length or choose "
        "--overlong truncate or drop"
    )
    assert build_splits(config(path, seq_length=15, overlong="drop")).train.num_samples == 1


def test_nothing_of_it_is_left_where_only_its_prompt_fits(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1234", "responses": ["abc", "d"]}, {"text": "x"}])
    stream = build_splits(config(path, seq_length=3, overlong="truncate")).train
    assert stream.num_samples == 1
    assert "1 left out because" in stream.describe()


BAD = [
    ({"prompt": "ab", "responses": []}, "field 'responses' is an empty list: a list of at least 1 text is needed"),
    ({"prompt": "ab", "responses": "c"}, "field 'responses' is a str: a list of at least 1 text is needed"),
    ({"prompt": "ab", "responses": ["c", 5]}, "response 2 of 2 is a int, not a string: repair or remove it"),
    ({"responses": ["c"]}, "has 'responses' but no 'prompt': write {'prompt': ..., 'responses': [...]}"),
    ({"prompt": "a", "responses": ["c"]}, "its prompt has 1 tokens, at least 2 are needed"),
]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *BAD,
        ({"prompt": "ab", "text": "x", "responses": ["c"]}, "has 'responses' and 'text': leave 'text' out, or give it"),
        ({"prompt": ["ab"], "responses": ["c"]},
         "field 'prompt' is a list, not a string: write it as one text, or read"),
        ({"prompt": "ab", "answer": "c"}, "has no field 'text' (it has 'prompt', 'answer')"),
        ({"turns": {"text": "ab"}, "prompt": "x"}, "has 'turns' and 'prompt': leave 'prompt' out, or give it alone"),
        ({"turns": []}, "turn 1 has list: give a string 'text', and maybe 'learned' and 'children'"),
        ({"turns": {"text": "ab", "children": [{"text": "c"}, {"txt": "c"}]}},
         "turn 1.2 has 'txt': give a string 'text'"),
        ({"turns": {"text": "ab", "children": {}}}, "turn 1: 'learned' is true or false, 'children' a list of turns"),
        ({"turns": {"text": "", "children": [{"text": "c"}]}}, "turn 1 has an empty text and 1 behind it"),
        ({"turns": {"text": "ab", "learned": False}}, "none of its 1 turns is learned"),
        ({"turns": {"text": "a", "children": [{"text": "c"}, {"text": "d"}]}},
         "its turns have 1 tokens before they branch, and 4 learned ones behind the first: at least 2 and 1 are"),
        (nested(129), "its turns have 129 levels, at most 128 are supported: cut it in several lines"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_with_the_remedy(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", [LINES[0], line])
    assert_line_refused(config(path), path, 2, message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *BAD[:4],
        ({"messages": TWO, "prompt": "ab", "responses": ["c"]}, "has 'responses' and 'messages': leave 'messages' out"),
        ({"prompt": 5, "responses": ["c"]}, "field 'prompt' is a int: a text, or at least one message, is needed"),
        ({"prompt": [{"role": "me", "content": ""}], "responses": ["c"]}, "message 1 has role 'me': use one of"),
        ({"prompt": "ab", "responses": ["\ufdd0"]}, "field 'responses' has the noncharacter U+FDD0"),
    ],
)
def test_a_malformed_line_of_chats_is_named_with_the_remedy(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", [CHATS[0], line])
    assert_line_refused(chat_flags(path), path, 2, message)


def test_a_template_that_writes_a_prompt_by_its_answer_is_refused(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ messages[-1].content | length }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    path = write(tmp_path / "a.jsonl", [{"prompt": "ab", "responses": ["c", "de"]}])
    with pytest.raises(DataError, match="writes the prompt of response 2 in another way than that of response 1"):
        build_splits(chat_flags(path, chat_template=str(template)))


PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it far?"}]
NO, YES = ({"role": "assistant", "content": text} for text in ("No.", "Yes, it is."))
EARLIER = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, *PROMPT[1:]]


TEXTS = {"chosen": "No.", "rejected": "Yes, it is."}
ANSWERS = {"chosen": [NO], "rejected": [YES]}


def whole(messages):
    return {"chosen": [*messages, NO], "rejected": [*messages, YES]}


BRIEF = {"system": "Be brief."}
SPOKEN = {"human": ["Is it far?"], "gpt": ["No.", "Yes, it is."]}
HUMAN, GPT = ([{"from": name, "value": text} for text in texts] for name, texts in SPOKEN.items())
SHAREGPT = {"conversations": HUMAN, "chosen": GPT[0], "rejected": GPT[1]}
FORMS = {
    "messages": ({"prompt": PROMPT, **ANSWERS}, PROMPT),
    "texts of answers": ({"prompt": PROMPT, **TEXTS}, PROMPT),
    "whole chats": ({**whole(PROMPT), "prompt": None}, PROMPT),
    "whole chats and their question": ({"prompt": "Is it far?", **whole(PROMPT), "messages": [*PROMPT, NO]}, PROMPT),
    "a question and messages": ({"prompt": "Is it far?", **ANSWERS}, PROMPT[1:]),
    "an answer before": (whole(EARLIER), EARLIER),
    "sharegpt": (SHAREGPT | BRIEF, PROMPT),
    "alpaca": ({"instruction": "Is it", "input": "far?", **TEXTS}, [{"role": "user", "content": "Is it\nfar?"}]),
    "alpaca and whole chats": ({"instruction": "Is it far?", "output": "", **whole(PROMPT[1:])}, PROMPT[1:]),
    "texts and a system": ({"prompt": "Is it far?", **TEXTS, **BRIEF}, PROMPT),
    "messages and a system": ({"prompt": PROMPT[1:], **ANSWERS, **BRIEF}, PROMPT),
    "whole chats and a system": (whole(PROMPT[1:]) | BRIEF, PROMPT),
    "a prompt that chats repeat": ({"prompt": PROMPT, **whole(PROMPT)}, PROMPT),
    "a question that chats repeat": ({"prompt": PROMPT, **whole(PROMPT[1:])}, PROMPT),
    "the last question of whole chats": ({"prompt": EARLIER[2:], **whole(EARLIER)}, EARLIER),
    "a system that chats follow": ({"prompt": PROMPT[:1], **whole(PROMPT[1:])}, PROMPT),
}


def pairs(path, *records, **words):
    return [*preference_pairs(str(write_records(path, *records)), ByteTokenizer(), **words)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_tokens_of_its_two_chats(tmp_path, form):
    record, prompt = FORMS[form]
    (pair,) = pairs(tmp_path / "a.jsonl", record)
    for tokens, is_target, answer in (
        (pair.chosen, pair.chosen_is_target, NO),
        (pair.rejected, pair.rejected_is_target, YES),
    ):
        chat = [message | {"weight": 0} if message["role"] == "assistant" else message for message in prompt]
        alone, learned = tokens_of(reader_of(flags()), json.dumps({"messages": [*chat, answer]}).encode())
        assert bytes(tokens.tolist()) == bytes(alone[: len(tokens)].tolist())
        assert is_target.tolist() == learned[: len(tokens)].tolist()
        assert not learned[len(tokens) :].any()
        assert int(is_target.argmax()) == pair.prompt_length
        assert bytes(tokens[pair.prompt_length :].tolist()).decode() == answer["content"] + "<|im_end|>"


@pytest.mark.parametrize("prompt", ["Is it far?", PROMPT[1:]])
def test_answers_that_begin_alike_stay_behind_their_prompt(tmp_path, prompt):
    chats = [[{"role": "assistant", "content": "Sure."}, *EARLIER[:1], answer] for answer in (NO, YES)]
    (pair,) = pairs(tmp_path / "a.jsonl", {"prompt": prompt, "chosen": chats[0], "rejected": chats[1]})
    alone, learned = tokens_of(reader_of(flags()), json.dumps({"messages": [*PROMPT[1:], *chats[0]]}).encode())
    assert pair.chosen.tolist() == alone[: len(pair.chosen)].tolist()
    assert pair.chosen_is_target.tolist() == learned[: len(pair.chosen)].tolist()


TEXT_PAIRS = [  # a line, its prompt and its answers
    ({"prompt": "Is it far?", "chosen": " No.", "rejected": " Yes."}, ("Is it far?", " No.", " Yes.")),
    ({"chosen": "Is it far? No.", "rejected": "Is it far? Yes."}, ("Is it far?", " No.", " Yes.")),
    ({"chosen": "Is it far? No.", "rejected": "Is it far? Not."}, ("Is it far? No", ".", "t.")),
]


@pytest.mark.parametrize(("record", "expected"), TEXT_PAIRS)
def test_texts_are_a_prompt_and_two_answers(tmp_path, record, expected):
    (pair,) = pairs(tmp_path / "a.jsonl", record)
    for tokens, answer in ((pair.chosen, expected[1]), (pair.rejected, expected[2])):
        assert tokens[-1] == ByteTokenizer().eod
        assert bytes(tokens[: pair.prompt_length].tolist()).decode() == expected[0]
        assert bytes(tokens[pair.prompt_length : -1].tolist()).decode() == answer


@pytest.mark.nightly  # it takes seconds to import
def test_trl_reads_texts_so():
    data_utils = pytest.importorskip("trl.data_utils", reason="compares with TRL")
    for record, expected in TEXT_PAIRS:
        found = data_utils.maybe_extract_prompt(record)
        assert tuple(found[name] for name in ("prompt", "chosen", "rejected")) == expected


def test_answers_of_several_messages_and_files_of_all_kinds(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}.{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    long, short = call_messages("{}"), [*call_messages("{}")[:1], NO]
    records = [{"chosen": long, "rejected": short}, {"chosen": short, "rejected": long}]
    first, second = pairs(tmp_path / "a.jsonl", *records, chat_template=str(template))
    assert bytes(first.chosen.tolist()) == b"<user>2 plus 3?<assistant>add.<tool>5<assistant>5.."
    assert bytes(first.chosen[first.chosen_is_target].tolist()) == b"add.5.."
    tokens, mask = first.sample()
    lengths = [len(first.chosen) - first.prompt_length, len(first.rejected) - first.prompt_length]
    assert mask == SharedQuestion(first.prompt_length - 1, (lengths[0], lengths[1]))
    assert bytes(tokens.labels[tokens.loss_mask > 0].tolist()) == b"add.5..No.."
    assert bytes(tokens.tokens[-lengths[1] :].tolist()) == b">" + bytes(
        first.rejected[first.prompt_length : -1].tolist()
    )
    assert len(tokens.tokens) == mask.prompt + sum(lengths)
    assert second.rejected.tolist() == first.chosen.tolist()
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    arrays = [*preference_pairs(str(tmp_path / "b.json.gz"), ByteTokenizer(), chat_template=str(template))]
    assert [pair.chosen.tolist() for pair in arrays] == [first.chosen.tolist(), second.chosen.tolist()]


def test_variables_and_unread_keys_of_a_pair(tmp_path, caplog):
    template = tmp_path / "t.jinja"
    template.write_text("{{ mode }}{% for m in messages %}<{{ m.role }}>{{ m.content }}.{% endfor %}")
    record = FORMS["messages"][0] | {"chat_template_kwargs": {"mode": "short"}, "score_chosen": 1, "id": 2}
    first, _ = pairs(tmp_path / "a.jsonl", record, record, chat_template=str(template))
    assert bytes(first.chosen.tolist()).startswith(b"short<system>Be brief.")
    (said,) = caplog.messages
    assert said.endswith("a.jsonl line 1 has the key 'score_chosen', which has no effect; this is said once")
    pairs(tmp_path / "a.jsonl", {"prompt": "ab", "chosen": "c", "rejected": "d", "score": 1})
    assert "'score'" in caplog.messages[1]


BAD_PAIRS = {
    "no preference": (
        {"prompt": "ab", "completion": "c"},
        "has no field 'chosen' (it has 'prompt', 'completion'): preferences are read (chosen with rejected, "
        "prompt with chosen with rejected",
    ),
    "alike": ({"prompt": PROMPT, "chosen": [NO], "rejected": [NO]}, "'chosen' and 'rejected' are the same"),
    "texts alike": ({"chosen": "abc", "rejected": "abc"}, "'chosen' and 'rejected' are the same"),
    "nothing before": ({"chosen": [NO], "rejected": [YES]}, "have no message in common and no 'prompt' precedes them"),
    "two prompts": ({"prompt": PROMPT, "instruction": "x", "chosen": "a", "rejected": "b"},
        "has 'prompt' with 'chosen' with 'rejected' and 'instruction' with 'chosen' with 'rejected': leave one"),
    "an output": ({"instruction": "x", "output": "y", "chosen": "a", "rejected": "b"},
        "has 'output' beside 'chosen' and 'rejected': leave 'output' out"),
    "two systems": ({"system": "Be long.", "prompt": PROMPT, "chosen": "a", "rejected": "b"},
        "field 'system' differs from the chat's own system message"),
    "a system alone": ({"system": "Be brief.", "chosen": "Far? No.", "rejected": "Far? Yes."},
        "have no message in common and no 'prompt' precedes them"),
    "a prompt by another name": (
        {"system": "Be brief.", "question": "Far?", "chosen": "It is not.", "rejected": "It is."},
        "have no message in common and no 'prompt' precedes them: rename 'question' to 'prompt'"),
    "texts that begin otherwise": ({"chosen": "No.", "rejected": "Yes."},
        "have no message in common and no 'prompt' precedes them: repair or remove the line"),
    "no answer": ({"prompt": PROMPT, "chosen": PROMPT[1:], "rejected": [YES]}, "has no assistant message to learn"),
    "role": ({"prompt": "?", "chosen": [{"role": "me", "content": ""}], "rejected": [YES]}, "message 1 has role 'me'"),
    "a short prompt": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "its prompt has 1 tokens, at least 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_what_is_no_pair_names_its_line(tmp_path, case):
    record, says = BAD_PAIRS[case]
    with pytest.raises(DataError) as caught:
        pairs(tmp_path / "a.jsonl", FORMS["messages"][0], record)
    assert f"{tmp_path / 'a.jsonl'} line 2" in str(caught.value)
    assert says in str(caught.value)


def test_files_without_records_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InvalidInputError, match="has no records: preference pairs are read from JSONL"):
        next(preference_pairs(str(tmp_path / "a.txt"), ByteTokenizer()))
