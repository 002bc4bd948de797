"""DeployConfig: how many replicas, where they run, and how requests find them."""

from typing import Literal

from pydantic import Field, model_validator

from outpace.config.base import ConfigModel


class DeployConfig(ConfigModel):
    """Options of `outpace deploy` besides those of the engine and the server."""

    address: str | None = Field(default=None, min_length=1)
    """Ray cluster: HOST:PORT or ray://HOST:PORT of its head node, auto for the one that runs on this machine, local for
    a new one that ends with this command. None: RAY_ADDRESS, else auto if there is one, else local."""
    name: str = Field(default="outpace", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the application. Deploying the same name again updates it replica by replica."""

    replicas: int | None = Field(default=None, ge=1)
    """Number of replicas, fixed. Give this, or --min-replicas and --max-replicas."""
    min_replicas: int = Field(default=1, ge=1)
    """Fewest replicas when scaling with the load."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Most replicas when scaling with the load; None: as many as --min-replicas, no scaling."""
    target_ongoing: int | None = Field(default=None, ge=1)
    """Requests of one replica, running and queued, that scaling aims at; None: --max-num-seqs, a full batch."""
    upscale_delay: float = Field(default=10.0, ge=0)
    """Seconds for which the load must ask for more replicas before some are started."""
    downscale_delay: float = Field(default=300.0, ge=0)
    """Seconds for which the load must ask for fewer replicas before some are drained."""

    routing: Literal["least-loaded", "round-robin"] = "least-loaded"
    """Which replica gets a request: the one with the least to compute, or each in turn."""
    ingress_replicas: int = Field(default=1, ge=1)
    """Processes that forward requests to the replicas and retry those of a replica that dies. They hold no model."""
    cpus_per_rank: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each rank of a replica; on a CPU it computes with as many threads."""
    gpus_per_rank: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for each rank of a replica; None: 1, or 0 with --device cpu, and without GPUs."""
    health_check_period: float = Field(default=5.0, gt=0)
    """Seconds between health checks of a replica. One that fails three in a row, or whose process is gone, is
    replaced."""

    @model_validator(mode="after")
    def _one_way_to_count(self) -> "DeployConfig":
        scaling = {"min_replicas", "max_replicas", "target_ongoing", "upscale_delay", "downscale_delay"}
        if self.replicas is not None and (both := sorted(scaling & self.model_fields_set)):
            raise ValueError(f"replicas: fixes the number, {both[0]} is for scaling; give one of them")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: {self.max_replicas} is less than min_replicas={self.min_replicas}")
        return self

    @model_validator(mode="after")
    def _whole_gpus(self) -> "DeployConfig":
        if self.gpus_per_rank is not None and self.gpus_per_rank > 1:
            raise ValueError(f"gpus_per_rank: a rank uses one GPU, got {self.gpus_per_rank:g}; give 1 or less")
        return self
