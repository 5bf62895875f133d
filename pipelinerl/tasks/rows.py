"""Read the rows of a data set, from files (JSONL, JSON, CSV, TSV, Parquet, perhaps compressed) or from the Hugging Face hub.

If a row cannot be read, it has a `BadRow` in place of values, so that the caller can report all such rows at once.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from pipelinerl.errors import FieldError, Lacking, MissingPackage, UserError, counted, one_of
from pipelinerl.recipe.fields import TaskConfig

ABSENT = object()
"""Result of `value_in` if a row lacks the field."""
LONGEST_LINE = 64 * 2**20
"""Maximum bytes of a line or of a CSV field."""
LARGEST_WHOLE = 2 * 2**30
"""Maximum bytes of a file that is read at once: a .json file, or Parquet inside .gz or .zst."""
LARGEST_UNPACKED = 32 * 2**30
"""Maximum bytes of all lines of a file. Without this limit, a small compressed file could take unbounded time."""
_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_COMPRESSIONS = (".gz", ".zst", ".zstd")
_SPLITS = re.compile(r"(?<![a-z])(?:(?P<train>train(ing)?)|(?P<test>test(ing)?|eval(uation)?)|val(id(ation)?)?|dev)(?![a-z])")
"""Words by which the library `datasets` recognises splits in names of files and folders."""


class BadRow(Exception):
    """A row that cannot be used. Attribute: `absent`, the field that the row lacks; empty if there is another reason."""

    def __init__(self, problem: str, absent: str = "") -> None:
        self.absent = absent
        super().__init__(problem)


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of a file or of a hub data set. `place`: position in the file, as `line 7`, `row 7` or `entry 7`, from 1."""

    file: str
    place: str
    values: Values | BadRow


def value_in(row: Any, name: str) -> Any:
    """Return the field `name`, or `ABSENT`. `a.0` is item 0 of a. `a.b` is field b of a, unless the row has a field `a.b`."""
    inside: Any = {str(position): value for position, value in enumerate(row)} if isinstance(row, list) else row
    if not isinstance(inside, Mapping):
        return ABSENT
    if name in inside:
        return inside[name]
    for dot in (position for position, letter in enumerate(name) if letter == "."):
        if name[:dot] in inside and (found := value_in(inside[name[:dot]], name[dot + 1 :])) is not ABSENT:
            return found
    return ABSENT


def rows_of(config: TaskConfig) -> Iterator[Row]:
    """Yield the rows of `task.path`, at most `task.max_rows` if that is set. Raises `MissingPackage` if a library is
    not installed, `Lacking` if neither the hub nor its cache can give the rows, and `UserError` for mistakes in the data."""
    rows = _hub_rows(config) if config.source == "hub" else (row for path in files_at(config.path) for row in _file_rows(path))
    yield from islice(rows, config.max_rows or None)


def files_at(path: str) -> list[Path]:
    """Return the sorted files at a path, which may be a file, a folder or a pattern. Leave out a folder's files of unknown
    formats. Raises `FieldError` if no file is left, a format is unknown, or a folder's files differ in format or split."""
    given = Path(path)
    if os.path.isdir(path):
        visible = [file for file in sorted(given.rglob("*")) if "/." not in f"/{file.relative_to(given)}"]
        found = [file for file in visible if known_format(file) and file.is_file()]
        lacking = f"this folder holds no {one_of(_FORMATS)} file"
        _check_alike(given, found)
    else:
        found = [given] if os.path.isfile(path) else [Path(name) for name in sorted(glob.glob(path, recursive=True))]
        lacking = f"there is no such file{'' if given.is_absolute() else f' in {Path.cwd()}'}"
    if not (found := [file for file in found if file.is_file()]):
        raise FieldError("task.path", path, lacking)
    if other := [file for file in found if not known_format(file)]:
        raise FieldError("task.path", str(other[0]), f"give a {one_of(_FORMATS)} file, perhaps compressed (.gz, .zst)")
    return found


