"""Documents -> a deterministic, endless stream of samples whose lengths are known before anything is read.

Read in this order: `config` (a run's flags about data), `source` (what a source of documents is), `hugging_face`,
`tokenizer` (text to tokens), `mock` (random tokens), `indexed` (.bin/.idx files), `records` (files of records to
lines), `lines` (a line to documents), `chat_template` (messages to a text), `chat_records` (forms of chats to
messages), `chat_format` (what of a text is learned), `chat` (a line of chats to documents), `chat_reader` (which
template), `workers` (tasks over processes, with progress), `files` (--data-path to files), `index_file` (the file of an
index), `index_cache` (finds or makes it), `tokenizing` (writes it), `documents` (an index as a source), `samples`
(documents to samples, shuffled in every epoch), `stream` (position to sample: lengths of a global batch, tokens of a
sample), `build` (all of it), `index_once` (once per job).
"""
