"""Files of data sets, by their names."""

from __future__ import annotations

from pathlib import PurePath

TEXT = (".jsonl", ".json", ".csv", ".tsv")  # suffixes of files whose rows are text
COLUMNS = (".parquet", ".arrow")  # suffixes of files of Arrow columns
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstandard"}
"""Suffix of a compressed text file, such as .jsonl.gz -> module that opens it."""


def data_suffix(name: str) -> str:
    """Return the suffix that names the format of a file, without that of its compression: .csv of data.csv.gz."""
    path = PurePath(name)
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix


def is_text_file(name: str) -> bool:
    """Whether a name is that of a file whose rows are text, which is read without any package."""
    return data_suffix(name) in TEXT


def names_a_file(name: str) -> bool:
    """Whether a relative name is that of a file, and not OWNER/NAME of something on the Hugging Face hub."""
    return data_suffix(name) in (*TEXT, *COLUMNS) or name.count("/") > 1