def _check_alike(folder: Path, files: list[Path]) -> None:
    """Raise `FieldError` if the files differ in format, or if their names indicate different splits."""
    names = [str(file.relative_to(folder)) for file in files]
    words = [_SPLITS.search(name.lower()) for name in names]
    for kinds in ([known_format(file) for file in files], [word and (word.lastgroup or "validation") for word in words]):
        first = {kind: name for kind, name in zip(reversed(kinds), reversed(names), strict=True) if kind}
        if len(first) > 1:
            told = ", ".join(f"{kind} ({counted(kinds.count(kind), 'file')}, such as {first[kind]})" for kind in sorted(first))
            pattern = folder / "**" / f"*{max(sorted(first), key=kinds.count)}*"
            fix = f"this folder holds {told}; select one kind by its folder or a pattern, such as {pattern}"
            raise FieldError("task.path", str(folder), fix)


def known_format(path: Path) -> str:
    """Return the format that a file's name indicates, such as `.jsonl` for a.JSONL.gz; empty if it is not supported."""
    suffixes = [suffix for suffix in map(str.lower, path.suffixes) if suffix not in _COMPRESSIONS]
    return suffixes[-1] if suffixes and suffixes[-1] in _FORMATS else ""


def _file_rows(path: Path) -> Iterator[Row]:
    readers = {".parquet": _parquet_rows, ".csv": _csv_rows, ".tsv": _csv_rows, ".json": _json_rows}
    name, kind = str(path), known_format(path)
    unit = {".parquet": "row", ".json": "entry"}.get(kind, "line")
    try:
        with _opened(path) as stream:
            for number, values in readers.get(kind, _jsonl_rows)(path, stream):
                yield Row(name, f"{unit} {number}", values)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _opened(path: Path) -> io.BufferedIOBase:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() in _COMPRESSIONS:
        return io.BufferedReader(_pyarrow("reading zstd").CompressedInputStream(str(path), "zstd"))
    return path.open("rb")


def _pyarrow(purpose: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingPackage(f"{purpose} needs pyarrow: pip install pyarrow, or convert the file to JSONL") from error
    return pyarrow


def _lines(path: Path, stream: io.BufferedIOBase) -> Iterator[bytes]:
    size = 0
    while line := stream.readline(LONGEST_LINE + 1):
        size += len(line)
        if len(line) > LONGEST_LINE or size > LARGEST_UNPACKED:
            what, fix = f"more than {LARGEST_UNPACKED:,} bytes", "split the file"
            if len(line) > LONGEST_LINE:
                what, fix = f"a line of more than {LONGEST_LINE:,} bytes", "shorten it, or correct the file's extension"
            raise UserError(f"{path}: holds {what}; {fix}")
        yield line


def _whole(path: Path, stream: io.BufferedIOBase) -> bytes:
    content = stream.read(LARGEST_WHOLE + 1)
    if len(content) > LARGEST_WHOLE:
        raise UserError(f"{path}: holds more than {LARGEST_WHOLE:,} bytes; use JSONL or Parquet that is not inside .gz or .zst")
    return content


def _jsonl_rows(path: Path, stream: io.BufferedIOBase) -> Iterator[tuple[int, Values | BadRow]]:
    for number, line in enumerate(_lines(path, stream), start=1):
        try:
            text = _decoded(line, number).strip()
            if not text:
                continue
            row = json.loads(text)
        except BadRow as error:
            row = error
        except (ValueError, RecursionError) as error:
            at = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
            row = BadRow(f"not JSON: {at}")
        yield number, _object(row)


def _decoded(line: bytes, number: int = 1) -> str:
    """Return a line as text. Raises `BadRow` if it is not UTF-8, or if 25 % or more of it is zero bytes."""
    try:
        text = line.decode()
        if 4 * line.count(0) < len(line):
            return text.removeprefix("\ufeff") if number == 1 else text
        found = f"{line.count(0):,} of {len(line):,} bytes are zero"
    except UnicodeDecodeError as error:
        found = f"{error.reason} (0x{line[error.start]:02x}) at byte {error.start + 1}"
    order = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}.get(line[:2], "UTF-16LE" if b"\0" in line else "WINDOWS-1252")
    raise BadRow(f"not UTF-8: {found}; save it as UTF-8, or convert it: iconv -f {order} -t UTF-8")


