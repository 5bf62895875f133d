"""Whether and how traces leave a process: OpenTelemetry's own environment variables, as far as they are ours to check.

What is not here the SDK reads itself: headers, certificates, compression, the bounds of its queue.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _is_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give a URL of a collector such as http://collector:4318")
    return value


Endpoint = Annotated[str, AfterValidator(lambda value: _is_url(value) if value else value)]
Protocol = Annotated[Literal["", "http/protobuf", "grpc"], BeforeValidator(_lower)]


class TracingSwitch(BaseSettings):
    """The variables that switch traces on, unchecked: a process that does not trace has no use for the others."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", frozen=True, extra="ignore", env_ignore_empty=True)

    sdk_disabled: str = Field("", description="true = no traces, whatever else is set.")
    traces_exporter: str = Field(
        "", description="otlp, console or none. Unset = otlp where an endpoint is set, else none."
    )
    exporter_otlp_endpoint: str = Field("", description="Base URL of a collector.")
    exporter_otlp_traces_endpoint: str = Field("", description="Whole URL for traces; wins over the base.")

    @property
    def is_on(self) -> bool:
        if self.sdk_disabled.strip().lower() == "true":
            return False
        exporter = self.traces_exporter.strip().lower()
        endpoint = self.exporter_otlp_traces_endpoint or self.exporter_otlp_endpoint
        return exporter != "none" and bool(exporter or endpoint)


class TracingSettings(BaseSettings):
    """Of a process that traces."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", frozen=True, extra="ignore", env_ignore_empty=True)

    traces_exporter: Annotated[Literal["otlp", "console"], BeforeValidator(_lower)] = "otlp"
    exporter_otlp_endpoint: Endpoint = ""
    exporter_otlp_traces_endpoint: Endpoint = ""
    exporter_otlp_protocol: Protocol = ""
    exporter_otlp_traces_protocol: Protocol = ""
    traces_sampler: Annotated[
        Literal[
            "always_on",
            "always_off",
            "traceidratio",
            "parentbased_always_on",
            "parentbased_always_off",
            "parentbased_traceidratio",
        ],
        BeforeValidator(_lower),
    ] = "parentbased_always_on"
    traces_sampler_arg: str = Field("", description="Share of the traces that a ratio sampler takes, 0 to 1.")
    exporter_otlp_timeout: float | None = Field(None, gt=0, description="Seconds for one export.")
    exporter_otlp_traces_timeout: float | None = Field(None, gt=0)
    bsp_max_queue_size: int | None = Field(None, gt=0, description="Spans that wait at most; more are dropped.")
    bsp_max_export_batch_size: int | None = Field(None, gt=0)
    bsp_schedule_delay: int | None = Field(None, gt=0, description="Milliseconds between two exports.")

    @field_validator("traces_sampler_arg")
    @classmethod
    def _is_share(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("traces_sampler", "").endswith("traceidratio"):
            try:
                share = float(value)
            except ValueError:
                share = -1.0
            if not 0 <= share <= 1:
                raise ValueError("the sampler takes a share of the traces: give a number from 0 to 1, such as 0.01")
        return value

    @property
    def protocol(self) -> str:
        return self.exporter_otlp_traces_protocol or self.exporter_otlp_protocol or "http/protobuf"

    @property
    def endpoint(self) -> str:
        """For people: where the exporter sends to, by scheme, host and port. The rest of a URL may hold a password."""
        default = "http://localhost:4317" if self.protocol == "grpc" else "http://localhost:4318"
        parts = urlsplit(self.exporter_otlp_traces_endpoint or self.exporter_otlp_endpoint or default)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
