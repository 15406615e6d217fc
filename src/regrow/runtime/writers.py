"""Who writes the manifests of checkpoints and publications, as a coordinator was told that they are made."""

from __future__ import annotations

from typing import Any

from regrow.checkpoint.epochs import EpochWriter
from regrow.checkpoint.extras import Extras
from regrow.checkpoint.manifests import ManifestWriter
from regrow.checkpoint.model_names import note
from regrow.checkpoint.publications import PublicationWriter
from regrow.launch.saving import Saving


def make_manifests(saving: Saving, config: dict[str, Any]) -> ManifestWriter | EpochWriter:
    """Who writes the manifests of this run."""
    common: dict[str, Any] = {name: getattr(saving, name) for name in ("url", "run", "starts", "made_by")}
    common |= {
        "extra": {"config": config} | note(saving.model),
        "extras": Extras([(extra.step, extra.text) for extra in saving.extras]),
    }
    if saving.epochs:
        return EpochWriter(**common)
    return ManifestWriter(encoding=saving.encoding, bits=saving.bits, **common)


def make_publications(saving: Saving, config: dict[str, Any]) -> PublicationWriter:
    """Who writes the manifests of publications."""
    names = ("url", "run", "starts", "made_by", "encoding", "bits")
    return PublicationWriter(
        extra={"config": config} | note(saving.model), **{name: getattr(saving, name) for name in names}
    )
