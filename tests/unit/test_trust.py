"""What a run reads is data: planted code is not run, and the places that could run it are listed. See SECURITY.md."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamic_cp.decide.length_files import read_lengths
from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.plans.serialize import loads
from dynamic_cp.search.planner_process import PlannerProcess, Request
from dynamic_cp.types import PlanOptions, Problem, Sample, Topology
from tests.payload import Payload, planted, works


def test_pickles_in_place_of_data_files_are_refused(tmp_path: Path) -> None:
    from megatron.trainer.data.index_file import load_index

    assert works(tmp_path)
    mark = tmp_path / "ran"
    np.save(tmp_path / "objects.npy", np.array([Payload(mark)], dtype=object), allow_pickle=True)
    for name in ("plain.npy", "plain.json", "plain.txt", "plain.jsonl", "plain.idx", "plain.lengths"):
        (tmp_path / name).write_bytes(planted(mark))
    readers: list[Any] = [
        *(lambda name=name: read_lengths(tmp_path / name) for name in ("objects.npy", "plain.npy", "plain.txt")),
        *(lambda name=name: read_lengths(tmp_path / name) for name in ("plain.json", "plain.jsonl", "plain.idx")),
        lambda: load_index(str(tmp_path / "plain.lengths")),
        lambda: load_hardware(tmp_path / "plain.json"),
        lambda: load_model(tmp_path / "plain.json"),
        lambda: loads((tmp_path / "plain.json").read_bytes()),
    ]
    for read in readers:
        with pytest.raises((DataError, InvalidInputError)):
            read()
    assert not mark.exists()


def test_code_beside_a_hugging_face_model_is_not_imported(tmp_path: Path) -> None:
    """As trust_remote_code would."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from megatron.trainer.data.hugging_face import HuggingFaceTokenizer, chat_templates, special_tokens
    from tests.unit.data.made_tokenizers import write_tokenizer

    folder = write_tokenizer(tmp_path / "tokenizer")
    mark = tmp_path / "ran"
    for name in ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py"):
        (folder / name).write_text(f"import os; os.mkdir({str(mark)!r})")
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "configuration_evil.Evil"}}
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said["auto_map"] = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    assert load_model(folder / "config.json").num_layers == 2
    assert HuggingFaceTokenizer.load(str(folder)).encode(b"The river").tolist()
    assert special_tokens(str(folder))
    chat_templates(str(folder))
    assert not mark.exists()


ESCAPES = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of jinja": "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].mkdir('MARK') }}",
    "globals of ours": "{{ raise_exception.__globals__['json'].codecs.builtins.open('MARK', 'w') }}",
    "attr of ours": "{{ (raise_exception|attr('__globals__'))['json'] }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "format by attr": "{{ ('{0.__class__.__mro__}'|attr('format'))(messages) }}",
    "format by map": "{{ ['{0.__class__.__mro__}']|map('format', messages)|first }}{{ ''.__class__.x.y }}",
    "the environment": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.environment.x.y }}",
    "another file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os.mkdir('MARK') }}",
    "changing a message": "{% set _ = messages.append({'role': 'user'}) %}",
    "json with a class of its own": "{{ messages|tojson(cls=cycler) }}",
    "names of a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "first names of a namespace": "{{ namespace(__class__=1) }}",
    "what the date is bound to": "{{ strftime_now.__self__.__class__.x }}",
    "a huge loop": "{% for i in range(1000000000) %}x{% endfor %}",
    "recursion without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_chat_template_stays_in_its_sandbox(name: str, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    from megatron.trainer.data.chat_format import ChatFormat
    from megatron.trainer.data.lines import LineError

    mark = tmp_path / "ran"
    chat = ChatFormat(name="t", template=ESCAPES[name].replace("MARK", str(mark)))
    messages = [{"role": "user", "content": "{{ 7*7 }}"}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(LineError, match="t refuses this chat"):
        chat.texts(messages)
    assert not mark.exists()


def test_the_escapes_are_real_ones(tmp_path: Path) -> None:
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed")
    for number, name in enumerate(("globals of jinja", "globals of lipsum")):
        mark = tmp_path / str(number)
        jinja2.Environment().from_string(ESCAPES[name].replace("MARK", str(mark))).render()
        assert mark.is_dir(), "without a sandbox it runs"


def test_texts_of_a_chat_are_no_templates() -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    from megatron.trainer.data.chat_format import ChatFormat
    from megatron.trainer.data.chat_template import TEMPLATES

    messages = [{"role": "user", "content": "{{ 7*7 }}"}, {"role": "assistant", "content": "{% raw %}"}]
    ((text, _),) = ChatFormat(name="t", template=TEMPLATES["chatml"]).texts(messages)
    assert "{{ 7*7 }}" in text
    assert "{% raw %}" in text


def test_a_sandbox_that_can_be_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.trainer.data import chat_template

    for version, good in (("3.1.6", True), ("3.2", True), ("4.0.0rc1", True), ("3.1.5", False), ("2.11.3", False)):
        monkeypatch.setattr(chat_template.metadata, "version", lambda name, version=version: version)
        assert (chat_template.why_no_templates() is None) == good, version
    assert "jinja2 2.11.3 is installed, 3.1.6 or later" in str(chat_template.why_no_templates())


def test_the_planner_imports_nothing_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may be started in a folder of data that others write to."""
    mark = tmp_path / "ran"
    for name in ("dynamic_cp.py", "numpy.py", "numba.py", "secrets.py", "subprocess.py"):
        (tmp_path / name).write_text(f"import os; os.mkdir({str(mark)!r})")
    monkeypatch.chdir(tmp_path)
    process = PlannerProcess()
    process.start(
        Problem(
            topology=Topology(num_lanes=2), model=load_model("llama-3-8b"), hardware=load_hardware("h100"),
            options=PlanOptions(max_tokens_per_rank=8192, cp_comm_types=("p2p",)),
        )
    )  # fmt: skip
    try:
        process.submit(Request.of("key", [Sample(sample_id=0, seqlen=9)]))
        found = process.receive(120.0)
    except (EOFError, OSError):
        found = None
    finally:
        process.close()
    assert not mark.exists()
    assert found is not None
    assert found.lanes is not None
