"""Documents -> a deterministic, infinite stream of samples whose lengths are known before anything is read.

Read in this order:

- `config`: what a run's flags say of its data
- `source`: what a source of documents is
- `progress`, `workers`: a long scan, shown and spread over processes
- `length_index`: the file of an index; `file_table` knows the files behind it and notices changes
- `index_cache`: finds an index or makes it
- `unpacked`: gzip, JSON arrays and parquet as lines
- `turns`: a tree of turns in a line; `json_text`: the text of a line, its prompt and responses, or such a tree
- `scan`: tasks of indexing, without numpy
- `hugging_face`, `tokenizer`: text to tokens; `line_reader`: a line to documents
- `chat_template` (messages to a text), `chat_records` (forms of chats to messages), `chat_format` (what of a text is
  learned), `chat` (tokens and a loss mask), `chat_reader` (by which template): a line of chats to documents
- `questions`: which documents are prompts with several responses, or trees
- `token_scan`: tasks of indexing with a tokenizer; `indexing`: all of them
- `line_table`: where the lines of JSONL are
- `text_files`, `json_lines`: two sources; `indexed` (.bin/.idx), `mock` (random tokens): two more
- `data_path`: --data-path to entries with weights, and their files
- `entries`: files to an index, and to a source
- `split`: ranges of documents for training, validation and test
- `samples`: documents of a range to samples no longer than --seq-length (--overlong)
- `dataset`: the samples of one or more sources, newly shuffled in every epoch
- `blend`: which dataset fills which position of the stream
- `stream`: position to sample, `SampleStream.global_batch` (lengths) and `.read` (tokens)
- `build`: all of it
- `index_once`: one scan in the whole job
"""
