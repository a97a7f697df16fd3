"""Documents -> a deterministic, infinite stream of samples whose lengths are known before anything is read.

data_path.py    --data-path -> entries with weights -> files
entries.py      files -> index -> source. index_cache.py finds or makes an index: file_table.py knows the files and sees
                a change of them, scan.py reads them (workers.py, progress.py), length_index.py is the file of an index
source.py       what a source is; text_files.py, json_lines.py, chat_lines.py, indexed.py (.bin/.idx), mock.py are those
                that there are; line_table.py finds the lines of JSONL, token_scan.py tokenizes them for an index
tokenizer.py    text -> tokens; hugging_face.py with a local tokenizer.json. chat.py: chats -> text, tokens, loss mask
split.py        contiguous document ranges for training, validation and test
samples.py      documents of a range -> samples no longer than --seq-length (--overlong)
pool.py         the samples of one or more sources, shuffled anew in every epoch
blend.py        which pool fills which position of the stream
stream.py       position -> sample: `SampleStream.global_batch` (lengths) and `.read` (tokens)
build.py        all of it from a `config.DataConfig`
"""
