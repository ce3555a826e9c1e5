"""Croissant metadata: the files with their sums, and every column of the table."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from autotune.dataset.croissant import COLUMNS, CONTEXT, FILE, write_croissant
from autotune.dataset.folder import SUMS, read_sums

DATASETS = Path(__file__).parents[2] / "datasets"
SHIPPED = sorted(path.parent for path in DATASETS.glob("*/*/domain.json"))
REQUIRED = {
    "Dataset": {"@context", "@type", "name", "description", "license", "url", "creator"}
    | {"datePublished", "conformsTo", "version", "citeAs", "distribution", "recordSet"},
    "FileObject": {"@id", "name", "contentUrl", "encodingFormat", "sha256"},
    "RecordSet": {"@id", "name", "field"},
    "Field": {"@id", "name", "dataType", "source"},
}
"""Croissant 1.0: what each kind of node must have."""
OF_SCHEMA_ORG = {"name", "description", "license", "url", "creator", "datePublished", "version"}
OF_SCHEMA_ORG |= {"distribution", "contentUrl", "encodingFormat", "sha256"}


def nodes(data):
    """Return every object of the document."""
    children = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    mine = [data] if isinstance(data, dict) else []
    return mine + [node for child in children for node in nodes(child)]


@pytest.mark.parametrize("folder", SHIPPED, ids=str)
def test_the_metadata_of_a_shipped_domain_is_whole(folder: Path):
    metadata = json.loads((folder / FILE).read_text())
    assert metadata["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    body = {key: value for key, value in metadata.items() if key != "@context"}
    terms = {key for node in nodes(body) for key in node if not key.startswith("@")}
    assert terms <= metadata["@context"].keys() | OF_SCHEMA_ORG, "the context defines every term"
    for node in [metadata, *nodes(body)[1:]]:
        kind = node.get("@type", "").partition(":")[2]
        assert REQUIRED.get(kind, set()) <= node.keys(), node.get("name")
    files = {entry["@id"]: entry["sha256"] for entry in metadata["distribution"]}
    assert files == read_sums(folder)
    [records] = metadata["recordSet"]
    columns = [field["source"]["extract"]["column"] for field in records["field"]]
    assert columns == pq.read_schema(folder / "trials.parquet").names
    sources = {field["source"]["fileObject"]["@id"] for field in records["field"]}
    assert sources == {"trials.parquet"} and sources <= files.keys()
    known = {field["@id"] for field in records["field"]}
    assert records["key"]["@id"] in known and len(known) == len(columns)


def test_every_column_is_described_and_terms_are_croissants():
    assert all(text.endswith(".") for text in COLUMNS.values())
    assert CONTEXT["recordSet"] == "cr:recordSet"


def test_writing_the_metadata_again_changes_nothing(tmp_path: Path):
    source = min(SHIPPED, key=lambda folder: (folder / "trials.parquet").stat().st_size)
    for name in (*read_sums(source), SUMS):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    write_croissant(tmp_path)
    assert (tmp_path / FILE).read_bytes() == (source / FILE).read_bytes()
