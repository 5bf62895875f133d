"""Spans of the work on sequences and on weight updates (docs/traces.md).

Only the API of OpenTelemetry is reached from here: what is done with spans, if anything, `pipelinerl.service.tracing` sets up.
Import the module you need.
"""
