"""Streams between the services: one Protocol, a JetStream adapter, an in-memory adapter, one contract test suite."""
