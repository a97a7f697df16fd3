"""Documents -> a deterministic, infinite stream of samples whose lengths are known before anything is read.

Read in this order:

- `config`: what a run's flags say of its data
- `source`: what a source of documents is
- `hugging_face`, `tokenizer`: text to tokens
- `mock` (random tokens), `indexed` (.bin/.idx): two sources
- `records`: files of records as lines; `lines`: a line to documents
- `chat_template` (messages to a text), `chat_records` (forms of chats to messages), `chat_format` (what of a text is
  learned), `chat` (tokens and a loss mask), `chat_reader` (by which template): a line of chats to documents
- `workers`: a long task spread over processes, and how far it is
- `files`: --data-path to entries with weights, their files, and whether these have changed
- `index_file`: the file of an index; `index_cache` finds it or has it made; `tokenizing` writes it
- `documents`: the source that an index is
- `samples`: documents of a range to samples no longer than --seq-length (--overlong), newly shuffled in every epoch
- `stream`: position to sample, `SampleStream.global_batch` (lengths) and `.read` (tokens)
- `build`: all of it
- `index_once`: once in the whole job
"""
