"""The weights' manifest as a control message, both ways."""

from __future__ import annotations

from dataclasses import astuple

from pipelinerl.control_codec import LowRankFields, decode_manifest, encode_manifest
from pipelinerl.errors import MessageError
from pipelinerl.weights.manifest import LowRank, Manifest, ParameterSpec


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """Raises `MessageError` for what `manifest_from_bytes` would refuse."""
    parameters = ((spec.name, spec.shape, spec.dtype) for spec in manifest.parameters)
    low_rank = (LowRankFields(*astuple(item)) for item in manifest.low_rank)
    return encode_manifest(manifest.manifest_id, parameters, manifest.chunk_bytes, manifest.wire_dtype, low_rank)


def manifest_from_bytes(data: bytes) -> Manifest:
    """Raises `MessageError` when the message does not parse or its id is not that of its content."""
    fields = decode_manifest(data)
    parameters = tuple(ParameterSpec(name, shape, dtype) for name, shape, dtype in fields.parameters)
    low_rank = tuple(LowRank(*item) for item in fields.low_rank)
    manifest = Manifest(parameters, fields.chunk_bytes, fields.wire_dtype, low_rank)
    if manifest.manifest_id != fields.manifest_id:
        raise MessageError(
            "WeightManifest", "manifest_id", f"{fields.manifest_id} is not that of its content, {manifest.manifest_id}"
        )
    return manifest