def _object(row: Any) -> Values | BadRow:
    if isinstance(row, dict | BadRow):
        return row
    return BadRow(f"{type(row).__name__} instead of an object with the problem's fields")


def _json_rows(path: Path, stream: io.BufferedIOBase) -> Iterator[tuple[int, Values | BadRow]]:
    """Read a JSON array of objects, or JSONL, since many JSONL files are named .json. Raises `UserError` for any other JSON."""
    content = _whole(path, stream)
    is_array = content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    try:
        rows = json.loads(_decoded(content))
    except (BadRow, ValueError, RecursionError) as error:
        if is_array:
            raise UserError(f"{path}: not a JSON array: {error}") from error
        yield from _jsonl_rows(path, io.BytesIO(content))
        return
    is_table = isinstance(rows, dict) and all(isinstance(value, list) for value in rows.values())  # such as {"train": [...]}
    if isinstance(rows, dict) and not is_table and b"\n" not in content.strip():  # JSONL with one row
        rows = [rows]
    elif not is_array:
        found = f"one object with {', '.join(rows)}"[:200] if isinstance(rows, dict) else "a single value"
        raise UserError(f"{path}: holds {found}; give an array of objects, or one object on each line")
    yield from ((number, _object(row)) for number, row in enumerate(rows, start=1))


def _csv_rows(path: Path, stream: io.BufferedIOBase) -> Iterator[tuple[int, Values | BadRow]]:
    """Yield rows under a header, each with the number of its first line, as a quoted value may span several lines. Rows without
    values, columns without a name and spaces after separators are skipped, because spreadsheets write them."""
    csv.field_size_limit(LONGEST_LINE)
    lines = map(_decoded, _lines(path, stream), count(1))
    reader, first = csv.reader(()), 1
    header: list[str] | None = None
    try:
        top = next(lines, "")
        separators = "\t" if known_format(path) == ".tsv" and "\t" in top else ",;\t|"
        delimiter = max(separators, key=lambda one: len(next(csv.reader([top], delimiter=one), ())))
        reader = csv.reader(chain([top], lines), delimiter=delimiter, skipinitialspace=True, strict=True)
        for values in reader:
            if header is None:
                header, named = values, list(filter(None, values))
                if len(set(named)) < len(named):
                    raise UserError(f"{path}: its header has a column twice: {', '.join(named)}; rename one")
            elif not any(value.strip() for value in values):
                pass
            elif len(values) == len(header):
                yield first, {name: value for name, value in zip(header, values, strict=True) if name}
            else:
                fix = f"quote values that contain the separator {delimiter!r}"
                yield first, BadRow(f"has {len(values)} values, but the header has {len(header)} columns; {fix}")
            first = reader.line_num + 1
    except csv.Error as error:
        quoted = "; put the separator right after the closing quote, without a space" if "expected after" in str(error) else ""
        fix = "; save it with the line ends of Linux or Windows" if "new-line" in str(error) else quoted
        raise UserError(f"{path}, line {max(1, reader.line_num)}: not CSV: {error}{fix}") from error
    except BadRow as error:
        raise UserError(f"{path}, line {reader.line_num + 1}: {error}") from None


def _parquet_rows(path: Path, stream: io.BufferedIOBase) -> Iterator[tuple[int, Values | BadRow]]:
    arrow = _pyarrow("reading Parquet")
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        is_packed = path.suffix.lower() in _COMPRESSIONS
        for batch in ParquetFile(io.BytesIO(_whole(path, stream)) if is_packed else path).iter_batches():
            try:
                rows = batch.to_pylist()
            except (ValueError, OverflowError):  # To find the bad row, read them one by one, which is slower.
                rows = [_parquet_row(batch.slice(row, 1)) for row in range(batch.num_rows)]
            yield from enumerate(rows, start=number + 1)
            number += len(rows)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file: {error}") from error


