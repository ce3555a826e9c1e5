"""Croissant metadata of a domain: JSON-LD for search engines and loaders of datasets.

Format: Croissant 1.0 (MLCommons 2024, http://mlcommons.org/croissant/1.0). It describes the files
with their sums and one record set, the rows of the table of trials.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from autotune.dataset.card import LICENCE, card_of
from autotune.dataset.columns import SCHEMA
from autotune.dataset.folder import read_domain, read_sums
from autotune.dataset.trials import Domain
from autotune.errors import InvalidInput
from autotune.files import write_whole

FILE = "croissant.json"
CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
VERSION = "1.0.0"
LICENCES = {"CC-BY-4.0": "https://creativecommons.org/licenses/by/4.0/"}
_OURS = ("citeAs", "column", "extract", "field", "fileObject", "isLiveDataset", "key")
_ALSO_OURS = ("recordSet", "repeated", "source")
CONTEXT: Mapping[str, object] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    **{name: f"cr:{name}" for name in (*_OURS, *_ALSO_OURS)},
}
FORMATS = {
    ".parquet": "application/vnd.apache.parquet",
    ".json": "application/json",
    ".md": "text/markdown",
}
COLUMNS: Mapping[str, str] = {
    "number": "Number of the trial, from 0 on, in the order of time.",
    "source": "Why the trial was run: a kind with its parameters.",
    "strategy_id": "Identity of the strategy; empty for the script's own setup.",
    "strategy": "The strategy as canonical JSON: a choice per variable.",
    "plan_id": "Identity of the enacted plan.",
    "plan": "The plan as canonical JSON: the messages in their order.",
    "step_s": "Seconds of each timed step: a list per rank; empty for a failure.",
    "failure_kind": "Kind of the failure: crash, hang, out-of-memory, numerics or refused.",
    "failure_message": "The failure's own message.",
    "failure_rank": "The rank that failed.",
    "gradient_error": "Relative difference of the gradients to the reference reduction.",
    "left_out": "Steps that an evaluation interrupted.",
    "stopped": "Why the trial ended, if its number of steps was not fixed.",
    "overrun": "Excess of real work over the emulated computation, as a share of it.",
    "load": "The machine's load average at the start.",
    "time_s": "Unix time of the end, in seconds.",
    "session": "The session, as domain.json describes it.",
    "disturbed": "Whether the machine changed during the trial or around it.",
    "stolen": "Share of the cores' time that other virtual machines had meanwhile.",
}


def croissant_of(domain: Domain, sums: Mapping[str, str]) -> dict[str, object]:
    """Return the metadata. `sums`: file -> SHA-256, as `SHA256SUMS` lists them."""
    card = card_of(domain)
    what = (
        f"Step times of {card.model} on {card.cluster} ({domain.cluster.world_size} ranks) under "
        f"{card.strategies} strategies of gradient synchronization; {card.conditions or 'real'}."
    )
    return {
        "@context": dict(CONTEXT),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": card.name,
        "description": what,
        "license": LICENCES[LICENCE],
        "url": "card.md",
        "creator": {"@type": "sc:Organization", "name": "The autotune maintainers"},
        "datePublished": card.last[:10],
        "version": VERSION,
        "citeAs": f"The autotune maintainers. {card.name}: trials of gradient synchronization.",
        "isLiveDataset": False,
        "distribution": [_file_object(name, digest) for name, digest in sorted(sums.items())],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "trials",
                "name": "trials",
                "description": "One record per trial.",
                "key": {"@id": "trials/number"},
                "field": [_field(column) for column in SCHEMA],
            }
        ],
    }


def write_croissant(folder: Path) -> None:
    """Write `croissant.json` next to the card of a domain's folder."""
    metadata = croissant_of(read_domain(folder), read_sums(folder))
    write_whole(folder / FILE, json.dumps(metadata, indent=2) + "\n", "the Croissant metadata")


def _file_object(name: str, digest: str) -> dict[str, object]:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "encodingFormat": FORMATS[Path(name).suffix],
        "sha256": digest,
    }


def _field(column: pa.Field) -> dict[str, object]:
    repeated = {"repeated": True} if pa.types.is_list(column.type) else {}
    return {
        "@type": "cr:Field",
        "@id": f"trials/{column.name}",
        "name": column.name,
        "description": COLUMNS[column.name],
        "dataType": _data_type(column.type),
        **repeated,
        "source": {"fileObject": {"@id": "trials.parquet"}, "extract": {"column": column.name}},
    }


def _data_type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return _data_type(kind.value_type)
    if pa.types.is_list(kind):
        return _data_type(kind.value_type)
    known = (
        (pa.types.is_boolean, "sc:Boolean"),
        (pa.types.is_integer, "sc:Integer"),
        (pa.types.is_floating, "sc:Float"),
        (pa.types.is_string, "sc:Text"),
    )
    for matches, name in known:
        if matches(kind):
            return name
    raise InvalidInput(
        "a column of trials must be text, a number or a truth value, or a list of them, "
        f"but is {kind}"
    )