def _parquet_row(batch: Any) -> Values | BadRow:
    try:
        return dict(batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        return BadRow(f"a text is not UTF-8: {error.reason} at byte {error.start + 1}")
    except (ValueError, OverflowError) as error:
        return BadRow(f"a value cannot be read: {error}")


def _hub_rows(config: TaskConfig) -> Iterator[Row]:
    """Yield the rows of a data set of the hub, or of a local folder laid out like one. If the hub cannot be reached, only the
    cache is used."""
    try:
        import datasets
    except ImportError as error:
        raise MissingPackage("task.source = 'hub' needs the library datasets: pip install 'pipelinerl[trainer]'") from error
    where = "/".join(filter(None, (config.path, config.subset, config.split)))
    datasets.disable_progress_bars()
    is_folder = os.path.isdir(config.path)
    commit = None if is_folder else _commit(config)
    is_streamed = bool(config.max_rows) and (is_folder or commit is not None)  # to download only a part
    options = {"split": config.split, "revision": commit or config.revision or None, "streaming": is_streamed}
    was_offline = datasets.config.HF_HUB_OFFLINE
    # Offline mode avoids half a minute of retries. `load_dataset` has no argument for it.
    datasets.config.HF_HUB_OFFLINE = was_offline or not (is_folder or commit)
    try:
        # The library takes the access token from the environment, and refuses data sets that come with code.
        found = datasets.load_dataset(config.path, config.subset or None, **options)
        if not is_folder and commit is None and config.revision:
            _check_cached_commit(config, found)
        # Images and sounds are left out: problems do not use them, and reading them needs further packages.
        kinds = (found.features or {}).items()
        media = [name for name, kind in kinds if hasattr(kind, "decode") and type(kind).__name__ != "Json"]
        for number, row in enumerate(found.remove_columns(media), start=1):
            yield Row(where, f"row {number}", row)
    except UserError:
        raise
    except Exception as error:  # The errors of the library and its dependencies have no common base.
        raise _hub_error(config, error) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _check_cached_commit(config: TaskConfig, found: Any) -> None:
    """Raise `Lacking` if the cache holds another revision, which the library uses silently when the hub cannot be reached."""
    from huggingface_hub import try_to_load_from_cache

    card = try_to_load_from_cache(config.path, "README.md", repo_type="dataset", revision=config.revision)
    commit = Path(card).parent.name if isinstance(card, str) else config.revision
    if not all(commit in Path(file["filename"]).parts for file in found.cache_files):
        fix = f"the hub cannot be reached from here, and the cache of this machine holds another revision of {config.path}"
        raise Lacking("task.revision", config.revision, fix)


def _commit(config: TaskConfig) -> str | None:
    """Return the commit of `task.revision`; None if the hub does not answer. Raises `FieldError` if it refuses the request."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return HfApi().dataset_info(config.path, revision=config.revision or None, timeout=10).sha
    except GatedRepoError as error:
        raise FieldError("task.path", config.path, "this set is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise FieldError("task.revision", config.revision, f"{config.path} has no such branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        fix = "the hub has no such data set, or it is private: then set HF_TOKEN to an access token that may read it"
        raise FieldError("task.path", config.path, fix) from error
    except HFValidationError as error:
        raise FieldError("task.path", config.path, f"is not the id of a data set, such as openai/gsm8k: {error}") from error
    except Exception:  # noqa: BLE001 - the client's errors have no common base; all others count as "the hub does not answer"
        return None


def _hub_error(config: TaskConfig, error: Exception) -> UserError:
    """Return an error that names the recipe field whose value made the library `datasets` raise `error`."""
    from datasets.exceptions import DatasetNotFoundError

    said = " ".join(str(error).split())[:300]
    if isinstance(error, ValueError) and "split" in said.lower():
        return FieldError("task.split", config.split, f"{config.path} has no such split: {said}")
    if isinstance(error, ValueError) and "config" in said.lower():
        return FieldError("task.subset", config.subset, f"{config.path} cannot be read with this configuration: {said}")
    if isinstance(error, DatasetNotFoundError | ConnectionError):
        fix = "the hub cannot be reached from here, and the cache of this machine does not hold this set"
        return Lacking("task.path", config.path, fix)
    return FieldError("task.path", config.path, f"cannot be read: {type(error).__name__}: {said}")
